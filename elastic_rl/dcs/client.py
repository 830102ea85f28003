"""Talking to nodes: one connection that is kept open, and the finding of nodes by their records in etcd."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.dcs import protocol
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.arena import is_owned
from elastic_rl.errors import AccessDenied, NodeUnavailable
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode

Located = tuple[str, int, int]
"""A chunk in a node's arena: digest, offset, bytes."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
OnChunks = Callable[[Sequence[Located]], None]
"""Called with chunks that are here; quick, as the node waits for it."""

_BATCH = 50_000
"""Chunks in one request, whose header is bounded."""


class NodeConnection:
    """One connection to a node. Thread-safe, one call at a time.

    What it allocated and sealed is held by the node for this connection; when it closes, however that comes about, the
    node gives open regions back. Every call raises NodeUnavailable when the node is gone or does not answer in time;
    the connection is closed then. ``close`` from another thread ends a call that is under way.
    """

    def __init__(self, node: DcsNode, job: str, *, io_timeout_s: float, security: Security | None = None,
                 as_node: str = "") -> None:
        """``as_node``: the caller's id, if it is a node itself. Raises NodeUnavailable and AccessDenied."""
        self.node = node
        self._lock = threading.Lock()  # held during a call
        self._state = threading.Lock()  # guards the two below
        self._sock: socket.socket | None = None
        self._in_call = False
        try:
            self._sock = self._opened(security, io_timeout_s)
        except OSError as e:
            raise self._gone(e) from e
        hello = {"op": "hello", "job": job, **({"id": as_node} if as_node else {})}
        if security is not None and security.token:
            hello["token"] = security.token
        try:
            answer, _ = self.call(hello)
            if answer["arena_path"] != node.arena_path:  # another node took over the port of a dead one
                raise NodeUnavailable(
                    f"what answers at {node.host}:{node.port} is not node {node.id} as it registered")
        except BaseException:
            self.close()
            raise

    def _opened(self, security: Security | None, io_timeout_s: float) -> socket.socket:
        sock = socket.create_connection((self.node.host, self.node.port), timeout=io_timeout_s)
        try:
            protocol.configure(sock, io_timeout_s=io_timeout_s)
            if security is None or security.client_context is None:
                return sock
            return security.client_context.wrap_socket(sock, server_hostname=self.node.host)
        except ssl.SSLCertVerificationError as e:
            sock.close()
            raise AccessDenied(f"node {self.node.id} at {self.node.host}:{self.node.port} shows a certificate that is "
                               f"not to be trusted: {e.verify_message}",
                               hint="every node's certificate must come from dcs.tls_ca") from e
        except BaseException:
            sock.close()
            raise

    def call(self, header: dict[str, Any], payload: memoryview | bytes = b"",
             into: protocol.Receiver | None = None, on_progress: Callable[[dict[str, Any]], None] | None = None
             ) -> tuple[dict[str, Any], memoryview]:
        """Sends a request and returns the answer; ``on_progress`` gets what comes before it. Raises what the node
        raised."""
        with self._lock:
            with self._state:
                sock = self._sock
                if sock is None:
                    raise NodeUnavailable(f"the connection to node {self.node.id} is closed")
                self._in_call = True
            try:
                protocol.send(sock, header, payload)
                while True:
                    answer, data = protocol.receive(sock, into)
                    if "progress" not in answer:
                        break
                    if on_progress is not None:
                        on_progress(answer)
            except (OSError, protocol.Closed, protocol.ProtocolError) as e:
                self.close()
                raise self._gone(e) from e
            except BaseException:
                self.close()  # the rest of an answer may be under way
                raise
            finally:
                self._end_call(sock)
        protocol.raise_failure(answer)
        return answer, data

    def _end_call(self, sock: socket.socket) -> None:
        with self._state:
            self._in_call = False
            if self._sock is None:
                sock.close()

    def _gone(self, why: Exception) -> NodeUnavailable:
        return NodeUnavailable(f"node {self.node.id} at {self.node.host}:{self.node.port} does not answer: "
                               f"{str(why) or type(why).__name__}", hint="is the DCS node running? see its log")

    @property
    def closed(self) -> bool:
        return self._sock is None

    def stale(self) -> bool:
        """Whether the connection is of no more use; notices a node that has gone since the last call."""
        with self._state:
            sock = self._sock
            if sock is None or self._in_call:  # what can be read now is the answer that another thread waits for
                return sock is None
        try:  # nothing is to come between two calls; what can be read is the end, or the rest of a broken answer
            return bool(select.select([sock], [], [], 0)[0])
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        with self._state:
            sock, self._sock = self._sock, None
            if sock is None:
                return
            # Wakes a call that waits. That one then closes the socket: its number must not be used anew under it.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            if not self._in_call:
                sock.close()

    # -- the node's operations -----------------------------------------------------------------------------------------
    def alloc(self, nbytes: int, *, upto: int = 0) -> tuple[int, int]:
        """Offset and bytes of a region of the arena to write: ``nbytes``, or up to ``upto`` where there is plenty of
        room. Raises ArenaFull and DiskFull."""
        answer, _ = self.call({"op": "alloc", "nbytes": nbytes, "upto": upto})
        return int(answer["offset"]), int(answer["nbytes"])

    def seal(self, offset: int, nbytes: int, *, digest: str = XXH3, keep_rest: bool = False) -> str:
        """Makes the first ``nbytes`` of a region a chunk, held for this connection; its digest, of the given kind.
        ``keep_rest``: what is behind them, from a multiple of ``ALIGN`` on, stays open as a region of its own."""
        answer, _ = self.call({"op": "seal", "offset": offset, "nbytes": nbytes, "digest": digest,
                               **({"rest": True} if keep_rest else {})})
        return str(answer["digest"])

    def put(self, data: bytes | memoryview, *, digest: str = XXH3) -> str:
        """Stores bytes sent over the connection as a held chunk; its digest, of the given kind. Raises ArenaFull."""
        return str(self.call({"op": "put", "digest": digest}, data)[0]["digest"])

    def get(self, digest: str, into: protocol.Receiver | None = None, *, base: str = "") -> memoryview:
        """A chunk's bytes, not verified. Raises ChunkMissing.

        With ``base``, a chunk that the caller has, the node may send what differs from it: the header that ``into``
        sees then has ``delta``, the bytes of the whole chunk.
        """
        return self.call({"op": "get", "digest": digest, **({"base": base} if base else {})}, into=into)[1]

    def has(self, digests: Sequence[str]) -> list[str]:
        """Which of the chunks the node lacks."""
        return self.ask(digests)[0]

    def ask(self, digests: Sequence[str]) -> tuple[list[str], int]:
        """Which of the chunks the node lacks, and how many sends to others are under way and waiting there."""
        answer, _ = self.call({"op": "has", "digests": list(digests)})
        return list(answer["missing"]), int(answer.get("load", 0))

    def fetch(self, digests: Sequence[str], *, prefer: Sequence[str] = (), hold: bool = False, use: str = "",
              sizes: Mapping[str, int] | None = None, bases: Mapping[str, str] | None = None,
              on_progress: Progress | None = None, on_chunks: OnChunks | None = None) -> list[Located]:
        """Makes the node have sound copies of the chunks, from its peers if need be, those in ``prefer`` (ids) first.

        ``use``: a token under which the chunks stay where they are until ``release``, or until this closes.
        ``sizes``: bytes of the chunks; those that are missing then lie next to each other in this order where there is
        room. ``bases``: for a chunk one that is much like it, and may be here already. ``on_chunks`` is told of chunks
        as they come; not of those that come last, which only the result has.

        Raises ChunkMissing, ChunkCorrupt (only rotten copies were found), ArenaFull and DiskFull.
        """
        out: list[Located] = []
        sizes, bases = sizes or {}, bases or {}
        total, done = sum(sizes.get(d, 0) for d in digests), 0
        for start in range(0, len(digests), _BATCH):
            batch = digests[start:start + _BATCH]
            header = {"op": "fetch", "digests": list(batch), "prefer": list(prefer), "hold": hold,
                      "sizes": {d: sizes[d] for d in batch if d in sizes},
                      "bases": {d: bases[d] for d in batch if d in bases}, **({"use": use} if use else {}),
                      **({"tell": True} if on_chunks is not None else {})}
            answer, _ = self.call(header, on_progress=_teller(done, total, on_progress, on_chunks))
            out += _located(answer)
            done = sum(n for _, _, n in out)
        if on_progress is not None:
            on_progress(done, done)
        return out

    def release(self, use: str) -> None:
        """The chunks that were located under the token may move again."""
        self.call({"op": "release", "use": use})

    def persist(self, digests: Sequence[str]) -> None:
        """Returns when the chunks are on the node's disk. Raises DiskFull, DeadlineExceeded and ChunkMissing."""
        self.call({"op": "persist", "digests": list(digests)})

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
        """Numbers of the node; ``ChunkTable.stat`` says which."""
        return dict(self.call({"op": "stat"})[0])


def _located(answer: Mapping[str, Any]) -> list[Located]:
    return [(str(d), int(offset), int(nbytes)) for d, offset, nbytes in answer.get("chunks", ())]


def _teller(before: int, total: int, on_progress: Progress | None, on_chunks: OnChunks | None
            ) -> Callable[[dict[str, Any]], None]:
    """Passes on what a node tells during one request among several."""
    def tell(answer: dict[str, Any]) -> None:
        done, of = answer["progress"]
        if on_progress is not None:
            on_progress(before + int(done), total or int(of))
        if on_chunks is not None and (chunks := _located(answer)):
            on_chunks(chunks)

    return tell


class DcsClient:
    """The nodes of a job. One connection to each that was needed is kept; ``open`` and ``open_local`` give further
    ones. Thread-safe."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, io_timeout_s: float, local_host: str = "", node: str = "",
                 security: Security | None = None) -> None:
        """``node``: id of the node to take as local. Otherwise it is the one whose arena is on this host, if there are
        several, first one at ``local_host``, then by id."""
        self._etcd, self._keys = etcd, keys
        self._io_timeout_s, self._security = io_timeout_s, security
        self._local_host, self._node = local_host, node
        self._lock = threading.Lock()
        self._open: dict[str, NodeConnection] = {}
        self._guards: dict[str, Compare] = {}
        self._local_id = ""

    def nodes(self) -> list[DcsNode]:
        """Registered nodes, by id."""
        return [node for node, _ in self._registered()]

    def _registered(self) -> list[tuple[DcsNode, int]]:
        kvs, _ = self._etcd.range(self._keys.dcs_nodes_prefix())
        return [(DcsNode.decode(kv.value), kv.create_revision) for kv in kvs]

    def open(self, node: DcsNode, *, as_node: str = "") -> NodeConnection:
        """A new connection, which the caller closes. Raises NodeUnavailable and AccessDenied."""
        return NodeConnection(node, self._keys.job, io_timeout_s=self._io_timeout_s, security=self._security,
                              as_node=as_node)

    def open_local(self) -> NodeConnection:
        """A new connection to this host's node, which the caller closes. Raises NodeUnavailable and AccessDenied."""
        return self._first(self._is_local, "this host has no running DCS node", local=True)[0]

    def local(self) -> NodeConnection:
        """The kept connection to this host's node. Raises NodeUnavailable and AccessDenied."""
        with self._lock:
            kept = self._open.get(self._local_id)
            if kept is not None and not kept.stale():
                return kept
            connection = self._keep(*self._first(self._is_local, "this host has no running DCS node", local=True))
            self._local_id = connection.node.id
            return connection

    def connect(self, node_id: str) -> NodeConnection:
        """The kept connection to the node of that id. Raises NodeUnavailable and AccessDenied."""
        with self._lock:
            kept = self._open.get(node_id)
            if kept is not None and not kept.stale():
                return kept
            return self._keep(*self._first(lambda n: n.id == node_id, f"DCS node {node_id} is not registered",
                                           local=False))

    def _is_local(self, node: DcsNode) -> bool:
        return node.id == self._node if self._node else is_owned(Path(node.arena_path))

    def _first(self, fits: Callable[[DcsNode], bool], otherwise: str, *, local: bool) -> tuple[NodeConnection, int]:
        """A connection to the first that answers, and the create revision of its record."""
        found = [(n, rev) for n, rev in self._registered() if fits(n)]
        found.sort(key=lambda item: (item[0].host != self._local_host, item[0].id))
        last = NodeUnavailable(f"{otherwise} (job {self._keys.job})", hint="start one: `elastic-rl up`, see its log")
        for node, created in found:
            if local and not os.access(node.arena_path, os.R_OK | os.W_OK):
                continue
            try:
                return self.open(node), created
            except NodeUnavailable as e:
                last = e
        raise last

    def _keep(self, connection: NodeConnection, created: int) -> NodeConnection:
        node_id = connection.node.id
        if (old := self._open.get(node_id)) is not None:
            if old.node.arena_path == connection.node.arena_path and not old.stale():
                connection.close()  # it was asked for under another name; what the old one holds must not be let go
                return old
            old.close()
        self._open[node_id] = connection
        self._guards[node_id] = Compare.create(self._keys.dcs_node(node_id), "==", created)
        return connection

    def guard(self, node_id: str) -> Compare:
        """Condition that the node is still registered as it was when it was connected to: the same process, so that it
        still has what it was given."""
        return self._guards[node_id]

    def close(self) -> None:
        with self._lock:
            for connection in self._open.values():
                connection.close()
            self._open.clear()
