"""The history of etcd, as the observer saw it, replayed transaction by transaction for all checkers at once.

A checker knows what was seen. Of a key that was there before the observation began, or before a gap, nothing is known
until the key changes, and a change of it is no violation for what came before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from chaos_tests.event_log import Event
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.job_records import ENDED_PHASES
from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys

_CLUSTERS = ClusterKeys("c").root.removesuffix("c/")
_STATUS = Keys("j").job_status().removeprefix(Keys("j").root)
FIRST_REVISION = 100
"""A history that begins before this revision is that of a cluster from its start."""
OBSERVER_LATE_S = 30.0
"""Longest by which the observer may be late, which is started again where etcd was killed."""
_MOST_ABSENT = 50_000
"""Deleted keys that are known as such; of those deleted before, nothing is known."""


@dataclass(eq=False)
class KeyChange:
    """One change of a key, with what the key had before."""

    event: Event
    """Its record in the log."""
    before: Event | None
    """The record of the change before; None: there was nothing, or nothing that was seen."""

    @cached_property
    def scope(self) -> str:
        """Root of the keys of its job or cluster."""
        return scope_of(self.key)

    @property
    def job(self) -> str:
        """Name of its job."""
        return job_of(self.scope)

    @cached_property
    def name(self) -> str:
        """Its key below that root."""
        return self.key.removeprefix(self.scope)

    @property
    def key(self) -> str:
        return str(self.event["key"])

    @property
    def put(self) -> bool:
        """False: the key was deleted."""
        return bool(self.event["put"])

    @property
    def revision(self) -> int:
        return int(self.event["revision"])

    @property
    def value(self) -> str:
        return str(self.event.get("value", ""))

    @property
    def created(self) -> bool:
        """Whether the key was not there before."""
        return self.put and self.event["create"] == self.event["revision"]

    @property
    def past_unseen(self) -> bool:
        return self.before is None and not self.created

    @property
    def omitted(self) -> bool:
        """Whether what was put was too long for the log: nothing is known of it."""
        return bool(self.event.get("omitted_bytes"))

    @cached_property
    def old(self) -> Mapping[str, Any]:
        """The record before; empty where there was none, and where it is unseen."""
        return record(self.before) if self.before is not None else {}

    @cached_property
    def new(self) -> Mapping[str, Any]:
        return record(self.event)

    def at(self) -> str:
        return f"revision {self.revision}: {self.key}"


@dataclass
class Store:
    """What is known of etcd at a revision."""

    present: dict[str, Event] = field(default_factory=dict)
    """Keys that are there, with their last change."""
    absent: dict[str, None] = field(default_factory=dict)
    """Keys that were seen to be deleted and are not there, the newest last."""
    whole: bool = False
    """Whether all changes were seen, from the first one on."""
    _folders: dict[str, dict[str, None]] = field(default_factory=dict)
    """The keys that are there, by what is before the last slash of them."""

    def lacks(self, key: str) -> bool:
        """Whether a key is known not to be there."""
        return key in self.absent or self.whole and key not in self.present

    def get(self, key: str) -> Mapping[str, Any]:
        return record(self.present[key]) if key in self.present else {}

    def under(self, folder: str) -> list[str]:
        """The keys right below ``folder``, which ends with a slash."""
        return [*self._folders.get(folder, ())]

    def apply(self, event: Event) -> KeyChange:
        key = event["key"]
        change, folder = KeyChange(event, self.present.pop(key, None)), key[:key.rfind("/") + 1]
        if event["put"]:
            self.present[key] = event
            self._folders.setdefault(folder, {})[key] = None
            self.absent.pop(key, None)
        else:
            keys = self._folders.get(folder, {})
            keys.pop(key, None)
            if not keys:
                self._folders.pop(folder, None)
            self.absent[key] = None
            if len(self.absent) > _MOST_ABSENT:
                del self.absent[next(iter(self.absent))]
        return change


@dataclass(eq=False)
class Transaction:
    """The changes of one revision. ``after`` is of the replay, and changes with the next one."""

    revision: int
    at: float
    """When the observer saw it, unix s."""
    changes: list[KeyChange]
    after: Store
    absent_before: frozenset[str] = frozenset()
    """Those of its keys that were known not to be there."""

    @cached_property
    def _by_key(self) -> Mapping[str, KeyChange]:
        return {change.key: change for change in reversed(self.changes)}

    def change_of(self, key: str) -> KeyChange | None:
        return self._by_key.get(key)

    def ended(self, scope: str) -> bool:
        """Whether the job with these keys is known to have ended: what is deleted then, I15 judges."""
        return self.after.get(scope + _STATUS).get("phase") in ENDED_PHASES

    def before(self, key: str) -> Mapping[str, Any]:
        """The record that a key had before the transaction."""
        change = self.change_of(key)
        return change.old if change is not None else self.after.get(key)


class Replay:
    """Shows each transaction to the checkers that want one of its keys, and each gap to all."""

    def __init__(self, checkers: Iterable[Checker]) -> None:
        self._all = [*checkers]
        self._store, self._batch, self._began = Store(), list[Event](), False
        self._of_name = lru_cache(maxsize=4096)(self._wanted_by)

    def change(self, event: Event) -> None:
        if self._batch and self._batch[0]["revision"] != event["revision"]:
            self.flush()
        self._batch.append(event)

    def gap(self, event: Event) -> None:
        self.flush()
        self._store, self._began = Store(), True
        for checker in self._all:
            checker.gap(int(event["first"]), int(event["last"]))

    def present(self, event: Event) -> None:
        """What there is at the end of a gap. To the rest of the replay it is unseen: what a change was of, a checker
        that has lost its own state cannot tell from what it has seen."""
        self.flush()
        if "key" in event:
            change = KeyChange(event, None)
            for index in sorted(self._of_name(change.name)):
                self._all[index].present(change)
        else:
            for checker in self._all:
                checker.listed(event)

    def flush(self) -> None:
        """The last change of a transaction was seen."""
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        if not self._began:
            self._began, self._store.whole = True, batch[0]["revision"] < FIRST_REVISION
        gone = frozenset(event["key"] for event in batch if self._store.lacks(event["key"]))
        found = Transaction(batch[0]["revision"], float(batch[-1].get("at", 0.0)),
                            [self._store.apply(event) for event in batch], self._store, gone)
        wanted = set[int]().union(*(self._of_name(change.name) for change in found.changes))
        for index in sorted(wanted):
            self._all[index].transaction(found)

    def _wanted_by(self, name: str) -> tuple[int, ...]:
        return tuple(index for index, checker in enumerate(self._all) if name.startswith(checker.keys))


@lru_cache(maxsize=256)
def _decoded(value: str) -> Mapping[str, Any]:
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def record(event: Event) -> Mapping[str, Any]:
    """The record that a put has written; empty for a delete, for what is no JSON object, and for a value that was too
    long for the log."""
    value = event.get("value", "")
    return _decoded(value) if event["put"] and value.startswith("{") else {}


def scope_of(key: str) -> str:
    """Root of the keys of the job or cluster that a key belongs to."""
    if key.startswith(_CLUSTERS):
        return f"{_CLUSTERS}{key.removeprefix(_CLUSTERS).partition('/')[0]}/"
    return f"{ROOT}/{key.removeprefix(f'{ROOT}/').partition('/')[0]}/"


def job_of(scope: str) -> str:
    """Name of the job with this root of its keys."""
    return scope.removeprefix(f"{ROOT}/").rstrip("/")


def below(key: str) -> str:
    """The name of a key of ``Keys("j")`` or ``ClusterKeys("c")``, below its root: how checkers know keys of any job."""
    return key.removeprefix(scope_of(key))


class Lifecycle(Checker):
    """A state machine whose state is a field of the records under a prefix, ``keys[0]``."""

    state: ClassVar[str]
    """Name of the field."""
    allowed: ClassVar[Mapping[str, frozenset[str]]]
    """State → those that may follow it; each may stay as it is."""
    first: ClassVar[frozenset[str]]
    """States in which a record may begin."""

    def same(self, change: KeyChange) -> bool:
        """Whether the record is still about the same thing, else it begins."""
        return True

    def moved(self, change: KeyChange) -> None:
        """Judges the state after a change."""
        new = change.new.get(self.state)
        if not change.put or not change.new or change.past_unseen or new not in self._known():
            return  # a record of another release is acted on by nobody
        self.judged += 1
        before = change.old.get(self.state)
        if change.created or change.old and not self.same(change):
            if new not in self.first:
                self.violated(f"{change.at()} begins as {new}", change.event)
        elif change.old and new != before and new not in self.allowed.get(str(before), frozenset()):
            self.violated(f"{change.at()} went from {before} to {new}", change.event)

    @classmethod
    def _known(cls) -> frozenset[str]:
        return cls.first.union(cls.allowed, *cls.allowed.values())

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name.startswith(self.keys):
                self.moved(change)
                self.also(found, change)

    def also(self, found: Transaction, change: KeyChange) -> None:
        """Further rules of a record under the prefix."""


def is_job(change: KeyChange) -> bool:
    """Whether a change is of a job, and not of a cluster."""
    return not change.scope.startswith(_CLUSTERS)
