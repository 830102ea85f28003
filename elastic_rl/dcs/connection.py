"""A connection to a node, and what can be asked of a node over it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic_rl.dcs import protocol
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.security import Security
from elastic_rl.errors import AccessDenied, NodeUnavailable, PortTaken
from elastic_rl.etcd.records import CatalogIdentity, DcsNode, Version
from elastic_rl.net.listeners import check_socket
from elastic_rl.runtime.sequences import batches

Located = tuple[str, int, int]
"""A chunk in a node's arena: digest, offset, bytes."""
Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes."""

_RECORDS_BATCH = 256
"""Version records in one message."""
_CONNECT_TIMEOUT_S = 10.0
"""Longest wait for a new connection and its hello, where ``io_timeout_s`` is longer."""


class VersionName(NamedTuple):
    """What identifies a version over every catalog: two catalogs may have given one number to different contents."""

    stream: str
    number: int
    manifest: str
    """Digest."""

    @classmethod
    def from_version(cls, version: Version) -> VersionName:
        return cls(version.stream, version.number, version.manifest)


@dataclass(frozen=True)
class Dropped:
    """What a node has dropped in a sweep."""

    chunks: int
    nbytes: int
    lacks: str = ""
    """Why it cannot have the manifest of some live version, while which it keeps what may be of that version; empty
    where it has all that it needs."""


@dataclass(frozen=True)
class SweepMark:
    """What a node says at the beginning of a sweep."""

    incarnation: str
    """Incarnation of the node."""
    mark: int
    """Mark of the node's last touch: see ``storage/chunk_table.py``."""
    catalog: str
    """Id of the catalog that its chunks belong to; empty where it knows of none."""
    commits: int
    """Highest number of commits of that catalog that it has seen."""
    versions: frozenset[VersionName]
    """Committed versions that it has the records of."""


@dataclass(frozen=True)
class HeldVersion:
    """A committed version that a node has the record of."""

    version: Version
    parts: int
    """Number of parts of its manifest; 0 where the node lacks that."""
    held: tuple[int, ...]
    """Indexes of the parts whose every chunk the node has."""


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
            self._sock = self._opened(security, min(io_timeout_s, _CONNECT_TIMEOUT_S))
        except OSError as e:
            raise self._gone(e) from e
        hello = {"op": "hello", "job": job, **({"id": as_node} if as_node else {})}
        if security is not None and security.token:
            hello["token"] = security.token
        try:
            answer, _ = self.call(hello)
            if answer["arena_path"] != node.arena_path:  # another process has the port of one that died
                raise NodeUnavailable(
                    f"the process at {node.host}:{node.port} is not node {node.id} as registered in etcd")
            self._sock.settimeout(io_timeout_s)
        except BaseException:
            self.close()
            raise

    def _opened(self, security: Security | None, timeout_s: float) -> socket.socket:
        sock = socket.create_connection((self.node.host, self.node.port), timeout=timeout_s)
        try:
            protocol.configure(sock, io_timeout_s=timeout_s)
            if security is None or security.client_context is None:
                check_socket(sock)  # of another user, it would be given the token
                return sock
            return security.client_context.wrap_socket(sock, server_hostname=self.node.host)
        except PortTaken as e:
            sock.close()
            raise NodeUnavailable(f"node {self.node.id} is not there: {e.message}", hint=e.hint) from e
        except ssl.SSLCertVerificationError as e:
            sock.close()
            raise AccessDenied(f"node {self.node.id} at {self.node.host}:{self.node.port} presents a certificate "
                               f"that is not trusted: {e.verify_message}",
                               hint="every node's certificate must come from dcs.tls_ca") from e
        except BaseException:
            sock.close()
            raise

    def call(self, header: dict[str, Any], payload: memoryview | bytes = b"",
             into: protocol.Receiver | None = None, on_progress: Callable[[dict[str, Any]], None] | None = None
             ) -> tuple[dict[str, Any], memoryview]:
        """Sends a request and returns the answer; ``on_progress`` gets the messages before it. Raises what the node
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
                self.close()  # the rest of an answer may follow
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
        """Whether the connection cannot be used any more; detects a node that has gone since the last call."""
        with self._state:
            sock = self._sock
            if sock is None or self._in_call:  # what can be read is another thread's answer
                return sock is None
        try:  # nothing may arrive between two calls but the end, or the rest of a broken answer
            return protocol.wait_readable(sock, 0)
        except OSError:
            return True

    def close(self) -> None:
        with self._state:
            sock, self._sock = self._sock, None
            if sock is None:
                return
            # Wakes a waiting call, which then closes the socket: its descriptor must not be reused meanwhile.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            if not self._in_call:
                sock.close()

    # -- the node's operations -----------------------------------------------------------------------------------------
    def alloc(self, nbytes: int, *, upto: int = 0) -> tuple[int, int]:
        """Offset and bytes of a region of the arena to write: ``nbytes``, or up to ``upto`` where there is room enough.
        Raises ArenaFull and DiskFull."""
        answer, _ = self.call({"op": "alloc", "nbytes": nbytes, "upto": upto})
        return _count(answer, "offset"), _count(answer, "nbytes")

    def seal(self, offset: int, nbytes: int, *, digest: str = XXH3, keep_rest: bool = False) -> str:
        """Makes the first ``nbytes`` of a region a chunk, held for this connection; its digest, of the given kind.
        ``keep_rest``: the rest, from the next multiple of ``ALIGN``, stays open as a region of its own."""
        answer, _ = self.call({"op": "seal", "offset": offset, "nbytes": nbytes, "digest": digest,
                               **({"rest": True} if keep_rest else {})})
        return str(answer["digest"])

    def put(self, data: bytes | memoryview, *, digest: str = XXH3) -> str:
        """Stores bytes sent over the connection as a held chunk; its digest, of the given kind. Raises ArenaFull."""
        return str(self.call({"op": "put", "digest": digest}, data)[0]["digest"])

    def get(self, digest: str, into: protocol.Receiver | None = None, *, base: str = "", verify: bool = False
            ) -> memoryview:
        """A chunk's bytes, not verified here. ``verify``: the node compares them with the digest before it sends them,
        for a caller that got other bytes. Raises ChunkMissing.

        With ``base``, a chunk that the caller has, the node may send the difference to it: the header given to ``into``
        then has ``delta``, the bytes of the whole chunk.
        """
        return self.call({"op": "get", "digest": digest, **({"base": base} if base else {}),
                          **({"verify": True} if verify else {})}, into=into)[1]

    def has(self, digests: Sequence[str]) -> list[str]:
        """Which of the chunks the node lacks."""
        return [d for batch in batches(digests, protocol.MAX_DIGESTS) for d in self.ask(batch)[0]]

    def ask(self, digests: Sequence[str]) -> tuple[list[str], int]:
        """Which of the chunks (at most as many as fit in one request) the node lacks, and how many of its sends to
        others are under way or waiting."""
        answer, _ = self.call({"op": "has", "digests": list(digests)})
        return list(answer["missing"]), _count(answer, "load", 0)

    def fetch(self, digests: Sequence[str], *, prefer: Sequence[str] = (), hold: bool = False,
              sizes: Mapping[str, int] | None = None, bases: Mapping[str, str] | None = None,
              on_progress: Progress | None = None) -> list[Located]:
        """Has the node get verified copies of the chunks, from its peers where it lacks them, those in ``prefer`` (ids)
        first. They are kept for this connection with ``hold``, but may move; ``fetch/puller.py`` reads in place.

        ``sizes``: bytes of the chunks; missing ones are then placed next to each other in this order where there is
        room. ``bases``: for a chunk a similar one that the node may have.

        Raises ChunkMissing, ChunkCorrupt (only corrupt copies were found), ArenaFull and DiskFull.
        """
        out: list[Located] = []
        sizes, bases = sizes or {}, bases or {}
        total, done = sum(sizes.get(d, 0) for d in digests), 0
        for batch in batches(digests, protocol.MAX_DIGESTS):
            header = {"op": "fetch", "digests": list(batch), "prefer": list(prefer), "hold": hold,
                      "sizes": {d: sizes[d] for d in batch if d in sizes},
                      "bases": {d: bases[d] for d in batch if d in bases}}
            answer, _ = self.call(header, on_progress=_progress_handler(done, total, on_progress))
            out += [(str(d), int(offset), int(nbytes)) for d, offset, nbytes in answer["chunks"]]
            done = sum(n for _, _, n in out)
        if on_progress is not None:
            on_progress(done, done)
        return out

    def release_holds(self) -> None:
        """Ends this connection's holds."""
        self.call({"op": "release_holds"})

    # -- the catalog on the node's disk: ``node/version_index.py`` -----------------------------------------------------
    def mark(self) -> SweepMark:
        """Begins a sweep: what is used or held from now on is not dropped by it."""
        answer, _ = self.call({"op": "mark"})
        return SweepMark(self.node.incarnation, _count(answer, "mark"), str(answer["catalog"]),
                         _count(answer, "commits"),
                         frozenset(VersionName(str(s), int(n), str(m)) for s, n, m in answer["versions"]))

    def note_versions(self, identity: CatalogIdentity, versions: Sequence[Version]) -> None:
        """Has the node remember committed versions, and that its chunks belong to this catalog, also over a restart.
        Raises CatalogMismatch when it belongs to another catalog, and DiskFull."""
        for batch in batches(versions, _RECORDS_BATCH) if versions else [()]:
            self.call({"op": "note_versions", "catalog": identity.id, "commits": identity.commits,
                       "versions": [v.model_dump(mode="json") for v in batch]})

    def drop(self, identity: CatalogIdentity, mark: int, live: Iterable[VersionName],
             released: Iterable[VersionName]) -> Dropped:
        """Drops chunks that no version refers to. ``storage/chunk_table.py`` says when that is safe.

        ``live``: all versions whose chunks are needed; ``released``: versions that the catalog knows to be gone. What
        the node has noted and is in neither is kept for ``dcs.unknown_version_grace_s``.

        Raises CatalogMismatch when the node belongs to another catalog; Conflict when it has seen a newer state of it.
        """
        request = {"op": "drop", "catalog": identity.id, "commits": identity.commits, "mark": mark}
        names = [*((True, n) for n in live), *((False, n) for n in released)]
        requests = list(batches(names, protocol.MAX_DIGESTS)) or [[]]
        for i, batch in enumerate(requests):
            answer, _ = self.call({**request, "live": [list(n) for is_live, n in batch if is_live],
                                   "released": [list(n) for is_live, n in batch if not is_live],
                                   "more": i < len(requests) - 1})
        return Dropped(_count(answer, "chunks"), _count(answer, "nbytes"), str(answer.get("lacks", "")))

    def inventory(self) -> tuple[str, int, list[HeldVersion]]:
        """What recovery needs: id of the node's catalog, commits of it that it has seen, and the versions that it
        noted."""
        held: list[HeldVersion] = []
        while True:
            answer, _ = self.call({"op": "inventory", "start": len(held), "limit": _RECORDS_BATCH})
            held += [HeldVersion(Version.model_validate(v["version"]), int(v["parts"]), tuple(map(int, v["held"])))
                     for v in answer["versions"]]
            if not answer["more"]:
                return str(answer["catalog"]), _count(answer, "commits"), held

    def stat(self) -> dict[str, int]:
        """Numbers of the node; ``ChunkTable.stat`` says which."""
        return dict(self.call({"op": "stat"})[0])


def _count(answer: dict[str, Any], name: str, otherwise: int | None = None) -> int:
    """A number of an answer. Raises ProtocolError for what is none."""
    try:
        return protocol.count(answer.get(name, otherwise))
    except ValueError as e:
        raise protocol.ProtocolError(f"a node's answer has {name}={e}") from e


def _progress_handler(before: int, total: int, on_progress: Progress | None) -> Callable[[dict[str, Any]], None]:
    """Passes on the progress messages of one request among several."""
    def handle(answer: dict[str, Any]) -> None:
        done, of = answer["progress"]
        if on_progress is not None:
            on_progress(before + int(done), total or int(of))

    return handle
