"""Hung or only slow? How long a member may be silent is learned from how long its role usually is. Pure.

A member beats from a thread of its own and gives a sign of life from the thread that works. Both times come from the
member's own clock, so the silence ``beat_at - progress_at`` is true on any leader, whatever its clock says. A process
that is stopped as a whole does not beat: its lease ends, and it is dead, not hung.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_rl.config import CoordinatorConfig
from elastic_rl.etcd.records import Member, Record

AT_REST = frozenset({"", "closed", "idle", "finished", "failed"})
"""Phases without a duty to give signs: not begun yet, at an end, or waiting to be asked. Phases that begin with
``waiting`` are at rest too."""
_KNOWN_AFTER = 3
"""Signs of a phase after which its pace counts as known; before, only the ceiling holds."""
_FORGET = 0.98
"""Share of the longest silence that is kept at each sign, so that one slow step is not remembered for ever."""


class Pace(Record):
    """How long a role is silent in each of its phases. Kept in etcd, so that a new leader need not learn it again."""

    role: str
    usual_s: dict[str, float] = {}
    """Phase → longest silence seen, fading."""
    signs: dict[str, int] = {}
    """Phase → signs seen, counted up to where the pace is known."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what is learned. ``factor``: how many times the usual silence is still no hang."""

    factor: float
    floor_s: float
    ceiling_s: float

    @classmethod
    def of(cls, cfg: CoordinatorConfig) -> Limits:
        return cls(cfg.hang_factor, cfg.hang_min_s, cfg.hang_max_s)


def at_rest(phase: str) -> bool:
    return phase in AT_REST or phase.startswith("waiting")


def learn(pace: Pace, phase: str, silence_s: float) -> Pace:
    """The pace after a member was silent for so long in a phase and then gave a sign."""
    usual = max(silence_s, pace.usual_s.get(phase, 0.0) * _FORGET)
    return pace.replace(usual_s={**pace.usual_s, phase: round(usual, 3)},
                    signs={**pace.signs, phase: min(_KNOWN_AFTER, pace.signs.get(phase, 0) + 1)})


def limit_s(pace: Pace | None, phase: str, limits: Limits) -> float:
    """Seconds of silence from which on a member in this phase counts as hung."""
    if pace is None or pace.signs.get(phase, 0) < _KNOWN_AFTER:
        return limits.ceiling_s
    return min(limits.ceiling_s, max(limits.floor_s, limits.factor * pace.usual_s[phase]))


def silence_s(member: Member) -> float:
    """How long the working thread had given no sign at the last beat."""
    return max(0.0, member.beat_at - member.progress_at)


def hung(member: Member, paces: Mapping[str, Pace], limits: Limits) -> bool:
    """Whether the member beats but does not work."""
    return not at_rest(member.phase) and silence_s(member) > limit_s(paces.get(member.role), member.phase, limits)


class Learner:
    """Turns successive sights of members into paces, from those that are kept in etcd on.

    What it remembers between sights is of use but never needed: a new leader's first sight of a member teaches nothing.
    """

    def __init__(self, kept: Mapping[str, Pace]) -> None:
        self.paces = dict(kept)
        self._kept = dict(kept)
        self._last: dict[tuple[str, str], Member] = {}

    def see(self, seen: Mapping[tuple[str, str], Member]) -> list[Pace]:
        """Learns from the members as they are now. Returns the paces that are worth keeping anew: a phase became known,
        or has changed by a tenth. They count as kept from then on."""
        for name, member in seen.items():
            before = self._last.get(name)
            if before is None or before.incarnation != member.incarnation or before.progress_at >= member.progress_at:
                continue
            if not at_rest(before.phase):
                pace = self.paces.get(member.role) or Pace(role=member.role)
                self.paces[member.role] = learn(pace, before.phase, member.progress_at - before.progress_at)
        self._last = dict(seen)
        news = [pace for role, pace in self.paces.items() if _differs(pace, self._kept.get(role))]
        self._kept |= {pace.role: pace for pace in news}
        return news


def _differs(new: Pace, old: Pace | None) -> bool:
    return old is None or any(
        signs != old.signs.get(phase) or abs(new.usual_s[phase] - old.usual_s[phase]) > 0.1 * old.usual_s[phase]
        for phase, signs in new.signs.items())
