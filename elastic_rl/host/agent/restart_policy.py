"""When a service that has ended is started again. Pure: no clock, no process, no random number of its own.

The first end after a quiet time is answered at once; ends in a row wait longer and longer, with jitter, and a budget
that refills bounds how many starts there are in the long run. Nothing here gives up: a service that cannot live is
tried for ever, at a bounded rate, since only its operator ends a cluster.

There is no transition from RUNNING to a start: a service is only started after its end was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from elastic_rl.runtime.backoff import doubled_s


class Phase(StrEnum):
    RUNNING = "running"
    ENDED = "ended"
    """It waits until it is started again."""


@dataclass(frozen=True)
class RestartLimits:
    """Limits of the restarts of one service; times are seconds."""

    backoff_initial_s: float = 1.0
    """Pause before the second start in a row; each further one waits twice as long, up to ``backoff_max_s``."""
    backoff_max_s: float = 30.0
    stable_s: float = 60.0
    """A service that ran for so long has recovered: its next end is the first in a row."""
    budget: int = 6
    """Starts that may follow each other as fast as the backoff allows."""
    refill_s: float = 30.0
    """Time in which one of them is given back."""

    @property
    def longest_wait_s(self) -> float:
        """Longest time from an end to the start that it is owed."""
        return max(self.backoff_max_s, self.refill_s)


@dataclass(frozen=True)
class ServiceState:
    """One service as its supervisor knows it. Times are seconds of one monotonic clock."""

    phase: Phase
    since: float
    """When the phase began."""
    ends: int = 0
    """Ends in a row, without a stable run in between."""
    start_at: float = 0.0
    """When it is started again; counts while it has ended."""
    budget: float = 0.0
    """Starts left, as of ``budget_at``; a fraction is on its way."""
    budget_at: float = 0.0

    @classmethod
    def running(cls, now: float, limits: RestartLimits) -> ServiceState:
        """A service that is seen running for the first time."""
        return cls(Phase.RUNNING, now, budget=limits.budget, budget_at=now)

    @classmethod
    def ended(cls, now: float, limits: RestartLimits) -> ServiceState:
        """A service that had ended before it was first seen."""
        return on_ended(cls.running(now, limits), now, limits, jitter=1.0)

    def due(self, now: float) -> bool:
        """Whether it is to be started now."""
        return self.phase is Phase.ENDED and now >= self.start_at


def on_seen(state: ServiceState | None, running: bool, now: float, limits: RestartLimits, *,
            jitter: float) -> ServiceState:
    """The service was found running, or not. ``state``: None the first time. ``jitter``: as for ``on_ended``."""
    if state is None:
        return ServiceState.running(now, limits) if running else ServiceState.ended(now, limits)
    return on_running(state, now, limits) if running else on_ended(state, now, limits, jitter=jitter)


def on_running(state: ServiceState, now: float, limits: RestartLimits) -> ServiceState:
    """The service was seen running: by our start, or by another command's."""
    if state.phase is Phase.ENDED:
        return replace(state, phase=Phase.RUNNING, since=now)
    if state.ends and now - state.since >= limits.stable_s:
        return replace(state, ends=0)
    return state


def on_ended(state: ServiceState, now: float, limits: RestartLimits, *, jitter: float) -> ServiceState:
    """The service was seen not to run. ``jitter``: a random number in [0, 1]; it shortens the pause by up to half."""
    return state if state.phase is Phase.ENDED else _waiting(on_running(state, now, limits), now, limits, jitter)


def on_started(state: ServiceState, now: float, limits: RestartLimits) -> ServiceState:
    """It was started, which takes one of the budget."""
    state = _refilled(state, now, limits)
    return replace(state, phase=Phase.RUNNING, since=now, budget=max(0.0, state.budget - 1.0))


def on_start_failed(state: ServiceState, now: float, limits: RestartLimits, *, jitter: float) -> ServiceState:
    """It could not be started: as a start that ended at once."""
    return _waiting(on_started(state, now, limits), now, limits, jitter)


def _waiting(state: ServiceState, now: float, limits: RestartLimits, jitter: float) -> ServiceState:
    state = _refilled(state, now, limits)
    pause = doubled_s(state.ends, limits.backoff_initial_s, limits.backoff_max_s) if state.ends else 0.0
    pause *= 1.0 - 0.5 * jitter
    refill = max(0.0, 1.0 - state.budget) * limits.refill_s
    return replace(state, phase=Phase.ENDED, since=now, ends=state.ends + 1, start_at=now + max(pause, refill))


def _refilled(state: ServiceState, now: float, limits: RestartLimits) -> ServiceState:
    got = max(0.0, now - state.budget_at) / limits.refill_s
    return replace(state, budget=min(float(limits.budget), state.budget + got), budget_at=now)
