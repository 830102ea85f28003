"""I5 of the prompt groups: who works on them, and which were consumed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import Transaction, below
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

Spans = Sequence[Sequence[int]]
"""Ordinals as intervals [start, stop)."""


class Leases(Checker):
    """A lease of groups is written in the present epoch and term, and no group is leased to two producers of a term."""

    rule = "I5"
    keys = (_LEASES,)
    judges = "leases of groups"

    def transaction(self, found: Transaction) -> None:
        for step in found.steps:
            new = step.new
            if not step.name.startswith(_LEASES) or not new:
                continue
            self.judged += 1
            for what, key in (("epoch", _EPOCH), ("term", _TERM)):
                now = found.before(step.scope + key).get("number")
                if now is not None and new[what] != now:
                    self.violated(f"{step.at()} was written under {what} {new[what]} in {what} {now}", step.event)
            if double := overlap(new["groups"], new["groups"], same=True):
                self.violated(f"{step.at()} names the groups {double} twice", step.event)
            for key in found.after.under(step.scope + _LEASES):
                other = found.after.get(key)
                if (key > step.key or found.step(key) is None) and key != step.key and other and (
                        other["epoch"], other["term"]) == (new["epoch"], new["term"]) and (
                        both := overlap(new["groups"], other["groups"])):
                    self.violated(f"{step.at()} and {key} both have the groups {both}", step.event)


class Consumed(Checker):
    """What a committed state of the trainer has consumed, every later one has, and its step does not go back."""

    rule = "I5"
    keys = (_STATES,)
    judges = "states of the trainer"

    def __init__(self) -> None:
        super().__init__()
        self._last = dict[tuple[str, str], tuple[int, Spans, int]]()

    def transaction(self, found: Transaction) -> None:
        for step in found.steps:
            if _STATE.fullmatch(step.name) is None:
                continue
            meta = step.new.get("meta", {})
            if step.new.get("state") != "committed" or step.old.get("state") == "committed" or "consumed" not in meta:
                continue
            self.judged += 1
            of = (step.scope, str(meta.get("phase", "")))
            groups, at, number = meta["consumed"].get("groups", []), int(meta.get("step", 0)), step.new["number"]
            if (before := self._last.get(of)) is not None and number > before[2]:
                if lost := missing(before[1], groups):
                    self.violated(f"{step.at()} lacks the groups {lost}, consumed by version {before[2]}", step.event)
                elif at < before[0]:
                    self.violated(f"{step.at()} is of step {at}, after step {before[0]}", step.event)
            self._last[of] = (at, groups, number)


@dataclass(frozen=True)
class _State:
    """A committed state of the trainer."""

    event: Event
    at: str
    policy_version: int
    groups: IntervalSet
    trained: int
    dropped: int


class ConsumedOfSteps(Checker):
    """Each committed state of the trainer has consumed the groups of the steps up to its own, as they were in effect
    then, those that were dropped, those of the state that the run began with, and no others."""

    rule = "I5"
    reads = frozenset({Kind.STEP})
    keys = (_STATES,)
    judges = "states of the trainer compared with its steps"
    lacks = "the log has no steps, or no states of the trainer"

    def __init__(self) -> None:
        super().__init__()
        self._effective = Effective()
        """Step → the groups of all steps up to it; None: a step before it is not in the log."""
        self._after = dict[int, list[tuple[int, IntervalSet]]]()
        """Step → the same each time that it was done, with the version of the policy that it made."""
        self._states = dict[int, list[_State]]()
        """The committed states by their steps, whose records may come later."""

    def see(self, event: Event) -> None:
        step = int(event["step"])
        self._effective.undo(step)
        before: IntervalSet | None = self._effective.of.get(step - 1) if self._effective.of else IntervalSet()
        groups = None if before is None else before | IntervalSet.from_values(event.get("groups") or ())
        self._effective.add(step, groups)
        if groups is not None:
            self._after.setdefault(step, []).append((int(event.get("policy_version") or 0), groups))

    def transaction(self, found: Transaction) -> None:
        for step in found.steps:
            meta = step.new.get("meta") or {}
            if (_STATE.fullmatch(step.name) is None or step.new.get("state") != "committed"
                    or step.old.get("state") == "committed" or meta.get("phase", "rl") != "rl"):
                continue
            consumed = meta.get("consumed") or {}
            self._states.setdefault(int(meta.get("step", 0)), []).append(_State(
                step.event, step.at(), int(meta.get("policy_version", 0)),
                IntervalSet.from_json(consumed.get("groups", [])), int(consumed.get("trained", 0)),
                sum(map(int, consumed.get("dropped", {}).values()))))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if not self._after:
            return
        before = min(self._after) - 1
        begun_with = IntervalSet() if before == 0 else next((s.groups for s in self._states.get(before, ())), None)
        for step, states in sorted(self._states.items()):
            done = [(0, IntervalSet())] if step == before == 0 else self._after.get(step, ())
            for state in states if done else ():
                of_version = [groups for version, groups in done if version == state.policy_version]
                # A loop that resumes from a step may have recorded it, with the version that it has published again.
                wanted = of_version or [groups for _, groups in done]
                if begun_with is None:
                    begun_with = state.groups - wanted[0]
                problems = [_disagreement(state, groups | begun_with, counted=not begun_with) for groups in wanted]
                self.judged += 1
                if all(problems):
                    self.violated(f"{state.at} is of step {step} and {problems[0]}", state.event)


def _disagreement(state: _State, trained: IntervalSet, *, counted: bool) -> str:
    """How a state differs from what was trained; "" where it does not. ``counted``: whether ``trained`` is all since
    the begin of the job, so that its groups can be counted."""
    if lost := trained - state.groups:
        return f"has not consumed the groups {lost.to_json()[:_MOST]}, which were trained on"
    more = state.groups - trained
    if len(more) != state.dropped and (counted or len(more) > state.dropped):
        return f"has consumed the groups {more.to_json()[:_MOST]}, which were not, and {state.dropped} were dropped"
    if counted and state.trained != len(trained):
        return f"counts {state.trained} groups, and {len(trained)} were trained on"
    return ""


def overlap(some: Spans, others: Spans, *, same: bool = False) -> list[list[int]]:
    """The ordinals of both. ``same``: they are one list, of which each interval is compared with the others."""
    return [[max(a[0], b[0]), min(a[1], b[1])] for n, a in enumerate(some) for m, b in enumerate(others)
            if max(a[0], b[0]) < min(a[1], b[1]) and not (same and n >= m)]


def missing(some: Spans, others: Spans) -> list[list[int]]:
    """The ordinals of the first that are not among the others, which are sorted."""
    out = list[list[int]]()
    for start, stop in some:
        for begin, end in sorted(map(list, others)):
            if end <= start or begin >= stop:
                continue
            if begin > start:
                out.append([start, begin])
            start = end
        if start < stop:
            out.append([start, stop])
    return out


CHECKERS: tuple[type[Checker], ...] = (Leases, Consumed, ConsumedOfSteps)
