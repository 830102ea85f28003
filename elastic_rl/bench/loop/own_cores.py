"""Cores of their own for generation and training, in a run on one machine: what engines compute and what trainer ranks
compute cannot take time from each other, as where each has devices of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import psutil

from elastic_rl.bench.options import Unmeasurable
from elastic_rl.faults.context import INJECT_TIMEOUT_S, Fault, FaultContext
from elastic_rl.runtime import wait_until


def split(cores: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those of the engines, and those of the ranks: half of the cores each. Raises Unmeasurable. Pure."""
    if len(cores) < 2:
        raise Unmeasurable("generation and training cannot have cores of their own: there is only one")
    half = len(cores) // 2
    return list(cores[:half]), list(cores[half:])


class OwnCores:
    """In the form of a fault, so that it is done once in a run that works. The servers of all engines and the ranks of
    the policy, with their children, keep to their cores from then on; all else runs on any core."""

    name = "own_cores"

    def __init__(self, context: FaultContext) -> None:
        self._context = context

    def inject(self) -> tuple[str, str]:
        wait_until(lambda: len(self._context.ready()) >= self._context.cfg.rollout.engines, timeout_s=INJECT_TIMEOUT_S,
                   what="a pool of ready engines")
        engines, ranks = split(sorted(os.sched_getaffinity(0)))
        keep_to(engines, [e.pid for e in self._context.engines() if e.pid])
        keep_to(ranks, [m.pid for m in self._context.trainer_ranks()])
        return "engines and ranks", f"engines run on the cores {engines}, ranks on {ranks}"

    def detected(self) -> bool:
        return True

    def healed(self) -> bool:
        return True


def plan(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    """A plan of the injector that gives them their cores when the first step is done."""
    return [(1, [OwnCores(context)])]


def keep_to(cores: Sequence[int], pids: Iterable[int]) -> None:
    """All threads of these processes and of their children run on these cores only; what they start later too."""
    for pid in pids:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)
