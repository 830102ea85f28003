"""Versions from their publisher to their reader, in a world that fails: the product's publisher, catalog, pins, garbage
collector, chunk tables of nodes and chunk reader, on the model of etcd. What is left out are sockets and threads.

Publishers die at any call, are taken over by a later formation or epoch and go on all the same, leases end, nodes lose
their memory, bytes change in it and on the way. Whatever the product calls, something else may happen before it.
``RuleViolated`` is raised where a reader does not get what was published, and where a publisher writes that was
replaced.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast
from unittest import mock

from chaos_tests.event_log import Event
from chaos_tests.sim.store import Interference, Log, ObservedEtcd, SimClient, SimLease
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.config import DcsConfig
from elastic_rl.dcs import fan_out
from elastic_rl.dcs.catalog import pins, reads
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import digest_of, matches
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.fetch import chunk_reader
from elastic_rl.dcs.fetch.chunk_reader import ChunkReader
from elastic_rl.dcs.fetch.executor import FetchExecutor
from elastic_rl.dcs.fetch.fetcher import Fetcher
from elastic_rl.dcs.fetch.model import ChunkRequest
from elastic_rl.dcs.manifest import Slice, TensorEntry
from elastic_rl.dcs.node.open_versions import OpenVersions
from elastic_rl.dcs.node.server import NodeServer, Session
from elastic_rl.dcs.node.version_index import VersionIndex
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.registered_nodes import read_node
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.dcs.storage.disk import DiskFolder, WriteBatch
from elastic_rl.errors import (
    ChunkCorrupt,
    ChunkMissing,
    DiskFull,
    ElasticRLError,
    Fenced,
    NodeUnavailable,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, Formation, Version, VersionState
from elastic_rl.etcd.transaction import KeyValue, Op
from elastic_rl.runtime.backoff import RetryBackoff

KEYS, STREAM, GROUP = Keys("j"), "policy", "actor"
NODES, ARENA_BYTES, TENSOR_BYTES = 3, 1 << 18, 128
NAMES = ("t0", "t1")
"""The tensors of a version, each of which is written by another rank."""
ACTIONS = 55
"""Things that happen in a run, beside those that happen between two calls of another."""
GRACE_S, KEPT = 8.0, 2
DISK_BYTES = 1 << 16
OWNER = -1
"""The connection as which a node gets chunks for itself."""
SETTINGS = DcsConfig()


class SimDisk(DiskFolder):
    """A disk in memory, which outlives its node. A batch of files is there as a whole, or not at all."""

    def __init__(self, files: dict[str, bytearray]) -> None:
        self.files, self.limit_bytes, self.used_bytes, self._sizes = files, DISK_BYTES, 0, {}

    def room(self) -> int:
        return self.limit_bytes - self.used_bytes

    def index(self) -> dict[str, int]:
        for digest, data in self.files.items():
            self.account(digest, len(data))
        return dict(self._sizes)

    def batch(self) -> WriteBatch:
        return SimBatch(self)

    def read_into(self, digest: str, out: memoryview) -> None:
        if (data := self.files.get(digest)) is None:
            raise ChunkMissing(f"chunk {digest} is not on this disk")
        if len(data) != len(out):
            raise ChunkCorrupt(f"chunk {digest} has {len(data)} bytes on this disk")
        out[:] = data

    def remove(self, digest: str) -> None:
        self.files.pop(digest, None)
        self.used_bytes -= self._sizes.pop(digest, 0)


class SimBatch(WriteBatch):
    def __init__(self, disk: SimDisk) -> None:
        self._to, self._added = disk, dict[str, bytearray]()

    def add(self, digest: str, data: memoryview) -> None:
        if self._to.room() < len(data) + sum(map(len, self._added.values())):
            raise DiskFull("the disk is full")
        self._added[digest] = bytearray(data)

    def commit(self) -> list[str]:
        for digest, data in self._added.items():
            self._to.files[digest] = data
            self._to.account(digest, len(data))
        return [*self._added]

    def __exit__(self, *exc: object) -> None:
        pass


class SimNode:
    """A checkpoint node."""

    def __init__(self, world: CatalogWorld, name: str, *, disk: bool) -> None:
        self.world, self.name, self.starts, self.killed_at = world, name, 0, 0
        self.files: dict[str, bytearray] | None = {} if disk else None
        """What is on its disk; None: it has none."""
        self.etcd = SimClient(world.model, lambda: world.now)
        self.lease = 0
        self.kill()
        self.start()

    def kill(self) -> None:
        """What was in its memory is lost."""
        if self.lease:
            self.world.model.revoke(self.lease)
        self.lease = 0
        self.table = ChunkTable(memoryview(bytearray(ARENA_BYTES)), orphan_grace_s=GRACE_S,
                                disk=SimDisk(self.files) if self.files is not None else None,
                                clock=lambda: self.world.now)
        self._saver = self.table.saver() if self.files is not None else None
        index = VersionIndex(None, grace_s=1e9, clock=lambda: self.world.now)
        self.server = NodeServer(self.table, SimFetcher(self), cast(OpenVersions, None), index, {},
                                 cast(socket.socket, None), SETTINGS, Security(), lambda: self.world.now)
        self.server._manifest_backoff = RetryBackoff(0.5, GRACE_S, random.Random(self.name))

    def start(self) -> None:
        self.starts += 1
        self.lease = self.etcd.keepalive(0).id
        self.etcd.put(KEYS.dcs_node(self.name), DcsNode(
            id=self.name, host="h", port=1, pid=1, arena_path=f"{self.name}-{self.starts}",
            arena_bytes=ARENA_BYTES).encode(), lease=self.lease)

    def get(self, digest: str, *, verify: bool) -> memoryview:
        """A chunk, as it arrives at who asks for it."""
        session = SimSession(next(self.world.connections), cast(socket.socket, None), "h", authenticated=True)
        self.server._get(session, {"op": "get", "digest": digest, **({"verify": True} if verify else {})})
        return self.world.sent(memoryview(session.sent))

    def save(self) -> None:
        """What its thread for the disk does at once: it may be killed with some chunks of a version saved."""
        if self._saver is not None and self.lease:
            self._saver.step(0.0, max_chunks=self.world.rng.choice([1, 2, 64]))

    def rot(self, rng: random.Random) -> None:
        """A byte of its memory changes; or one of a file does, or a file loses its end or is gone."""
        if not self.files or rng.random() < 0.4:
            at = rng.randrange(max(1, self.table.usage()["used_bytes"]))
            self.table.view[at] ^= 1 << rng.randrange(8)
            return
        digest = rng.choice(sorted(self.files))
        match rng.randrange(3):
            case 0:
                self.files[digest][rng.randrange(len(self.files[digest]))] ^= 1
            case 1:
                del self.files[digest][len(self.files[digest]) // 2:]
            case _:
                del self.files[digest]

    def sound(self) -> dict[str, bool]:
        """The chunks of which it has the bytes, each with whether somebody writes it now."""
        found = dict[str, bool]()
        for digest, chunk in [*self.table._chunks.items()]:
            copies = [self.table.view[chunk.copy.offset:chunk.copy.offset + chunk.nbytes]] if chunk.copy else []
            if chunk.on_disk and self.files is not None and digest in self.files:
                copies.append(memoryview(self.files[digest]))
            if any(matches(copy, digest) for copy in copies):
                found[digest] = bool(chunk.holders) or chunk.keep_until > self.world.now
        return found


class SimSession(Session):
    """A connection of a node without a socket."""

    sent = b""
    """The bytes of its last message."""

    def send(self, header: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        self.sent = bytes(payload)


class SimExecutor:
    """Gets chunks from the other nodes, as the executor of a node does, one after the other."""

    def __init__(self, sim: SimNode) -> None:
        self._sim, self._world = sim, sim.world

    def fetch(self, requests: Sequence[ChunkRequest], prefer: Sequence[str], holder: int | None,
              on_chunk: Callable[[Chunk], None], tick: Callable[[], None]) -> dict[str, Chunk]:
        found = dict[str, Chunk]()
        for digest in [request.digest for request in requests]:
            self._bring(digest, prefer)
            if (chunk := self._sim.table.use(digest, holder)) is not None:
                found[digest] = chunk
        return found

    def _bring(self, digest: str, prefer: Sequence[str]) -> None:
        table, refused = self._sim.table, False
        for other in sorted((n for n in self._world.nodes if n is not self._sim), key=lambda n: n.name not in prefer):
            for verify in (False, True):  # as ``FetchExecutor._receive``
                with suppress(ChunkMissing):
                    found = other.get(digest, verify=verify)
                    region = table.alloc(OWNER, len(found))
                    table.view[region:region + len(found)] = found
                    try:
                        table.seal(OWNER, region, len(found), expect=digest, hold=False)
                        return
                    except ChunkCorrupt:
                        self._world.counts["refused bytes"] += 1
                        refused = True
        raise (ChunkCorrupt if refused else ChunkMissing)(f"no other node has a sound copy of chunk {digest}")


class SimFetcher(Fetcher):
    """The product's fetcher, without the threads of its executor."""

    def __init__(self, sim: SimNode) -> None:
        self._table, self._executor = sim.table, cast(FetchExecutor, SimExecutor(sim))


class SimConnection(NodeConnection):
    """The product's connection to a node, without a socket: it is answered by the product's server at once."""

    def __init__(self, client: SimDcsClient, sim: SimNode, node: DcsNode) -> None:
        self._client, self._sim, self._server, self.node = client, sim, sim.server, node
        self._session = SimSession(next(client.world.connections), cast(socket.socket, None), "h", authenticated=True)
        self._ended = False

    def call(self, header: dict[str, Any], payload: memoryview | bytes = b"",
             into: Any = None, on_progress: Any = None) -> tuple[dict[str, Any], memoryview]:
        self._client.etcd.reach()
        if self.stale():
            raise NodeUnavailable(f"node {self.node.id} was restarted")
        table, region = self._sim.table, -1
        if header["op"] == "get":
            return {}, self._sim.get(header["digest"], verify=bool(header.get("verify")))
        if payload:
            region = table.alloc(self._session.conn, len(payload))
            table.view[region:region + len(payload)] = payload
        return self._server._answer(self._session, header, region, len(payload)), memoryview(b"")

    def stale(self) -> bool:
        return self._ended or self._server is not self._sim.server

    def close(self) -> None:
        if not self.stale():
            self._sim.table.close(self._session.conn)
        self._ended = True


class SimDcsClient(DcsClient):
    """The product's client of the nodes, with connections that have no socket."""

    def __init__(self, world: CatalogWorld, etcd: SimClient, local: str) -> None:
        super().__init__(etcd, KEYS, io_timeout_s=1.0, clock=lambda: world.now)
        self.world, self.etcd, self._local = world, etcd, local
        self._open = dict[str, SimConnection]()

    def connect(self, node_id: str) -> NodeConnection:
        kept = self._open.get(node_id)
        if kept is None or kept.stale():
            if (found := read_node(self.etcd, KEYS, node_id)) is None:
                raise NodeUnavailable(f"node {node_id} is not registered")
            sim = next(node for node in self.world.nodes if node.name == node_id)
            kept = self._open[node_id] = SimConnection(self, sim, found.node)
        return cast(NodeConnection, kept)

    def local(self) -> NodeConnection:
        return self.connect(self._local)

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()
        self._open.clear()


class SerialExecutor:
    """Takes the place of the threads in which nodes are called at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> SerialExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(call, items)


class SimPublisher:
    """A rank of a formation of the trainer group that publishes."""

    def __init__(self, world: CatalogWorld, epoch: int, formation: int) -> None:
        self.world, self.epoch, self.formation, self.is_busy = world, epoch, formation, False
        self.etcd = SimClient(world.model, lambda: world.now, world.interference)
        self.client = SimDcsClient(world, self.etcd, world.rng.choice(world.nodes).name)
        token = FencedWriter.of_formation(self.etcd, KEYS, epoch, GROUP, formation)
        self.publisher = Publisher(self.etcd, KEYS, STREAM, epoch=epoch, owner="rank", chunk_bytes=1024,
                                   replicas=world.rng.choice([1, 2]), staging_ttl_s=3, token=token)
        self.publisher._client = self.client

    def publish(self, content: int) -> Version:
        """Publishes the weights ``content``, as two ranks have written them."""
        ranks, parts = SimDcsClient(self.world, self.etcd, ""), list[Part]()
        try:
            for place, node in enumerate(self.world.rng.sample(self.world.nodes, len(NAMES))):
                connection, name = ranks.connect(node.name), NAMES[place]
                data = weights(content, name)
                digest = connection.put(data)
                entry = TensorEntry(name, "uint8", (len(data),), (Slice(digest, 0, len(data)),))
                parts.append(Part(node.name, connection.node.incarnation, ((place, entry),), {digest: len(data)}))
            return self.publisher.publish_parts(parts, meta={
                "content": content, "epoch": self.epoch, "formation": self.formation})
        finally:
            ranks.close()

    def kill(self) -> None:
        self.etcd.dead = True
        self.client.close()


class SimReader:
    """An engine, or whoever else reads a version."""

    def __init__(self, world: CatalogWorld, name: str) -> None:
        self.name, self.etcd = name, SimClient(world.model, lambda: world.now, world.interference)
        self._client = SimDcsClient(world, self.etcd, world.rng.choice(world.nodes).name)
        self.chunks = ChunkReader(self._client)
        self.version: Version
        self.lease: SimLease

    def pin(self, number: int | None) -> None:
        self.lease = self.etcd.keepalive(0)
        self.version = pins.pin(self.etcd, KEYS, STREAM, number, self.name, self.lease.id)

    def unpin(self) -> None:
        pins.unpin(self.etcd, KEYS, STREAM, self.version.number, self.name)

    def close(self) -> None:
        """Its lease ends later, unless it has unpinned the version."""
        self.etcd.dead = True
        self._client.close()


def weights(content: int, name: str) -> bytes:
    return random.Random(f"{content} {name}").randbytes(TENSOR_BYTES)


def chunks_of(content: int) -> set[str]:
    """Digests of the chunks of the weights ``content``."""
    return {digest_of(weights(content, name)) for name in NAMES}


class CatalogWorld:
    """A trainer group that publishes, readers, the leader's garbage collector, and nodes."""

    def __init__(self, seed: int, *, disks: bool = False) -> None:
        self.rng, self.now, self.counts = random.Random(seed), 0.0, Counter[str]()
        self.log = Log("versions", seed, clock=lambda: self.now)
        self.model = ObservedEtcd(self.log, self._written)
        self.connections = iter(range(1, 1 << 30))
        self.interference = Interference(lambda: self.rng.random() < 0.2, self._anything)
        self.driver = SimClient(self.model, lambda: self.now)
        self.nodes = list[SimNode]()
        self.nodes += [SimNode(self, f"n{i}", disk=disks) for i in range(NODES)]
        self.publishers, self._next_content = list[SimPublisher](), 1
        self._changes = 0
        """How often a node has ended or begun."""
        self._committed_at = dict[int, int]()
        """Version → ``_changes`` when it was committed."""
        self._lost = set[str]()
        """Chunks whose last copy this world has taken."""
        self._highest = 0
        leader = SimClient(self.model, lambda: self.now, self.interference)
        self.collector = GarbageCollector(leader, KEYS, RetentionPolicy(KEPT), clock=lambda: self.now)
        self.collector._client = SimDcsClient(self, leader, "n0")
        self._readers, self._sweeps, self._is_quiet = 0, False, False
        self._pinning = list[SimReader]()
        self.in_formations = seed % 3 > 0
        """Whether publishers are ranks of a formation; else any process of the epoch may publish."""
        self._form(new_epoch=True)

    def run(self) -> list[Event]:
        with mock.patch.object(fan_out, "ThreadPoolExecutor", SerialExecutor):
            for _ in range(ACTIONS):
                self._anything()
            with self.interference.quiet():
                self._goes_on()
        return self.log.end()

    def _goes_on(self) -> None:
        """When nothing fails any more, a new formation publishes, and everybody can read it."""
        self._is_quiet = True
        self._pass_time(2 * GRACE_S)
        self._form(new_epoch=False)
        version = self.publishers[-1].publish(self._new_content())
        self.collector.sweep([])
        reader = self._pin(None)
        if reader is None or reader.version.number != version.number:
            raise RuleViolated("I3", f"version {version.number} was published, and is not the head")
        self._read(reader)
        self._require_nothing_else_is_kept()

    def _require_nothing_else_is_kept(self) -> None:
        """What no version needs is dropped in the end: all of it, unless a version has its manifest nowhere any more;
        and by each node what came since everything works, whatever was lost before."""
        self._settle()
        if all(version.manifest in self._sound() for version in self._committed()):
            self._require_dropped(lambda here: here - self._needed())
        else:
            self.counts["manifest lost for good"] += 1
        for content in (contents := [self._new_content() for _ in range(2 * KEPT)]):
            self.publishers[-1].publish(content)
            self._pass_time(GRACE_S)
            self._sweep()
        self._settle()
        since = {digest for content in contents for digest in chunks_of(content)} - self._needed()
        self._require_dropped(lambda here: here & since)

    def _settle(self) -> None:
        self._pass_time(4 * GRACE_S)
        for _ in range(3):
            self._sweep()
            self._pass_time(GRACE_S)

    def _require_dropped(self, unneeded: Callable[[set[str]], set[str]]) -> None:
        """``unneeded``: of the chunks that a node has, those that no version needs."""
        for node in self.nodes:
            if more := unneeded({*node.table._chunks}):
                raise RuleViolated("I3", f"node {node.name} keeps {len(more)} chunks that no version needs")

    def _committed(self) -> list[Version]:
        return [version for version in reads.list_versions(self.driver, KEYS, STREAM)
                if version.state is VersionState.COMMITTED]

    def _needed(self) -> set[str]:
        return {digest for version in self._committed()
                for digest in (version.manifest, *chunks_of(int(version.meta["content"])))}

    def _sound(self) -> set[str]:
        return {digest for node in self.nodes for digest in node.sound()}

    # -- what happens --------------------------------------------------------------------------------------------------
    def _anything(self) -> None:
        roll = self.rng.random()
        self.counts["steps"] += 1
        if roll < 0.38:
            self._publish(self.rng.choice(self.publishers))
        elif roll < 0.62:
            if self._pinning and self.rng.random() < 0.5:
                self._read(self._pinning.pop(self.rng.randrange(len(self._pinning))))
            elif (reader := self._pin(self.rng.choice([None, self._any_number(), self._any_number()]))) is not None:
                self._pinning.append(reader)
        elif roll < 0.76:
            self._sweep()
        elif roll < 0.86:
            self._pass_time(self.rng.choice([0.5, 2.0, 5.0]))
        elif roll < 0.93:
            self._form(new_epoch=self.rng.random() < 0.4)
        elif roll < 0.96:
            self._kill_node(self.rng.choice(self.nodes))
        else:
            node = self.rng.choice(self.nodes)
            self._take(node, lambda: node.rot(self.rng))
            self.counts["bytes changed on a node"] += 1

    def _sweep(self) -> None:
        if not self._sweeps:
            self._sweeps = True
            self.counts["sweeps"] += 1
            for line in self.collector.sweep([]):
                self.counts[line.partition(" ")[0]] += 1
            self._sweeps = False

    def _pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for node in self.nodes:
                if not node.lease:
                    node.start()
                    self._changes += 1
                node.etcd.keep_alive()
                if self.rng.random() < 0.5:
                    node.save()
            for client in (*(p.etcd for p in self.publishers), *(reader.etcd for reader in self._pinning)):
                if self.rng.random() < 0.6:  # others are stopped for a while, and their leases end
                    client.keep_alive()
            self.model.expire(self.now)

    def _form(self, *, new_epoch: bool) -> None:
        """A driver has the trainer group form again, in this epoch or, after a global restart, in the next one."""
        epoch = (fencing.raise_epoch(self.driver, KEYS, "driver").number if new_epoch
                 else fencing.current_epoch(self.driver, KEYS))
        fencing.write(self.driver, KEYS, epoch, Op.put(KEYS.formation(GROUP), Formation(
            epoch=epoch, hosts=[], data_parallel=1).encode()))
        number = self.model.keys[KEYS.formation(GROUP)].version
        self.counts["new epoch" if new_epoch else "new formation"] += 1
        for old in self.publishers[:-2]:
            old.kill()
        self.publishers = [*(p for p in self.publishers[-2:] if not p.etcd.dead), SimPublisher(
            self, epoch, number if self.in_formations else 0)]

    def _new_content(self) -> int:
        self._next_content += 1
        return self._next_content

    def _publish(self, publisher: SimPublisher) -> None:
        if publisher.etcd.dead or publisher.is_busy:
            return
        publisher.is_busy = True
        if self.rng.random() < 0.1:
            calls = iter(range(self.rng.randrange(1, 25)))
            usual = publisher.etcd.on_call
            publisher.etcd.on_call = lambda: usual() if next(calls, None) is not None else publisher.kill()
        try:
            publisher.publish(self._new_content())
            self.counts["published"] += 1
        except Fenced:
            self.counts["fenced"] += 1
            publisher.kill()
        except ElasticRLError as e:
            self.counts[type(e).__name__] += 1
        finally:
            publisher.is_busy = False
        if publisher.etcd.dead and publisher is self.publishers[-1]:
            self._form(new_epoch=False)

    def _kill_node(self, node: SimNode) -> None:
        """It starts again when time passes. None is killed between a publisher's last look at the nodes and its commit:
        that is the loss of a copy, as at any later time (``dcs.registered_nodes``)."""
        if any(p.etcd.read_last == KEYS.dcs_nodes_prefix() for p in self.publishers):
            return
        self._take(node, node.kill)
        self._changes += 1
        node.killed_at = self._changes
        self.counts["node killed"] += 1

    def _take(self, node: SimNode, how: Callable[[], None]) -> None:
        """Something is done to a node, by which copies that it has may be lost."""
        before = self._copies(node)
        how()
        self._lost |= before.difference(*map(self._copies, self.nodes))

    def _copies(self, node: SimNode) -> set[str]:
        """The chunks that a node has, and has to keep: somebody writes them, or they are of a version of which it has a
        copy. What it has got for a reader only, it may drop at any time."""
        sound = node.sound()
        kept = {digest for digest, is_written in sound.items() if is_written}
        for version in self._committed():
            lost_all = node.files is None and node.killed_at > self._committed_at[version.number]
            if node.name in version.sources and not lost_all:
                kept |= sound.keys() & {version.manifest, *chunks_of(int(version.meta["content"]))}
        return kept

    # -- rules ---------------------------------------------------------------------------------------------------------
    def _any_number(self) -> int | None:
        committed = [version.number for version in self._committed()]
        return self.rng.choice(committed) if committed else None

    def _pin(self, number: int | None) -> SimReader | None:
        """A reader pins a version, or the head."""
        self._readers += 1
        reader = SimReader(self, f"reader{self._readers}")
        try:
            reader.pin(number)
        except ElasticRLError as e:
            self.counts[f"pin: {type(e).__name__}"] += 1
            reader.close()
            return None
        return reader

    def _read(self, reader: SimReader) -> None:
        """A reader reads all of the version that it has pinned, and ends."""
        try:
            self._read_pinned(reader.chunks, reader.version, lambda: reader.lease.alive)
            reader.unpin()
        except ElasticRLError as e:
            self.counts[f"read: {type(e).__name__}"] += 1
        finally:
            reader.close()

    def _read_pinned(self, reader: ChunkReader, version: Version, is_pinned: Callable[[], bool]) -> None:
        changes, sweeps = self._changes, self.counts["sweeps"]
        is_whole = all(node.lease for node in self.nodes)
        try:
            manifest = reader.manifest(version)
            found = {entry.name: reader.tensor(entry) for entry in manifest.tensors}
        except ChunkMissing as e:
            of_version = {version.manifest, *chunks_of(int(version.meta["content"]))}
            is_away = self._changes > changes or not is_whole  # a node may have the copy, and was not there
            if is_pinned() and not is_away and self._lost.isdisjoint(of_version) and (
                    self.counts["sweeps"] < sweeps + chunk_reader.ROUNDS):
                raise RuleViolated("I3", f"a reader that pins version {version.number} does not get it: "
                                         f"{e.message}") from e
            raise
        content = int(version.meta["content"])
        if found != {name: weights(content, name) for name in NAMES}:
            raise RuleViolated("I2", f"a reader got other bytes than those of version {version.number}")
        self.counts["read"] += 1

    def sent(self, data: memoryview) -> memoryview:
        """Bytes as they arrive: now and then one has changed on the way."""
        found = bytearray(data)
        if not self._is_quiet and self.rng.random() < 0.01:
            found[self.rng.randrange(len(found))] ^= 1
            self.counts["bytes changed on the way"] += 1
        return memoryview(found)

    def _written(self, kv: KeyValue) -> None:
        """A version is begun and committed by the epoch and the formation that there are then; its number is new."""
        if not kv.key.startswith(KEYS.versions_prefix(STREAM)):
            return
        version = Version.decode(kv.value)
        if version.state is VersionState.COMMITTED:
            self._committed_at.setdefault(version.number, self._changes)
        if kv.version == 1:
            if version.number <= self._highest:
                raise RuleViolated("I3", f"number {version.number} was taken twice")
            self._highest = version.number
        now = {"epoch": self.model.keys[KEYS.epoch()].version,
               "formation": self.model.keys[KEYS.formation(GROUP)].version}
        if kv.version == 1 or version.state is VersionState.COMMITTED:
            for what, number in now.items():
                if version.meta[what] not in (0, number):
                    raise RuleViolated("I1", f"version {version.number} became {version.state} for {what} "
                                             f"{version.meta[what]} in {what} {number}")


def run(seed: int, *, disks: bool = False) -> CatalogWorld:
    """The world after the run of a seed. ``disks``: whether nodes have one. Raises RuleViolated."""
    world = CatalogWorld(seed, disks=disks)
    world.run()
    return world


def run_with_disks(seed: int) -> CatalogWorld:
    return run(seed, disks=True)


def log(seed: int) -> list[Event]:
    """The log of a run, until a rule was broken."""
    world = CatalogWorld(seed)
    with suppress(RuleViolated):
        return world.run()
    return world.log.end()
