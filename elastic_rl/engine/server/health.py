"""Health of an engine's server: a pure state machine over probes. No I/O and no clock.

    HEALTHY ──probe unanswered──▶ SUSPECTED ──too long silent──▶ FROZEN
       ▲                              │
       └────── any sign of life ──────┘

A *sign of life* is a load that has moved since the last probe, or an answer to a one-token generation. The time since
the last one is split by what the processes of the server did in it: they *waited* (for nothing that this machine owes
them), they *worked* (used a CPU), or they were *starved* (could have run, but had no CPU). Slow is not frozen: a server
on a machine with 15 times more to do than it has cores is starved most of the time, and starvation is not limited.
Waiting is limited tightly, and work without a sign of life loosely: one long prefill works, and so does a scheduler
that spins for ever on a collective that a dead rank never joins.

Transitions that must NOT exist: HEALTHY → FROZEN (one unanswered probe condemns nobody), FROZEN → anything (its server
is being killed), and SUSPECTED → FROZEN by starvation, or by a gap in which the observer itself did not run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECTED = "suspected"
    """The last probe was not answered."""
    FROZEN = "frozen"
    """It has shown no sign of life for too long."""


@dataclass(frozen=True)
class HealthLimits:
    """``waiting_s``, ``working_s``: seconds without a sign of life. ``gap_s``: the most seconds of waiting that the
    time between two observations can count for; must be less than ``waiting_s``."""

    waiting_s: float
    working_s: float
    gap_s: float

    def __post_init__(self) -> None:
        if not 0 < self.gap_s < self.waiting_s <= self.working_s:
            raise ValueError("expected 0 < gap_s < waiting_s <= working_s")


@dataclass(frozen=True)
class Effort:
    """What the busiest process of a server did between two observations, in seconds."""

    worked_s: float = 0.0
    starved_s: float = 0.0


@dataclass(frozen=True)
class EngineHealth:
    """Health of one server. The three times are seconds since the last sign of life."""

    limits: HealthLimits
    observed_at: float
    """Time of the last observation, by the clock of the caller."""
    state: Health = Health.HEALTHY
    waited_s: float = 0.0
    worked_s: float = 0.0
    starved_s: float = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return self.waited_s + self.worked_s + self.starved_s

    def sign_of_life(self, now: float) -> EngineHealth:
        """The server has shown that its schedulers work."""
        if self.state is Health.FROZEN:
            return self
        return EngineHealth(self.limits, now)

    def silence(self, now: float, effort: Effort) -> EngineHealth:
        """A probe was not answered. ``effort``: since the last observation."""
        if self.state is Health.FROZEN:
            return self
        elapsed = max(0.0, now - self.observed_at)
        worked = min(max(0.0, effort.worked_s), elapsed)
        starved = min(max(0.0, effort.starved_s), elapsed - worked)
        waited = min(elapsed - worked - starved, self.limits.gap_s)
        new = replace(self, observed_at=now, waited_s=self.waited_s + waited, worked_s=self.worked_s + worked,
                      starved_s=self.starved_s + starved)
        if self.state is Health.HEALTHY:
            return replace(new, state=Health.SUSPECTED)
        over = new.waited_s >= self.limits.waiting_s or new.worked_s >= self.limits.working_s
        return replace(new, state=Health.FROZEN if over else Health.SUSPECTED)

    def skip(self, now: float) -> EngineHealth:
        """No probe was possible, as while the weights change: the time until now counts for nothing."""
        return self if self.state is Health.FROZEN else replace(self, observed_at=now)

    def describe(self) -> str:
        """The time since the last sign of life, for people."""
        return (f"no sign of life for {self.silent_s:.0f} s (its processes waited {self.waited_s:.0f} s, worked "
                f"{self.worked_s:.0f} s and had no CPU for {self.starved_s:.0f} s)")
