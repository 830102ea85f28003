"""The serving side of a node: accepts connections, lets in who may, and answers their requests.

Every message is a JSON header and bytes (``protocol.py``). The first request of a connection is

    hello {job, token?, id?} -> what the node is    ``id``: of a caller that is a node itself

and then come any of

    alloc {nbytes, upto?} -> {offset, nbytes}   a region of the arena to write; of up to ``upto`` bytes if there is room
    seal {offset, nbytes, digest, rest?} -> {digest, offset}    its bytes as a chunk that this connection holds; with
        ``rest`` what is behind them stays open
    put {digest} + bytes -> {digest}        the same for bytes that come over the wire; ``digest`` here: which kind
    has {digests} -> {missing, load}        ``load``: sends to others under way and waiting here
    get {digest, base?} -> {} + bytes, or {delta: bytes of the chunk} + what differs from chunk ``base``
    fetch {digests, prefer, hold, use?, sizes?, bases?, tell?} -> {progress: [bytes done, in all]} each second, then
        {chunks: [[digest, offset, bytes], ..]}    sound copies in this arena, which stay in place until ``release``;
        with ``tell``, progress comes more often, and with it those ``chunks`` that are here since the last one
    release {use} -> {}                     or the connection's end; a fetch that fails releases, too
    persist {digests} -> {}                 once they are on this node's disk
    release_holds -> {}                     ends the connection's holds
    mark -> {mark, catalog, commits, versions}    see ``storage/chunk_table.py`` and ``node/version_index.py``
    note_versions {catalog, commits, versions} -> {}
    drop {catalog, commits, mark, live, released, more} -> {chunks, nbytes}    once ``more`` is false
    inventory {start, limit} -> {catalog, commits, versions, more}
    stat -> numbers
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.config import DcsConfig
from elastic_rl.dcs import failpoints, protocol
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.connection import VersionName
from elastic_rl.dcs.fetch.fetcher import Fetcher
from elastic_rl.dcs.node.fetch_progress import Arrivals
from elastic_rl.dcs.node.sends import DeltaCache, SendLimiter
from elastic_rl.dcs.node.version_index import VersionIndex, names_of, versions_of
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.dcs.storage.tiers import Chunk
from elastic_rl.errors import AccessDenied, ChunkMissing, ConfigError, ElasticRLError, NodeUnavailable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
_STOP_POLL_S = 0.5
_HELLO_BYTES = 64 << 10
"""Longest header of a connection that was not let in yet."""
_DELTA_CACHE_BYTES = 64 << 20
_TLS_HANDSHAKE = b"\x16"
"""First byte of a TLS connection; never that of a message of ours."""


@dataclass
class Session:
    """A connection that is being served."""

    conn: int
    sock: socket.socket
    host: str
    began: float
    node_id: str = ""
    """What a node calls itself; empty for others."""
    admitted: bool = False
    live: list[VersionName] = field(default_factory=list)
    released: list[VersionName] = field(default_factory=list)
    """Of a ``drop`` whose versions come in several requests."""
    sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def peer(self) -> str:
        """Whose share of the sends its requests take."""
        return f"{self.host}/{self.node_id}"

    def send(self, header: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        with self.sending:
            protocol.send(self.sock, header, payload)


class Server:
    """Accepts connections, one thread each, and answers their requests."""

    def __init__(self, table: ChunkTable, fetcher: Fetcher, hello: dict[str, Any], listener: socket.socket,
                 settings: DcsConfig, security: Security, index: VersionIndex) -> None:
        """``hello``: what the node says of itself; ``job`` is in it."""
        self._table, self._fetcher, self._hello, self._index = table, fetcher, hello, index
        self._listener, self._settings, self._security = listener, settings, security
        self._io_timeout_s = settings.io_timeout_s
        self._gate = SendLimiter(settings.max_sends, settings.peer_sends, max_waiting=MAX_CONNECTIONS // 2)
        self._deltas = DeltaCache(_DELTA_CACHE_BYTES)
        self._stop = threading.Event()
        self._ids = itertools.count(1)
        self._open: set[int] = set()

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._listener.close()

    # -- connections -------------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                if not select.select([self._listener], [], [], _STOP_POLL_S)[0]:
                    continue
                sock, address = self._listener.accept()
            except (OSError, ValueError):
                if not self._stop.wait(_STOP_POLL_S):
                    continue
                return
            if len(self._open) >= MAX_CONNECTIONS:
                log.warning("%s refused: %d connections are open", address, len(self._open))
                sock.close()
                continue
            conn = next(self._ids)
            self._open.add(conn)
            threading.Thread(target=self._serve, args=(conn, sock, str(address[0])), name=f"conn-{conn}",
                             daemon=True).start()

    def _serve(self, conn: int, sock: socket.socket, host: str) -> None:
        try:
            protocol.configure(sock, io_timeout_s=self._io_timeout_s)
            sock = self._secured(sock)
            session = Session(conn, sock, host, time.monotonic())
            while self._wait_readable(session):
                self._one(session)
        except protocol.Closed:
            pass
        except AccessDenied as e:
            log.warning("connection %d from %s was refused: %s", conn, host, e.message)
        except (OSError, protocol.ProtocolError) as e:
            log.info("connection %d from %s ended: %s", conn, host, e)
        finally:
            # First the socket, then the regions: whoever still writes to a region must not outlive our word on it.
            sock.close()
            self._table.close(conn)
            self._open.discard(conn)

    def _secured(self, sock: socket.socket) -> socket.socket:
        """The connection, with TLS where that is on; the handshake ends within ``io_timeout_s``. Raises AccessDenied,
        after telling the caller, to one that does not speak TLS."""
        context = self._security.server_context
        if context is None:
            return sock
        if sock.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            return context.wrap_socket(sock, server_side=True)
        protocol.receive(sock, max_header=_HELLO_BYTES)
        denied = AccessDenied("this node speaks TLS only", hint="set dcs.tls_cert, dcs.tls_key and dcs.tls_ca")
        protocol.send(sock, protocol.failure(denied))
        raise denied

    def _wait_readable(self, session: Session) -> bool:
        while not self._stop.is_set():
            if isinstance(session.sock, ssl.SSLSocket) and session.sock.pending():
                return True
            if select.select([session.sock], [], [], _STOP_POLL_S)[0]:
                return True
            if not session.admitted and time.monotonic() - session.began > self._io_timeout_s:
                raise AccessDenied("it said no hello")
        return False

    # -- requests ----------------------------------------------------------------------------------------------------
    def _one(self, session: Session) -> None:
        incoming = -1

        def place(header: dict[str, Any], nbytes: int) -> memoryview:
            nonlocal incoming
            if not session.admitted or header.get("op") != "put" or nbytes > len(self._table.view):
                raise protocol.ProtocolError(f"a payload of {nbytes} bytes with {header.get('op')!r}")
            try:
                incoming = self._table.alloc(session.conn, nbytes)
            except ElasticRLError:
                return memoryview(bytearray(nbytes))  # received in full all the same, so that the answer can be read
            return self._table.view[incoming:incoming + nbytes]

        limit = protocol.MAX_HEADER if session.admitted else _HELLO_BYTES
        header, payload = protocol.receive(session.sock, place, max_header=limit)
        if incoming >= 0:
            failpoints.reach("node.received")
        try:
            if not session.admitted:
                answer = self._admit(session, header)
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

    def _admit(self, session: Session, header: dict[str, Any]) -> dict[str, Any]:
        if header.get("op") != "hello" or not self._security.admits(header.get("token", "")):
            raise AccessDenied("this node asks for a token that the caller does not have",
                               hint="all processes of a job must have the same dcs.token_file")
        if header["job"] != self._hello["job"]:
            raise NodeUnavailable(f"this is a node of job {self._hello['job']}, not of {header['job']}")
        session.admitted, session.node_id = True, str(header.get("id", ""))
        return self._hello

    def _answer(self, session: Session, header: dict[str, Any], incoming: int, nbytes: int) -> dict[str, Any]:
        table, conn = self._table, session.conn
        match header.get("op"):
            case "hello":
                return self._hello
            case "alloc":
                offset, nbytes = table.extent(conn, int(header["nbytes"]), int(header.get("upto", 0)))
                return {"offset": offset, "nbytes": nbytes}
            case "seal":
                chunk = table.seal(conn, int(header["offset"]), int(header["nbytes"]), kind=header.get("digest", XXH3),
                                   keep_rest=bool(header.get("rest")))
                return {"digest": chunk.digest, "offset": chunk.offset}
            case "put":
                # Without a region of its own the payload found no room; asking again raises the error to send.
                region = incoming if incoming >= 0 else table.alloc(conn, nbytes)
                chunk = table.seal(conn, region, nbytes, kind=header.get("digest", XXH3))
                return {"digest": chunk.digest}
            case "has":
                missing = [d for d in header["digests"] if not table.has(d)]
                return {"missing": missing, "load": self._gate.load(besides=session.peer)}
            case "fetch":
                return {"chunks": self._fetch(session, header)}
            case "release":
                table.release(conn, str(header["use"]))
                return {}
            case "persist":
                table.persist(header["digests"], self._io_timeout_s / 2)
                return {}
            case "release_holds":
                table.settle(conn)
                return {}
            case "mark":
                mark, (catalog, commits) = table.mark(), self._index.summary()
                return {"mark": mark, "catalog": catalog, "commits": commits,
                        "versions": [list(name) for name in self._index.names()]}
            case "note_versions":
                self._index.note(str(header["catalog"]), int(header["commits"]), versions_of(header["versions"]))
                return {}
            case "drop":
                return self._drop(session, header)
            case "inventory":
                return self._index.inventory(table, int(header["start"]), int(header["limit"]))
            case "stat":
                return {**table.stat(), "connections": len(self._open), "load": self._gate.load()}
            case other:
                raise ConfigError(f"this node knows no operation {other!r}")

    def _drop(self, session: Session, header: dict[str, Any]) -> dict[str, Any]:
        """The versions may come in several requests, of which the last one has no ``more``."""
        session.live += names_of(header["live"])
        session.released += names_of(header["released"])
        if header["more"]:
            return {}
        live, released, session.live, session.released = session.live, session.released, [], []
        manifests = self._index.kept(str(header["catalog"]), int(header["commits"]), live, released)
        dropped, freed = self._table.drop(manifests, int(header["mark"]))
        return {"chunks": dropped, "nbytes": freed}

    # -- giving chunks -----------------------------------------------------------------------------------------------
    def _get(self, session: Session, header: dict[str, Any]) -> None:
        digest, base = str(header["digest"]), str(header.get("base") or "")
        # In the slot until the last byte is with the kernel: a peer that stops reading gives it back by its timeout.
        with self._gate.slot(session.peer, self._io_timeout_s / 2):
            change = None
            if base and self._settings.delta:
                change = self._deltas.get(digest, base, lambda: self._encode(digest, base))
            with self._table.reading(digest) as data:
                if change is None:
                    session.send({}, data)
                else:
                    session.send({"delta": len(data)}, change)

    def _encode(self, digest: str, base: str) -> bytes | None:
        if not (self._table.sound(base) and self._table.sound(digest)):
            return None
        try:
            with self._table.reading(base) as old, self._table.reading(digest) as new:
                return delta.encode(old, new)
        except ChunkMissing:  # dropped meanwhile
            return None

    def _fetch(self, session: Session, header: dict[str, Any]) -> list[tuple[str, int, int]]:
        digests, token = [str(d) for d in header["digests"]], header.get("use")
        sizes = header.get("sizes") or {}
        if token is not None and not header["hold"]:
            here = self._table.locate_all(digests, session.conn, str(token))
            if here is not None:
                return here

        def located(chunks: Iterable[Chunk]) -> list[tuple[str, int, int]]:
            if token is None:
                return [(c.digest, c.offset, c.nbytes) for c in chunks]
            return [(c.digest, *self._table.locate(c.digest, session.conn, str(token))) for c in chunks]

        try:
            arrivals = Arrivals(sum(map(int, sizes.values())), located if header.get("tell") else None)
            with arrivals.told(session.send):
                chunks = self._fetcher.fetch(digests, header["prefer"], session.conn if header["hold"] else None,
                                             sizes, header.get("bases"), arrivals)
                return located(chunks)
        except ElasticRLError:
            if token is not None:
                self._table.release(session.conn, str(token))
            raise
