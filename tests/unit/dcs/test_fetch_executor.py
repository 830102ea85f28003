"""Fetchers and servers of several nodes in this process, over links that fail. No etcd: nodes are listed by hand."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.tcp_link import Link, Links
from support.waiting import wait_until

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.fetch.fetcher import Fetcher, FetchSettings
from elastic_rl.dcs.fetch.transfers import DurableChunks
from elastic_rl.dcs.node.open_versions import OpenVersions
from elastic_rl.dcs.node.pins import NodePins
from elastic_rl.dcs.node.server import NodeServer
from elastic_rl.dcs.node.version_index import VersionIndex
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import ArenaFull, ChunkCorrupt, ChunkMissing, EtcdUnavailable, NodeUnavailable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode

SIZE, COUNT = 64 << 10, 32
_RANDOM = random.Random(0)
DATA = [_RANDOM.randbytes(SIZE) for _ in range(COUNT)]
DIGESTS = [digest_of(d) for d in DATA]
SIZES = dict.fromkeys(DIGESTS, SIZE)
_SETTINGS = DcsConfig(io_timeout_s=60)  # longer than any test here waits
_TOKEN = Security("secret")


class Nodes:
    """The nodes; also the peer source of their fetchers."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.records: dict[str, DcsNode] = {}
        self.table: dict[str, ChunkTable] = {}
        self.fetcher: dict[str, Fetcher] = {}
        self.link: dict[str, Link] = {}
        self.etcd_unavailable = False
        self._servers: list[NodeServer] = []
        self._pool = ThreadPoolExecutor(8)

    def nodes(self) -> list[DcsNode]:
        if self.etcd_unavailable:
            raise EtcdUnavailable("no etcd")
        return list(self.records.values())

    def open(self, node: DcsNode, *, as_node: str = "") -> NodeConnection:
        return NodeConnection(node, "job", io_timeout_s=_SETTINGS.io_timeout_s, security=_TOKEN, as_node=as_node)

    def start(self, node_id: str, data: list[bytes] | None = None, *, bytes_per_s: float = 64 << 20,
              arena_bytes: int = 8 << 20, durable: DurableChunks | None = None) -> None:
        """A node that has ``data``."""
        table = self.table[node_id] = ChunkTable(memoryview(bytearray(arena_bytes)), wait_s=0.1, verify_every_s=60)
        for chunk in data or []:
            self.put(node_id, chunk)
        fetcher = self.fetcher[node_id] = Fetcher(table, self, node_id, FetchSettings(hedge_after_s=0.3), durable)
        listener = socket.create_server(("127.0.0.1", 0))
        hello = {"job": "job", "id": node_id, "arena_path": f"/{node_id}", "arena_bytes": arena_bytes}
        versions = OpenVersions(table, fetcher, NodePins(None, Keys("job"), node_id, 5))
        server = NodeServer(table, fetcher, versions, VersionIndex(None, grace_s=0), hello, listener, _SETTINGS, _TOKEN)
        server.start()
        self._servers.append(server)
        link = self.link[node_id] = self._links.add(listener.getsockname()[1], bytes_per_s)
        self.records[node_id] = DcsNode(id=node_id, host="127.0.0.1", port=link.port, pid=1, arena_path=f"/{node_id}",
                                        arena_bytes=arena_bytes)

    def put(self, node_id: str, data: bytes) -> str:
        table = self.table[node_id]
        offset = table.alloc(1, len(data))
        table.view[offset:offset + len(data)] = data
        return table.seal(1, offset, len(data), hold=False).digest

    def fetch(self, node_id: str, digests: list[str] = DIGESTS, **options: object) -> Future[list[Chunk]]:
        options = {"sizes": SIZES, **options}
        return self._pool.submit(self.fetcher[node_id].fetch, digests, [], None, **options)  # type: ignore[arg-type]

    def read(self, node_id: str, digest: str) -> bytes:
        with self.table[node_id].reading(digest) as data:
            return bytes(data)

    def sent(self) -> int:
        return sum(link.sent.nbytes for link in self.link.values())

    def break_link(self, node_id: str) -> None:
        self.link[node_id].close()

    def close(self) -> None:
        for fetcher in self.fetcher.values():
            fetcher.close()
        for server in self._servers:
            server.stop()
        self._pool.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Links() as links:
        out = Nodes(links)
        try:
            yield out
        finally:
            out.close()


def test_chunks_are_contiguous_in_request_order_and_each_is_reported_once(nodes: Nodes) -> None:
    nodes.start("a", DATA)
    nodes.start("b")
    seen: list[str] = []
    chunks = nodes.fetch("b", on_chunk=lambda chunk: seen.append(chunk.digest)).result(20)
    assert [c.offset for c in chunks] == [i * SIZE for i in range(COUNT)]
    assert [nodes.read("b", d) for d in DIGESTS] == DATA
    assert sorted(seen) == sorted(DIGESTS)
    assert nodes.sent() < 1.1 * COUNT * SIZE


def test_concurrent_callers_share_transfers(nodes: Nodes) -> None:
    nodes.start("a", DATA, bytes_per_s=4 << 20)
    nodes.start("b")
    pulls = [nodes.fetch("b") for _ in range(4)]
    assert all(len(p.result(20)) == COUNT for p in pulls)
    assert nodes.sent() < 1.1 * COUNT * SIZE


def test_chunk_is_held_for_its_caller_from_its_arrival(nodes: Nodes) -> None:
    nodes.start("a", DATA)
    nodes.start("b")
    nodes.fetcher["b"].fetch(DIGESTS, [], 7)
    assert nodes.table["b"].drop(set(), nodes.table["b"].mark()) == (0, 0)
    nodes.table["b"].release_holds(7)
    assert nodes.table["b"].drop(set(), nodes.table["b"].mark())[0] == COUNT


def test_chunks_of_a_stalled_node_come_from_another(nodes: Nodes) -> None:
    for source in ("a", "b"):
        nodes.start(source, DATA, bytes_per_s=1 << 20)
    nodes.start("c")
    pull = nodes.fetch("c")
    wait_until(lambda: nodes.link["b"].sent.nbytes > SIZE, what="b to send", poll_s=0.01)
    nodes.link["b"].pause()
    wait_until(lambda: nodes.link["b"].held, what="bytes that are held back", poll_s=0.01)
    assert not pull.done(), "the fault came too late"
    assert len(pull.result(20)) == COUNT and nodes.link["b"].held
    wait_until(lambda: not nodes.table["c"].stat()["pending"],
               what="the losers' regions to be freed")


def test_fetch_survives_the_loss_of_one_of_two_sources(nodes: Nodes) -> None:
    for source in ("a", "b"):
        nodes.start(source, DATA, bytes_per_s=1 << 20)
    nodes.start("c")
    pull = nodes.fetch("c")
    wait_until(lambda: nodes.link["b"].sent.nbytes > SIZE, what="b to send", poll_s=0.01)
    nodes.break_link("b")
    assert not pull.done(), "the fault came too late"
    assert len(pull.result(20)) == COUNT


def test_loss_of_all_sources_is_reported_and_arrived_chunks_are_kept(nodes: Nodes) -> None:
    nodes.start("a", DATA, bytes_per_s=1 << 20)
    nodes.start("b")
    pull = nodes.fetch("b")
    wait_until(lambda: nodes.table["b"].stat()["chunks"], what="the first chunk", poll_s=0.01)
    nodes.break_link("a")
    with pytest.raises(ChunkMissing):
        pull.result(20)
    kept = nodes.table["b"].stat()["chunks"]
    assert 0 < kept < COUNT
    wait_until(lambda: not nodes.table["b"].stat()["pending"], what="regions to be freed")
    nodes.start("c", DATA)
    before = nodes.sent()
    assert len(nodes.fetch("b").result(20)) == COUNT
    assert nodes.sent() - before < (COUNT - kept + 1) * SIZE, "chunks that were there were sent again"


def test_corrupt_copy_is_skipped_and_reported_if_there_is_no_other(nodes: Nodes) -> None:
    nodes.start("a", DATA[:1])
    nodes.start("b")
    nodes.table["a"].view[10] ^= 1
    with pytest.raises(ChunkCorrupt, match=DIGESTS[0]):
        nodes.fetch("b", DIGESTS[:1]).result(20)
    nodes.start("c", DATA[:1])
    nodes.fetch("b", DIGESTS[:1]).result(20)
    assert nodes.read("b", DIGESTS[0]) == DATA[0]


def _changed(data: bytes) -> bytes:
    out = bytearray(data)
    for i in range(0, len(out), 1000):
        out[i] ^= 1
    return bytes(out)


@pytest.mark.parametrize("corrupt", [False, True])
def test_delta_needs_a_local_base_and_a_sound_one(nodes: Nodes, corrupt: bool) -> None:
    nodes.start("a", DATA, bytes_per_s=2 << 20)  # a link on which deltas pay, however busy the machine is
    nodes.start("b")
    nodes.fetch("b").result(20)
    new = [_changed(d) for d in DATA]
    digests = [nodes.put("a", d) for d in new]
    before, spoiled = nodes.sent(), []

    def spoil(data: bytearray) -> None:
        if (at := data.find(b'{"delta":')) >= 0 and len(data) > at + 100:
            data[-1] ^= 0x55
            spoiled.append(at)

    if corrupt:
        nodes.link["a"].tamper = lambda: spoil
        nodes.link["a"].cut()  # those connections run without it
    nodes.fetch("b", digests, sizes=dict.fromkeys(digests, SIZE),
                bases=dict(zip(digests, DIGESTS, strict=True))).result(20)
    assert [nodes.read("b", d) for d in digests] == new
    assert [nodes.read("b", d) for d in DIGESTS] == DATA, "a base was written to"
    if corrupt:
        assert spoiled, "the fault did not happen"
        assert nodes.sent() - before >= len(spoiled) * SIZE
    else:
        assert nodes.sent() - before < COUNT * SIZE / 10


def test_chunk_on_no_node_is_read_from_the_durable_store(nodes: Nodes) -> None:
    class Durable:
        def read_chunk(self, digest: str) -> bytes:
            if digest == DIGESTS[0]:
                return DATA[0]
            raise ChunkMissing("not here")

    nodes.start("a", DATA[2:])
    nodes.start("b", durable=Durable())
    nodes.fetch("b", [DIGESTS[0], *DIGESTS[2:]]).result(20)
    assert nodes.read("b", DIGESTS[0]) == DATA[0]
    with pytest.raises(ChunkMissing, match=DIGESTS[1]):
        nodes.fetch("b").result(20)


def test_full_arena_is_reported_and_nothing_is_left_behind(nodes: Nodes) -> None:
    nodes.start("a", DATA)
    nodes.start("b", arena_bytes=1 << 20)
    with pytest.raises(ArenaFull):
        nodes.fetch("b").result(20)
    with pytest.raises(ArenaFull):
        nodes.fetch("b", sizes=None).result(20)
    wait_until(lambda: not nodes.table["b"].stat()["pending"], what="regions to be freed")


def test_fetch_that_cannot_begin_does_not_affect_others(nodes: Nodes) -> None:
    nodes.start("a", DATA)
    nodes.start("b")
    with pytest.raises(TypeError):
        nodes.fetch("b", sizes=dict.fromkeys(DIGESTS, "many")).result(20)
    assert len(nodes.fetch("b").result(20)) == COUNT


def test_known_nodes_are_used_without_etcd_and_otherwise_its_error_is_raised(nodes: Nodes) -> None:
    nodes.start("a", DATA)
    nodes.start("b")
    nodes.start("c")
    nodes.fetch("b", DIGESTS[:1]).result(20)
    nodes.etcd_unavailable = True
    assert len(nodes.fetch("b").result(20)) == COUNT
    with pytest.raises(EtcdUnavailable):
        nodes.fetch("c").result(20)


def test_node_at_the_address_of_another_is_not_mistaken_for_it(nodes: Nodes) -> None:
    nodes.start("a", DATA[:1])
    nodes.start("b")
    nodes.records["a"] = nodes.records["a"].replace(arena_path="/of-another-process")
    with pytest.raises(ChunkMissing):
        nodes.fetch("b", DIGESTS[:1]).result(20)


def test_wrong_token_receives_nothing(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.start("a", DATA[:1])
    nodes.start("b")
    monkeypatch.setitem(globals(), "_TOKEN", replace(_TOKEN, token="wrong"))
    with pytest.raises(ChunkMissing):
        nodes.fetch("b", DIGESTS[:1]).result(20)
    assert not nodes.table["b"].has(DIGESTS[0])


def test_node_that_hangs_during_connect_occupies_no_region(nodes: Nodes) -> None:
    for source in ("a", "b"):
        nodes.start(source, DATA, bytes_per_s=2 << 20)
    nodes.start("c")
    nodes.link["b"].pause()
    pull = nodes.fetch("c")
    assert len(pull.result(20)) == COUNT and nodes.link["b"].held
    wait_until(lambda: not nodes.table["c"].stat()["pending"], what="all regions to be freed")


def test_transfer_that_ends_by_an_unexpected_error_is_tried_again(
        nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.start("a", DATA)
    nodes.start("b")
    seal, failed = nodes.table["b"].seal, list[int]()

    def fail_twice(*args: object, **options: object) -> Chunk:
        if len(failed) < 2:
            failed.append(1)
            raise RuntimeError("a bug")
        return seal(*args, **options)

    monkeypatch.setattr(nodes.table["b"], "seal", fail_twice)
    assert len(nodes.fetch("b").result(20)) == COUNT and len(failed) == 2
    assert not nodes.table["b"].stat()["pending"]


def test_fetch_whose_transfers_always_fail_unexpectedly_ends_with_an_error(
        nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.start("a", DATA[:1])
    nodes.start("b")

    def fail(*args: object, **options: object) -> Chunk:
        raise RuntimeError("a bug")

    monkeypatch.setattr(nodes.table["b"], "seal", fail)
    with pytest.raises(NodeUnavailable, match="a bug"):
        nodes.fetch("b", DIGESTS[:1]).result(20)
    wait_until(lambda: not nodes.table["b"].stat()["pending"], what="regions to be freed")


def test_fetch_ends_with_an_error_when_no_thread_can_be_started(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.start("a", DATA[:1])
    nodes.start("b")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("fetch-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises((ChunkMissing, NodeUnavailable)):
        nodes.fetch("b", DIGESTS[:1]).result(20)


def test_fetch_is_cancelled_by_its_tick(nodes: Nodes) -> None:
    nodes.start("a", DATA, bytes_per_s=1 << 20)
    nodes.start("b")
    arrived = list[Chunk]()

    def tick() -> None:
        if arrived:
            raise NodeUnavailable("cancelled")

    with pytest.raises(NodeUnavailable, match="cancelled"):
        nodes.fetch("b", on_chunk=arrived.append, tick=tick).result(20)
    wait_until(lambda: not nodes.table["b"].stat()["pending"], what="regions to be freed")
    assert 0 < len(arrived) < COUNT


def test_cancelled_caller_does_not_fail_others_that_share_its_chunks(nodes: Nodes) -> None:
    nodes.start("a", DATA)
    nodes.start("b")
    executor, begun, cancelled = nodes.fetcher["b"]._executor, threading.Event(), []

    def cancel_once_shared() -> None:
        if not executor._jobs:
            return
        begun.set()
        wait_until(lambda: all(len(j.waiters) == 2 for j in list(executor._jobs.values())),
                   what="the other caller")
        cancelled.append(True)
        raise KeyError("the caller is gone")

    first = nodes.fetch("b", tick=cancel_once_shared)
    assert begun.wait(20)
    second = nodes.fetch("b")
    with pytest.raises(KeyError):
        first.result(20)
    assert [c.digest for c in second.result(20)] == DIGESTS and cancelled == [True]
    assert [nodes.read("b", d) for d in DIGESTS] == DATA and nodes.table["b"].stat()["pending"] == 0
