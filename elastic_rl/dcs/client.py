"""Talking to nodes: one connection that is kept open, and the finding of nodes by their records in etcd."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import DcsNode
from elastic_rl.coordinator.store import Compare, Store
from elastic_rl.dcs import protocol
from elastic_rl.dcs.arena import is_owned
from elastic_rl.errors import NodeUnavailable

Located = tuple[str, int, int]
"""A chunk in a node's arena: digest, offset, bytes."""


class NodeConnection:
    """One connection to a node. Thread-safe, one call at a time.

    What it allocated and sealed is held by the node for this connection; when it closes, however that comes about, the
    node gives open regions back. Every call raises NodeUnavailable when the node is gone or does not answer in time;
    the connection is closed then.
    """

    def __init__(self, node: DcsNode, job: str, *, io_timeout_s: float) -> None:
        self.node = node
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        try:
            self._sock = socket.create_connection((node.host, node.port), timeout=io_timeout_s)
            protocol.configure(self._sock, io_timeout_s=io_timeout_s)
        except OSError as e:
            self.close()
            raise self._gone(e) from e
        hello, _ = self.call({"op": "hello", "job": job})
        if hello["arena_path"] != node.arena_path:  # another node took over the port of a dead one
            self.close()
            raise NodeUnavailable(f"what answers at {node.host}:{node.port} is not node {node.id} as it registered")

    def call(self, header: dict[str, Any], payload: memoryview | bytes = b"",
             into: protocol.Receiver | None = None) -> tuple[dict[str, Any], memoryview]:
        """Sends a request and returns the answer. Raises what the node raised."""
        with self._lock:
            if self._sock is None:
                raise NodeUnavailable(f"the connection to node {self.node.id} is closed")
            try:
                protocol.send(self._sock, header, payload)
                answer, data = protocol.receive(self._sock, into)
            except (OSError, protocol.Closed, protocol.ProtocolError) as e:
                self.close()
                raise self._gone(e) from e
        protocol.raise_failure(answer)
        return answer, data

    def _gone(self, why: Exception) -> NodeUnavailable:
        return NodeUnavailable(f"node {self.node.id} at {self.node.host}:{self.node.port} does not answer: "
                               f"{str(why) or type(why).__name__}", hint="is the DCS node running? see its log")

    @property
    def closed(self) -> bool:
        return self._sock is None

    def stale(self) -> bool:
        """Whether the connection is of no more use; notices a node that has gone since the last call."""
        sock = self._sock
        if sock is None:
            return True
        try:  # nothing is to come between two calls; what can be read is the end, or the rest of a broken answer
            return bool(select.select([sock], [], [], 0)[0])
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    # -- the node's operations -----------------------------------------------------------------------------------------
    def alloc(self, nbytes: int) -> int:
        """Offset of a region of the arena to write. Raises ArenaFull."""
        return int(self.call({"op": "alloc", "nbytes": nbytes})[0]["offset"])

    def seal(self, offset: int, nbytes: int) -> str:
        """Makes the first ``nbytes`` of a region a chunk, held for this connection; its digest."""
        return str(self.call({"op": "seal", "offset": offset, "nbytes": nbytes})[0]["digest"])

    def put(self, data: bytes | memoryview) -> str:
        """Stores bytes sent over the connection as a held chunk; its digest. Raises ArenaFull."""
        return str(self.call({"op": "put"}, data)[0]["digest"])

    def get(self, digest: str, into: protocol.Receiver | None = None) -> memoryview:
        """A chunk's bytes, not verified. Raises ChunkMissing."""
        return self.call({"op": "get", "digest": digest}, into=into)[1]

    def has(self, digests: Sequence[str]) -> list[str]:
        """Which of the chunks the node lacks."""
        return list(self.call({"op": "has", "digests": list(digests)})[0]["missing"])

    def fetch(self, digests: Sequence[str], *, prefer: Sequence[str] = (), hold: bool = False) -> list[Located]:
        """Makes the node have sound copies of the chunks, from its peers if need be, those in ``prefer`` (ids) first.

        Raises ChunkMissing, ChunkCorrupt (only rotten copies were found) and ArenaFull.
        """
        answer, _ = self.call({"op": "fetch", "digests": list(digests), "prefer": list(prefer), "hold": hold})
        return [(str(d), int(offset), int(nbytes)) for d, offset, nbytes in answer["chunks"]]

    def settle(self) -> None:
        """Ends this connection's holds."""
        self.call({"op": "settle"})

    def mark(self) -> int:
        return int(self.call({"op": "mark"})[0]["mark"])

    def drop(self, live: Sequence[str], mark: int) -> tuple[int, int]:
        """Drops chunks that no live manifest refers to: (chunks, bytes). ``chunks.py`` says when that is safe."""
        answer, _ = self.call({"op": "drop", "live": list(live), "mark": mark})
        return int(answer["chunks"]), int(answer["nbytes"])

    def stat(self) -> dict[str, int]:
        """used_bytes, arena_bytes, chunks, pending, held, connections."""
        return dict(self.call({"op": "stat"})[0])


class HubClient:
    """The nodes of a job. Connections are opened when needed and kept. Thread-safe."""

    def __init__(self, store: Store, keys: Keys, *, io_timeout_s: float, local_host: str = "", node: str = "") -> None:
        """``node``: id of the node to take as local. Otherwise it is the one whose arena is on this host, if there are
        several, first one at ``local_host``, then by id."""
        self._store, self._keys = store, keys
        self._io_timeout_s = io_timeout_s
        self._local_host, self._node = local_host, node
        self._lock = threading.Lock()
        self._open: dict[str, NodeConnection] = {}
        self._guards: dict[str, Compare] = {}
        self._local_id = ""

    def nodes(self) -> list[DcsNode]:
        """Registered nodes, by id."""
        return [node for node, _ in self._registered()]

    def _registered(self) -> list[tuple[DcsNode, int]]:
        kvs, _ = self._store.range(self._keys.dcs_nodes_prefix())
        return [(DcsNode.decode(kv.value), kv.create_revision) for kv in kvs]

    def local(self) -> NodeConnection:
        """A connection to this host's node. Raises NodeUnavailable."""
        with self._lock:
            kept = self._open.get(self._local_id)
            if kept is not None and not kept.stale():
                return kept
            return self._first(lambda n: (n.id == self._node) if self._node else is_owned(Path(n.arena_path)),
                               "this host has no running DCS node")

    def connect(self, node_id: str) -> NodeConnection:
        """A connection to the node of that id. Raises NodeUnavailable."""
        with self._lock:
            kept = self._open.get(node_id)
            if kept is not None and not kept.stale():
                return kept
            return self._first(lambda n: n.id == node_id, f"DCS node {node_id} is not registered", local=False)

    def _first(self, fits: Callable[[DcsNode], bool], otherwise: str, *, local: bool = True) -> NodeConnection:
        found = [(n, rev) for n, rev in self._registered() if fits(n)]
        found.sort(key=lambda item: (item[0].host != self._local_host, item[0].id))
        last = NodeUnavailable(f"{otherwise} (job {self._keys.job})", hint="start one: `elastic-rl up`, see its log")
        for node, created in found:
            if local and not os.access(node.arena_path, os.R_OK | os.W_OK):
                continue
            try:
                connection = NodeConnection(node, self._keys.job, io_timeout_s=self._io_timeout_s)
            except NodeUnavailable as e:
                last = e
                continue
            if (old := self._open.pop(node.id, None)) is not None:
                old.close()
            self._open[node.id] = connection
            self._guards[node.id] = Compare.create(self._keys.dcs_node(node.id), "==", created)
            if local:
                self._local_id = node.id
            return connection
        raise last

    def guard(self, node_id: str) -> Compare:
        """Condition that the node is still registered as it was when it was connected to: the same process, so that it
        still has what it was given."""
        return self._guards[node_id]

    def close(self) -> None:
        with self._lock:
            for connection in self._open.values():
                connection.close()
            self._open.clear()
