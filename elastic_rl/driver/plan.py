"""What to do about the difference between the engines that are wanted and the engines there are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.etcd.records import EngineState


@dataclass(frozen=True)
class Running:
    """An engine as the driver sees it. ``started_at``: unix seconds."""

    id: str
    state: EngineState
    started_at: float


@dataclass(frozen=True)
class Plan:
    start: int = 0
    drain: tuple[str, ...] = ()


def plan(desired: int, engines: Sequence[Running], *, may_start: int) -> Plan:
    """Engines to start and to drain so that ``desired`` stay.

    Draining and dead engines count for nothing. Scaling in takes engines that serve nothing yet first, then the
    youngest: the older ones have the warmer caches. ``may_start`` bounds what a crash loop may start now.
    """
    staying = [e for e in engines if e.state in (EngineState.STARTING, EngineState.SYNCING, EngineState.READY)]
    if len(staying) < desired:
        return Plan(start=min(desired - len(staying), may_start))
    leave_first = sorted(staying, key=lambda e: (e.state is EngineState.READY, -e.started_at))
    return Plan(drain=tuple(e.id for e in leave_first[:len(staying) - desired]))


@dataclass(frozen=True)
class StartBudget:
    """Brakes a crash loop: after each engine that died before it was ready, the next start waits twice as long."""

    failures: int = 0
    not_before: float = 0.0

    def after_failure(self, now: float, *, base_s: float = 1.0, ceiling_s: float = 60.0) -> StartBudget:
        return StartBudget(self.failures + 1, now + min(ceiling_s, base_s * 2**self.failures))

    def after_success(self) -> StartBudget:
        return StartBudget()

    def open(self, now: float) -> bool:
        return now >= self.not_before
