"""Hung or only slow? The limit for a member's time without progress follows what it has said that its work costs, and
what its role's history makes usual. Pure.

A member that states the cost of its work (``StatedWork``) has a multiple of the time that this cost takes at its own
rate or at its role's slowest, whichever is slower: one long sequence after many short ones is not hung, and neither is
a replica that is ten times slower than the others. In work of more than ten minutes or so it is less than ten times,
since what a member may take beyond what is expected has a bound of its own: a hang in a piece of work that takes an
hour is not to be found after ten. One that is past half of its limit is late, which is only shown.

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
from elastic_rl.etcd.records import Member, StatedWork

IDLE_PHASES = frozenset({"", "closed", "idle", "finished", "failed", "stopped"})
"""Phases in which no progress is expected: not started, ended, or waiting for a request. So are those that begin with
``waiting``."""
_KNOWN_AFTER = 3
"""Intervals of a phase after which its limit is learned; before, only the ceiling holds."""
_FADE = 0.98
"""Fraction of the longest interval that is kept at each new one, so that one slow step is forgotten."""

_RATE_CHANGED = 0.5
"""A role's rate is stored again when it has changed by this fraction."""
_LATE = 0.5
"""Fraction of its limit after which a member is late."""
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


def limit_s(intervals: ProgressIntervals | None, phase: str, limits: HangLimits, work: StatedWork | None = None
            ) -> float:
    """Seconds without progress beyond which a member in this phase, with this work, counts as hung."""
    known = intervals is not None and intervals.samples.get(phase, 0) >= _KNOWN_AFTER
    usual = (min(limits.ceiling_s, max(limits.floor_s, limits.factor * intervals.longest_s[phase]))
             if intervals is not None and known else limits.ceiling_s)
    if work is None:
        return usual
    if not (expected := expected_s(intervals, work)):
        return limits.ceiling_s  # nobody knows how long it takes, and what was usual for other work says nothing
    return max(usual, min(limits.factor * expected, expected + limits.factor * limits.ceiling_s))


def expected_s(intervals: ProgressIntervals | None, work: StatedWork | None) -> float:
    """Seconds that the work is expected to take; 0 where that is not known."""
    if work is None:
        return 0.0
    return work.flops * max(work.s_per_flop, intervals.s_per_flop if intervals is not None else 0.0)


def stalled_s(member: Member) -> float:
    """Seconds without progress at the member's last heartbeat."""
    return max(0.0, member.beat_at - member.progress_at)


@dataclass(frozen=True)
class Pace:
    """How a member's time without progress compares with what is expected."""

    stalled_s: float
    expected_s: float
    """What its work is expected to take; 0: it has stated none, or its rate is not known."""
    limit_s: float
    """Beyond it the member is hung."""

    @property
    def hung(self) -> bool:
        """Whether the member sends heartbeats but makes no progress."""
        return self.stalled_s > self.limit_s

    @property
    def late(self) -> str:
        """What is late, for people; empty while it is not."""
        if self.stalled_s <= _LATE * self.limit_s:
            return ""
        expected = f", of {self.expected_s:.0f} s that were expected" if self.expected_s else ""
        return (f"{self.stalled_s:.0f} s without progress{expected}; it counts as hung after {self.limit_s:.0f} s")


def pace(member: Member, intervals: Mapping[str, ProgressIntervals], limits: HangLimits, load_per_core: float = 0.0
         ) -> Pace:
    """``intervals``: by role; ``load_per_core``: the load of the member's machine."""
    if is_idle(member.phase):
        return Pace(0.0, 0.0, limits.ceiling_s)
    known = intervals.get(member.role)
    limit = limit_s(known, member.phase, limits, member.work) * stretch(load_per_core)
    return Pace(stalled_s(member), expected_s(known, member.work), limit)


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
        for role, slowest in _slowest(now.values()).items():
            intervals = self.intervals.get(role) or ProgressIntervals(role=role)
            self.intervals[role] = intervals.replace(s_per_flop=slowest)
        self._last = now
        changed = [i for role, i in self.intervals.items() if _differs(i, self._stored.get(role))]
        self._stored |= {i.role: i for i in changed}
        return changed


def _slowest(members: Iterable[Member]) -> dict[str, float]:
    """Seconds for an operation of the slowest member of each role in which one has stated its rate: for those that have
    none yet, as after a restart."""
    slowest: dict[str, float] = {}
    for m in members:
        if m.work is not None and m.work.s_per_flop:
            slowest[m.role] = max(m.work.s_per_flop, slowest.get(m.role, 0.0))
    return slowest


def _differs(new: ProgressIntervals, old: ProgressIntervals | None) -> bool:
    return old is None or abs(new.s_per_flop - old.s_per_flop) > _RATE_CHANGED * old.s_per_flop or any(
        samples != old.samples.get(phase)
        or abs(new.longest_s[phase] - old.longest_s[phase]) > 0.1 * old.longest_s[phase]
        for phase, samples in new.samples.items())
