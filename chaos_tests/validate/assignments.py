"""I1 and I12 of light runs (``traffic.driver_writes``), beside what ``fencing`` says of assignments: only the driver of
the host that holds a run writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from chaos_tests.event_log import Kind
from chaos_tests.observation import Change
from chaos_tests.traffic.driver_writes import PREFIX, Driver
from chaos_tests.validate.fencing import Assignments, Held
from chaos_tests.validate.replay import Replay, Transaction
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.etcd.keys import ClusterKeys


class LightWrites(Assignments):
    """Each write of a light run is of the driver on the host that holds it, in the present generation."""

    keys = (*Assignments.keys, PREFIX)
    judges = "assignments, and writes of drivers"

    def __init__(self, keys: ClusterKeys) -> None:
        super().__init__()
        self._keys = keys

    def transaction(self, found: Transaction) -> None:
        super().transaction(found)
        for step in found.steps:
            if step.put and step.name.startswith(PREFIX):
                self.judged += 1
                driver, job = Driver(**json.loads(step.value)), step.key.removeprefix(PREFIX).partition("/")[0]
                now = self.held(self._keys.assignment(driver_of(job))) or Held(0, "", "")
                if (driver.assignment, driver.host) != (now.generation, now.host):
                    self.violated(f"{step.at()}: a driver on {driver.host} of generation {driver.assignment} has "
                                  f"written while {now.host or 'no host'} has generation {now.generation}", step.event)


def check(changes: Sequence[Change], keys: ClusterKeys) -> list[str]:
    """What is wrong with the assignments, and with the writes of light runs. ``changes``: of all keys, from a revision
    on at which nothing was assigned yet."""
    checker = LightWrites(keys)
    replay = Replay([checker])
    for change in changes:
        replay.change({"kind": Kind.CHANGE, **asdict(change)})
    replay.flush()
    return [violation.what for violation in checker.violations]


def superseded(drivers: Sequence[Driver]) -> list[str]:
    """The drivers that have written although a later one had begun. ``drivers``: in the order of their writes."""
    return [f"{one} wrote before {following}" for one, following in pairwise(drivers) if not (
        one.epoch < following.epoch and one.generation < following.generation
        and one.assignment <= following.assignment)]
