"""I1 of writes in the place of a driver (``traffic.driver_writes``): only the newest driver of the host that holds a
run writes. A job that computes has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from chaos_tests.event_log import Event
from chaos_tests.traffic.driver_writes import PREFIX, Driver
from chaos_tests.validate.fencing import Holders
from chaos_tests.validate.replay import Transaction, below
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.etcd.keys import ClusterKeys

_ASSIGNMENTS = below(ClusterKeys("c").assignments_prefix())


class LightWrites(Checker):
    """Each write is of the driver on the host that holds the run, in the present generation of its assignment, and of
    none that a later one has followed."""

    rule = "I1"
    keys: ClassVar[tuple[str, ...]] = (_ASSIGNMENTS, PREFIX)
    judges = "writes in the place of a driver"

    def __init__(self) -> None:
        super().__init__()
        self._holders, self._last = Holders(), dict[str, Driver]()
        """Who holds each assignment; the newest driver by the root of its job."""
        self._cluster = ""

    def begin(self, run: Event) -> None:
        super().begin(run)
        self._cluster = str(self.settings.get("cluster") or "")

    def gap(self, first: int, last: int) -> None:
        self._holders.forget()

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name.startswith(_ASSIGNMENTS):
                self._holders.change(change)
        for change in found.changes:
            if change.put and change.name.startswith(PREFIX):
                driver, last = Driver(**change.new), self._last.get(change.scope)
                self._last[change.scope] = driver
                self.judged += 1
                if last is not None:
                    for problem in superseded([last, driver]):
                        self.violated(f"{change.at()}: {problem}", change.event)
                now = self._holders.of(ClusterKeys(self._cluster or change.job).assignment(driver_of(change.job)))
                if now is not None and (driver.assignment, driver.host) != (now.generation, now.host):
                    self.violated(f"{change.at()}: a driver on {driver.host} of generation {driver.assignment} has "
                                  f"written while {now.host or 'no host'} has generation {now.generation}",
                                  change.event)


def superseded(drivers: Sequence[Driver]) -> list[str]:
    """The drivers that have written although a later one had begun. ``drivers``: in the order of their writes."""
    return [f"{one} wrote before {following}" for one, following in pairwise(drivers) if one != following and not (
        one.epoch < following.epoch and one.generation < following.generation
        and one.assignment <= following.assignment)]


CHECKERS: tuple[type[Checker], ...] = (LightWrites,)
