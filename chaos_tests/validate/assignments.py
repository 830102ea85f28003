"""I1 and I12 of the runs of jobs: one host holds each, a move has a reason, and only its holder's driver writes. Pure
checks of the store's history."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from chaos_tests.observation import Change
from chaos_tests.traffic.driver_writes import PREFIX, Driver
from elastic_rl.etcd.cluster_records import HostPhase, driver_of
from elastic_rl.etcd.keys import ClusterKeys

_GONE = (HostPhase.DRAINING, HostPhase.LEFT, HostPhase.LOST)
"""Phases of a host from which what it holds moves."""
_FIT = (HostPhase.READY,)
"""Phases in which a host is given something."""


@dataclass(frozen=True)
class Held:
    """An assignment, as of one revision."""

    generation: int
    host: str
    incarnation: str


def check(changes: Sequence[Change], keys: ClusterKeys) -> list[str]:
    """What is wrong with the assignments, and with the writes of light runs. ``changes``: of all keys, from a revision
    on at which nothing was assigned yet."""
    return [*_found(changes, keys)]


def _found(changes: Sequence[Change], keys: ClusterKeys) -> Iterator[str]:
    held, phases, incarnations = dict[str, Held](), dict[str, str](), dict[str, str]()
    of_hosts, of_states = keys.hosts_prefix(), keys.host_states_prefix()
    of_assignments = keys.assignments_prefix()
    for revision, together in groupby(changes, key=lambda c: c.revision):
        batch = list(together)
        for change in batch:
            if change.put and change.key.startswith(of_states):
                phases[change.key.removeprefix(of_states)] = json.loads(change.value)["phase"]
            elif change.put and change.key.startswith(of_hosts):
                incarnations[change.key.removeprefix(of_hosts)] = json.loads(change.value)["incarnation"]
        for change in batch:
            if change.key.startswith(of_assignments):
                singleton = change.key.removeprefix(of_assignments)
                before = held.get(singleton, Held(0, "", ""))
                if not change.put:
                    yield f"{revision}: the assignment of {singleton} was deleted: its generations begin again"
                    continue
                record = json.loads(change.value)
                now = held[singleton] = Held(before.generation + 1, record.get("host", ""),
                                             record.get("incarnation", ""))
                yield from (f"{revision}: {singleton}: {problem}" for problem in _move(
                    before, now, record, phases, incarnations))
            elif change.put and change.key.startswith(PREFIX):
                yield from (f"{revision}: {problem}" for problem in _write(change, held))


def _move(before: Held, now: Held, record: dict[str, Any], phases: dict[str, str], incarnations: dict[str, str]
          ) -> Iterator[str]:
    if not now.host:
        return
    if phases.get(now.host) not in _FIT:
        yield f"it was given to {now.host}, which is {phases.get(now.host, 'unknown')}"
    moved_from_living = before.host not in ("", now.host) and phases.get(before.host) not in _GONE
    if moved_from_living and incarnations.get(before.host) == before.incarnation and before.host not in {
            failed["host"] for failed in record.get("failed", [])}:
        yield f"it was taken from {before.host}, which is {phases.get(before.host)}, and given to {now.host}"


def _write(change: Change, held: dict[str, Held]) -> Iterator[str]:
    driver = Driver(**json.loads(change.value))
    now = held.get(driver_of(change.key.removeprefix(PREFIX).partition("/")[0]), Held(0, "", ""))
    if (driver.assignment, driver.host) != (now.generation, now.host):
        yield (f"a driver on {driver.host} of generation {driver.assignment} has written while {now.host or 'no host'} "
               f"has generation {now.generation}")


def superseded(drivers: Sequence[Driver]) -> list[str]:
    """The drivers that have written although a later one had begun. ``drivers``: in the order of their writes."""
    return [f"{one} wrote before {following}" for one, following in pairwise(drivers) if not (
        one.epoch < following.epoch and one.generation < following.generation
        and one.assignment <= following.assignment)]
