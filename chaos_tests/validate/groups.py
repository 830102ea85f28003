"""I5 of the prompt groups: who works on them, and which were consumed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from chaos_tests.validate.replay import Transaction, below
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.keys import Keys

_JOB = Keys("j")
_LEASES, _EPOCH, _TERM = below(_JOB.group_leases_prefix()), below(_JOB.epoch()), below(_JOB.actor_term())
_STATES = below(_JOB.versions_prefix("trainer_state"))
_STATE = re.compile(re.escape(_STATES) + r"\d+")

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


CHECKERS: tuple[type[Checker], ...] = (Leases, Consumed)
