"""I1 to I3 of the catalog of versions. What an operator's recovery of the catalog writes, while the catalog is
suspended, is not judged."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaos_tests.event_log import Event
from chaos_tests.validate.replay import KeyChange, Transaction, below
from chaos_tests.validate.running import longest_recovery_s
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.job_records import ENDED_PHASES
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState

_JOB = Keys("j")
_EPOCH, _CATALOG, _STATUS = below(_JOB.epoch()), below(_JOB.dcs_catalog()), below(_JOB.job_status())
_STREAMS, _PINS = below(_JOB.streams_prefix()), below(_JOB.pins_prefix("")).rstrip("/") + "/"
_NODES, _SETS = below(_JOB.dcs_node("")), below(_JOB.replica_sets_prefix("")).rstrip("/") + "/"
_OF_VERSION = re.compile(re.escape(_STREAMS) + r"([^/]+)/versions/(\d+)")
_OF_HEAD, _OF_NEXT = (re.compile(re.escape(_STREAMS) + rf"([^/]+)/{name}") for name in ("head", "next"))
_OF_PIN = re.compile(re.escape(_PINS) + r"([^/]+)/(\d+)/.+")
_OF_SETS = re.compile(re.escape(_SETS) + r"([^/]+)/(\d+)")

STAGING, COMMITTED = VersionState.STAGING.value, VersionState.COMMITTED.value
RELEASING, RELEASED, ABORTED = VersionState.RELEASING.value, VersionState.GONE.value, VersionState.ABORTED.value
ALLOWED: Mapping[str, Set[str]] = {
    STAGING: {COMMITTED, ABORTED}, COMMITTED: {RELEASING, RELEASED}, RELEASING: {RELEASED}, RELEASED: set(),
    ABORTED: set()}
"""State of a version → those that may follow it; each may stay as it is while it is committed. A leader of an older
release goes by way of RELEASING."""
_FIXED = ("stream", "number", "epoch", "created_at", "meta")
_FIXED_BY_COMMIT = ("manifest", "nbytes", "committed_at")


class _Catalog(Checker, ABC):
    """Is shown the changes of catalogs that are not, and were not, suspended."""

    keys: ClassVar[tuple[str, ...]] = (_STREAMS,)

    def transaction(self, found: Transaction) -> None:
        judged = list[KeyChange]()
        for change in found.changes:
            catalog = change.scope + _CATALOG
            if not found.before(catalog).get("suspended") and not found.after.get(catalog).get("suspended"):
                judged.append(change)
        if judged:
            self.judge(found, judged)

    @abstractmethod
    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        """The changes of a transaction that are to be judged."""


def _versions(changes: list[KeyChange]) -> Iterator[tuple[KeyChange, str, int]]:
    """Those of versions, of which the log has what was put."""
    for change in changes:
        if not change.omitted and (match := _OF_VERSION.fullmatch(change.name)):
            yield change, match[1], int(match[2])


def _catalog_deleted(found: Transaction, scope: str) -> bool:
    """Whether the job was taken off its cluster with all that it had."""
    change = found.change_of(scope + _CATALOG)
    return change is not None and not change.put


class States(_Catalog):
    """A version goes STAGING → COMMITTED → GONE, or STAGING → ABORTED, and in no other way; what its publisher said of
    it does not change; only the record of one that is GONE or ABORTED is deleted."""

    rule = "I3"
    judges = "states of versions"

    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        for change, _, _ in _versions(changes):
            old, new = change.old, change.new
            self.judged += 1
            if not change.put:
                if old and ALLOWED.get(old["state"]) and not _catalog_deleted(found, change.scope):
                    self.violated(f"{change.at()} was deleted while it was {old['state']}", change.event)
            elif change.created and new.get("state") != STAGING:
                self.violated(f"{change.at()} begins as {new.get('state')}", change.event)
            elif old and new:
                was, now = old["state"], new.get("state")
                fixed = _FIXED if was == STAGING else _FIXED + _FIXED_BY_COMMIT
                if now not in ALLOWED.get(was, ()) and not was == now == COMMITTED:
                    self.violated(f"{change.at()} went from {was} to {now}", change.event)
                elif changed := [name for name in fixed if old.get(name) != new.get(name)]:
                    self.violated(f"{change.at()} has another {', '.join(changed)} than before", change.event)


class Numbers(_Catalog):
    """Numbers of a stream only grow and none is used twice: each begin takes the next one, in one transaction."""

    rule = "I3"
    judges = "numbers of versions taken"

    def __init__(self) -> None:
        super().__init__()
        self._highest = dict[tuple[str, str], int]()

    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        for change in changes:
            if (match := _OF_NEXT.fullmatch(change.name)) is None:
                continue
            if not change.put:
                if not _catalog_deleted(found, change.scope):
                    self.violated(f"{change.at()} was deleted", change.event)
                self._highest = {k: n for k, n in self._highest.items() if k[0] != change.scope}
                continue
            number, stream = int(change.value), (change.scope, match[1])
            highest = self._highest.get(stream, 0)
            self.judged += 1
            if number <= highest:
                self.violated(f"{change.at()} is {number} after {highest}", change.event)
            elif found.change_of(Keys(change.job).version(match[1], number)) is None:
                self.violated(f"{change.at()} took number {number} without its version", change.event)
            self._highest[stream] = max(number, highest)
        for change, stream_name, number in _versions(changes):
            counted = found.change_of(Keys(change.job).stream_next(stream_name))
            if change.created and (counted is None or counted.value != str(number)):
                self.violated(f"{change.at()} was begun with a number that the stream did not give it", change.event)


class Heads(_Catalog):
    """The head of a stream never goes back, and its record is that of a committed version, which it stays while it is
    the head."""

    rule = "I3"
    judges = "versions that became visible"

    def __init__(self) -> None:
        super().__init__()
        self._last = dict[str, int]()

    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        for change in changes:
            if (match := _OF_HEAD.fullmatch(change.name)) is not None and not change.omitted:
                self._head(found, change, match[1])
        for change, stream, number in _versions(changes):
            head = Keys(change.job).stream_head(stream)
            if (change.new.get("state") != COMMITTED and found.after.get(head).get("number") == number
                    and found.change_of(head) is None and not _catalog_deleted(found, change.scope)):
                self.violated(f"{change.at()} is the head, and was made {change.new.get('state', 'absent')}",
                              change.event)

    def _head(self, found: Transaction, change: KeyChange, stream: str) -> None:
        last = self._last.get(change.key, 0)
        if not change.put:
            if not _catalog_deleted(found, change.scope) and not found.ended(change.scope):
                self.violated(f"{change.at()} was deleted", change.event)
            self._last.pop(change.key, None)
            return
        number, state = int(change.new.get("number", 0)), change.new.get("state")
        key = Keys(change.job).version(stream, number)
        version = found.after.present.get(key)
        self._last[change.key] = max(number, last)
        self.judged += 1
        if number < last:
            self.violated(f"{change.at()} went back from {last} to {number}", change.event)
        elif state != COMMITTED or found.after.lacks(key):
            self.violated(f"{change.at()} names version {number}, which is {state if version else 'absent'}",
                          change.event,
                          rule="I2")
        elif version is not None and not version.get("omitted_bytes") and version["value"] != change.value:
            self.violated(f"{change.at()} differs from the record of version {number}",
                          change.event, version, rule="I2")


class Commits(_Catalog):
    """A version is committed in one transaction with its head, its replica sets and the end of its publisher's key,
    which was there until then; every part is on as many nodes as the settings say, and on none that is gone; the
    catalog counts the commit."""

    rule = "I2"
    keys = (_STREAMS, _CATALOG)
    judges = "versions committed"

    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        scopes = set[str]()
        for change, stream, number in _versions(changes):
            if change.new.get("state") == COMMITTED and change.old.get("state") == STAGING:
                scopes.add(change.scope)
                self.judged += 1
                if why := [*_why_incomplete(found, change.new, Keys(change.job), stream, number, self._replicas)]:
                    self.violated(f"{change.at()} was committed {', and '.join(why)}", change.event)
        for scope in scopes:
            counted = found.change_of(scope + _CATALOG)
            if counted is None or counted.old and counted.new.get("commits") != counted.old.get("commits", 0) + 1:
                self.violated(f"revision {found.revision}: a commit that {scope}{_CATALOG} does not count",
                              *(change.event for change in found.changes[:1]))
        for change in changes:
            if change.name == _CATALOG and change.old and change.new:
                if change.old["id"] != change.new["id"]:
                    self.violated(f"{change.at()} became another catalog", change.event, rule="I3")
                elif change.new.get("commits", 0) < change.old.get("commits", 0):
                    self.violated(f"{change.at()} counts fewer commits than before", change.event, rule="I3")


    @property
    def _replicas(self) -> int:
        """Nodes that must hold each part before a version is committed."""
        told = (self.settings.get("dcs") or {}).get("replicas")
        return told if isinstance(told, int) else 1


def _nodes_of(part: Iterable[str]) -> list[str]:
    """The nodes that hold a part. One that is named twice has one copy."""
    return [*dict.fromkeys(part)]


def _why_incomplete(found: Transaction, version: Mapping[str, Any], keys: Keys, stream: str, number: int, replicas: int
                    ) -> Iterator[str]:
    if not version.get("manifest"):
        yield "without a manifest"
    if found.change_of(keys.stream_head(stream)) is None:
        yield "without becoming the head"
    owner = found.change_of(keys.staging_owner(stream, number))
    if owner is None or owner.put or keys.staging_owner(stream, number) in found.absent_before:
        yield "after the end of its publisher's lease"
    sets = found.change_of(keys.replica_sets(stream, number))
    if sets is None or not sets.put:
        yield "without its replica sets"
    elif not sets.omitted:
        parts = [_nodes_of(part) for part in sets.new.get("parts", [])]
        if not parts or not all(parts):
            yield f"although not all of its parts are stored: {parts}"
        elif (fewest := min(map(len, parts))) < replicas:
            yield f"although a part is on {fewest} of {replicas} nodes"
        if lost := sorted({node for part in parts for node in part if found.after.lacks(keys.dcs_node(node))}):
            yield f"on nodes that are gone: {', '.join(lost)}"


class Epochs(_Catalog):
    """A version is begun and committed in the epoch that it names, which is the run's present one."""

    rule = "I1"
    judges = "versions begun or committed in a known epoch"

    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        for change, _, _ in _versions(changes):
            begun = change.created or change.old.get("state") == STAGING and change.new.get("state") == COMMITTED
            epoch = found.before(change.scope + _EPOCH).get("number")
            if begun and epoch is not None:
                self.judged += 1
                if change.new.get("epoch") != epoch:
                    self.violated(f"{change.at()} became {change.new.get('state')} under epoch "
                                  f"{change.new.get('epoch')} in epoch {epoch}", change.event)


class Pins(_Catalog):
    """Only a committed version is pinned, and none is released while somebody pins it."""

    rule = "I3"
    keys = (_STREAMS, _PINS)
    judges = "pins and releases"

    def judge(self, found: Transaction, changes: list[KeyChange]) -> None:
        for change, stream, number in _versions(changes):
            if change.new.get("state") == RELEASED:
                self.judged += 1
                if held := found.after.under(Keys(change.job).pins_prefix(stream, number)):
                    self.violated(f"{change.at()} was released while {held[0]} pinned it", change.event)
        for change in changes:
            if change.put and (match := _OF_PIN.fullmatch(change.name)) is not None:
                key = Keys(change.job).version(match[1], int(match[2]))
                state = found.after.get(key).get("state")
                self.judged += 1
                if found.after.lacks(key) or state not in (None, COMMITTED):
                    self.violated(f"{change.at()} pins a version that is {state or 'deleted'}", change.event)


@dataclass
class _Held:
    """A committed version that nobody has released, and where its parts are."""

    stream: str
    number: int
    parts: list[list[str]] = field(default_factory=list)
    nodes: frozenset[str] = frozenset()
    """Those that have one of them."""
    copies: int = 0
    """Nodes that held each part at least, as it was last said of nodes that were all there. 0: each part was on a node
    that was there never yet: a version that was committed so is no version lost."""
    failed: set[str] = field(default_factory=set)
    """Its nodes that have failed since then. What one has kept that comes back is to be checked."""
    lost_at: float | None = None
    """Since when a part is on no node that is registered."""
    proof: tuple[Event, ...] = ()


class KeptVersions(Checker):
    """No committed version that was not released is lost while fewer nodes fail than hold it. Where as many have
    failed, the head is whole again, or another version is the head, within the time after which a run gives a
    recovery up, and when the job ends."""

    rule = "I3"
    keys = (_STREAMS, _SETS, _NODES, _STATUS)
    judges = "changes of where the parts of versions are"
    lacks = "the log has no replica sets of versions"

    def __init__(self) -> None:
        super().__init__()
        self._held = dict[str, dict[tuple[str, int], _Held]]()
        self._gone = dict[str, set[str]]()
        """Nodes that were seen to be registered no longer. Of others nothing is known."""
        self._heads = dict[str, dict[str, int]]()
        self._due = defaultdict[str, set[tuple[str, int]]](set)
        """Versions of which a part has moved, or a node has come or gone, since they were judged: nodes write their
        status again and again, and say mostly the same."""
        self._over, self._at = set[str](), 0.0

    def gap(self, first: int, last: int) -> None:
        for known in (self._held, self._gone, self._heads, self._due):
            known.clear()

    def transaction(self, found: Transaction) -> None:
        self._at = found.at
        touched, said = set[str](), set[tuple[str, str, int]]()
        for change in found.changes:
            if change.name.startswith(_NODES):
                self._node(change)
                touched.add(change.scope)
            elif (match := _OF_SETS.fullmatch(change.name)) is not None:
                self._sets(found, change, match[1], int(match[2]))
                touched.add(change.scope)
                said.add((change.scope, match[1], int(match[2])))
            elif (match := _OF_HEAD.fullmatch(change.name)) is not None and change.new:
                self._heads.setdefault(change.scope, {})[match[1]] = int(change.new.get("number", 0))
                touched.add(change.scope)
            elif change.name == _STATUS and change.new:
                if change.new.get("phase") in ENDED_PHASES:
                    self._job_ended(change.scope)
                else:
                    self._over.discard(change.scope)
        for scope in touched - self._over:
            if not self._due.get(scope) or found.after.get(scope + _CATALOG).get("suspended"):
                continue
            due, of_scope = self._due.pop(scope), self._held.get(scope, {})
            for held in [of_scope[version] for version in sorted(due) if version in of_scope]:
                self._judge(scope, held, said=(scope, held.stream, held.number) in said)
        for change, stream, number in _versions(found.changes):
            if change.new.get("state") != COMMITTED:  # it is released, or was never visible
                self._held.get(change.scope, {}).pop((stream, number), None)

    def _node(self, change: KeyChange) -> None:
        node = change.name.removeprefix(_NODES)
        gone = self._gone.setdefault(change.scope, set())
        moved = (node in gone) == change.put
        failed = not change.put or change.created or bool(change.new.get("lost_chunks"))
        if not moved and not failed:
            return
        if change.put:
            gone.discard(node)
        else:
            gone.add(node)
        for version, held in self._held.get(change.scope, {}).items():
            if node in held.nodes:
                if failed:
                    held.failed.add(node)
                if moved:
                    self._due[change.scope].add(version)

    def _sets(self, found: Transaction, change: KeyChange, stream: str, number: int) -> None:
        versions = self._held.setdefault(change.scope, {})
        state = found.after.get(Keys(change.job).version(stream, number)).get("state")
        if not change.put or change.omitted or state != COMMITTED:
            versions.pop((stream, number), None)
            return
        self.judged += 1
        held = versions.setdefault((stream, number), _Held(stream, number))
        held.parts, held.proof = [_nodes_of(part) for part in change.new.get("parts", [])], (change.event,)
        held.nodes = frozenset().union(*held.parts)
        self._due[change.scope].add((stream, number))

    def _judge(self, scope: str, held: _Held, *, said: bool) -> None:
        """``said``: whether the leader has just written where its parts are."""
        gone = self._gone.get(scope, set())
        there = [sum(node not in gone for node in part) for part in held.parts]
        if there and all(there):
            if said and there == [len(part) for part in held.parts]:
                held.copies = min(there)
                held.failed.clear()
            held.copies = max(1, held.copies)
            self._found_again(scope, held)
        elif held.copies and held.lost_at is None:
            held.lost_at = self._at
            if len(held.failed) < held.copies:
                self._lost(scope, held, f"while {len(held.failed)} nodes had failed, of {held.copies} that hold each "
                                        "part")

    def _found_again(self, scope: str, held: _Held) -> None:
        since, held.lost_at = held.lost_at, None
        if since is not None and self._at - since > longest_recovery_s(self.run) and self._is_head(scope, held):
            self._lost(scope, held, f"for {self._at - since:.0f} s")

    def _job_ended(self, scope: str) -> None:
        """Its nodes stop, and keep what is on their disks."""
        if scope in self._over:
            return
        self._over.add(scope)
        for held in [*self._held.get(scope, {}).values()]:
            if held.lost_at is not None and self._is_head(scope, held) and not all(held.parts):
                self._lost(scope, held, "when the job ended")

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for scope, versions in self._held.items():
            for held in [*versions.values()] if scope not in self._over else ():
                self._found_again(scope, held)

    def _is_head(self, scope: str, held: _Held) -> bool:
        return self._heads.get(scope, {}).get(held.stream) == held.number

    def _lost(self, scope: str, held: _Held, when: str) -> None:
        self.violated(f"version {held.number} of {held.stream} has a part that is on no node that is there, {when}",
                      *held.proof)
        self._held[scope].pop((held.stream, held.number), None)  # one loss is one violation


CHECKERS: tuple[type[Checker], ...] = (States, Numbers, Heads, Commits, Epochs, Pins, KeptVersions)
