"""One node and its disk, its limits and its door: real node processes, spoken to over the wire."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certificates import Authority
from support.dcs_nodes import Nodes, spawn_node
from support.etcd_server import EtcdServers
from support.shared_fixtures import small_disk

from elastic_rl.config import DcsConfig
from elastic_rl.dcs import protocol
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import (
    AccessDenied,
    ArenaFull,
    ChunkCorrupt,
    ChunkMissing,
    ConfigError,
    DiskFull,
    ElasticRLError,
    NodeUnavailable,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.processes import stop
from elastic_rl.runtime import wait_until

MIB = 1 << 20
CHUNK = 64 << 10


class Wire:
    """A client that says just what a test wants to say."""

    def __init__(self, node: DcsNode, *, timeout_s: float = 20, buffer_bytes: int = 0,
                 context: ssl.SSLContext | None = None) -> None:
        self.sock: socket.socket = socket.socket()
        if buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.sock.settimeout(timeout_s)
        self.sock.connect((node.host, node.port))
        if context is not None:
            self.sock = context.wrap_socket(self.sock)

    def send(self, payload: bytes = b"", **header: object) -> None:
        protocol.send(self.sock, header, payload)

    def answer(self) -> tuple[dict[str, Any], bytes]:
        header, payload = protocol.receive(self.sock)
        protocol.raise_failure(header)
        return header, bytes(payload)

    def call(self, payload: bytes = b"", **header: object) -> dict[str, Any]:
        self.send(payload, **header)
        return self.answer()[0]

    def get(self, digest: str, **more: object) -> tuple[dict[str, Any], bytes]:
        self.send(op="get", digest=digest, **more)
        return self.answer()

    def fetch(self, digests: Sequence[str], **more: object) -> dict[str, tuple[int, int]]:
        answer = self.call(op="fetch", digests=list(digests), prefer=[], **{"hold": False, **more})
        while "progress" in answer:
            answer = self.answer()[0]
        return {d: (offset, nbytes) for d, offset, nbytes in answer["chunks"]}

    def close(self) -> None:
        self.sock.close()


@dataclass(kw_only=True)
class Hub(Nodes):
    """Nodes of one job, and what talks to them."""

    epoch: int
    closing: list[Callable[[], object]] = field(default_factory=list)

    def launch(self, node: str, **dcs: object) -> subprocess.Popen[bytes]:
        return super().launch(node, **{"arena_bytes": 4 * MIB, "disk_bytes": 64 * MIB, "orphan_grace_s": 0, **dcs})

    def start(self, node: str = "a", **dcs: object) -> DcsNode:
        return self.start_node(node, **dcs)

    def kill(self, node: str = "a") -> None:
        super().kill(node)

    def wire(self, node: DcsNode, *, hello: bool = True, **options: Any) -> Wire:
        wire = Wire(node, **options)
        self.closing.append(wire.close)
        if hello:
            wire.call(op="hello", job=self.keys.job)
        return wire

    def publisher(self, node: str = "a") -> Publisher:
        out = Publisher(self.etcd, self.keys, "policy", epoch=self.epoch, owner="test", chunk_bytes=CHUNK,
                        staging_ttl_s=5, io_timeout_s=20, node=node)
        self.closing.append(out.close)
        return out

    def assert_pulls(self, numbers: Sequence[int], node: str = "a") -> None:
        """Each version comes back bit for bit."""
        puller = Puller(self.etcd, self.keys, "test", pin_ttl_s=5, io_timeout_s=20, node=node)
        with contextlib.closing(puller):
            for number in numbers:
                with puller.pull("policy", number) as pulled:
                    assert all(torch.equal(t, weights(number)[name]) for name, t in pulled.tensors()), number

    def digests(self, number: int) -> list[str]:
        """A version's chunks; the last one is its manifest."""
        puller = Puller(self.etcd, self.keys, "test", pin_ttl_s=5, io_timeout_s=20, node="a")
        with contextlib.closing(puller), puller.pull("policy", number) as pulled:
            return [*pulled.manifest.chunks, pulled.version.manifest]

    def await_saved(self, wire: Wire) -> None:
        wait_until(lambda: not wire.call(op="stat")["unsaved"], timeout_s=20, what="the copies on disk")

    def file(self, digest: str, node_id: str = "a") -> Path:
        return self.folder / "disk" / node_id / digest[:2] / digest

    def log(self, node_id: str = "a") -> str:
        return (self.folder / f"{node_id}.log").read_text()

    def close(self) -> None:
        for close in reversed(self.closing):
            close()
        super().close()


@pytest.fixture
def hub(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Hub]:
    out = Hub(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path,
              epoch=fencing.raise_epoch(etcd, keys, "test").number)
    try:
        yield out
    finally:
        out.close()
        assert not list(SHM.glob(f"elastic-rl-{keys.job}-*")), "a node left its arena behind"


def weights(seed: int) -> dict[str, torch.Tensor]:
    """About 200 KB, in four chunks."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(12_500, generator=generator) for name in "wxyz"}


def publish(publisher: Publisher, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert publisher.publish(weights(number).items(), meta={}).number == number


# -- the disk ----------------------------------------------------------------------------------------------------------
def test_a_killed_node_serves_its_versions_again_after_its_next_start(hub: Hub) -> None:
    node = hub.start()
    publish(hub.publisher(), [1, 2, 3])
    hub.await_saved(hub.wire(node))
    segment = Path(node.arena_path)
    digest = hub.digests(1)[0]
    hub.kill()
    assert segment.exists(), "the fault did not happen"
    left, foreign = hub.file(digest).with_name("ab" * 16 + ".partial"), hub.file(digest).with_name("mine.txt")
    left = left.parent.parent / "ab" / left.name
    for path in (left, foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    again = hub.start()
    assert not segment.exists() and not left.exists() and foreign.read_bytes() == b"half"
    assert hub.wire(again).call(op="stat")["resident"] == 0, "what is on disk is read when it is wanted"
    hub.assert_pulls([1, 2, 3])
    publish(hub.publisher(), [4])
    hub.assert_pulls([4, 1])


def test_a_node_that_is_stopped_saves_what_is_committed_first(hub: Hub) -> None:
    hub.start()
    publish(hub.publisher(), [1, 2])
    stop(hub.processes["a"].pid)
    assert hub.processes["a"].wait(10) == 0
    hub.start()
    hub.assert_pulls([1, 2])


def test_what_was_persisted_is_there_after_a_kill_also_before_the_commit(hub: Hub) -> None:
    wire = hub.wire(hub.start())
    digest = wire.call(b"x" * CHUNK, op="put")["digest"]
    assert wire.call(op="persist", digests=[digest]) == {}
    assert wire.call(op="stat")["held"] == 1
    hub.kill()
    assert hub.wire(hub.start()).get(digest)[1] == b"x" * CHUNK


def test_a_corrupt_file_is_never_served_and_another_copy_is_found(hub: Hub) -> None:
    wire = hub.wire(hub.start())
    publish(hub.publisher(), [1])
    digest = hub.digests(1)[1]
    hub.await_saved(wire)
    hub.kill()
    damaged = bytearray(hub.file(digest).read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    hub.file(digest).write_bytes(damaged)
    wire = hub.wire(hub.start())
    assert wire.call(op="has", digests=[digest])["missing"] == []
    with pytest.raises(ChunkMissing):
        wire.get(digest)
    with pytest.raises(ChunkCorrupt, match=digest):
        hub.assert_pulls([1])
    assert f"chunk {digest} on disk is given up" in hub.log()
    wait_until(lambda: not hub.file(digest).exists(), timeout_s=10, what="the removal")
    offset = int(wire.call(op="alloc", nbytes=1)["offset"])  # its place in the arena was given back
    assert offset >= 0 and wire.call(op="stat")["pending"] == 1
    tensor = next(t for t in weights(1).values() if digest_of(t.numpy().tobytes()) == digest)
    other = hub.wire(hub.start("b"))
    assert other.call(tensor.numpy().tobytes(), op="put")["digest"] == digest
    hub.assert_pulls([1])


def test_more_versions_than_the_arena_holds_are_all_served(hub: Hub) -> None:
    wire = hub.wire(hub.start(arena_bytes=1 * MIB))
    publish(hub.publisher(), range(1, 16))
    # saved behind everyone's back, so a moment later
    wait_until(lambda: wire.call(op="stat")["unsaved"] == 0, timeout_s=20, what="all chunks to be on disk")
    stat = wire.call(op="stat")
    assert stat["disk_used_bytes"] > 2 * stat["arena_bytes"] and stat["resident"] < stat["chunks"]
    told = ("used_bytes", "disk_bytes", "disk_used_bytes", "chunks", "unsaved")

    def record() -> DcsNode:
        return DcsNode.decode(hub.etcd.range(hub.keys.dcs_nodes_prefix())[0][0].value)

    wait_until(lambda: [getattr(record(), name) for name in told] == [stat[name] for name in told], timeout_s=20,
               what="the node's record to tell the same")
    hub.assert_pulls([*range(1, 16), *range(15, 0, -1)])


def test_a_chunk_that_someone_maps_stays_where_it_is_while_others_come_and_go(hub: Hub) -> None:
    node = hub.start(arena_bytes=1 * MIB)
    publish(hub.publisher(), [1])
    reader, other = hub.wire(node), hub.wire(node)
    digests = hub.digests(1)
    located = reader.fetch(digests, use="one")
    fd = os.open(node.arena_path, os.O_RDONLY)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        os.close(fd)

        def unmoved() -> bool:
            return all(digest_of(memory[offset:offset + nbytes]) == d for d, (offset, nbytes) in located.items())

        assert unmoved()
        publisher = hub.publisher()
        publish(publisher, range(2, 12))
        assert unmoved() and other.call(op="stat")["located"] == len(set(digests))
        assert reader.fetch(digests, use="two") == located
        reader.call(op="release", use="one")
        publish(publisher, range(12, 20))
        assert unmoved()
        reader.close()
        wait_until(lambda: not other.call(op="stat")["located"], timeout_s=10, what="the end of the reader's hold")
        publish(publisher, range(20, 30))
        assert not unmoved(), "nothing was ever spilled: this test has shown nothing"
    hub.assert_pulls([1])


def test_a_pull_of_more_than_the_arena_can_hold_is_refused_and_keeps_nothing(hub: Hub) -> None:
    wire = hub.wire(hub.start(arena_bytes=1 * MIB, io_timeout_s=3))
    publish(hub.publisher(), range(1, 10))
    wanted = [d for n in range(1, 10) for d in hub.digests(n)]
    with pytest.raises(ArenaFull):
        wire.fetch(wanted, use="all")
    assert wire.call(op="stat")["located"] == 0
    assert len(wire.fetch(wanted[:5], use="all")) == 5


def test_a_disk_at_its_limit_refuses_the_publisher_and_goes_on_when_there_is_room(hub: Hub) -> None:
    hub.start(arena_bytes=2 * MIB, disk_bytes=1 * MIB)
    assert_full_then_room(hub)


def test_a_disk_without_space_refuses_the_publisher_and_goes_on_when_there_is_room(tmp_path: Path, hub: Hub) -> None:
    with small_disk(tmp_path / "disk", "1M") as folder:
        hub.start(arena_bytes=2 * MIB, disk_dir=folder)
        assert_full_then_room(hub)
        assert "has no room for a chunk" in hub.log(), "the file system was never full: this test has shown nothing"


def assert_full_then_room(hub: Hub) -> None:
    """Publishes to an arena of twice the disk's size until neither has room; all that was committed stays; releasing
    versions makes room again."""
    publisher, committed = hub.publisher(), list[int]()
    with pytest.raises(DiskFull):
        for number in range(1, 30):
            publish(publisher, [number])
            committed.append(number)
    assert len(committed) in (9, 10), "what fits in the arena needs no disk"
    assert "chunks cannot be saved" in hub.log()
    hub.assert_pulls(committed)
    assert not list((hub.folder / "disk").rglob("*.partial"))
    janitor = GarbageCollector(hub.etcd, hub.keys, RetentionPolicy(2))
    hub.closing.append(janitor.close)
    wait_until(lambda: any("dropped" in line for line in janitor.sweep([])), timeout_s=20, what="the drop")
    hub.assert_pulls(committed[-2:])
    number = wait_until(lambda: try_publish(publisher, committed[-1]), timeout_s=30, what="room", poll_s=0.5)
    with contextlib.closing(Puller(hub.etcd, hub.keys, "x", pin_ttl_s=5, io_timeout_s=20, node="a")) as puller:
        assert puller.pull("policy", number).version.number == number
    hub.assert_pulls(committed[-1:])


def try_publish(publisher: Publisher, seed: int) -> int:
    """A new version with new bytes; 0 while there is no room."""
    try:
        return publisher.publish(weights(seed + 100).items(), meta={}).number
    except DiskFull:
        return 0


def test_the_janitor_takes_dropped_chunks_from_the_disk_too(hub: Hub) -> None:
    wire = hub.wire(hub.start())
    publish(hub.publisher(), [1, 2])
    old, new = hub.digests(1), hub.digests(2)
    hub.await_saved(wire)
    assert all(hub.file(d).exists() for d in (*old, *new))
    janitor = GarbageCollector(hub.etcd, hub.keys, RetentionPolicy(1))
    hub.closing.append(janitor.close)

    def swept() -> bool:
        janitor.sweep([])
        return not any(hub.file(d).exists() for d in old)

    wait_until(swept, timeout_s=20, what="the removal of version 1")
    assert all(hub.file(d).exists() for d in new)
    hub.assert_pulls([2])


def test_two_nodes_cannot_have_the_same_folder(hub: Hub, etcd_servers: EtcdServers) -> None:
    hub.start()
    for job in (f"{hub.keys.job}-x", hub.keys.job):
        elsewhere = spawn_node(etcd_servers.endpoints, Keys(job), "a", hub.folder / job, arena_bytes=MIB,
                               disk_bytes=MIB,
                               disk_dir=hub.folder / "disk")
        assert elsewhere.wait(20) == 2
        assert "PreflightFailed" in (hub.folder / job / "a.log").read_text()
    assert "another process has" in (hub.folder / f"{hub.keys.job}-x" / "a.log").read_text()


def test_a_node_without_a_disk_says_so_when_it_is_to_persist(hub: Hub) -> None:
    wire = hub.wire(hub.start(disk_bytes=0))
    digest = wire.call(b"x" * 100, op="put")["digest"]
    with pytest.raises(ConfigError, match="memory only"):
        wire.call(op="persist", digests=[digest])
    assert not (hub.folder / "disk").exists()


# -- limits ------------------------------------------------------------------------------------------------------------
def test_a_peer_that_stops_reading_blocks_no_other_and_is_cut_off(hub: Hub) -> None:
    node = hub.start(arena_bytes=32 * MIB, max_sends=2, max_sends_per_peer=1, io_timeout_s=4)
    owner = hub.wire(node)
    data = os.urandom(16 * MIB)
    digest = owner.call(data, op="put")["digest"]
    stuck = hub.wire(node, hello=False, buffer_bytes=64 << 10)
    stuck.call(op="hello", job=hub.keys.job, id="slow")
    stuck.send(op="get", digest=digest)
    wait_until(lambda: owner.call(op="has", digests=[])["load"] == 1, timeout_s=5, what="the send that is stuck")
    second = hub.wire(node, hello=False)
    second.call(op="hello", job=hub.keys.job, id="slow")
    second.send(op="get", digest=digest)  # the same peer's second: it waits
    wait_until(lambda: owner.call(op="has", digests=[])["load"] == 2, timeout_s=3, what="the send that waits")
    other = hub.wire(node, hello=False)
    other.call(op="hello", job=hub.keys.job, id="quick")
    assert other.get(digest)[1] == data
    assert owner.call(op="has", digests=[])["load"] == 2, "the slow peer was gone by itself: this has shown nothing"
    with pytest.raises(NodeUnavailable, match="busy"):
        second.answer()
    wait_until(lambda: not owner.call(op="has", digests=[])["load"], timeout_s=20, what="the end of the stuck send")
    assert second.get(digest)[1] == data, "the freed slot is not used"
    with pytest.raises((OSError, protocol.Closed)):
        while stuck.sock.recv(1 << 20):
            pass
        raise protocol.Closed


def test_a_long_fetch_tells_that_it_goes_on(hub: Hub) -> None:
    source, node = hub.start("b"), hub.start("a", io_timeout_s=5)
    digest = hub.wire(source).call(b"x" * CHUNK, op="put")["digest"]
    wire = hub.wire(node)
    hub.processes["b"].send_signal(signal.SIGSTOP)
    wire.send(op="fetch", digests=[digest], prefer=["b"], hold=False)
    told = 0
    with pytest.raises(ElasticRLError):
        while True:
            header = wire.answer()[0]
            assert header.keys() == {"progress"}
            told += 1
    assert told >= 2


def test_what_changed_is_sent_to_one_who_has_the_base(hub: Hub) -> None:
    node = hub.start()
    wire = hub.wire(node)
    old = bytes(range(256)) * 1024
    new = bytearray(old)
    new[1000:1010] = b"0123456789"
    base, digest = (wire.call(data, op="put")["digest"] for data in (old, bytes(new)))
    for _ in range(2):
        header, change = wire.get(digest, base=base)
        assert header["delta"] == len(new) and len(change) < 1000
        out = bytearray(len(new))
        delta.decode(change, memoryview(old), memoryview(out))
        assert out == new
    assert wire.get(digest) == ({}, new)
    assert wire.get(digest, base="0" * 32) == ({}, new), "the node does not have that base"
    noise = wire.call(os.urandom(len(old)), op="put")["digest"]
    assert wire.get(noise, base=base)[0] == {}, "all of it changed: a delta would be larger"
    plain = hub.wire(hub.start("b", delta="false"))
    base, digest = (plain.call(data, op="put")["digest"] for data in (old, bytes(new)))
    assert plain.get(digest, base=base) == ({}, new)


def test_what_makes_no_sense_is_refused_and_the_connection_lives_on(hub: Hub) -> None:
    wire = hub.wire(hub.start())
    for header in ({"op": "alloc"}, {"op": "alloc", "nbytes": -1}, {"op": "get"}, {"op": "what"}, {"op": "fetch"},
                   {"op": "release"}, {"op": "seal", "offset": 0, "nbytes": 1}):
        with pytest.raises(ConfigError):
            wire.call(**header)
    with pytest.raises(ChunkMissing):
        wire.get("0" * 32, base="1" * 32)
    assert wire.call(op="release", use="never located") == {}


# -- the door ----------------------------------------------------------------------------------------------------------
def test_only_who_knows_the_token_is_let_in(hub: Hub) -> None:
    secret = hub.folder / "token"
    secret.write_text("correct horse\n")
    node = hub.start(token_file=secret)
    for header in ({"op": "hello", "token": "correct hors"}, {"op": "hello"}, {"op": "stat", "token": "correct horse"},
                   {"op": "put"}):
        wire = hub.wire(node, hello=False)
        with pytest.raises(AccessDenied):
            wire.call(job=hub.keys.job, **header)
        with pytest.raises((protocol.Closed, OSError)):
            wire.call(op="stat")
    wire = hub.wire(node, hello=False)
    assert wire.call(op="hello", job=hub.keys.job, token="correct horse")["id"] == "a"
    assert wire.call(op="stat")["chunks"] == 0
    assert "correct" not in hub.log()


def test_a_payload_of_one_who_was_not_let_in_takes_no_memory(hub: Hub) -> None:
    wire = hub.wire(hub.start(), hello=False)
    wire.send(b"x" * 1000, op="put")
    with pytest.raises((protocol.Closed, OSError)):
        wire.answer()


def test_a_caller_that_says_nothing_is_sent_away(hub: Hub) -> None:
    wire = hub.wire(hub.start(io_timeout_s=1), hello=False)
    assert wire.sock.recv(1) == b""


def test_a_node_of_another_job_is_not_taken_for_ours(hub: Hub) -> None:
    wire = hub.wire(hub.start(), hello=False)
    with pytest.raises(NodeUnavailable, match="of job"):
        wire.call(op="hello", job="another")


def test_with_tls_only_holders_of_a_certificate_are_served(hub: Hub) -> None:
    ours, theirs = Authority(hub.folder, "ours"), Authority(hub.folder, "theirs")
    host, client, stranger = ours.issue("node"), ours.issue("client"), theirs.issue("client")
    tls = {"tls_cert": host.cert, "tls_key": host.key, "tls_ca": ours.cert}
    node = hub.start(io_timeout_s=4, arena_bytes=32 * MIB, **tls)

    def context(cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
        out = Security.from_config(DcsConfig(tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca))).client_context
        assert out is not None
        return out

    wire = hub.wire(node, context=context(client.cert, client.key, ours.cert))
    data = os.urandom(20 * MIB)
    assert wire.get(wire.call(data, op="put")["digest"])[1] == data
    assert isinstance(wire.sock, ssl.SSLSocket) and wire.sock.version() in ("TLSv1.2", "TLSv1.3")

    with pytest.raises(ssl.SSLCertVerificationError):
        hub.wire(node, context=context(client.cert, client.key, theirs.cert))
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    for unknown in (context(stranger.cert, stranger.key, ours.cert), anonymous):
        with pytest.raises((OSError, protocol.Closed)):
            hub.wire(node, context=unknown)
    with pytest.raises(AccessDenied, match="TLS"):
        hub.wire(node)
    silent = hub.wire(node, hello=False)
    assert silent.sock.recv(1) == b"", "a handshake that never comes is waited for without end"
    assert wire.call(op="stat")["chunks"] == 1


def test_nodes_with_tls_and_a_token_fetch_from_each_other(hub: Hub) -> None:
    ours, secret = Authority(hub.folder, "ours"), hub.folder / "token"
    secret.write_text("correct horse")

    def settings(name: str) -> dict[str, object]:
        pem = ours.issue(name)
        return {"tls_cert": pem.cert, "tls_key": pem.key, "tls_ca": ours.cert, "token_file": secret}

    source, node = hub.start("a", **settings("a")), hub.start("b", **settings("b"))
    security = Security.from_config(DcsConfig.model_validate({k: str(v) for k, v in settings("client").items()}))
    digest = ""
    for there in (source, node):
        wire = hub.wire(there, hello=False, context=security.client_context)
        wire.call(op="hello", job=hub.keys.job, token=security.token)
        if not digest:
            digest = wire.call(b"x" * CHUNK, op="put")["digest"]
    assert wire.fetch([digest], use="t")[digest][1] == CHUNK
    assert wire.get(digest)[1] == b"x" * CHUNK


def test_a_node_that_cannot_read_its_token_does_not_start(hub: Hub) -> None:
    assert hub.launch("a", token_file=hub.folder / "none").wait(20) == 2
    assert "dcs.token_file" in hub.log()
