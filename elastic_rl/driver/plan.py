"""Which engines to start and drain, given those that are desired and those that exist. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.etcd.records import EngineState


@dataclass(frozen=True)
class Running:
    """An engine of the driver. ``started_at``: unix seconds."""

    id: str
    state: EngineState
    started_at: float


@dataclass(frozen=True)
class Plan:
    start: int = 0
    drain: tuple[str, ...] = ()


def plan(desired: int, engines: Sequence[Running], *, may_start: int) -> Plan:
    """Engines to start and to drain so that ``desired`` remain.

    Draining and dead engines do not count. Scaling in drains engines that serve nothing yet first, then the youngest:
    the older ones have the warmer caches. ``may_start`` bounds what may be started now, in a crash loop.
    """
    staying = [e for e in engines if e.state in (EngineState.STARTING, EngineState.SYNCING, EngineState.READY)]
    if len(staying) < desired:
        return Plan(start=min(desired - len(staying), may_start))
    leave_first = sorted(staying, key=lambda e: (e.state is EngineState.READY, -e.started_at))
    return Plan(drain=tuple(e.id for e in leave_first[:len(staying) - desired]))


@dataclass(frozen=True)
class StartBudget:
    """Backoff of a crash loop: each start that failed doubles the wait before the next one."""

    failures: int = 0
    not_before: float = 0.0
    """Monotonic seconds, so that a clock that is set back does not stop the starts."""

    def after_failure(self, now: float, *, base_s: float = 1.0, ceiling_s: float = 60.0) -> StartBudget:
        return StartBudget(self.failures + 1, now + min(ceiling_s, base_s * 2.0 ** min(self.failures, 32)))

    def after_success(self) -> StartBudget:
        return StartBudget()

    def open(self, now: float) -> bool:
        """Whether an engine may be started now."""
        return now >= self.not_before
