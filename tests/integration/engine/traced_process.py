"""Parts of a run in a process of their own, which trace.

    traced_process.py publish CONTEXT   publishes the weights of the head again, as a new version
    traced_process.py ask CONTEXT       the rollout role asks the engines for a sample of the head
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from elastic_rl.engine.generation import Generated
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.roles.rollout import EncodedAnswers, decoded
from elastic_rl.telemetry import traces

# Each command imports what it needs: torch, which only the first one does, takes longer than all else here.


def publish(ctx: RunContext) -> None:
    from elastic_rl.dcs.fetch.puller import Puller
    from elastic_rl.dcs.publish.publisher import Publisher

    traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.trainer")
    with ctx.connect() as etcd, \
            Puller(etcd, ctx.keys, "again", io_timeout_s=30) as puller, \
            Publisher(etcd, ctx.keys, "policy", epoch=ctx.epoch, owner="again", chunk_bytes=1 << 20,
                      staging_ttl_s=10) as publisher:
        with puller.pull("policy") as pulled:
            weights = [(name, tensor.clone()) for name, tensor in pulled.tensors()]
        print(publisher.publish(weights, meta={}).number)


async def answered(stream: AsyncIterator[EncodedAnswers]) -> list[Generated]:
    return [group async for answers in stream for _, group in decoded(answers)]


def ask(ctx: RunContext) -> None:
    from elastic_rl.data.samples import Prompt
    from elastic_rl.dcs.catalog import reads
    from elastic_rl.engine.client import Sampling
    from elastic_rl.engine.generation import PromptRequest
    from elastic_rl.roles.rollout import GenerationRequest, RolloutRole

    role = RolloutRole(ctx)
    try:
        version = reads.head(role.etcd, ctx.keys, "policy").number
        request = GenerationRequest(tuple(PromptRequest(i, Prompt((5, 6, 3, 4, 7)), Sampling(4), 2)
                                          for i in range(4)), version)
        groups = asyncio.run(answered(role.generate(request, 0)))
        assert all(sample.versions == (version,) for group in groups for sample in group)
    finally:
        role.close()


if __name__ == "__main__":
    {"publish": publish, "ask": ask}[sys.argv[1]](RunContext.load(sys.argv[2]))
    traces.shutdown()
