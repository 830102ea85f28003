"""A DCS node: one process a host that owns the shared-memory arena and serves its chunks over TCP.

    python -m elastic_rl.dcs.node --etcd host:port[,..] --job J --id N --host H --port P --arena-bytes B --run-dir D

Port 0 takes a free one. Logs go to stderr. SIGTERM and SIGINT end it cleanly; exit status 2 means that it could not
start.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import DcsNode
from elastic_rl.coordinator.store import Compare, KeptLease, Op, Store
from elastic_rl.dcs import arena, protocol
from elastic_rl.dcs.chunks import Chunk, ChunkTable
from elastic_rl.dcs.client import HubClient, NodeConnection
from elastic_rl.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ConfigError,
    ElasticRLError,
    MachineUnfit,
    NodeUnavailable,
    StoreUnavailable,
)
from elastic_rl.telemetry import logs

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
_STOP_POLL_S = 0.5
Answer = tuple[dict[str, Any], memoryview | bytes]


class Fetcher:
    """Gets missing chunks from peers. Two callers that miss the same chunk make one transfer of it."""

    def __init__(self, table: ChunkTable, hub: HubClient, own_id: str) -> None:
        self._table, self._hub, self._own_id = table, hub, own_id
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._ids = itertools.count(-1, -1)  # owners of regions being received; connections count upwards

    def fetch(self, digests: Sequence[str], prefer: Sequence[str], holder: int | None) -> list[Chunk]:
        """Sound local copies of the chunks, marked as used now. Raises ChunkMissing, ChunkCorrupt, ArenaFull."""
        peers: list[str] | None = None
        out = []
        for digest in digests:
            # Marked as used before it is verified: from then on no sweep can take it.
            chunk = self._table.use(digest, holder)
            went_bad = chunk is not None and not self._table.sound(digest)
            if went_bad or chunk is None:
                if went_bad:
                    log.error("chunk %s in this arena is corrupt; looking for another copy", digest)
                if peers is None:
                    peers = self._peers(prefer)
                chunk = self._from_peers(digest, peers, holder)
            out.append(chunk)
        return out

    def _peers(self, prefer: Sequence[str]) -> list[str]:
        ids = [n.id for n in self._hub.nodes() if n.id != self._own_id]
        return sorted(ids, key=lambda node_id: (node_id not in prefer, node_id))

    def _from_peers(self, digest: str, peers: Sequence[str], holder: int | None) -> Chunk:
        rotten = self._table.was_rotten(digest)
        with self._lock:
            busy = self._busy.setdefault(digest, threading.Lock())
        try:
            with busy:
                if self._table.sound(digest) and (chunk := self._table.use(digest, holder)):
                    return chunk  # another caller was faster
                for peer in peers:
                    try:
                        return self._receive(self._hub.connect(peer), digest, holder)
                    except ChunkCorrupt as e:
                        rotten = True
                        log.error("node %s sent a corrupt chunk: %s", peer, e.message)
                    except (ChunkMissing, NodeUnavailable) as e:
                        log.info("chunk %s not from node %s: %s", digest, peer, e.message)
        finally:
            with self._lock:
                self._busy.pop(digest, None)
        if rotten:
            raise ChunkCorrupt(f"every copy of chunk {digest} that was found is corrupt")
        raise ChunkMissing(f"chunk {digest} is on no node that answers")

    def _receive(self, peer: NodeConnection, digest: str, holder: int | None) -> Chunk:
        owner = next(self._ids)
        offset = -1

        def place(_: dict[str, Any], nbytes: int) -> memoryview:
            nonlocal offset
            offset = self._table.alloc(owner, nbytes)
            return self._table.view[offset:offset + nbytes]

        try:
            data = peer.get(digest, place)
            if offset < 0:
                raise ChunkCorrupt(f"chunk {digest} arrived empty")
            chunk = self._table.seal(owner, offset, len(data), expect=digest, hold=False)
            if holder is not None:
                self._table.use(digest, holder)
            return chunk
        except ElasticRLError:
            if peer.closed or offset < 0:
                peer.close()  # the rest of an answer may be under way
            raise
        finally:
            self._table.close(owner)


class Server:
    """Accepts connections, one thread each, and answers their requests."""

    def __init__(self, table: ChunkTable, fetcher: Fetcher, hello: dict[str, Any], listener: socket.socket,
                 io_timeout_s: float) -> None:
        self._table, self._fetcher, self._hello = table, fetcher, hello
        self._listener, self._io_timeout_s = listener, io_timeout_s
        self._stop = threading.Event()
        self._ids = itertools.count(1)
        self._open: set[int] = set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()
        self._listener.close()

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
            threading.Thread(target=self._serve, args=(conn, sock), name=f"conn-{conn}", daemon=True).start()

    def _serve(self, conn: int, sock: socket.socket) -> None:
        try:
            protocol.configure(sock, io_timeout_s=self._io_timeout_s)
            while self._wait_readable(sock):
                self._one(conn, sock)
        except protocol.Closed:
            pass
        except (OSError, protocol.ProtocolError) as e:
            log.info("connection %d ended: %s", conn, e)
        finally:
            # First the socket, then the regions: whoever still writes to a region must not outlive our word on it.
            sock.close()
            self._table.close(conn)
            self._open.discard(conn)

    def _wait_readable(self, sock: socket.socket) -> bool:
        while not self._stop.is_set():
            if select.select([sock], [], [], _STOP_POLL_S)[0]:
                return True
        return False

    def _one(self, conn: int, sock: socket.socket) -> None:
        incoming = -1

        def place(header: dict[str, Any], nbytes: int) -> memoryview:
            nonlocal incoming
            if header.get("op") != "put" or nbytes > len(self._table.view):
                raise protocol.ProtocolError(f"a payload of {nbytes} bytes with {header.get('op')!r}")
            try:
                incoming = self._table.alloc(conn, nbytes)
            except ElasticRLError:
                return memoryview(bytearray(nbytes))  # received in full all the same, so that the answer can be read
            return self._table.view[incoming:incoming + nbytes]

        header, payload = protocol.receive(sock, place)
        try:
            if header.get("op") == "get":
                with self._table.reading(str(header.get("digest"))) as data:
                    protocol.send(sock, {}, data)
                return
            answer = self._answer(conn, header, incoming, len(payload))
        except ElasticRLError as e:
            answer = protocol.failure(e)
        except (KeyError, TypeError, ValueError) as e:
            answer = protocol.failure(ConfigError(f"a malformed request {header.get('op')!r}: {e!r}"))
        protocol.send(sock, answer)

    def _answer(self, conn: int, header: dict[str, Any], incoming: int, nbytes: int) -> dict[str, Any]:
        table = self._table
        match header.get("op"):
            case "hello":
                if header["job"] != self._hello["job"]:
                    raise NodeUnavailable(f"this is a node of job {self._hello['job']}, not of {header['job']}")
                return self._hello
            case "alloc":
                return {"offset": table.alloc(conn, int(header["nbytes"]))}
            case "seal":
                chunk = table.seal(conn, int(header["offset"]), int(header["nbytes"]))
                return {"digest": chunk.digest, "offset": chunk.offset}
            case "put":
                # Without a region of its own the payload found no room; asking again raises the error to send.
                chunk = table.seal(conn, incoming if incoming >= 0 else table.alloc(conn, nbytes), nbytes)
                return {"digest": chunk.digest}
            case "has":
                return {"missing": [d for d in header["digests"] if not table.has(d)]}
            case "fetch":
                chunks = self._fetcher.fetch(header["digests"], header["prefer"], conn if header["hold"] else None)
                return {"chunks": [[c.digest, c.offset, c.nbytes] for c in chunks]}
            case "settle":
                table.settle(conn)
                return {}
            case "mark":
                return {"mark": table.mark()}
            case "drop":
                dropped, nbytes = table.drop(set(header["live"]), int(header["mark"]))
                return {"chunks": dropped, "nbytes": nbytes}
            case "stat":
                return {**table.stat(), "connections": len(self._open)}
            case other:
                raise ConfigError(f"this node knows no operation {other!r}")


class Registration:
    """The node's record in etcd, under a lease; put anew when the lease is lost, so that commits which relied on the
    old registration fail."""

    def __init__(self, store: Store, keys: Keys, record: DcsNode, ttl_s: int) -> None:
        self._store, self._keys, self._record, self._ttl_s = store, keys, record, ttl_s
        self._key = keys.dcs_node(record.id)
        self._lease: KeptLease | None = None
        self._created = 0

    def check_free(self) -> None:
        """Raises MachineUnfit when another process of this host is that node already."""
        kv = self._store.get(self._key)
        if kv is not None and arena.is_owned(Path(DcsNode.decode(kv.value).arena_path)):
            raise MachineUnfit(f"DCS node {self._record.id} of job {self._keys.job} runs already, "
                               f"as process {DcsNode.decode(kv.value).pid}", hint="stop it first, or use another --id")

    def put(self) -> None:
        """Registers. The key is made anew, so that its create revision stands for this registration."""
        if self._lease is not None:
            self._lease.close()
        self._lease = self._store.keepalive(self._ttl_s)
        self._store.delete(self._key)
        self._created = self._store.put(self._key, self._record.encode(), lease=self._lease.id)

    def beat(self, used_bytes: int) -> None:
        """Registers again if that was lost, and brings the record up to date."""
        if self._lease is None or self._lease.lost.is_set():
            log.warning("the registration was lost; registering again")
            self.put()
        if used_bytes == self._record.used_bytes:
            return
        record = self._record.but(used_bytes=used_bytes)
        assert self._lease is not None
        if self._store.txn([Compare.create(self._key, "==", self._created)],
                           [Op.put(self._key, record.encode(), self._lease.id)]).succeeded:
            self._record = record

    def remove(self) -> None:
        """Says good-bye: no one may take this for a death."""
        with contextlib.suppress(StoreUnavailable):
            self._store.txn([Compare.create(self._key, "==", self._created)],
                            [Op.delete(self._key), Op.delete(self._keys.roster("dcs", self._record.id))])
        if self._lease is not None:
            self._lease.close()


def run(args: argparse.Namespace, stop: threading.Event) -> None:
    """Serves until ``stop`` is set. Raises MachineUnfit (memory, port, a second node) and StoreUnavailable."""
    keys = Keys(args.job)
    for path in arena.remove_leftovers():
        log.warning("removed %s, left by a dead node", path)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(args.etcd.split(","), call_timeout_s=args.call_timeout_s))
        listener = stack.enter_context(_listen(args.host, args.port))
        record = DcsNode(id=args.id, host=args.host, port=listener.getsockname()[1], pid=os.getpid(), arena_path="",
                         arena_bytes=args.arena_bytes)
        Registration(store, keys, record, args.lease_ttl_s).check_free()
        memory = arena.ArenaFile.create(args.job, args.id, args.arena_bytes)
        stack.callback(memory.close)
        record = record.but(arena_path=str(memory.path))
        table = ChunkTable(memory.view, orphan_grace_s=args.orphan_grace_s)
        hub = HubClient(store, keys, io_timeout_s=args.io_timeout_s)
        stack.callback(hub.close)
        hello = {"job": args.job, "id": args.id, "arena_path": str(memory.path), "arena_bytes": memory.size}
        server = Server(table, Fetcher(table, hub, args.id), hello, listener, args.io_timeout_s)
        server.start()
        stack.callback(server.stop)
        registration = Registration(store, keys, record, args.lease_ttl_s)
        stack.callback(registration.remove)
        registration.put()
        log.info("node %s serves %s:%d, arena %s of %d bytes", args.id, args.host, record.port, memory.path,
                 memory.size)
        while not stop.wait(args.beat_s):
            try:
                registration.beat(table.stat()["used_bytes"])
            except ElasticRLError as e:  # etcd is away: chunks are served on, and the next beat tries again
                log.warning("cannot keep the registration: %s", e)
    log.info("node %s ended", args.id)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as e:
        raise MachineUnfit(f"port {port} on {host} cannot be bound (dcs.port): {e.strerror}",
                           hint=f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or set another dcs.port"
                           ) from e


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic_rl.dcs.node", description="A node of the checkpoint service.")
    parser.add_argument("--etcd", required=True, help="host:port of the etcd members, comma-separated")
    parser.add_argument("--job", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind, and under which others reach this node")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--arena-bytes", type=int, required=True)
    parser.add_argument("--run-dir", default="", help="folder of the run, made if need be")
    parser.add_argument("--call-timeout-s", type=float, default=0.5, help="deadline of one attempt on one etcd member")
    parser.add_argument("--io-timeout-s", type=float, default=30.0, help="longest wait for the rest of a message")
    parser.add_argument("--lease-ttl-s", type=int, default=3)
    parser.add_argument("--beat-s", type=float, default=1.0, help="pause between two looks at the registration")
    parser.add_argument("--orphan-grace-s", type=float, default=15.0,
                        help="how long chunks of a publisher that died stay; longer than dcs.staging_ttl_s")
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args(argv)
    logs.setup(f"dcs-{args.id}", args.log_level)
    if args.run_dir:
        Path(args.run_dir).mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(args, stop)
    except ElasticRLError as e:
        log.error("node %s cannot run: %s: %s", args.id, type(e).__name__, e)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
