"""Publishing a version: copy the tensors into the host's arena, have them hashed, make them visible in one
transaction."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import Version
from elastic_rl.coordinator.store import KeptLease, Op, Store
from elastic_rl.dcs.arena import ArenaFile
from elastic_rl.dcs.catalog import Staged, Writer
from elastic_rl.dcs.client import HubClient, NodeConnection
from elastic_rl.dcs.manifest import Packer
from elastic_rl.dcs.tensors import dtype_name, to_bytes
from elastic_rl.errors import ElasticRLError, NodeUnavailable, OutcomeUnknown


class Publisher:
    """Publishes versions of one stream under one fencing epoch. One publish at a time; connections stay open
    between."""

    def __init__(self, store: Store, keys: Keys, stream: str, *, epoch: int, owner: str, chunk_bytes: int,
                 replicas: int = 1, staging_ttl_s: int, io_timeout_s: float = 30.0, node: str = "") -> None:
        """``replicas``: nodes that must hold every chunk before the commit. ``node``: id of the node to write to, where
        a host has several."""
        self.stream = stream
        self._store, self._keys = store, keys
        self._owner, self._chunk_bytes, self._replicas = owner, chunk_bytes, replicas
        self._staging_ttl_s = staging_ttl_s
        self._hub = HubClient(store, keys, io_timeout_s=io_timeout_s, node=node)
        self._writer = Writer(store, keys, stream, epoch=epoch)
        self._lease: KeptLease | None = None
        self._arena: ArenaFile | None = None
        self._arena_view: torch.Tensor | None = None
        self._lock = threading.Lock()

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, meta: Mapping[str, Any],
                also: Sequence[Op] = ()) -> Version:
        """Publishes named tensors of any device and layout as the stream's next version and returns it, committed.

        ``meta`` must be JSON-able; ``also`` are writes that happen in the commit's transaction, or not at all. The
        tensors are read once, in order, and may be made while they are read.

        Raises Fenced (the epoch is over: stop), ArenaFull, NodeUnavailable, Conflict (aborted meanwhile), and whatever
        ``tensors`` raises; then nothing is visible, and the number is not used again.
        Raises OutcomeUnknown when etcd went away during the commit: look at the catalog before you go on.
        """
        with self._lock:
            if self._lease is None or not self._lease.alive:
                self._drop_lease()
                self._lease = self._store.keepalive(self._staging_ttl_s)
            staged: Staged | None = None
            try:
                staged = self._writer.begin(owner=self._owner, lease=self._lease.id, meta=meta)
                node = self._hub.local()
                manifest, nbytes, nodes = self._store_chunks(node, tensors)
                version = self._writer.commit(staged, manifest=manifest, nbytes=nbytes, nodes=nodes, also=also,
                                              guards=[self._hub.guard(n) for n in nodes])
            except OutcomeUnknown:
                # The chunks stay held: the commit may have happened, or may happen still. The lease that it depends on
                # is given up, so that it cannot happen for ever.
                self._drop_lease()
                raise
            except BaseException:
                self._give_up(staged)
                raise
            for node_id in nodes:
                with contextlib.suppress(NodeUnavailable):  # committed all the same
                    self._hub.connect(node_id).settle()
            return version

    def _drop_lease(self) -> None:
        """Ends the lease, and with it every publish that is not committed."""
        old, self._lease = self._lease, None
        if old is not None:
            old.close()

    def _store_chunks(self, node: NodeConnection, tensors: Iterable[tuple[str, torch.Tensor]]
                      ) -> tuple[str, int, list[str]]:
        """Writes and seals every chunk and the manifest: the manifest's digest, the tensors' bytes, the nodes' ids."""
        arena = self._attach(node)
        packer = Packer(self._chunk_bytes)
        digests: list[str] = []
        region, filled = -1, 0
        for name, tensor in tensors:
            data = to_bytes(tensor)
            for part in packer.add(name, dtype_name(tensor.dtype), tuple(tensor.shape)):
                if part.chunk > len(digests) or region < 0:
                    if region >= 0:
                        digests.append(node.seal(region, filled))
                    region, filled = node.alloc(packer.chunk_bytes), 0
                start = region + part.offset
                if part.offset > filled:
                    arena[region + filled:start] = 0  # the region may hold old bytes
                arena[start:start + part.nbytes] = data[part.source:part.source + part.nbytes]
                filled = part.offset + part.nbytes
        if region >= 0:
            digests.append(node.seal(region, filled))
        manifest = packer.manifest(digests)
        digest = node.put(manifest.encode())
        return digest, manifest.nbytes, [node.node.id, *self._replicate(node, [digest, *manifest.chunks])]

    def _replicate(self, node: NodeConnection, digests: Sequence[str]) -> list[str]:
        """Has other nodes fetch the chunks; their ids. Raises NodeUnavailable when there are too few."""
        done: list[str] = []
        if self._replicas <= 1:
            return done
        for other in self._hub.nodes():
            if len(done) == self._replicas - 1:
                break
            if other.id != node.node.id:
                with contextlib.suppress(NodeUnavailable):
                    self._hub.connect(other.id).fetch(digests, prefer=[node.node.id], hold=True)
                    done.append(other.id)
        if len(done) < self._replicas - 1:
            raise NodeUnavailable(f"{self._replicas} copies are wanted and only {1 + len(done)} nodes can hold one",
                                  hint="start more DCS nodes or set fewer replicas")
        return done

    def _attach(self, node: NodeConnection) -> torch.Tensor:
        """The node's arena as a uint8 tensor."""
        path = Path(node.node.arena_path)
        if self._arena is None or self._arena_view is None or self._arena.path != path:
            self._detach()
            try:
                self._arena = ArenaFile.attach(path)
            except OSError as e:
                raise NodeUnavailable(f"the arena {path} of node {node.node.id} cannot be mapped: {e.strerror}") from e
            self._arena_view = torch.frombuffer(self._arena.map, dtype=torch.uint8)
        return self._arena_view

    def _detach(self) -> None:
        self._arena_view = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _give_up(self, staged: Staged | None) -> None:
        """Leaves nothing behind; what cannot be reached now is cleaned up by the janitor, since our lease ends."""
        try:
            if staged is not None:
                self._writer.abort(staged)
        except ElasticRLError:
            self._drop_lease()
        self._hub.close()  # gives open regions back and ends the holds

    def close(self) -> None:
        with self._lock:
            self._hub.close()
            self._detach()
            self._drop_lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
