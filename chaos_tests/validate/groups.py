"""I5 of the prompt groups: who works on them, and which were consumed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import Transaction, below, record
from chaos_tests.validate.training import Effective
from chaos_tests.validate.verdict import Checker
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.etcd.keys import Keys

_JOB = Keys("j")
_LEASES, _EPOCH, _TERM = below(_JOB.group_leases_prefix()), below(_JOB.epoch()), below(_JOB.actor_term())
_STATES = below(_JOB.versions_prefix("trainer_state"))
_STATE = re.compile(re.escape(_STATES) + r"\d+")

_MOST = 4
"""Intervals that are named in a violation."""
_STATES_KEPT = 100
"""Newest states of the trainer to which a job may go back, and by which the records of its steps may be late: far more
than etcd keeps of them."""

Spans = Sequence[Sequence[int]]
"""Ordinals as intervals [start, stop)."""


class Leases(Checker):
    """A lease of groups is written in the present epoch and term, and no group is leased to two producers of a term."""

    rule = "I5"
    keys = (_LEASES,)
    judges = "leases of groups"

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            new = change.new
            if not change.name.startswith(_LEASES) or not new:
                continue
            self.judged += 1
            for what, key in (("epoch", _EPOCH), ("term", _TERM)):
                now = found.before(change.scope + key).get("number")
                if now is not None and new[what] != now:
                    self.violated(f"{change.at()} was written under {what} {new[what]} in {what} {now}", change.event)
            if double := overlap(new["groups"], new["groups"], same=True):
                self.violated(f"{change.at()} names the groups {double} twice", change.event)
            for key in found.after.under(change.scope + _LEASES):
                other = found.after.get(key)
                if (key > change.key or found.change_of(key) is None) and key != change.key and other and (
                        other["epoch"], other["term"]) == (new["epoch"], new["term"]) and (
                        both := overlap(new["groups"], other["groups"])):
                    self.violated(f"{change.at()} and {key} both have the groups {both}", change.event)


class Consumed(Checker):
    """What a committed state of the trainer has consumed, every later one has, and its step does not go back."""

    rule = "I5"
    keys = (_STATES,)
    judges = "states of the trainer"

    def __init__(self) -> None:
        super().__init__()
        self._last = dict[tuple[str, str], tuple[int, Spans, int]]()

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if _STATE.fullmatch(change.name) is None:
                continue
            meta = change.new.get("meta", {})
            is_new = change.new.get("state") == "committed" != change.old.get("state")
            if not is_new or "consumed" not in meta:
                continue
            self.judged += 1
            of = (change.scope, str(meta.get("phase", "")))
            groups, at, number = meta["consumed"].get("groups", []), int(meta.get("step", 0)), change.new["number"]
            if (before := self._last.get(of)) is not None and number > before[2]:
                if lost := missing(before[1], groups):
                    self.violated(f"{change.at()} lacks the groups {lost}, consumed by version {before[2]}",
                                  change.event)
                elif at < before[0]:
                    self.violated(f"{change.at()} is of step {at}, after step {before[0]}", change.event)
            self._last[of] = (at, groups, number)


@dataclass(frozen=True, slots=True)
class _State:
    """A committed state of the trainer. What it has consumed is in its record, and is read when it is judged: of a long
    run that is long."""

    event: Event
    at: str
    policy_version: int

    def read(self) -> tuple[IntervalSet, int, int]:
        """The groups, how many of them were trained on, and how many were dropped."""
        consumed = (record(self.event).get("meta") or {}).get("consumed") or {}
        return (IntervalSet.from_json(consumed.get("groups", [])), int(consumed.get("trained", 0)),
                sum(map(int, consumed.get("dropped", {}).values())))


@dataclass(eq=False, slots=True)
class _Begin:
    """What the steps of a run are counted from: the begin of the job, or the first step that the log has."""

    groups: IntervalSet | None
    """Those that were consumed before; None: no state has said it yet."""


@dataclass(eq=False, slots=True)
class _Done:
    """A time that a step was done. Its groups are its own: those of all steps up to it are found by way of the steps
    before, since a set for each step would grow with the square of the steps."""

    version: int
    """Of the policy that it made."""
    groups: IntervalSet
    before: _Done | None
    begin: _Begin


class ConsumedOfSteps(Checker):
    """Each committed state of the trainer has consumed the groups of the steps up to its own, as they were in effect
    then, those that were dropped, those of the state that the run began with, and no others.

    A state that agrees with its step is judged as soon as both were seen. Of others the record of their step may come
    later, so that they are judged at the end, or when so many states have come since that none follows from them."""

    rule = "I5"
    reads = frozenset({Kind.STEP})
    keys = (_STATES,)
    judges = "states of the trainer compared with its steps"
    lacks = "the log has no steps, or no states of the trainer"

    def __init__(self) -> None:
        super().__init__()
        self._effective = Effective()
        """Step → when it was done last; None: a step before it is not in the log."""
        self._done = dict[int, list[_Done]]()
        """Step → each time that it was done, of those that a later state can name."""
        self._begins = dict[int, _Begin]()
        """By the step before the first one."""
        self._states = dict[int, list[_State]]()
        """The states that are not judged yet, by their steps."""
        self._newest = list[int]()
        """The steps of the newest states, up to twice as many as are kept."""
        self._summed: tuple[_Done | None, IntervalSet] = (None, IntervalSet())
        """The step whose groups were added up last, with those of all steps up to it."""

    def see(self, event: Event) -> None:
        step = int(event["step"])
        self._effective.undo(step)
        before: _Done | None = self._effective.of.get(step - 1)
        begin = before.begin if before is not None else self._begin(step - 1) if not self._effective.of else None
        done = None if begin is None else _Done(
            int(event.get("policy_version") or 0), IntervalSet.from_values(event.get("groups") or ()), before, begin)
        self._effective.add(step, done)
        if done is not None:
            self._done.setdefault(step, []).append(done)
            self._settle(step)

    def _begin(self, step: int) -> _Begin:
        """The begin after this step."""
        states = self._states.get(step)
        groups = IntervalSet() if step == 0 else states[0].read()[0] if states else None
        begin = self._begins.setdefault(step, _Begin(groups))
        if step == 0:
            self._done.setdefault(0, [_Done(0, IntervalSet(), None, begin)])
        return begin

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            meta = change.new.get("meta") or {}
            if (_STATE.fullmatch(change.name) is None or change.new.get("state") != "committed"
                    or change.old.get("state") == "committed" or meta.get("phase", "rl") != "rl"):
                continue
            number = int(meta.get("step", 0))
            state = _State(change.event, change.at(), int(meta.get("policy_version", 0)))
            self._states.setdefault(number, []).append(state)
            if (begin := self._begins.get(number)) is not None and begin.groups is None:
                begin.groups = state.read()[0]
            self._settle(number)
            self._newest.append(number)
            if len(self._newest) >= 2 * _STATES_KEPT:
                del self._newest[:_STATES_KEPT]
                self._forget(min(self._newest))

    def _settle(self, step: int) -> None:
        """Judges the states of a step that agree with one of the times that it was done."""
        for state in [*self._states.get(step, ())]:
            of_version = [done for done in self._done.get(step, ()) if done.version == state.policy_version]
            if of_version and not self._disagreement(state, of_version):
                self.judged += 1
                self._states[step].remove(state)
        if not self._states.get(step, True):
            del self._states[step]

    def _judge(self, step: int) -> None:
        """Judges the states of a step that were not judged yet, for good. One whose step is not in the log is not."""
        done = self._done.get(step, ())
        for state in self._states.pop(step, ()) if done else ():
            # A loop that resumes from a step may have recorded it, with the version that it has published again.
            wanted = [each for each in done if each.version == state.policy_version] or done
            self.judged += 1
            if problem := self._disagreement(state, wanted):
                self.violated(f"{state.at} is of step {step} and {problem}", state.event)

    def _disagreement(self, state: _State, wanted: Sequence[_Done]) -> str:
        """How a state differs from the first of these times that its step was done; "" where it agrees with one."""
        groups, counted, dropped = state.read()
        problems = list[str]()
        for done in wanted:
            trained, begin = self._trained(done), done.begin
            self._summed = (done, trained)
            if begin.groups is None:
                begin.groups = groups - trained
            problems.append(_difference(groups, counted, dropped, trained | begin.groups, whole=not begin.groups))
        return problems[0] if all(problems) else ""

    def _trained(self, done: _Done) -> IntervalSet:
        """The groups of the steps from the begin to this one."""
        spans, at, (summed, groups) = list[tuple[int, int]](), done, self._summed
        while at is not summed and at.before is not None:
            spans += at.groups.spans
            at = at.before
        return (groups if at is summed else at.groups) | IntervalSet(tuple(spans))

    def _forget(self, step: int) -> None:
        """Drops the steps before this one, whose states are judged for good. Those after it follow from it alone."""
        for old in sorted(old for old in self._states if old < step):
            self._judge(old)
            self._states.pop(old, None)
        for done in self._done.get(step, ()):
            done.groups, done.before = self._trained(done), None
        for old in [old for old in self._done if 0 < old < step]:
            del self._done[old]
        for old in [old for old in self._effective.of if old < step]:
            del self._effective.of[old]

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for step in sorted(self._states):
            self._judge(step)


def _difference(groups: IntervalSet, counted: int, dropped: int, trained: IntervalSet, *, whole: bool) -> str:
    """How the groups of a state, of which it counts so many as trained on and dropped, differ from what was trained; ""
    where they do not. ``whole``: whether ``trained`` is all since the begin of the job, so that it can be counted."""
    if lost := trained - groups:
        return f"has not consumed the groups {lost.to_json()[:_MOST]}, which were trained on"
    more = groups - trained
    if len(more) != dropped and (whole or len(more) > dropped):
        return f"has consumed the groups {more.to_json()[:_MOST]}, which were not, and {dropped} were dropped"
    if whole and counted != len(trained):
        return f"counts {counted} groups, and {len(trained)} were trained on"
    return ""


def overlap(some: Spans, others: Spans, *, same: bool = False) -> list[list[int]]:
    """The ordinals of both. ``same``: they are one list, of which each interval is compared with the others."""
    return [[max(a[0], b[0]), min(a[1], b[1])] for n, a in enumerate(some) for m, b in enumerate(others)
            if max(a[0], b[0]) < min(a[1], b[1]) and not (same and n >= m)]


def missing(some: Spans, others: Spans) -> list[list[int]]:
    """The ordinals of the first, in their order, that are not among the others. Neither overlap themselves."""
    out, left = list[list[int]](), deque(sorted(map(tuple, others)))
    for start, stop in sorted(map(tuple, some)):
        while left and left[0][1] <= start:
            left.popleft()
        while left and left[0][0] < stop:
            begin, end = left[0]
            if begin > start:
                out.append([start, begin])
            start = max(start, end)
            if end > stop:
                break
            left.popleft()
        if start < stop:
            out.append([start, stop])
    return out


CHECKERS: tuple[type[Checker], ...] = (Leases, Consumed, ConsumedOfSteps)
