"""The catalog of versions in etcd: which exist, in which state, which is the head. Every write is one guarded
transaction.

    STAGING ──▶ COMMITTED ──▶ RELEASING ──▶ GONE
       └──────▶ ABORTED

There is no way back from RELEASING to COMMITTED, and that is what makes release safe without a lock: a pin is taken
only together with the check that the version is COMMITTED, so once it is RELEASING no pin is added, and when the last
one is gone it may go. There is no way from STAGING to RELEASING either: nobody ever saw a version that was not
committed.

The head of a stream holds the same bytes as its version's key and is written in the same transaction, so the mod
revision of the head is that of the version as committed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.errors import Conflict, Fenced, IllegalTransition, VersionNotFound
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version, VersionState

TRANSITIONS: Mapping[VersionState, frozenset[VersionState]] = {
    VersionState.STAGING: frozenset({VersionState.COMMITTED, VersionState.ABORTED}),
    VersionState.COMMITTED: frozenset({VersionState.RELEASING}),
    VersionState.RELEASING: frozenset({VersionState.GONE}),
    VersionState.GONE: frozenset(),
    VersionState.ABORTED: frozenset(),
}
_TRIES = 16


def move(version: Version, to: VersionState, **changes: Any) -> Version:
    """The version in another state. Raises IllegalTransition. Pure."""
    if to not in TRANSITIONS[version.state]:
        raise IllegalTransition(f"{version.stream} version {version.number} cannot go from {version.state} to {to}")
    return version.replace(state=to, **changes)


@dataclass(frozen=True)
class Entry:
    """A version's record as read, and the revision to guard a change of it with."""

    version: Version
    revision: int


@dataclass(frozen=True)
class Staged:
    """A publish in progress: its version, and the revision at which it and its owner key were written."""

    version: Version
    revision: int


# -- reads -------------------------------------------------------------------------------------------------------------
def entries(etcd: EtcdClient, keys: Keys, stream: str) -> list[Entry]:
    """Every version of a stream that has a record, oldest first."""
    kvs, _ = etcd.range(keys.versions_prefix(stream))
    return [_entry(kv) for kv in kvs]


def entries_by_stream(etcd: EtcdClient, keys: Keys) -> dict[str, list[Entry]]:
    """Every version record of every stream, oldest first, in one reading."""
    prefix = keys.streams_prefix()
    out: dict[str, list[Entry]] = {}
    for kv in etcd.range(prefix)[0]:
        stream, _, rest = kv.key.removeprefix(prefix).partition("/")
        if rest.startswith("versions/"):
            out.setdefault(stream, []).append(_entry(kv))
    return out


def list_versions(etcd: EtcdClient, keys: Keys, stream: str) -> list[Version]:
    """Every version of a stream that has a record, in any state, oldest first."""
    return [e.version for e in entries(etcd, keys, stream)]


def get_entry(etcd: EtcdClient, keys: Keys, stream: str, number: int) -> Entry | None:
    kv = etcd.get(keys.version(stream, number))
    return _entry(kv) if kv else None


def get_version(etcd: EtcdClient, keys: Keys, stream: str, number: int) -> Version | None:
    """The version's record in whatever state it is; None when there is none."""
    entry = get_entry(etcd, keys, stream, number)
    return entry.version if entry else None


def head_entry(etcd: EtcdClient, keys: Keys, stream: str) -> Entry | None:
    """The newest committed version of a stream."""
    kv = etcd.get(keys.stream_head(stream))
    return _entry(kv) if kv else None


def head(etcd: EtcdClient, keys: Keys, stream: str) -> Version | None:
    """The newest committed version of a stream."""
    entry = head_entry(etcd, keys, stream)
    return entry.version if entry else None


def _entry(kv: KeyValue) -> Entry:
    return Entry(Version.decode(kv.value), kv.mod_revision)


# -- publishing --------------------------------------------------------------------------------------------------------
class Writer:
    """Begins and commits versions of one stream under one epoch. Remembers the last revisions it saw, so that each of
    its calls is one transaction as long as nobody else writes to the stream."""

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str, *, epoch: int) -> None:
        self._etcd, self._keys, self.stream, self.epoch = etcd, keys, stream, epoch
        self._next = (0, 0)  # last number given out, mod revision of its key
        self._head = (0, 0)  # number of the head, mod revision

    def begin(self, *, owner: str, lease: int, meta: Mapping[str, Any]) -> Staged:
        """Takes the next number; the version lives as STAGING while ``lease`` does. Raises Fenced, LeaseLost."""
        keys, next_key, head_key = self._keys, self._keys.stream_next(self.stream), self._keys.stream_head(self.stream)
        for _ in range(_TRIES):
            number, revision = self._next[0] + 1, self._next[1]
            version = Version(stream=self.stream, number=number, state=VersionState.STAGING, epoch=self.epoch,
                              created_at=time.time(), meta=dict(meta))
            done = self._etcd.txn(
                [fencing.epoch_guard(keys, self.epoch), Compare.mod(next_key, "==", revision)],
                [Op.put(next_key, str(number).encode()), Op.put(keys.version(self.stream, number), version.encode()),
                 Op.put(keys.staging_owner(self.stream, number), owner.encode(), lease)],
                [Op.get(next_key), Op.get(head_key)])
            if done.succeeded:
                self._next = (number, done.revision)
                return Staged(version, done.revision)
            found = done.get(next_key)
            now = (int(found.value), found.mod_revision) if found else (0, 0)
            if now == self._next:
                self._refused("begin")
            self._next = now
            self._saw_head(done.get(head_key))
        raise Conflict(f"other publishers of {self.stream} were faster {_TRIES} times")

    def commit(self, staged: Staged, *, manifest: str, nbytes: int, nodes: Sequence[str],
               guards: Sequence[Compare] = (), also: Sequence[Op] = ()) -> Version:
        """Makes the version visible, together with ``also``, in one transaction. Raises as ``commit_together`` does."""
        return commit_together([Draft(self, staged, manifest, nbytes, tuple(nodes))], guards=guards, also=also)[0]

    def abort(self, staged: Staged) -> None:
        """Gives the version up, if it is still STAGING and the epoch still ours; else there is nothing to do."""
        keys, number = self._keys, staged.version.number
        version_key = keys.version(self.stream, number)
        self._etcd.txn(
            [fencing.epoch_guard(keys, self.epoch), Compare.mod(version_key, "==", staged.revision)],
            [Op.put(version_key, move(staged.version, VersionState.ABORTED).encode()),
             Op.delete(keys.staging_owner(self.stream, number))])

    def _saw_head(self, kv: KeyValue | None) -> bool:
        """Takes note of the head; whether it is another than the one known."""
        now = (Version.decode(kv.value).number, kv.mod_revision) if kv else (0, 0)
        changed, self._head = now != self._head, now
        return changed

    def _refused(self, what: str) -> None:
        now = fencing.current_epoch(self._etcd, self._keys)
        if now != self.epoch:
            raise Fenced(f"{what} of a {self.stream} version refused: epoch {self.epoch} is over, the run is in {now}")

    def _explain(self, staged: Staged, version: KeyValue | None, owner: KeyValue | None) -> None:
        """Raises Conflict if the version itself is why a commit was refused."""
        what = f"{self.stream} version {staged.version.number}"
        if version is None or version.mod_revision != staged.revision:
            state = Version.decode(version.value).state if version else "deleted"
            raise Conflict(f"{what} is {state} and can no longer be committed")
        if owner is None:
            raise Conflict(f"the lease of the publisher of {what} ended before the commit")


@dataclass(frozen=True)
class Draft:
    """A version whose bytes are stored, ready for its commit."""

    writer: Writer
    staged: Staged
    manifest: str
    """Digest of its manifest."""
    nbytes: int
    nodes: tuple[str, ...]


def commit_together(drafts: Sequence[Draft], *, guards: Sequence[Compare] = (), also: Sequence[Op] = ()
                    ) -> list[Version]:
    """Makes versions of different streams, but of one job and epoch, visible in one transaction, with ``also``.

    Raises Fenced when the epoch is over; Conflict when a version was aborted meanwhile, a newer one is the head of its
    stream already, or a ``guards`` condition (the nodes' registrations) does not hold. Then none is visible.
    """
    first, now = drafts[0].writer, time.time()
    versions = [move(d.staged.version, VersionState.COMMITTED, manifest=d.manifest, nbytes=d.nbytes,
                     nodes=list(d.nodes), committed_at=now) for d in drafts]
    names = ", ".join(f"{v.stream} version {v.number}" for v in versions)
    for _ in range(_TRIES):
        done = first._etcd.txn(
            [fencing.epoch_guard(first._keys, first.epoch), *(c for d in drafts for c in _conditions(d)), *guards],
            [*(op for d, v in zip(drafts, versions, strict=True) for op in _writes(d, v)), *also],
            [Op.get(key) for d in drafts for key in _keys_of(d)])
        if done.succeeded:
            for d in drafts:
                d.writer._head = (d.staged.version.number, done.revision)
            return versions
        found = [(d, [done.get(key) for key in _keys_of(d)]) for d in drafts]
        if not any([d.writer._saw_head(head) for d, (_, _, head) in found]):  # a list: each is to take note
            first._refused("commit")
            for d, (version, owner, _) in found:
                d.writer._explain(d.staged, version, owner)
            raise Conflict(f"a DCS node that stored {names} was lost before the commit")
        for d in drafts:
            if d.writer._head[0] > d.staged.version.number:
                raise Conflict(f"{d.writer.stream} version {d.writer._head[0]} was committed before "
                               f"{d.staged.version.number}")
    raise Conflict(f"a head changed under each of {_TRIES} tries to commit {names}")


def _keys_of(d: Draft) -> tuple[str, str, str]:
    """Keys of the version, of its owner and of the stream's head."""
    keys, stream, number = d.writer._keys, d.writer.stream, d.staged.version.number
    return keys.version(stream, number), keys.staging_owner(stream, number), keys.stream_head(stream)


def _conditions(d: Draft) -> list[Compare]:
    version, owner, head_key = _keys_of(d)
    return [Compare.mod(version, "==", d.staged.revision), Compare.mod(owner, "==", d.staged.revision),
            Compare.mod(head_key, "==", d.writer._head[1])]


def _writes(d: Draft, version: Version) -> list[Op]:
    key, owner, head_key = _keys_of(d)
    return [Op.put(key, version.encode()), Op.put(head_key, version.encode()), Op.delete(owner)]


# -- pins --------------------------------------------------------------------------------------------------------------
def pin(etcd: EtcdClient, keys: Keys, stream: str, number: int | None, holder: str, lease: int) -> Version:
    """Keeps a committed version (the head for None) from release while ``lease`` lives or until ``unpin``.

    Raises VersionNotFound.
    """
    for _ in range(_TRIES):
        entry = head_entry(etcd, keys, stream) if number is None else get_entry(etcd, keys, stream, number)
        if entry is None or entry.version.state is not VersionState.COMMITTED:
            what = f"version {number}" if number is not None else "committed version"
            state = f" (it is {entry.version.state})" if entry else ""
            raise VersionNotFound(f"stream {stream} of job {keys.job} has no {what}{state}")
        version = entry.version
        if etcd.txn([Compare.mod(keys.version(stream, version.number), "==", entry.revision)],
                     [Op.put(keys.pin(stream, version.number, holder), b"{}", lease)]).succeeded:
            return version
        # An explicit version is RELEASING or gone by now, which the next reading tells; a head was replaced.
    raise Conflict(f"the head of {stream} changed under each of {_TRIES} tries to pin it")


def unpin(etcd: EtcdClient, keys: Keys, stream: str, number: int, holder: str) -> None:
    etcd.delete(keys.pin(stream, number, holder))


def pinned(etcd: EtcdClient, keys: Keys, stream: str) -> set[int]:
    """Numbers of the versions that someone pins."""
    prefix = keys.pins_prefix(stream)
    kvs, _ = etcd.range(prefix)
    return {int(kv.key.removeprefix(prefix).split("/", 1)[0]) for kv in kvs}


# -- the janitor's writes ----------------------------------------------------------------------------------------------
def abort_orphan(etcd: EtcdClient, keys: Keys, entry: Entry, guard: Sequence[Compare]) -> bool:
    """STAGING → ABORTED if its publisher's key is gone; whether it was."""
    v = entry.version
    return _write(etcd, keys, entry, move(v, VersionState.ABORTED),
                  [Compare.absent(keys.staging_owner(v.stream, v.number)), *guard])


def release(etcd: EtcdClient, keys: Keys, entry: Entry, guard: Sequence[Compare]) -> bool:
    """COMMITTED → RELEASING; from here on nobody can pin it."""
    return _write(etcd, keys, entry, move(entry.version, VersionState.RELEASING), guard)


def gone(etcd: EtcdClient, keys: Keys, entry: Entry, guard: Sequence[Compare]) -> bool:
    """RELEASING → GONE. The caller has seen, after the release, that nobody pins it."""
    return _write(etcd, keys, entry, move(entry.version, VersionState.GONE), guard)


def forget(etcd: EtcdClient, keys: Keys, entry: Entry, guard: Sequence[Compare]) -> bool:
    """Deletes the record of a version that is GONE or ABORTED; its number stays used."""
    v = entry.version
    if TRANSITIONS[v.state]:
        raise IllegalTransition(f"the record of {v.stream} version {v.number} is needed: it is {v.state}")
    key = keys.version(v.stream, v.number)
    return etcd.txn([Compare.mod(key, "==", entry.revision), *guard], [Op.delete(key)]).succeeded


def relocate(etcd: EtcdClient, keys: Keys, entry: Entry, nodes: Sequence[str], guard: Sequence[Compare]) -> bool:
    """Notes that other nodes hold a committed version now; whether it was still as read. The head's record changes with
    it, so both go on holding the same bytes under one revision."""
    version = entry.version.replace(nodes=list(nodes))
    current = head_entry(etcd, keys, version.stream)
    if current is None or current.version.number != version.number:  # and it never becomes the head again
        return _write(etcd, keys, entry, version, guard)
    key, head_key = keys.version(version.stream, version.number), keys.stream_head(version.stream)
    return etcd.txn(
        [Compare.mod(key, "==", entry.revision), Compare.mod(head_key, "==", entry.revision), *guard],
        [Op.put(key, version.encode()), Op.put(head_key, version.encode())]).succeeded


def _write(etcd: EtcdClient, keys: Keys, entry: Entry, new: Version, guards: Sequence[Compare]) -> bool:
    key = keys.version(new.stream, new.number)
    return etcd.txn([Compare.mod(key, "==", entry.revision), *guards], [Op.put(key, new.encode())]).succeeded
