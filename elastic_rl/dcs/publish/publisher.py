"""Publishing a version: every rank copies its tensors into its host's arena and has them hashed (``part_writer.py``);
one rank merges the parts, has their chunks replicated, and makes the version visible in one transaction.

    begin ─▶ parts of all ranks ─▶ store ─▶ commit ─▶ release_holds
                                     └─ any failure ─▶ abort: nothing was ever visible
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from elastic_rl.config.dcs import Replicas
from elastic_rl.dcs.catalog import replica_sets
from elastic_rl.dcs.catalog import writer as catalog_writer
from elastic_rl.dcs.catalog.writer import PendingCommit, Staged, StreamWriter, merge_acknowledged
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.connection import NodeConnection, Progress
from elastic_rl.dcs.fan_out import in_parallel, on_each
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.publish import parts
from elastic_rl.dcs.publish.kept_chunks import KeptChunks
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.security import Security
from elastic_rl.errors import (
    ArenaFull,
    Conflict,
    DeadlineExceeded,
    DiskFull,
    ElasticRLError,
    NodeUnavailable,
    OutcomeUnknown,
)
from elastic_rl.etcd.client import EtcdClient, KeptLease, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import ReplicaSets, Version
from elastic_rl.runtime import failpoints
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)

_COPIERS = 16
"""Parts that are replicated at once."""


@dataclass(frozen=True)
class StoredVersion:
    """A version whose chunks and manifest have their copies, ready for ``commit``."""

    pending: PendingCommit
    manifest: Manifest
    publisher: Publisher

    @property
    def stream(self) -> str:
        return self.publisher.stream


class Publisher:
    """Publishes versions of one stream under one fencing epoch. One publish at a time; connections stay open
    in between."""

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str, *, epoch: int, owner: str, chunk_bytes: int,
                 replicas: Replicas = 1, digest: str = XXH3, staging_ttl_s: int, io_timeout_s: float = 30.0,
                 node: str = "", security: Security | None = None, token: FencedWriter | None = None) -> None:
        """``replicas``: nodes that must hold every chunk before the commit (``dcs.replicas``). ``digest``: the kind
        that names chunks. ``node``: id of the node to write to, where a host has several. ``token``: as for
        ``StreamWriter``."""
        self.stream = stream
        self._etcd, self._keys = etcd, keys
        self._owner, self._chunk_bytes, self._replicas = owner, chunk_bytes, replicas
        self._digest, self._staging_ttl_s = digest, staging_ttl_s
        self._client = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, node=node, security=security)
        self._arena = LocalArena(self._client)
        self._writer = StreamWriter(etcd, keys, stream, epoch=epoch, token=token)
        self._lease: KeptLease | None = None
        self._last: Manifest | None = None
        self._lock = threading.Lock()

    # -- one process -------------------------------------------------------------------------------------------------
    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, meta: Mapping[str, Any],
                also: Sequence[Op] = ()) -> Version:
        """Publishes named tensors of any device and layout as the stream's next version and returns it, committed.

        ``meta`` must be JSON-able; ``also`` are writes that happen in the commit's transaction, or not at all. The
        tensors are read once, in order, and may be made while they are read.

        Raises Fenced (the epoch is over: stop), ArenaFull, NodeUnavailable, Conflict (aborted meanwhile, or a node was
        restarted), CatalogMismatch, and whatever ``tensors`` raises; then nothing is visible, and the number is not
        used again. Raises OutcomeUnknown when etcd went away during the commit: read the catalog before publishing
        again.
        """
        def write() -> Part:
            writer = PartWriter(self._arena, chunk_bytes=self._chunk_bytes, digest=self._digest, seal_early=True)
            for name, tensor in tensors:
                writer.add(name, tensor)
            return writer.seal()

        return self.publish_part(write, meta=meta, also=also)

    def publish_part(self, write: Callable[[], Part], *, meta: Mapping[str, Any], also: Sequence[Op] = (),
                     kept: KeptChunks | None = None) -> Version:
        """Publishes what ``write`` stores on the node of ``local``, as ``publish`` does. ``kept``: see ``store``."""
        return self._publish(lambda: [write()], meta=meta, also=also, kept=kept)

    def publish_parts(self, of: Sequence[Part], *, meta: Mapping[str, Any], deadline: float = float("inf")) -> Version:
        """Publishes what several ranks have written, each to its host's node, and hold there until this returns or
        raises. ``deadline``: see ``store``. Raises as ``publish`` and ``store`` do, and ConfigError when two parts hold
        a tensor of one name."""
        return self._publish(lambda: of, meta=meta, hold=True, deadline=deadline)

    def _publish(self, write: Callable[[], Sequence[Part]], *, meta: Mapping[str, Any], also: Sequence[Op] = (),
                 hold: bool = False, deadline: float = float("inf"), kept: KeptChunks | None = None) -> Version:
        with self._lock, traces.span("dcs.publish", stream=self.stream):
            staged: Staged | None = None
            try:
                staged = self.begin(meta)
                stored = self.store(staged, write(), hold=hold, deadline=deadline, kept=kept)
                version = commit([stored], also=also)[0]
            except OutcomeUnknown:
                self.drop_lease()
                raise
            except BaseException:
                self.abort(staged)
                raise
            self.release_holds(stored, version)
            return version

    def local(self) -> NodeConnection:
        """The connection to this host's node; what is put or sealed on it is held for this publisher. Raises
        NodeUnavailable and AccessDenied."""
        return self._client.local()

    # -- step by step ------------------------------------------------------------------------------------------------
    def begin(self, meta: Mapping[str, Any]) -> Staged:
        """Takes the stream's next number. The current trace is stored with the version, in ``meta["trace"]``, so that
        later spans can refer to it. Raises Fenced, CatalogMismatch, EtcdUnavailable and LeaseLost."""
        if self._lease is None or not self._lease.alive:
            self.drop_lease()
            self._lease = self._etcd.keepalive(self._staging_ttl_s)
        carrier = traces.inject()
        staged = self._writer.begin(owner=self._owner, lease=self._lease.id,
                                    meta={**({"trace": carrier} if carrier else {}), **meta})
        failpoints.reach("publish.begun")
        return staged

    def store(self, staged: Staged, of: Sequence[Part], *, hold: bool = False, deadline: float = float("inf"),
              kept: KeptChunks | None = None) -> StoredVersion:
        """Merges the parts, stores the manifest and has everything replicated.

        ``hold``: hold the parts' chunks for this publisher too, since their writer may die before the commit.
        ``kept``: chunks of the parts that need no hold, since the head of the stream keeps them. ``deadline``:
        monotonic time. Raises DeadlineExceeded, NodeUnavailable, Conflict (a node was restarted), ChunkMissing,
        ArenaFull and DiskFull.
        """
        with traces.span("dcs.store", stream=self.stream, version=staged.version.number):
            return self._store_parts(staged, of, hold, deadline, kept)

    def _store_parts(self, staged: Staged, of: Sequence[Part], hold: bool, deadline: float, kept: KeptChunks | None
                     ) -> StoredVersion:
        manifest, writers = parts.merge(of)
        written = merge_acknowledged({part.node: part.incarnation} for part in of if part.chunks)
        local = self._client.local()
        digest = local.put(manifest.encode(), digest=self._digest)
        failpoints.reach("publish.manifest")
        replication = _Replication(self._client, self._writer, manifest, digest, local.node.id, self._replicas,
                                   deadline, delta.bases(self._last, manifest) if self._last is not None else {},
                                   kept)
        sources = dict(zip(writers, manifest.part_digests(), strict=True))
        held = {n: [d for part in of if part.node == n for d in part.chunks] if hold else [] for n in writers}
        stored, failed = in_parallel(
            sources, lambda node: replication.store_part(node, written.get(node, ""), sources[node], held[node]),
            threads=_COPIERS)
        for error in failed.values():
            raise error
        failpoints.reach("publish.replicated")
        acknowledged = merge_acknowledged([written, {local.node.id: local.node.incarnation},
                                           *stored.values()])
        sets = ReplicaSets(parts=[list(nodes) for nodes in stored.values()])
        pending = PendingCommit(self._writer, staged, digest, manifest.nbytes, sets, acknowledged)
        return StoredVersion(pending, manifest, self)

    def release_holds(self, stored: StoredVersion, version: Version) -> None:
        """The nodes need not hold the chunks for this publisher any more after the commit. Some of them note the
        version on their disks first; the leader has the others do so. Nodes that fail are skipped: the version is
        committed, and their holds end with the connection."""
        self._last = stored.manifest
        identity = stored.pending.writer.identity
        noting = set(version.sources) if identity is not None else set()

        def release(connection: NodeConnection) -> None:
            if identity is not None and connection.node.id in noting:
                with contextlib.suppress(ElasticRLError):
                    connection.note_versions(identity, [version])
            connection.release_holds()

        _, failed = on_each(self._client, stored.pending.acknowledged, release)
        for node_id, error in failed.items():
            log.info("node %s holds chunks of %s version %d until its connection ends: %s", node_id, version.stream,
                     version.number, error.message)

    def abort(self, staged: Staged | None) -> None:
        """Aborts the version, and gives back all that was stored for it. The garbage collector cleans up what cannot be
        reached now, once the lease has ended."""
        try:
            if staged is not None:
                self._writer.abort(staged)
        except ElasticRLError:
            self.drop_lease()
        self._client.close()  # gives open regions back and ends the holds

    def drop_lease(self) -> None:
        """Ends the lease, and with it every publish that is not committed.

        Use after OutcomeUnknown instead of ``abort``: the chunks stay held, as the commit may have happened, or may
        still happen; but, without the lease that it depends on, not for ever.
        """
        old, self._lease = self._lease, None
        if old is not None:
            old.close()

    def close(self) -> None:
        with self._lock:
            self._client.close()
            self._arena.close()
            self.drop_lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Replication:
    """Copies the parts of one version from the nodes that wrote them to others. Thread-safe."""

    def __init__(self, client: DcsClient, writer: StreamWriter, manifest: Manifest, manifest_digest: str,
                 manifest_node: str, replicas: Replicas, deadline: float, bases: Mapping[str, str],
                 kept: KeptChunks | None) -> None:
        """``manifest_node``: where the manifest is. ``bases``: see ``NodeConnection.fetch``."""
        self._client, self._manifest, self._digest = client, manifest, manifest_digest
        self._manifest_node, self._bases, self._kept = manifest_node, bases, kept
        self._in_time = _within(deadline)
        catalog = writer.identity.id if writer.identity is not None else ""
        self._ids = [i for i, n in client.registered().items() if n.belongs_to(catalog)] if replicas != 1 else []
        self._wanted = replica_sets.wanted(replicas, len(self._ids))
        self._required = replica_sets.required(replicas)

    def store_part(self, source: str, incarnation: str, digests: Sequence[str], held: Sequence[str]
                   ) -> dict[str, str]:
        """Has ``source`` hold the chunks ``held`` and the manifest (by which a node knows what it must keep), and then
        as many others as are wanted fetch the part's chunks and the manifest. ``incarnation``: the incarnation of the
        source when it stored them; empty for a version without chunks. Returns the nodes that hold the part now, the
        source first, each with the incarnation that acknowledged. Raises Conflict when the source was restarted since.
        """
        connection = self._client.connect(source)
        if incarnation and connection.node.incarnation != incarnation:
            raise Conflict(f"DCS node {source} was restarted after chunks of the version had been stored on it")
        if held:
            connection.fetch(held, hold=True, on_progress=self._in_time)
        if source != self._manifest_node:
            connection.fetch([self._digest], prefer=[self._manifest_node], hold=True, on_progress=self._in_time)
        acknowledged = {source: connection.node.incarnation}
        last: ElasticRLError | None = None
        for other in self._candidates(source):
            if len(acknowledged) == self._wanted:
                break
            self._in_time(0, 0)
            try:
                acknowledged[other] = self._copy(other, source, digests)
            except (NodeUnavailable, ArenaFull, DiskFull) as e:
                last = e
        if len(acknowledged) < self._required:
            raise NodeUnavailable(
                f"{self._required} copies are required and only {len(acknowledged)} nodes can hold one"
                + (f" (the last one failed: {last})" if last else ""),
                hint="start more DCS nodes or set fewer replicas") from last
        return acknowledged

    def _copy(self, target: str, source: str, digests: Sequence[str]) -> str:
        """Has a node fetch a part; the incarnation that acknowledged."""
        connection = self._client.connect(target)
        if self._kept is not None:
            self._kept.bring(connection, prefer=[source], on_progress=self._in_time)
            digests = [d for d in digests if d not in self._kept.chunks]
        connection.fetch(
            [self._digest, *digests], prefer=[source], hold=True, sizes={d: self._manifest.chunks[d] for d in digests},
            bases={d: self._bases[d] for d in digests if d in self._bases}, on_progress=self._in_time)
        return connection.node.incarnation

    def _candidates(self, source: str) -> list[str]:
        """Nodes that may be given copies, in this order: after the source in the ring of ids; those that could not be
        reached lately last, so that a publish waits for them only where there is no other."""
        return sorted(replica_sets.successors(source, self._ids), key=self._client.is_unreachable)


def _within(deadline: float) -> Progress:
    """Ends a fetch that continues past the deadline, by DeadlineExceeded; the connection ends with it."""

    def in_time(done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"only {done} of {total} bytes were stored in time",
                                   hint="is a node overloaded? dcs.publish_timeout_s is the limit")

    return in_time


def commit(stored: Sequence[StoredVersion], *, also: Sequence[Op] = ()) -> list[Version]:
    """Makes versions of several streams visible in one transaction, or none. Raises as ``commit_together`` does."""
    what = ", ".join(f"{s.stream} {s.pending.staged.version.number}" for s in stored)
    with traces.span("dcs.commit", versions=what):
        versions = catalog_writer.commit_together([s.pending for s in stored], also=also)
    failpoints.reach("publish.committed")
    return versions
