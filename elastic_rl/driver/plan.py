"""Which engines to start and drain, given those that are desired and those that exist, and when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_rl.etcd.records import EngineState
from elastic_rl.runtime.backoff import doubled_s

_SERVING = (EngineState.READY, EngineState.RELEASED)
"""Released engines serve in the next phase of the engines."""


@dataclass(frozen=True)
class Running:
    """An engine of the driver. ``started_at``: unix seconds."""

    id: str
    state: EngineState
    started_at: float
    placed: bool = True
    """False while it waits for room in the cluster."""
    leaves: bool = False
    """Whether its host is to be emptied."""
    hurries: bool = False
    """Whether the time for that is over."""
    behind: bool = False
    """Whether it gets no requests before it has caught up with the others."""


@dataclass(frozen=True)
class Plan:
    start: int = 0
    drain: tuple[str, ...] = ()


def plan(desired: int, engines: Sequence[Running], *, may_start: int) -> Plan:
    """Engines to start and to drain so that ``desired`` remain.

    Draining and dead engines do not count. Scaling in drops engines that wait for room first, then those that serve
    nothing, then the youngest: the older ones have the warmer caches. Engines that leave do not count either; they
    serve on until as many others do, or the time for that is over. ``may_start`` bounds what may be started now: starts
    that fail, or engines that wait for room, leave no room for more of them.
    """
    staying = [e for e in engines if e.state.stays and not e.leaves]
    leaving = [e for e in engines if e.state.stays and e.leaves]
    leave_first = sorted(staying, key=lambda e: (e.placed, e.state in _SERVING and not e.behind, -e.started_at))
    surplus = leave_first[:max(0, len(staying) - desired)]
    serving = [e for e in leaving if e.state in _SERVING and not e.hurries]
    spare = sum(e.state in _SERVING for e in leave_first[len(surplus):]) + len(serving) - desired
    gone = [*surplus, *(e for e in leaving if e not in serving), *serving[:max(0, spare)]]
    return Plan(start=min(max(0, desired - len(staying)), max(0, may_start)), drain=tuple(e.id for e in gone))


@dataclass(frozen=True)
class StartBudget:
    """Backoff of starts that fail: each failure doubles the wait before the next start, and time forgives.

    The first failure costs ``base_s`` seconds, each further one twice as much, at most ``ceiling_s``. Every
    ``refill_s`` seconds in which starting was allowed and nothing failed take one failure back, so a cause that is
    fixed is forgotten within a bounded time, and one good start among many bad ones does not lift the backoff of the
    others. Failures beyond those that reach the ceiling are not remembered. There is no number of failures after which
    starting ends. All times are monotonic seconds, so that a clock that is set does not stop the starts.
    """

    base_s: float = 1.0
    ceiling_s: float = 60.0
    refill_s: float = 60.0
    count: int = 0
    """Failures that counted at the last one."""
    not_before: float = 0.0
    """When the next start is allowed."""
    failed_at: float = float("-inf")

    def failures(self, now: float) -> int:
        """Failures that still count."""
        return max(0, self.count - int(max(0.0, now - self.not_before) // self.refill_s))

    def after_failure(self, now: float, *, started_at: float | None = None, jitter: float = 0.0) -> StartBudget:
        """The budget once a start has failed.

        ``started_at``: when the start began. Starts that began before the last failure and failed after it had the same
        chance as that one: together they count once. ``jitter``: from 0 to 1, shortens the wait by up to a quarter, so
        that drivers that failed together do not start together again.
        """
        if started_at is not None and started_at <= self.failed_at:
            return self
        failures = self.failures(now)
        wait_s = doubled_s(failures + 1, self.base_s, self.ceiling_s)
        count = failures if wait_s >= self.ceiling_s and failures else failures + 1
        return replace(self, count=count, not_before=now + wait_s * (1 - 0.25 * jitter), failed_at=now)

    def open(self, now: float) -> bool:
        """Whether a start is allowed now."""
        return now >= self.not_before
