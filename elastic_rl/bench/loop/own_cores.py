"""Cores of their own for generation and training, in a run on one machine: what engines compute and what trainer ranks
compute cannot take time from each other, as where each has devices of its own."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import psutil

from elastic_rl.bench.options import Unmeasurable
from elastic_rl.errors import ElasticRLError
from elastic_rl.faults.context import INJECT_TIMEOUT_S, Fault, FaultContext
from elastic_rl.report.build import Record
from elastic_rl.runtime.waiting import wait_until

_TRIES = 20
"""Looks at processes that start threads and children meanwhile."""


def split(cores: Sequence[int]) -> tuple[list[int], list[int]]:
    """The cores of the engines, and those of the ranks: half of the cores each. Raises Unmeasurable. Pure."""
    if len(cores) < 2:
        raise Unmeasurable("generation and training cannot have cores of their own: there is only one")
    half = len(cores) // 2
    return list(cores[:half]), list(cores[half:])


def of_this_machine() -> tuple[list[int], list[int]]:
    """``split``, of the cores that this process may use. Raises Unmeasurable."""
    return split(sorted(os.sched_getaffinity(0)))


class OwnCores(Fault):
    """Gives engines and ranks cores of their own, in the form of a fault, so that it is done once in a run that works.
    The servers of all engines and the ranks of the policy, with their children, keep to their cores from then on; all
    else runs on any core."""

    name = "own_cores"

    def __init__(self, context: FaultContext) -> None:
        self._context = context

    def inject(self) -> tuple[str, str]:
        """Raises ElasticRLError and psutil.Error where it does not succeed: the record of the fault says so then."""
        wanted = self._context.cfg.rollout.engines
        wait_until(lambda: len(self._context.ready()) >= wanted, timeout_s=INJECT_TIMEOUT_S,
                   what="a pool of ready engines")
        engines, ranks = of_this_machine()
        for cores, pids, least, what in (
                (engines, [e.pid for e in self._context.engines() if e.pid], wanted, "engines"),
                (ranks, [m.pid for m in self._context.trainer_ranks()], self._context.cfg.trainer.ranks, "ranks")):
            if len(pids) < least:
                raise ElasticRLError(f"of {least} {what} only {len(pids)} have a known process")
            keep_to(cores, pids)
        return "engines and ranks", f"engines run on the cores {engines}, ranks on {ranks}"

    def detected(self) -> bool:
        return True

    def healed(self) -> bool:
        return True


def plan(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    """A plan of the injector that gives them their cores when the first step is done."""
    return [(1, [OwnCores(context)])]


def records_with(records: Sequence[Record]) -> list[Record]:
    """The records of a run of ``plan``, with no step that was made before all had their cores. Raises Unmeasurable for
    one in which they never had, or in which a process was replaced by one that runs on any core. Pure."""
    found = [record for record in records if record["kind"] == "fault" and record["name"] == OwnCores.name]
    if len(found) != 1 or not found[0].get("detected_at"):
        why = found[0].get("problem") or found[0].get("witness") if found else "the run ended before"
        raise Unmeasurable(f"engines and ranks did not get cores of their own: {why or 'it is not known why'}")
    kept = [record for record in records if record["kind"] != "step" or record["at"] >= found[0]["detected_at"]]
    pools = {frozenset(e["id"] for e in record["engines"]) for record in kept if record.get("engines")}
    if len(pools) > 1 or any(record["kind"] == "rewind" for record in records):
        raise Unmeasurable("a part was replaced in the run, by one without cores of its own")
    return kept


def keep_to(cores: Collection[int], pids: Collection[int]) -> None:
    """All threads of these processes and of their children run on these cores only; what they start later too. Raises
    psutil.NoSuchProcess when one of ``pids`` has ended, and ElasticRLError when threads keep to other cores."""
    for _ in range(_TRIES):
        others = [thread for pid in pids for thread in _threads(pid) if not _keeps_to(cores, thread)]
        if not others:  # as read back, so that one that was started meanwhile is seen
            return
        for thread in others:
            try:
                os.sched_setaffinity(thread, cores)
            except ProcessLookupError:  # it has ended
                continue
    raise ElasticRLError(f"threads of the processes {sorted(pids)} do not keep to the cores {sorted(cores)}")


def _threads(pid: int) -> list[int]:
    """Threads of a process and of its children."""
    parent = psutil.Process(pid)
    found = [thread.id for thread in parent.threads()]
    for child in parent.children(recursive=True):
        try:
            found += [thread.id for thread in child.threads()]
        except psutil.NoSuchProcess:
            continue
    return found


def _keeps_to(cores: Collection[int], thread: int) -> bool:
    try:
        return os.sched_getaffinity(thread) == set(cores)
    except ProcessLookupError:
        return True
