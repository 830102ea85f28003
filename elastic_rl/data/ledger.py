"""The group ledger: what has become of each prompt group, so that each is trained on exactly once or dropped (I5).
Pure.

    (none) ──lease──▶ leased ──generated──▶ generated ──queued──▶ queued ◀──────▶ chosen ───commit───▶ trained
      ▲                 │                     │     │               │               │
      └─────release─────┴─────────────────────┴─────┼─────┬─────────┴───────────────┘
                                                    └──drop──▶ dropped(reason)

A group is released, and leased again, when it is not being generated after all, or when its data was lost, is too
stale, or is of weights that the trainer went back from. Only what is to wait for its step is queued and chosen: a step
that is made of all that was generated consumes groups as they are.

There is no way back from trained or dropped: the set of both is committed inside ``trainer_state``, in the same
transaction as the weights that it made, and so can never disagree with them. Everything else is work in progress
of one writer. When that is lost, the ledger starts again from the committed sets, and the groups in progress are
leased again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

from elastic_rl.data.intervals import IntervalSet
from elastic_rl.errors import Conflict, IllegalTransition

_MAX_REASONS, _OTHER = 16, "other"
"""Reasons that are counted each by itself: a filter that puts a number into its reason must not grow the state."""


class GroupState(StrEnum):
    """The state of a group that is not consumed yet."""

    LEASED = "leased"
    GENERATED = "generated"
    """Its samples are there; they are on their way into the queue, where there is one."""
    QUEUED = "queued"
    CHOSEN = "chosen"
    """It is part of the step that is made now."""


@dataclass(frozen=True)
class OpenGroup:
    """A group that is not consumed yet."""

    versions: tuple[int, ...]
    """The versions of its tokens, ascending; while it is leased, the oldest one that is asked for."""
    place: int = 0
    """Groups are queued in this order."""


@dataclass(frozen=True)
class Consumption:
    """The groups that one update consumes. ``dropped``: reason → groups that are not trained on."""

    trained: IntervalSet = IntervalSet()
    dropped: Mapping[str, IntervalSet] = field(default_factory=dict)

    @property
    def groups(self) -> IntervalSet:
        out = self.trained
        for groups in self.dropped.values():
            out |= groups
        return out

    @property
    def count(self) -> int:
        """Groups that are named, with those that are named twice counted twice."""
        return len(self.trained) + sum(map(len, self.dropped.values()))

    def to_json(self) -> dict[str, Any]:
        return {"trained": self.trained.to_json(), "dropped": {r: g.to_json() for r, g in self.dropped.items()}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ValueError and KeyError for anything but what ``to_json`` returned."""
        return cls(IntervalSet.from_json(raw["trained"]),
                   {str(r): IntervalSet.from_json(g) for r, g in dict(raw.get("dropped") or {}).items()})


@dataclass(frozen=True)
class ConsumedGroups:
    """The groups that a state of the weights was trained on, and those that were dropped until then. Which of the two
    is not kept for each group: with filters the two sets would have a span for every few groups, and grow for ever."""

    groups: IntervalSet = IntervalSet()
    trained: int = 0
    """How many groups its updates were trained on, one after the other. Counted by what was executed, not derived from
    the set: a group that was trained on twice counts twice."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason → how many groups were dropped."""

    def check(self, new: Consumption) -> None:
        """Raises Conflict when an update would consume a group for the second time."""
        again = self.groups & new.groups
        if again:
            raise Conflict(f"the groups {again.to_json()} are consumed already",
                           hint="resume from the trainer's committed state")
        if new.count != len(new.groups):
            raise Conflict("an update names a group twice, as trained and dropped or under two reasons")

    def add(self, new: Consumption) -> ConsumedGroups:
        """The state after an update was executed. Does not check."""
        dropped = dict(self.dropped)
        for reason, groups in new.dropped.items():
            name = reason if reason in dropped or len(dropped) < _MAX_REASONS else _OTHER
            dropped[name] = dropped.get(name, 0) + len(groups)
        return ConsumedGroups(self.groups | new.groups, self.trained + len(new.trained), dropped)

    def to_json(self) -> dict[str, Any]:
        return {"groups": self.groups.to_json(), "trained": self.trained, "dropped": dict(self.dropped)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ValueError for anything but what ``to_json`` returned; {} is the empty one."""
        return cls(IntervalSet.from_json(raw.get("groups", [])), int(raw.get("trained", 0)),
                   {str(k): int(v) for k, v in dict(raw.get("dropped") or {}).items()})


class GroupLedger:
    """The groups in progress of one writer, on top of those that are consumed."""

    def __init__(self, consumed: IntervalSet) -> None:
        self._consumed = consumed
        self._open: dict[GroupState, dict[int, OpenGroup]] = {state: {} for state in GroupState}
        self._places = itertools.count(1)
        self._dropped: dict[str, set[int]] = {}
        self._stale: set[int] = set()
        self._stop = 0
        """One more than the highest group that was ever leased."""
        self._find_free()

    @property
    def consumed(self) -> IntervalSet:
        """Groups that are consumed."""
        return self._consumed

    @property
    def unrecorded(self) -> IntervalSet:
        """Groups that were begun and that no update has recorded: in progress, dropped, or released."""
        return self._consumed.complement(self._stop)

    def in_state(self, state: GroupState) -> Mapping[int, OpenGroup]:
        """Groups in this state, by ordinal; a view, which changes with the ledger."""
        return MappingProxyType(self._open[state])

    @property
    def in_progress(self) -> list[int]:
        """Groups in any state."""
        return [ordinal for groups in self._open.values() for ordinal in groups]

    def count(self, *states: GroupState) -> int:
        """How many groups are in these states."""
        return sum(len(self._open[state]) for state in states)

    def state(self, ordinal: int) -> GroupState | None:
        """None for a group that is not in progress."""
        return next((state for state, groups in self._open.items() if ordinal in groups), None)

    @property
    def stale(self) -> Collection[int]:
        """Groups that were released since they were too stale, and have not been consumed or dropped."""
        return self._stale

    @property
    def dropped(self) -> Mapping[str, Collection[int]]:
        """Reason → groups that the next update records as dropped."""
        return self._dropped

    def lease(self, count: int, min_version: int = 0) -> list[int]:
        """Takes the ``count`` lowest groups that nobody has. Its time does not depend on how many are in progress."""
        ordinals = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        new = count - len(ordinals)
        ordinals += range(self._free_from, self._free_from + new)
        self._free_from += new
        self._open[GroupState.LEASED] |= dict.fromkeys(ordinals, OpenGroup((min_version,)))
        self._stop = max(self._stop, self._consumed.stop, ordinals[-1] + 1)
        return ordinals

    def generated(self, ordinal: int, versions: Sequence[int] = ()) -> None:
        """A leased group has its samples. ``versions``: the versions of their tokens, ascending. Raises
        IllegalTransition for a group that is not leased: its samples are not to be used."""
        self._take(ordinal, GroupState.LEASED)
        self._open[GroupState.GENERATED][ordinal] = OpenGroup(tuple(versions) or (0,))

    def queued(self, ordinal: int) -> None:
        """A generated group waits for its step, after those that do so already; a chosen one waits again, in its former
        place. Raises IllegalTransition."""
        group = self._take(ordinal, GroupState.GENERATED, GroupState.CHOSEN)
        self._open[GroupState.QUEUED][ordinal] = replace(group, place=group.place or next(self._places))

    def chosen(self, ordinal: int) -> None:
        """Raises IllegalTransition for a group that is not queued: it could be in two steps."""
        self._open[GroupState.CHOSEN][ordinal] = self._take(ordinal, GroupState.QUEUED)

    def drop(self, ordinal: int, reason: str) -> None:
        """Takes a generated group out, which may be queued; the next update records why. Raises IllegalTransition."""
        self._take(ordinal, GroupState.GENERATED, GroupState.QUEUED)
        self._stale.discard(ordinal)
        self._dropped.setdefault(reason, set()).add(ordinal)

    def give_up(self, ordinal: int, reason: str) -> None:
        """Drops a group that nobody has, before it is generated (again); the next update records why. Raises
        IllegalTransition for one that is in progress."""
        if (state := self.state(ordinal)) is not None:
            raise IllegalTransition(f"group {ordinal} is {state}, and not to be given up")
        self._stale.discard(ordinal)
        self._stop = max(self._stop, ordinal + 1)
        self._dropped.setdefault(reason, set()).add(ordinal)
        self._find_free()

    def release(self, ordinal: int, *, stale: bool = False) -> None:
        """Gives a group back, which is to be generated again. Raises IllegalTransition for one that nobody has."""
        self._take(ordinal, *GroupState)
        heapq.heappush(self._free, ordinal)
        if stale:
            self._stale.add(ordinal)

    def forget_drops(self) -> None:
        """Groups that were dropped since the last update are to be generated again."""
        self._dropped = {}
        self._find_free()

    def rebase(self, consumed: IntervalSet) -> list[int]:
        """The trainer is at another committed state, with these groups. What is in progress goes on but for them.
        Returns those that were in progress."""
        self._consumed = consumed
        gone = [ordinal for ordinal in self.in_progress if ordinal in consumed]
        for ordinal in gone:
            self._take(ordinal, *GroupState)
        dropped = {reason: {g for g in groups if g not in consumed} for reason, groups in self._dropped.items()}
        self._dropped = {reason: groups for reason, groups in dropped.items() if groups}
        self._stale = {ordinal for ordinal in self._stale if ordinal not in consumed}
        self._find_free()
        return gone

    def _find_free(self) -> None:
        """Looks for the groups that nobody has and that are not consumed or dropped."""
        self._free_from = max(self._stop, self._consumed.stop)
        """Nobody has this one or a higher one."""
        dropped = (ordinal for groups in self._dropped.values() for ordinal in groups)
        taken = self._consumed | IntervalSet.from_values([*self.in_progress, *dropped])
        self._free = list(taken.complement(self._free_from))
        """The lower ones, as a heap."""

    def consumption(self, trained: Collection[int]) -> Consumption:
        """What an update on these groups consumes, with all that were dropped. Raises IllegalTransition for one that
        was not generated."""
        for ordinal in trained:
            self._state_of(ordinal, GroupState.GENERATED, GroupState.CHOSEN)
        return Consumption(IntervalSet.from_values(trained),
                           {reason: IntervalSet.from_values(groups) for reason, groups in self._dropped.items()})

    def commit(self, consumption: Consumption) -> None:
        """The update was executed. Groups that were dropped since it was decided on are for the next one."""
        self.rebase(self._consumed | consumption.groups)

    def _take(self, ordinal: int, *states: GroupState) -> OpenGroup:
        """Takes a group out of the state that it is in. Raises IllegalTransition unless it is one of these."""
        return self._open[self._state_of(ordinal, *states)].pop(ordinal)

    def _state_of(self, ordinal: int, *states: GroupState) -> GroupState:
        """The state of a group. Raises IllegalTransition unless it is one of these."""
        now = self.state(ordinal)
        if now is None or now not in states:
            raise IllegalTransition(f"group {ordinal} is {now or 'not open'}, not {' or '.join(states)}")
        return now


@dataclass(frozen=True)
class Audit:
    """What is wrong with the groups of a run. All zero and empty: each was trained on exactly once or dropped."""

    lost: int = 0
    """Groups that were skipped, neither trained nor dropped, below others that were; or the number of groups by which
    the steps that were done have too few."""
    duplicated: int = 0
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.problems)


def audit(states: Sequence[tuple[int, ConsumedGroups]], *, groups_per_step: int,
          leased: IntervalSet = IntervalSet()) -> Audit:
    """Audits the committed states (RL steps done, groups consumed) of a run, in the order of their commit. It is about
    the last one; the others must be stages on the way to it, unless a recovery went back behind them. ``leased``:
    groups that the actor worked on at its end: an asynchronous run that ends early leaves some of them behind, below
    others that it has trained."""
    if not states:
        return Audit()
    steps, last = states[-1]
    expected = steps * groups_per_step
    counted = last.trained + sum(last.dropped.values())
    holes = len(last.groups.complement(last.groups.stop) - leased)
    problems = [f"groups that were consumed at step {step} are not at step {steps}" for step, state in states[:-1]
                if step <= steps and len(state.groups - last.groups) and step * groups_per_step == state.trained]
    if counted < len(last.groups):
        problems.append(f"{len(last.groups)} groups are consumed, but {counted} were trained on or dropped")
    return Audit(lost=max(holes, expected - last.trained), problems=tuple(problems),
                 duplicated=max(0, counted - len(last.groups), last.trained - expected))
