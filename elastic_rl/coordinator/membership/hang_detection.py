"""Hung or only slow? The limit for a member's time without progress is learned from its role's history. Pure.

A member sends heartbeats from a thread of its own and records progress from the thread that works. Both times come from
the member's own clock, so ``beat_at - progress_at`` is right on any leader, whatever its clock says. A process that is
stopped as a whole sends no heartbeats: a witness of its machine says so, and it is dead, not hung.

On a machine with more work than cores everything takes longer than it used to, and nothing is wrong: there each limit
is stretched by the load that the machine's witnesses report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.records import ProgressIntervals
from elastic_rl.etcd.records import Member

IDLE_PHASES = frozenset({"", "closed", "idle", "finished", "failed"})
"""Phases in which no progress is expected: not started, ended, or waiting for a request. So are those that begin with
``waiting``."""
_KNOWN_AFTER = 3
"""Intervals of a phase after which its limit is learned; before, only the ceiling holds."""
_FADE = 0.98
"""Fraction of the longest interval that is kept at each new one, so that one slow step is forgotten."""


MAX_STRETCH = 4.0
"""A limit is stretched at most so far by the load of a machine: a hang must be found there too."""


def stretch(load_per_core: float) -> float:
    """Factor for limits on time on a machine with so many threads per core that run or want to."""
    return min(MAX_STRETCH, max(1.0, load_per_core))


@dataclass(frozen=True)
class HangLimits:
    """Bounds of what is learned. ``factor``: multiple of the longest usual interval that is still no hang."""

    factor: float
    floor_s: float
    ceiling_s: float

    @classmethod
    def from_config(cls, cfg: CoordinatorConfig) -> HangLimits:
        return cls(cfg.hang_factor, cfg.hang_min_s, cfg.hang_max_s)


def is_idle(phase: str) -> bool:
    return phase in IDLE_PHASES or phase.startswith("waiting")


def learn(intervals: ProgressIntervals, phase: str, interval_s: float) -> ProgressIntervals:
    """The intervals with one more in a phase."""
    longest = max(interval_s, intervals.longest_s.get(phase, 0.0) * _FADE)
    return intervals.replace(
        longest_s={**intervals.longest_s, phase: longest},
        samples={**intervals.samples, phase: min(_KNOWN_AFTER, intervals.samples.get(phase, 0) + 1)})


def limit_s(intervals: ProgressIntervals | None, phase: str, limits: HangLimits) -> float:
    """Seconds without progress beyond which a member in this phase counts as hung."""
    if intervals is None or intervals.samples.get(phase, 0) < _KNOWN_AFTER:
        return limits.ceiling_s
    return min(limits.ceiling_s, max(limits.floor_s, limits.factor * intervals.longest_s[phase]))


def stalled_s(member: Member) -> float:
    """Seconds without progress at the member's last heartbeat."""
    return max(0.0, member.beat_at - member.progress_at)


def is_hung(member: Member, intervals: Mapping[str, ProgressIntervals], limits: HangLimits,
            load_per_core: float = 0.0) -> bool:
    """Whether the member sends heartbeats but makes no progress. ``intervals``: by role; ``load_per_core``: the load
    of its machine."""
    limit = limit_s(intervals.get(member.role), member.phase, limits) * stretch(load_per_core)
    return not is_idle(member.phase) and stalled_s(member) > limit


class IntervalLearner:
    """Learns each role's progress intervals from successive snapshots of its members.

    What it remembers between snapshots is useful but never needed: a leader's first snapshot of a member teaches
    nothing.
    """

    def __init__(self, stored: Mapping[str, ProgressIntervals]) -> None:
        """``stored``: what etcd holds, by role."""
        self.intervals = dict(stored)
        self._stored = dict(stored)
        self._last: dict[tuple[str, str], Member] = {}

    def observe(self, members: Iterable[Member]) -> list[ProgressIntervals]:
        """Learns from the members as they are now. Returns what is worth storing again, which counts as stored from
        then on: a phase became known, or its interval has changed by a tenth."""
        now = {(m.role, m.id): m for m in members}
        for name, member in now.items():
            before = self._last.get(name)
            if before is None or before.incarnation != member.incarnation or before.progress_at >= member.progress_at:
                continue
            if not is_idle(before.phase):
                intervals = self.intervals.get(member.role) or ProgressIntervals(role=member.role)
                self.intervals[member.role] = learn(intervals, before.phase, member.progress_at - before.progress_at)
        self._last = now
        changed = [i for role, i in self.intervals.items() if _differs(i, self._stored.get(role))]
        self._stored |= {i.role: i for i in changed}
        return changed


def _differs(new: ProgressIntervals, old: ProgressIntervals | None) -> bool:
    return old is None or any(
        samples != old.samples.get(phase)
        or abs(new.longest_s[phase] - old.longest_s[phase]) > 0.1 * old.longest_s[phase]
        for phase, samples in new.samples.items())
