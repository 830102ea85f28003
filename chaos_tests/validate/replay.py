"""The history of etcd, as the observer saw it, replayed transaction by transaction for the checkers.

A checker knows what it has seen. Of a key that was there before the observation began, or before a gap, it knows
nothing until the key changes, and a change of it is no violation for what came before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from chaos_tests.event_log import Event, Kind
from chaos_tests.observation import Change
from chaos_tests.validate.verdict import Violation
from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys

Checker = Callable[[Iterable[Event]], Iterator[Violation]]
_CLUSTERS = ClusterKeys("c").root.removesuffix("c/")


@dataclass(frozen=True)
class Step:
    """One change, with what its key had before."""

    change: Change
    before: Change | None
    """None: nothing, or nothing that was seen."""

    @property
    def scope(self) -> str:
        """Root of the keys of its job or cluster."""
        return scope_of(self.change.key)

    @property
    def job(self) -> str:
        """Name of its job."""
        return self.scope.removeprefix(f"{ROOT}/").rstrip("/")

    @property
    def name(self) -> str:
        """Its key below that root."""
        return self.change.key.removeprefix(self.scope)

    @property
    def created(self) -> bool:
        """Whether the key was not there before."""
        return self.change.put and self.change.create == self.change.revision

    @property
    def past_unseen(self) -> bool:
        return self.before is None and not self.created

    @property
    def old(self) -> dict[str, Any]:
        """The record before; empty where there was none, and where it is unseen."""
        return record(self.before) if self.before is not None else {}

    @property
    def new(self) -> dict[str, Any]:
        return record(self.change)

    def at(self) -> str:
        return f"revision {self.change.revision}: {self.change.key}"


@dataclass
class Store:
    """What is known of etcd at a revision."""

    present: dict[str, Change] = field(default_factory=dict)
    """Keys that are there, with their last change."""
    absent: set[str] = field(default_factory=set)
    """Keys that were seen to be deleted and are not there."""

    def get(self, key: str) -> dict[str, Any]:
        return record(self.present[key]) if key in self.present else {}

    def under(self, prefix: str) -> list[str]:
        return [key for key in self.present if key.startswith(prefix)]

    def apply(self, change: Change) -> Step:
        step = Step(change, self.present.get(change.key))
        if change.put:
            self.present[change.key] = change
            self.absent.discard(change.key)
        else:
            self.present.pop(change.key, None)
            self.absent.add(change.key)
        return step


@dataclass(frozen=True)
class Transaction:
    """The changes of one revision. ``before`` and ``after`` are of the replay, and change with the next one."""

    revision: int
    steps: list[Step]
    after: Store
    absent_before: frozenset[str]
    """Of its keys, those that were known not to be there."""
    after_gap: bool = False
    """Whether changes before it were not seen."""

    def step(self, key: str) -> Step | None:
        return next((s for s in self.steps if s.change.key == key), None)

    def before(self, key: str) -> dict[str, Any]:
        """The record that a key had before the transaction."""
        step = self.step(key)
        return step.old if step is not None else self.after.get(key)


def replay(events: Iterable[Event], only: Callable[[str], bool] = lambda key: True) -> Iterator[Transaction]:
    """The transactions in the order of their revisions. ``only``: keys that the caller needs."""
    store, after_gap = Store(), False
    relevant = (e for e in events if e["kind"] == Kind.GAP or e["kind"] == Kind.CHANGE and only(e["key"]))
    for (kind, revision), together in groupby(relevant, key=lambda e: (e["kind"], e.get("revision", 0))):
        if kind == Kind.GAP:
            store, after_gap = Store(), True
            continue
        changes = [change_of(e) for e in together]
        gone = frozenset(c.key for c in changes if c.key in store.absent)
        yield Transaction(revision, [store.apply(change) for change in changes], store, gone, after_gap)
        after_gap = False


def change_of(event: Event) -> Change:
    return Change(event["revision"], event["put"], event["key"], event["create"], event.get("value", ""),
                  event.get("omitted_bytes", 0))


def record(change: Change) -> dict[str, Any]:
    """The record that a put has written; empty for a delete, for what is no JSON object, and for a value that was too
    long for the log."""
    if not change.put or not change.value.startswith("{"):
        return {}
    try:
        found = json.loads(change.value)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def scope_of(key: str) -> str:
    """Root of the keys of the job or cluster that a key belongs to."""
    if key.startswith(_CLUSTERS):
        return ClusterKeys(key.removeprefix(_CLUSTERS).partition("/")[0]).root
    return Keys(key.removeprefix(f"{ROOT}/").partition("/")[0]).root


def below(key: str) -> str:
    """The name of a key of ``Keys("j")`` or ``ClusterKeys("c")``, below its root: how checkers know keys of any job."""
    return key.removeprefix(scope_of(key))


def lifecycle(rule: str, prefix: str, field_name: str, allowed: Mapping[str, frozenset[str]], first: frozenset[str],
              events: Iterable[Event], *, same: Callable[[Step], bool] = lambda step: True) -> Iterator[Violation]:
    """Violations of a state machine whose state is a field of records under a prefix. ``allowed``: state → those that
    may follow it; each may stay as it is. ``first``: states in which a record may begin. ``same``: whether the record
    is still about the same thing, else it begins."""
    known = first.union(allowed, *allowed.values())
    for transaction in replay(events, lambda key: below(key).startswith(prefix)):
        for step in transaction.steps:
            if not step.change.put or not step.new or step.past_unseen:
                continue
            after = step.new.get(field_name)
            if after not in known:
                continue  # a record of another release, which nobody acts on
            if not step.old or not same(step):
                if after not in first:
                    yield Violation(rule, f"{step.at()} begins as {after}")
            elif after != (before := step.old.get(field_name)) and after not in allowed.get(str(before), frozenset()):
                yield Violation(rule, f"{step.at()} went from {before} to {after}")
