"""One rank of a bare trainer: a worker of ``bare_trainer``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

from elastic_rl.bench.workers import serve
from elastic_rl.data.batch import Batch
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address
from elastic_rl.runtime.process import freeze_heap
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.step import TrainStep


class Rank:
    """The model with its optimizer, and the run's own training step."""

    def __init__(self, context: str) -> None:
        ctx = RunContext.load(Path(context))
        self._par = parallel.init(ctx.config, own_address())
        policy = Policy(ModelArch.read(ctx.model_dir), ctx.config, self._par)
        policy.load_folder(ctx.model_dir)
        self._step = TrainStep(policy, Adam(policy, ctx.config), ctx.config, self._par)

    def step(self, number: int, shares: list[str]) -> dict[str, float]:
        """Trains on this rank's share; seconds from the moment at which every rank has its own."""
        share = Batch.from_bytes(Path(shares[self._par.dp_rank]).read_bytes())
        dist.barrier()
        began = time.monotonic()
        self._step.train(share, "rl", number)
        return {"seconds": time.monotonic() - began}


def main(context: str) -> None:
    made: list[Rank] = []

    def setup() -> None:
        made.append(Rank(context))  # a collective, so not before all ranks were asked
        freeze_heap()

    serve({"setup": setup, "step": lambda number, shares: made[0].step(number, shares)})


if __name__ == "__main__":
    main(sys.argv[1])
