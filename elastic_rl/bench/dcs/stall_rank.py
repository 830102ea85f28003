"""One rank of a Megatron trainer that publishes its weights: a worker of ``stall``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_rl.bench.workers import serve
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address
from elastic_rl.trainer.broadcast import broadcast_numbers
from elastic_rl.trainer.checkpoint import snapshot
from elastic_rl.trainer.checkpoint.checkpoints import Checkpoints
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.progress import Progress


class Rank:
    """A policy with random weights, its optimizer, and its way to the checkpoint service."""

    def __init__(self, context: str) -> None:
        torch.set_num_threads(1)
        ctx = RunContext.load(Path(context))
        self._bucket_bytes = ctx.config.dcs.bucket_bytes
        self._par = parallel.init(ctx.config, own_address())
        self._policy = Policy(ModelArch.read(ctx.model_dir), ctx.config, self._par)
        with torch.no_grad():
            for _, param in self._policy.parameters():
                param.normal_(std=0.02)
        self._checkpoints = Checkpoints(ctx, ctx.connect(), self._par, self._policy, Adam(self._policy, ctx.config),
                                        f"bench-{self._par.rank}")
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._step = 0

    def owned_bytes(self) -> dict[str, int]:
        """Bytes of the full tensors that this rank is to publish."""
        return {"nbytes": sum(t.nbytes for _, _, t in snapshot.weights(self._policy, self._bucket_bytes))}

    def prepare(self, nbytes: int) -> None:
        """Where the base of the comparison copies to; its pages are touched."""
        self._copy = torch.zeros(nbytes, dtype=torch.uint8)

    def gather(self) -> dict[str, float]:
        """The base: the same gather, and one copy of each tensor. Seconds."""
        dist.barrier()
        start, at = time.monotonic(), 0
        for _, _, tensor in snapshot.weights(self._policy, self._bucket_bytes):
            self._copy[at:at + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            at += tensor.nbytes
        return {"seconds": time.monotonic() - start}

    def publish(self) -> dict[str, float]:
        """How long the training loop stands still, seconds; the version is committed later."""
        self._step += 1
        with torch.no_grad():
            for _, param in self._policy.parameters():
                param.view(torch.int32).bitwise_xor_(self._step % 7 + 1)
        dist.barrier()
        start = time.monotonic()
        numbers = broadcast_numbers(self._checkpoints.begin(
            Progress(phase="rl", step=self._step), policy=True, state=False) if self._par.rank == 0 else [0, 0],
            self._par)
        published = self._checkpoints.publish(numbers, self._step, lambda: None)
        return {"seconds": time.monotonic() - start, "version": published.policy}

    def finish(self) -> None:
        """Waits for the publish under way."""
        self._checkpoints.finish()


def main(context: str) -> None:
    made: list[Rank] = []

    def setup() -> dict[str, int]:
        made.append(Rank(context))  # a collective, so not before all ranks were asked
        return made[0].owned_bytes()

    serve({"setup": setup, "prepare": lambda nbytes: made[0].prepare(nbytes), "gather": lambda: made[0].gather(),
           "publish": lambda: made[0].publish(), "finish": lambda: made[0].finish()})


if __name__ == "__main__":
    main(sys.argv[1])
