"""The serving side of a node: accepts connections, authenticates callers, and answers their requests.

Every message is a JSON header and bytes (``protocol.py``). The first request of a connection is

    hello {job, token?, id?} -> what the node is    ``id``: of a caller that is a node itself

and then come any of

    alloc {nbytes, upto?} -> {offset, nbytes}   a region of the arena to write; of up to ``upto`` bytes if there is room
    seal {offset, nbytes, digest, rest?} -> {digest, offset}    its bytes as a chunk that this connection holds; with
        ``rest`` what follows them stays open
    put {digest} + bytes -> {digest}        the same for bytes that come over the wire; ``digest`` here: which kind
    has {digests} -> {missing, load}        ``load``: sends to others that are in progress or waiting here
    get {digest, base?, verify?} -> {} + bytes, or {delta: bytes of the chunk} + what differs from chunk ``base``; with
        ``verify`` all of it, once its bytes were compared with its digest again
    fetch {digests, prefer, hold, sizes?, bases?, stream?} -> {progress: [bytes done, in all]} each second, then
        {chunks: [[digest, offset, bytes], ..]}    sound copies in this arena
    open {stream, number?, use, parts?} -> {progress, number, tensors?, map?} each second, or with ``parts`` more often
        with the ``tensors`` that are complete since the last one, then {version, number, nbytes, map, tensors}
        a version whose chunks are verified and stay in place until ``release`` or the connection's end
        (``open_versions``)
    confirm {use} -> {}                     if it is still open under this token
    release {use} -> {}
    release_holds -> {}                     ends the connection's holds
    mark -> {mark, catalog, commits, versions}    see ``storage/chunk_table.py`` and ``node/version_index.py``
    note_versions {catalog, commits, versions} -> {}
    drop {catalog, commits, mark, live, released, more} -> {chunks, nbytes}    once ``more`` is false
    inventory {start, limit} -> {catalog, commits, versions, more}
    stat -> numbers

At most ``protocol.MAX_DIGESTS`` digests go into one request.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.config import DcsConfig
from elastic_rl.dcs import protocol
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.connection import VersionName
from elastic_rl.dcs.fetch.fetcher import Fetcher
from elastic_rl.dcs.fetch.version_map import to_ranges
from elastic_rl.dcs.node.admission import Admission, ConnectionLimits
from elastic_rl.dcs.node.open_versions import OpenVersion, OpenVersions
from elastic_rl.dcs.node.sends import DeltaCache, SendLimiter
from elastic_rl.dcs.node.version_index import VersionIndex, names_of, versions_of
from elastic_rl.dcs.protocol import count
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import (
    AccessDenied,
    ChunkMissing,
    ConfigError,
    ElasticRLError,
    NodeUnavailable,
    VersionNotFound,
)
from elastic_rl.runtime import failpoints
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

_STOP_POLL_S = 0.5
_HELLO_BYTES = 16 << 10
"""Longest header of a connection that has not authenticated."""
_MANIFESTS_S = (1.0, 60.0)
"""First and longest pause before manifests are asked for again that no node has."""
_DELTA_CACHE_BYTES = 64 << 20
_TLS_HANDSHAKE = b"\x16"
"""First byte of a TLS connection; never that of a message of ours."""
_PROGRESS_S = 1.0
"""Time between two progress messages, by which the caller distinguishes slow from dead."""
_PARTS_S = 0.02
_HEAD_TRIES = 5
_MAX_OPEN = 64
"""Versions that one connection may have open."""


@dataclass(eq=False)
class Session:
    """A connection that is being served."""

    conn: int
    sock: socket.socket
    host: str
    node_id: str = ""
    """Id of a caller that is a node itself; empty for others."""
    authenticated: bool = False
    open: dict[str, OpenVersion] = field(default_factory=dict)
    """Token → the open version."""
    live: list[VersionName] = field(default_factory=list)
    released: list[VersionName] = field(default_factory=list)
    """Versions released by a ``drop`` whose versions come in several requests."""

    @property
    def peer(self) -> str:
        """The peer whose share of the sends its requests take."""
        return f"{self.host}/{self.node_id}"

    def send(self, header: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        protocol.send(self.sock, header, payload)

    def disconnect(self) -> None:
        """Ends the connection from another thread; its own thread closes the socket."""
        try:
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended


class NodeServer:
    """Accepts connections, one thread each, and answers their requests."""

    def __init__(self, table: ChunkTable, fetcher: Fetcher, versions: OpenVersions, index: VersionIndex,
                 hello: dict[str, Any], listener: socket.socket, settings: DcsConfig, security: Security,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``hello``: what the node says of itself; ``job`` is in it."""
        self._table, self._fetcher, self._versions, self._index = table, fetcher, versions, index
        self._hello = hello
        self._listener, self._settings, self._security = listener, settings, security
        self._io_timeout_s = settings.io_timeout_s
        limits = ConnectionLimits(deadline_s=min(ConnectionLimits.deadline_s, settings.io_timeout_s))
        self._limiter = SendLimiter(settings.max_sends, settings.max_sends_per_peer,
                                    max_waiting=limits.connections // 2)
        self._deltas = DeltaCache(_DELTA_CACHE_BYTES)
        self._clock, self._manifest_backoff = clock, RetryBackoff(*_MANIFESTS_S)
        self._lacks = ""
        """The error of the last manifest that a sweep needs and no node has; empty where it has all of them."""
        self._stop = threading.Event()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._admission = Admission(limits)
        self._sessions: dict[int, Session] = {}

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._listener.close()

    # -- connections -------------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        while not self._stop.is_set():
            self._disconnect(self._overdue(), "it did not authenticate in time")
            try:
                if not protocol.wait_readable(self._listener, _STOP_POLL_S):
                    continue
                sock, address = self._listener.accept()
            except OSError as e:
                if self._stop.is_set():
                    return
                log.error("a connection cannot be accepted: %s", e)  # no descriptors, or gone already
                self._stop.wait(_STOP_POLL_S)
                continue
            self._enter(Session(next(self._ids), sock, str(address[0])))

    def _enter(self, session: Session) -> None:
        with self._lock:
            evicted = self._admission.enter(session.conn, session.host, time.monotonic())
            if evicted is not None:
                self._sessions[session.conn] = session
        if evicted is None:
            log.warning("connection from %s refused: %d connections are open", session.host, len(self._admission))
            session.sock.close()
            return
        self._disconnect(evicted, "it has not authenticated and others are waiting")
        try:
            threading.Thread(target=self._serve, args=(session,), name=f"conn-{session.conn}", daemon=True).start()
        except RuntimeError as e:
            log.error("connection from %s refused, a thread cannot be started: %s", session.host, e)
            self._leave(session)

    def _overdue(self) -> list[int]:
        with self._lock:
            return self._admission.overdue(time.monotonic())

    def _disconnect(self, conns: list[int], why: str) -> None:
        for conn in conns:
            with self._lock:
                session = self._sessions.get(conn)
            if session is not None:
                log.info("connection %d from %s is closed: %s", conn, session.host, why)
                session.disconnect()

    def _leave(self, session: Session) -> None:
        with self._lock:
            self._admission.leave(session.conn)
            self._sessions.pop(session.conn, None)
        # First the socket, then the regions: no caller may believe in a connection whose regions are free.
        session.sock.close()
        self._table.close(session.conn)
        for version in session.open.values():
            self._versions.release(version)
        session.open.clear()

    def _serve(self, session: Session) -> None:
        try:
            protocol.configure(session.sock, io_timeout_s=self._io_timeout_s)
            self._secure(session)
            while self._wait_readable(session):
                self._one(session)
        except protocol.Closed:
            pass
        except AccessDenied as e:
            log.warning("connection %d from %s was refused: %s", session.conn, session.host, e.message)
        except (OSError, protocol.ProtocolError) as e:
            log.info("connection %d from %s ended: %s", session.conn, session.host, e)
        except Exception:
            log.exception("connection %d from %s failed", session.conn, session.host)
        finally:
            self._leave(session)

    def _secure(self, session: Session) -> None:
        """Wraps the connection in TLS if that is on. Raises AccessDenied, after reporting it to the caller, for one
        that does not speak TLS."""
        context = self._security.server_context
        if context is None:
            return
        if session.sock.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            # The handshake waits for the caller, so ``cut`` has to find the wrapped socket from here on. One that was
            # cut before had the plain socket, whose descriptor the wrapped one has taken over.
            sock = context.wrap_socket(session.sock, server_side=True, do_handshake_on_connect=False)
            with self._lock:
                session.sock = sock
                admitted = session.conn in self._admission
            if not admitted:
                raise protocol.Closed("it was closed before its TLS handshake")
            sock.do_handshake()
            return
        protocol.receive(session.sock, max_header=_HELLO_BYTES, max_payload=0)
        denied = AccessDenied("this node speaks TLS only", hint="set dcs.tls_cert, dcs.tls_key and dcs.tls_ca")
        session.send(protocol.failure(denied))
        raise denied

    def _wait_readable(self, session: Session) -> bool:
        while not self._stop.is_set():
            if protocol.wait_readable(session.sock, _STOP_POLL_S):
                return True
        return False

    # -- requests ----------------------------------------------------------------------------------------------------
    def _one(self, session: Session) -> None:
        incoming = -1

        def place(header: dict[str, Any], nbytes: int) -> memoryview:
            nonlocal incoming
            if header.get("op") != "put" or nbytes > len(self._table.view):
                raise protocol.ProtocolError(f"a payload of {nbytes} bytes with {header.get('op')!r}")
            try:
                incoming = self._table.alloc(session.conn, nbytes)
            except ElasticRLError:
                return memoryview(bytearray(nbytes))  # received in full all the same, so that the answer can be read
            return self._table.view[incoming:incoming + nbytes]

        if session.authenticated:
            header, payload = protocol.receive(session.sock, place)
        else:
            header, payload = protocol.receive(session.sock, max_header=_HELLO_BYTES, max_payload=0)
        if incoming >= 0:
            failpoints.reach("node.received")
        try:
            if not session.authenticated:
                answer = self._authenticate(session, header)
            elif header.get("op") == "get":
                self._get(session, header)
                return
            else:
                answer = self._answer(session, header, incoming, len(payload))
        except AccessDenied as e:
            session.send(protocol.failure(e))
            raise
        except ElasticRLError as e:
            answer = protocol.failure(e)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            answer = protocol.failure(ConfigError(f"a malformed request {header.get('op')!r}: {e!r}"))
        session.send(answer)

    def _authenticate(self, session: Session, header: dict[str, Any]) -> dict[str, Any]:
        if header.get("op") != "hello" or not self._security.admits(header.get("token", "")):
            raise AccessDenied("this node requires a token that the caller does not have",
                               hint="both must have the same cluster's secret, or the same dcs.token_file; after a "
                                    "change of either: `elastic-rl down`, then `elastic-rl up`")
        if header["job"] != self._hello["job"]:
            raise NodeUnavailable(f"this is a node of job {self._hello['job']}, not of {header['job']}")
        with self._lock:
            if not self._admission.authenticated(session.conn):
                raise NodeUnavailable("this node serves too many connections")
        session.authenticated, session.node_id = True, str(header.get("id", ""))
        return self._hello

    def _answer(self, session: Session, header: dict[str, Any], incoming: int, nbytes: int) -> dict[str, Any]:
        table, conn = self._table, session.conn
        match header.get("op"):
            case "hello":
                return self._hello
            case "alloc":
                offset, nbytes = table.alloc_extent(conn, count(header["nbytes"]), count(header.get("upto", 0)))
                return {"offset": offset, "nbytes": nbytes}
            case "seal":
                chunk = table.seal(conn, count(header["offset"]), count(header["nbytes"]),
                                   kind=header.get("digest", XXH3), keep_rest=bool(header.get("rest")))
                return {"digest": chunk.digest, "offset": chunk.offset}
            case "put":
                # Without a region of its own the payload found no room; a new try raises the error to send.
                region = incoming if incoming >= 0 else table.alloc(conn, nbytes)
                chunk = table.seal(conn, region, nbytes, kind=header.get("digest", XXH3))
                return {"digest": chunk.digest}
            case "has":
                missing = [d for d in _digests(header) if not table.has(d)]
                return {"missing": missing, "load": self._limiter.load(excluding=session.peer)}
            case "fetch":
                return {"chunks": self._fetch(session, header)}
            case "open":
                return self._open(session, header)
            case "confirm":
                if str(header["use"]) not in session.open:
                    raise NodeUnavailable("this connection does not have that version open",
                                          hint="what was read may have changed: pull again")
                return {}
            case "release":
                if (version := session.open.pop(str(header["use"]), None)) is not None:
                    self._versions.release(version)
                return {}
            case "release_holds":
                table.release_holds(conn)
                return {}
            case "mark":
                mark, (catalog, commits) = table.mark(), self._index.summary()
                return {"mark": mark, "catalog": catalog, "commits": commits,
                        "versions": [list(name) for name in self._index.names()]}
            case "note_versions":
                self._index.note(str(header["catalog"]), count(header["commits"]), versions_of(header["versions"]))
                return {}
            case "drop":
                return self._drop(session, header)
            case "inventory":
                return self._index.inventory(table, count(header["start"]), count(header["limit"]))
            case "stat":
                return {**table.stat(), "connections": len(self._admission), "load": self._limiter.load()}
            case other:
                raise ConfigError(f"this node knows no operation {other!r}")

    def _drop(self, session: Session, header: dict[str, Any]) -> dict[str, Any]:
        """The versions may come in several requests, of which the last one has no ``more``."""
        session.live += names_of(header["live"])
        session.released += names_of(header["released"])
        if header["more"]:
            return {}
        live, released, session.live, session.released = session.live, session.released, [], []
        manifests = self._index.kept(str(header["catalog"]), count(header["commits"]), live, released)
        self._fetch_manifests(self._table.manifests_to_fetch(manifests))
        dropped, freed = self._table.drop(manifests, count(header["mark"]))
        return {"chunks": dropped, "nbytes": freed, "lacks": self._lacks}

    def _fetch_manifests(self, missing: Sequence[str]) -> None:
        """Has what a sweep needs on this node. A manifest that no node has is asked for ever less often: each time all
        nodes are asked."""
        if missing and not self._manifest_backoff.is_due(self._clock()):
            return
        self._lacks = ""
        for manifest in missing:
            try:
                self._fetcher.fetch([manifest], (), None)
            except ElasticRLError as e:
                self._lacks = e.message
        if self._lacks:
            self._manifest_backoff.failed(self._clock())
        else:
            self._manifest_backoff.reset()

    # -- giving chunks -----------------------------------------------------------------------------------------------
    def _get(self, session: Session, header: dict[str, Any]) -> None:
        digest, base = str(header["digest"]), str(header.get("base") or "")
        # In the slot until the last byte is with the kernel: a peer that stops reading frees it by its timeout.
        with self._limiter.slot(session.peer, self._io_timeout_s / 2):
            change = None
            if header.get("verify"):
                self._deltas.forget(digest)  # they were made of the bytes that somebody refused
                if not self._table.verify(digest, force=True):
                    raise ChunkMissing(f"this node's copy of chunk {digest} is corrupt")
            elif base and self._settings.delta:
                change = self._deltas.get(digest, base, lambda: self._encode(digest, base))
            with self._table.reading(digest) as data:
                if change is None:
                    session.send({}, data)
                else:
                    session.send({"delta": len(data)}, change)

    def _encode(self, digest: str, base: str) -> bytes | None:
        if not (self._table.verify(base) and self._table.verify(digest)):
            return None
        try:
            with self._table.reading(base) as old, self._table.reading(digest) as new:
                return delta.encode(old, new)
        except ChunkMissing:  # dropped meanwhile
            return None

    # -- getting chunks ----------------------------------------------------------------------------------------------
    def _fetch(self, session: Session, header: dict[str, Any]) -> list[tuple[str, int, int]]:
        digests, sizes = _digests(header), header.get("sizes") or {}
        progress = _Progress(session, sum(map(int, sizes.values())))
        chunks = self._fetcher.fetch(digests, header["prefer"], session.conn if header["hold"] else None, sizes,
                                     header.get("bases"), stream=str(header.get("stream", "")),
                                     on_chunk=progress.add, tick=progress.tick)
        return [(c.digest, c.offset, c.nbytes) for c in chunks]

    def _open(self, session: Session, header: dict[str, Any]) -> dict[str, Any]:
        token, parts, number = str(header["use"]), bool(header.get("parts")), header.get("number")
        if token in session.open or len(session.open) >= _MAX_OPEN:
            raise ConfigError(f"this connection has {token!r} open already, or {_MAX_OPEN} versions")
        for tries_left in reversed(range(_HEAD_TRIES if number is None else 1)):
            version = (self._versions.acquire(str(header["stream"]), int(number)) if number is not None
                       else self._versions.acquire_head(str(header["stream"])))
            try:
                reported = self._report_opening(session, version, parts)
                record = version.record()
            except BaseException as e:
                self._versions.release(version)
                if isinstance(e, VersionNotFound) and tries_left:
                    continue  # the head was replaced and released
                raise
            break
        session.open[token] = version
        return {"version": record.encode().decode(), "number": version.number, "nbytes": version.total,
                "map": version.map_at, "tensors": to_ranges(version.complete[reported:])}

    @staticmethod
    def _report_opening(session: Session, version: OpenVersion, parts: bool) -> int:
        """Sends progress until the version is open or has failed; how many complete tensors were reported."""
        reported = steps = 0
        sent_at = time.monotonic()
        while not (progress := version.wait(_PARTS_S if parts else _PROGRESS_S)).over:
            complete = len(version.complete) if parts else 0
            alive = progress.steps != steps and time.monotonic() - sent_at >= _PROGRESS_S
            if complete == reported and not alive:
                continue  # silence when the opening hangs, too: then the caller's timeout ends the wait
            message: dict[str, Any] = {"progress": [progress.done, progress.total], "number": version.number}
            if complete > reported:
                message |= {"map": version.map_at, "tensors": to_ranges(version.complete[reported:complete])}
            session.send(message)
            reported, steps, sent_at = complete, progress.steps, time.monotonic()
        return reported


class _Progress:
    """Reports the progress of a fetch to its caller, each second, from the thread that fetches."""

    def __init__(self, session: Session, total: int) -> None:
        """``total``: bytes in all, as far as it is known."""
        self._session, self._total = session, total
        self._done = 0
        self._sent_at = time.monotonic()

    def add(self, chunk: Chunk) -> None:
        self._done += chunk.nbytes
        self.tick()

    def tick(self) -> None:
        if time.monotonic() - self._sent_at >= _PROGRESS_S:
            self._session.send({"progress": [self._done, max(self._done, self._total)]})
            self._sent_at = time.monotonic()


def _digests(header: dict[str, Any]) -> list[str]:
    digests = [str(d) for d in header["digests"]]
    if len(digests) > protocol.MAX_DIGESTS:
        raise ConfigError(f"a request names {len(digests)} chunks; {protocol.MAX_DIGESTS} are allowed at once")
    return digests
