"""Ranks that run jobs in rounds, without a model. Each prints its number and what came of each job.

    rounds_rank.py PORT
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_rl.errors import ChunkMissing, TrainerFailed
from elastic_rl.runtime.process import die_with_parent
from elastic_rl.trainer.checkpoint.rounds import Job, Rounds, Unavailable
from elastic_rl.trainer.megatron.parallel import ParallelDims

WORLD = 2
_TICK_S = 0.01
_LIMIT_S = 3


class CountingRounds(Rounds):
    made = 0

    def _maximum(self, *values: int) -> list[int]:
        self.made += 1
        return super()._maximum(*values)


def main(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=60))
    par = ParallelDims(rank, WORLD, WORLD, rank, 1, 0, torch.device("cpu"))
    rounds = CountingRounds(par, dist.group.WORLD, round_timeout_s=60)

    def say(*found: object) -> None:
        """Writes a line as a whole, which a print does not."""
        os.write(1, (" ".join(map(str, (rank, *found))) + "\n").encode())

    def slow_on_rank_1(job: Job[Any]) -> str:
        while rank == 1 and rounds.made < 3:
            job.cancelled.wait(_TICK_S)
        return f"result of {rank}"

    def unavailable_on_rank_1(job: Job[Any]) -> str:
        if rank == 1:
            raise ChunkMissing("chunk 17 is on no node")
        while True:  # a download that would take for ever
            job.check()
            job.cancelled.wait(_TICK_S)

    def broken_on_rank_1(job: Job[Any]) -> str:
        if rank == 1:
            raise ValueError("a bug")
        job.cancelled.wait()
        return ""

    say(rounds.run(slow_on_rank_1), rounds.made >= 3)
    impatient, waited = CountingRounds(par, dist.new_group(timeout=timedelta(seconds=_LIMIT_S)),
                                       round_timeout_s=_LIMIT_S), list[str]()
    with impatient.until_all_are_done(lambda: waited.append("waits")):
        while rank == 1 and impatient.made < _LIMIT_S + 2:  # rounds of a second each
            time.sleep(_TICK_S)
    say("met", waited, impatient.made >= _LIMIT_S + 2)
    with impatient.until_all_are_done(lambda: waited.append("waits")):
        pass
    say("met again", len(waited))
    try:
        rounds.run(unavailable_on_rank_1)
    except Unavailable as e:
        say(e)
    say(rounds.run(lambda job: "again"))
    try:
        with impatient.until_all_are_done(lambda: None):
            if rank == 1:
                raise ValueError("a bug")
    except (TrainerFailed, ValueError) as e:
        say(type(e).__name__)
    try:
        rounds.run(broken_on_rank_1)
    except (TrainerFailed, ValueError) as e:
        say(type(e).__name__)


if __name__ == "__main__":
    die_with_parent()
    for number in range(WORLD):  # forked, so that torch is imported once
        if not os.fork():
            die_with_parent()
            main(number, int(sys.argv[1]))
            os._exit(0)
    for _ in range(WORLD):
        os.wait()
