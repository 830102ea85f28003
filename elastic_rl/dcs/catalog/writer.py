"""Publishing in the catalog: numbers are taken, versions committed or aborted. Every write is one guarded transaction
with a bounded number of operations, however many nodes and parts a version has."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.dcs.catalog import replica_sets
from elastic_rl.dcs.catalog.reads import decode, decode_identity, read_identity
from elastic_rl.dcs.catalog.transitions import transition
from elastic_rl.dcs.registered_nodes import RECOVER_HINT, read_nodes, registration_guards
from elastic_rl.errors import CatalogMismatch, Conflict, Fenced
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, Epoch, ReplicaSets, Version, VersionState

_TRIES = 16


@dataclass(frozen=True)
class Staged:
    """A publish in progress: its version, and the revision at which it and its owner key were written."""

    version: Version
    revision: int


@dataclass(frozen=True)
class PendingCommit:
    """A version whose chunks are stored, ready to be committed."""

    writer: StreamWriter
    staged: Staged
    manifest: str
    """Digest of the manifest."""
    nbytes: int
    replica_sets: ReplicaSets
    acknowledged: Mapping[str, str]
    """Node id → incarnation, for every node that stored chunks or the manifest: the commit holds only for these very
    processes."""


class StreamWriter:
    """Begins and commits versions of one stream under one epoch. Remembers the last revisions that it saw, so that each
    of its calls is one transaction as long as there is no concurrent publish.

    Every method raises CatalogMismatch when etcd has another catalog than the one that was written to before, an older
    state of it, or none while nodes hold versions of one.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str, *, epoch: int, token: FencedWriter | None = None
                 ) -> None:
        """``token``: a fencing token that holds in this epoch only, where not everybody of the epoch may publish."""
        self.etcd, self.keys, self.stream, self.epoch = etcd, keys, stream, epoch
        self._token = token or FencedWriter.of_epoch(etcd, keys, epoch)
        self.identity: CatalogIdentity | None = None
        self._identity_revision = 0
        self._next = (0, 0)  # last number given out, mod revision of its key
        self._head = (0, 0)  # number of the head, mod revision

    def begin(self, *, owner: str, lease: int, meta: Mapping[str, Any]) -> Staged:
        """Takes the next number; the version lives as STAGING while ``lease`` does. Raises Fenced, LeaseLost."""
        keys, next_key, head_key = self.keys, self.keys.stream_next(self.stream), self.keys.stream_head(self.stream)
        if self.identity is None:
            self._saw_identity(*read_identity(self.etcd, keys))
        for _ in range(_TRIES):
            identity, create = self.identity, list[Op]()
            if identity is None:
                identity = self._first_identity()
                create = [Op.put(keys.dcs_catalog(), identity.encode())]
            number, revision = self._next[0] + 1, self._next[1]
            version = Version(stream=self.stream, number=number, state=VersionState.STAGING, epoch=self.epoch,
                              created_at=time.time(), meta=dict(meta))
            done = self.etcd.txn(
                [*self._token.guards, self._identity_guard(), Compare.mod(next_key, "==", revision)],
                [*create, Op.put(next_key, str(number).encode()),
                 Op.put(keys.version(self.stream, number), version.encode()),
                 Op.put(keys.staging_owner(self.stream, number), owner.encode(), lease)],
                [Op.get(keys.dcs_catalog()), Op.get(next_key), Op.get(head_key)])
            if done.succeeded:
                self._next = (number, done.revision)
                if create:
                    self.identity, self._identity_revision = identity, done.revision
                return Staged(version, done.revision)
            changed = [self._saw_identity(*decode_identity(done.get(keys.dcs_catalog()))),
                       self._saw_next(done.get(next_key)), self._saw_head(done.get(head_key))]
            if not any(changed[:2]):
                self.require_token("begin")
        raise Conflict(f"other publishers of {self.stream} won each of {_TRIES} tries")

    def abort(self, staged: Staged) -> None:
        """Aborts the version if it is still STAGING under this token; otherwise there is nothing to do."""
        keys, number = self.keys, staged.version.number
        version_key = keys.version(self.stream, number)
        self.etcd.txn(
            [*self._token.guards, Compare.mod(version_key, "==", staged.revision)],
            [Op.put(version_key, transition(staged.version, VersionState.ABORTED).encode()),
             Op.delete(keys.staging_owner(self.stream, number))])

    def require_token(self, what: str) -> None:
        """Raises Fenced when the token no longer holds."""
        key = self.keys.epoch()
        kv = self.etcd.get(key)
        now = kv.version if kv else 0
        if now != self.epoch:
            by = readable_one(kv, Epoch) if kv else None
            raise Fenced(f"{what} of a {self.stream} version refused: epoch {self.epoch} is over, the job is in {now}"
                         + (f" ({by.holder})" if by is not None else ""))
        self._token.require()

    # -- what was last seen ------------------------------------------------------------------------------------------
    def _first_identity(self) -> CatalogIdentity:
        """The identity of a catalog that begins now. An empty etcd under nodes that hold versions is no new catalog but
        a lost one."""
        nodes, _ = read_nodes(self.etcd, self.keys)
        holding = [n.node for n in nodes.values() if n.node.catalog]
        if holding:
            raise CatalogMismatch(f"etcd has no catalog of versions for job {self.keys.job}, but DCS node "
                                  f"{holding[0].id} holds versions of catalog {holding[0].catalog}", hint=RECOVER_HINT)
        return CatalogIdentity(id=secrets.token_hex(8), created_at=time.time())

    def _saw_identity(self, found: CatalogIdentity | None, revision: int) -> bool:
        """Remembers the catalog's record; whether it is another one than before."""
        known = self.identity
        if known is not None and (found is None or found.id != known.id or found.commits < known.commits):
            now = f"catalog {found.id} after {found.commits} commits" if found else "no catalog"
            raise CatalogMismatch(f"etcd has {now}; this publisher wrote to catalog {known.id} after {known.commits} "
                                  "commits", hint=RECOVER_HINT)
        if found is not None and found.suspended:
            raise CatalogMismatch(f"the catalog of job {self.keys.job} is suspended: {found.suspended}",
                                  hint=RECOVER_HINT)
        changed = revision != self._identity_revision
        self.identity, self._identity_revision = found, revision
        return changed

    def _identity_guard(self) -> Compare:
        return Compare.mod(self.keys.dcs_catalog(), "==", self._identity_revision)

    def _saw_next(self, kv: KeyValue | None) -> bool:
        now = (int(kv.value), kv.mod_revision) if kv else (0, 0)
        changed, self._next = now != self._next, now
        return changed

    def _saw_head(self, kv: KeyValue | None) -> bool:
        now = (decode(Version, kv).number, kv.mod_revision) if kv else (0, 0)
        changed, self._head = now != self._head, now
        return changed

    # -- commit: see ``commit_together`` -----------------------------------------------------------------------------
    def _commit_keys(self, pending: PendingCommit) -> tuple[str, str, str]:
        """Keys of the version, of its owner and of the stream's head."""
        keys, number = self.keys, pending.staged.version.number
        return (keys.version(self.stream, number), keys.staging_owner(self.stream, number),
                keys.stream_head(self.stream))

    def _commit_conditions(self, pending: PendingCommit) -> list[Compare]:
        version, owner, head = self._commit_keys(pending)
        revision = pending.staged.revision
        return [*self._token.guards, Compare.mod(version, "==", revision), Compare.mod(owner, "==", revision),
                Compare.mod(head, "==", self._head[1])]

    def _commit_writes(self, pending: PendingCommit, version: Version, as_of: int) -> list[Op]:
        key, owner, head = self._commit_keys(pending)
        sets = pending.replica_sets.replace(as_of=as_of)
        return [Op.put(key, version.encode()), Op.put(head, version.encode()), Op.delete(owner),
                Op.put(self.keys.replica_sets(version.stream, version.number), sets.encode())]

    def _committed(self, number: int, identity: CatalogIdentity, revision: int) -> None:
        self._head, self.identity, self._identity_revision = (number, revision), identity, revision

    def _require_committable(self, staged: Staged, version: KeyValue | None, owner: KeyValue | None) -> None:
        """Raises Conflict if the version itself is why its commit was refused."""
        what = f"{self.stream} version {staged.version.number}"
        if version is None or version.mod_revision != staged.revision:
            state = decode(Version, version).state if version else "deleted"
            raise Conflict(f"{what} is {state} and can no longer be committed")
        if owner is None:
            raise Conflict(f"the lease of the publisher of {what} ended before the commit")
        if self._head[0] > staged.version.number:
            raise Conflict(f"{self.stream} version {self._head[0]} was committed before {staged.version.number}")


def commit_together(pending: Sequence[PendingCommit], *, also: Sequence[Op] = ()) -> list[Version]:
    """Makes versions of different streams, of one job and epoch, visible in one transaction, with the writes ``also``.

    Raises Fenced when the epoch is over; Conflict when a version was aborted meanwhile, a newer one is the head of its
    stream already, or a node that stored chunks was lost or restarted; CatalogMismatch. Then none is visible.
    """
    first, now = pending[0].writer, time.time()
    etcd, keys = first.etcd, first.keys
    versions = [transition(p.staged.version, VersionState.COMMITTED, manifest=p.manifest, nbytes=p.nbytes,
                           sources=replica_sets.sources(p.replica_sets), committed_at=now) for p in pending]
    acknowledged = merge_acknowledged(p.acknowledged for p in pending)
    for _ in range(_TRIES):
        if first.identity is None:
            raise Conflict("a version can only be committed by the writer that began it")
        identity = first.identity.replace(commits=first.identity.commits + 1)
        registered, as_of = registration_guards(etcd, keys, acknowledged, first.identity)
        done = etcd.txn(
            [first._identity_guard(), *registered,
             *(c for p in pending for c in p.writer._commit_conditions(p))],
            [Op.put(keys.dcs_catalog(), identity.encode()),
             *(op for p, v in zip(pending, versions, strict=True) for op in p.writer._commit_writes(p, v, as_of)),
             *also],
            [Op.get(keys.dcs_catalog()), *(Op.get(key) for p in pending for key in p.writer._commit_keys(p))])
        if done.succeeded:
            for p in pending:
                p.writer._committed(p.staged.version.number, identity, done.revision)
            return versions
        for p in pending:
            p.writer.require_token("commit")
            version, owner, head = (done.get(key) for key in p.writer._commit_keys(p))
            p.writer._saw_identity(*decode_identity(done.get(keys.dcs_catalog())))
            p.writer._saw_head(head)
            p.writer._require_committable(p.staged, version, owner)
        # Else another stream was committed, or a node registered: with the new revisions the next try may succeed.
    names = ", ".join(f"{v.stream} version {v.number}" for v in versions)
    raise Conflict(f"other commits or registrations of nodes won each of {_TRIES} tries to commit {names}")


def merge_acknowledged(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """One mapping of node id → incarnation. Raises Conflict for a node of which two incarnations acknowledged: it may
    no longer have what it acknowledged first."""
    out: dict[str, str] = {}
    for acknowledged in several:
        for node_id, incarnation in acknowledged.items():
            if out.setdefault(node_id, incarnation) != incarnation:
                raise Conflict(f"DCS node {node_id} was restarted while chunks of a version were stored on it")
    return out
