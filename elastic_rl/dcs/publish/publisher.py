"""Publishing a version: every rank copies its share into its host's arena and has it hashed (``part_writer.py``); one
of them merges the parts, has the chunks replicated, and makes the version visible in one transaction.

    begin ─▶ parts of all ranks ─▶ store ─▶ commit ─▶ settle
                                     └─ any failure ─▶ give_up: nothing was ever visible
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch

from elastic_rl.dcs import failpoints
from elastic_rl.dcs.catalog import catalog
from elastic_rl.dcs.catalog.catalog import Draft, Staged, Writer
from elastic_rl.dcs.client import DcsClient, Progress
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.publish import parts
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.security import Security
from elastic_rl.errors import (
    ArenaFull,
    DeadlineExceeded,
    DiskFull,
    ElasticRLError,
    NodeUnavailable,
    OutcomeUnknown,
)
from elastic_rl.etcd.client import Compare, EtcdClient, KeptLease, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version
from elastic_rl.telemetry import traces

_COPIERS = 8
"""Nodes whose chunks are replicated at once."""


@dataclass(frozen=True)
class Stored:
    """A version whose chunks and manifest have their copies, and what must still hold when it is committed."""

    draft: Draft
    manifest: Manifest
    guards: tuple[Compare, ...]
    """Registrations of the nodes: the very processes that were given the chunks."""


class Publisher:
    """Publishes versions of one stream under one fencing epoch. One publish at a time; connections stay open
    between."""

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str, *, epoch: int, owner: str, chunk_bytes: int,
                 replicas: int = 1, digest: str = XXH3, staging_ttl_s: int, io_timeout_s: float = 30.0,
                 node: str = "", security: Security | None = None) -> None:
        """``replicas``: nodes that must hold every chunk before the commit. ``digest``: the kind that names chunks.
        ``node``: id of the node to write to, where a host has several."""
        self.stream = stream
        self._etcd, self._keys = etcd, keys
        self._owner, self._chunk_bytes, self._replicas = owner, chunk_bytes, replicas
        self._digest, self._staging_ttl_s = digest, staging_ttl_s
        self._hub = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, node=node, security=security)
        self._arena = LocalArena(self._hub)
        self._writer = Writer(etcd, keys, stream, epoch=epoch)
        self._lease: KeptLease | None = None
        self._last: Manifest | None = None
        self._lock = threading.Lock()

    # -- one process -------------------------------------------------------------------------------------------------
    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, meta: Mapping[str, Any],
                also: Sequence[Op] = ()) -> Version:
        """Publishes named tensors of any device and layout as the stream's next version and returns it, committed.

        ``meta`` must be JSON-able; ``also`` are writes that happen in the commit's transaction, or not at all. The
        tensors are read once, in order, and may be made while they are read.

        Raises Fenced (the epoch is over: stop), ArenaFull, NodeUnavailable, Conflict (aborted meanwhile), and whatever
        ``tensors`` raises; then nothing is visible, and the number is not used again.
        Raises OutcomeUnknown when etcd went away during the commit: look at the catalog before you go on.
        """
        with self._lock, traces.span("dcs.publish", stream=self.stream):
            staged: Staged | None = None
            try:
                staged = self.begin(meta)
                writer = PartWriter(self._arena, chunk_bytes=self._chunk_bytes, digest=self._digest, seal_early=True)
                for name, tensor in tensors:
                    writer.add(name, tensor)
                stored = self.store(staged, [writer.seal()])
                version = commit([stored], also=also)[0]
            except OutcomeUnknown:
                self.drop_lease()
                raise
            except BaseException:
                self.give_up(staged)
                raise
            self.settle(stored)
            return version

    # -- step by step ------------------------------------------------------------------------------------------------
    def begin(self, meta: Mapping[str, Any]) -> Staged:
        """Takes the stream's next number. The current trace goes with the version, in ``meta["trace"]``, so that what
        follows from it is seen as its consequence. Raises Fenced, EtcdUnavailable and LeaseLost."""
        if self._lease is None or not self._lease.alive:
            self.drop_lease()
            self._lease = self._etcd.keepalive(self._staging_ttl_s)
        carrier = traces.inject()
        staged = self._writer.begin(owner=self._owner, lease=self._lease.id,
                                    meta={**({"trace": carrier} if carrier else {}), **meta})
        failpoints.reach("publish.begun")
        return staged

    def store(self, staged: Staged, of: Sequence[Part], *, hold: bool = False, deadline: float = float("inf")
              ) -> Stored:
        """Merges the parts, stores the manifest and has everything replicated.

        ``hold``: hold the parts' chunks for this publisher, too, since whoever wrote them may die before the commit.
        ``deadline``: monotonic time. Raises DeadlineExceeded, NodeUnavailable, ChunkMissing, ArenaFull and DiskFull.
        """
        with traces.span("dcs.store", stream=self.stream, version=staged.version.number):
            return self._store_parts(staged, of, hold, deadline)

    def _store_parts(self, staged: Staged, of: Sequence[Part], hold: bool, deadline: float) -> Stored:
        manifest = parts.merge(of)
        for part in of if hold else ():
            self._hub.connect(part.node).fetch(list(part.chunks), hold=True, on_progress=_within(deadline))
        node = self._hub.local()
        digest = node.put(manifest.encode(), digest=self._digest)
        failpoints.reach("publish.manifest")
        # Every node that holds a chunk of the version has its manifest too: by it the node knows what it must keep.
        sources: dict[str, dict[str, None]] = {node.node.id: {digest: None}}
        for part in of:
            if part.node not in sources:
                self._hub.connect(part.node).fetch([digest], prefer=[node.node.id], hold=True,
                                                   on_progress=_within(deadline))
            sources.setdefault(part.node, {digest: None}).update(dict.fromkeys(part.chunks))
        copies = self._replicate({n: list(digests) for n, digests in sources.items()}, manifest, deadline)
        failpoints.reach("publish.replicated")
        guards = {Compare.create(self._keys.dcs_node(p.node), "==", p.registered) for p in of}
        guards |= {self._hub.guard(n) for n in (node.node.id, *copies)}
        nodes = tuple(dict.fromkeys((*sources, *copies)))
        return Stored(Draft(self._writer, staged, digest, manifest.nbytes, nodes), manifest, tuple(guards))

    def settle(self, stored: Stored) -> None:
        """After the commit: the nodes need not hold the chunks for this publisher any more."""
        self._last = stored.manifest
        for node_id in stored.draft.nodes:
            with contextlib.suppress(NodeUnavailable):  # committed all the same
                self._hub.connect(node_id).settle()

    def give_up(self, staged: Staged | None) -> None:
        """Leaves nothing behind; what cannot be reached now is cleaned up by the janitor, since our lease ends."""
        try:
            if staged is not None:
                self._writer.abort(staged)
        except ElasticRLError:
            self.drop_lease()
        self._hub.close()  # gives open regions back and ends the holds

    def drop_lease(self) -> None:
        """Ends the lease, and with it every publish that is not committed.

        After OutcomeUnknown this and not ``give_up``: the chunks stay held, as the commit may have happened, or may
        happen still; but without the lease that it depends on not for ever.
        """
        old, self._lease = self._lease, None
        if old is not None:
            old.close()

    # -- copies ------------------------------------------------------------------------------------------------------
    def _replicate(self, sources: Mapping[str, Sequence[str]], manifest: Manifest, deadline: float) -> list[str]:
        """Has ``replicas - 1`` other nodes fetch each source's chunks; the ids of all of them."""
        if self._replicas <= 1:
            return []
        bases = delta.bases(self._last, manifest) if self._last is not None else {}
        with ThreadPoolExecutor(min(_COPIERS, len(sources)), "replicate") as pool:
            done = list(pool.map(lambda source: self._copy(source, sources[source], manifest, bases, deadline),
                                 sources))
        return list(dict.fromkeys(itertools.chain.from_iterable(done)))

    def _copy(self, source: str, digests: Sequence[str], manifest: Manifest, bases: Mapping[str, str],
              deadline: float) -> list[str]:
        """Nodes after ``source`` in the ring of ids that have copies of its chunks now. Raises NodeUnavailable."""
        done: list[str] = []
        last: ElasticRLError | None = None
        in_time = _within(deadline)
        others = sorted((n.id for n in self._hub.nodes() if n.id != source), key=lambda n: (n < source, n))
        for other in others:
            if len(done) == self._replicas - 1:
                break
            in_time(0, 0)
            try:
                self._hub.connect(other).fetch(
                    digests, prefer=[source], hold=True,
                    sizes={d: manifest.chunks[d] for d in digests if d in manifest.chunks},
                    bases={d: bases[d] for d in digests if d in bases}, on_progress=in_time)
                done.append(other)
            except (NodeUnavailable, ArenaFull, DiskFull) as e:
                last = e
        if len(done) < self._replicas - 1:
            raise NodeUnavailable(
                f"{self._replicas} copies are wanted and only {1 + len(done)} nodes can hold one"
                + (f" (the last one said: {last})" if last else ""),
                hint="start more DCS nodes or set fewer replicas") from last
        return done

    def close(self) -> None:
        with self._lock:
            self._hub.close()
            self._arena.close()
            self.drop_lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _within(deadline: float) -> Progress:
    """Ends a fetch that goes on past the deadline, by DeadlineExceeded; the connection ends with it."""

    def in_time(done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"only {done} of {total} bytes were stored in time",
                                   hint="is a node overloaded? dcs.publish_timeout_s is the limit")

    return in_time


def commit(stored: Sequence[Stored], *, also: Sequence[Op] = ()) -> list[Version]:
    """Makes versions of several streams visible in one transaction, or none. Raises as ``commit_together`` does."""
    guards = tuple({guard for s in stored for guard in s.guards})
    what = ", ".join(f"{s.draft.writer.stream} {s.draft.staged.version.number}" for s in stored)
    with traces.span("dcs.commit", versions=what):
        versions = catalog.commit_together([s.draft for s in stored], guards=guards, also=also)
    failpoints.reach("publish.committed")
    return versions
