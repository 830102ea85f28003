"""I5 of the prompt groups: who works on them, and which were consumed. Replay checks of what etcd held."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from chaos_tests.event_log import Event
from chaos_tests.validate.replay import Checker, below, replay
from chaos_tests.validate.verdict import Violation
from elastic_rl.etcd.keys import Keys

_JOB = Keys("j")
_LEASES, _EPOCH, _TERM = below(_JOB.group_leases_prefix()), below(_JOB.epoch()), below(_JOB.actor_term())
_STATE = re.compile(re.escape(below(_JOB.versions_prefix("trainer_state"))) + r"\d+")

Spans = Sequence[Sequence[int]]
"""Ordinals as intervals [start, stop)."""


def leases(events: Iterable[Event]) -> Iterator[Violation]:
    """A lease of groups is written in the present epoch and term, and no group is leased to two producers of a term."""
    for found in replay(events, lambda key: below(key) in (_EPOCH, _TERM) or below(key).startswith(_LEASES)):
        for step in found.steps:
            new = step.new
            if not step.name.startswith(_LEASES) or not new:
                continue
            for what, key in (("epoch", _EPOCH), ("term", _TERM)):
                now = found.before(step.scope + key).get("number")
                if now is not None and new[what] != now:
                    yield Violation("I5", f"{step.at()} was written under {what} {new[what]} in {what} {now}")
            if double := overlap(new["groups"], new["groups"], same=True):
                yield Violation("I5", f"{step.at()} names the groups {double} twice")
            for key in found.after.under(step.scope + _LEASES):
                other = found.after.get(key)
                if (key > step.change.key or found.step(key) is None) and key != step.change.key and (
                        other["epoch"], other["term"]) == (new["epoch"], new["term"]) and (
                        both := overlap(new["groups"], other["groups"])):
                    yield Violation("I5", f"{step.at()} and {key} both have the groups {both}")


def consumed(events: Iterable[Event]) -> Iterator[Violation]:
    """What a committed state of the trainer has consumed, every later one has, and its step does not go back."""
    last = dict[tuple[str, str], tuple[int, Spans, int]]()
    for found in replay(events, lambda key: _STATE.fullmatch(below(key)) is not None):
        for step in found.steps:
            meta = step.new.get("meta", {})
            if step.new.get("state") != "committed" or step.old.get("state") == "committed" or "consumed" not in meta:
                continue
            of = (step.scope, str(meta.get("phase", "")))
            groups, at, number = meta["consumed"].get("groups", []), int(meta.get("step", 0)), step.new["number"]
            if (before := last.get(of)) is not None and number > before[2]:
                if lost := missing(before[1], groups):
                    yield Violation("I5", f"{step.at()} lacks the groups {lost}, consumed by version {before[2]}")
                if at < before[0]:
                    yield Violation("I5", f"{step.at()} is of step {at}, after step {before[0]}")
            last[of] = (at, groups, number)


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


CHECKERS: tuple[tuple[str, Checker], ...] = (("I5", leases), ("I5", consumed))
