"""One node: its disk, its registration, its limits. Real node processes, called over the wire."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from support.dcs_nodes import spawn_node
from support.dcs_wire import CHUNK, MIB, Dcs, publish, weights
from support.etcd_server import EtcdServers
from support.shared_fixtures import small_disk
from support.waiting import wait_until

from elastic_rl.dcs import protocol
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.holders import HeadHolders
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch.mapping import load_tensors
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.storage.arena import Leftovers
from elastic_rl.errors import (
    ArenaFull,
    ChunkCorrupt,
    ChunkMissing,
    ConfigError,
    DiskFull,
    ElasticRLError,
    NodeUnavailable,
)
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.processes import stop


# -- the disk ----------------------------------------------------------------------------------------------------------
def test_killed_node_serves_its_versions_after_a_restart(dcs: Dcs) -> None:
    node = dcs.start()
    publish(dcs.publisher(), [1, 2, 3])
    dcs.await_saved(dcs.wire(node))
    segment = Path(node.arena_path)
    digest = dcs.digests(1)[0]
    dcs.kill()  # which leaves its segment, until any node of this machine starts
    left, foreign = dcs.file(digest).with_name("ab" * 16 + ".partial"), dcs.file(digest).with_name("mine.txt")
    left = left.parent.parent / "ab" / left.name
    for path in (left, foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    again = dcs.start()
    assert not segment.exists() and not left.exists() and foreign.read_bytes() == b"half"
    assert dcs.wire(again).call(op="stat")["resident"] == 0, "what is on disk is read when it is needed"
    dcs.assert_pulls([1, 2, 3])
    publish(dcs.publisher(), [4])
    dcs.assert_pulls([4, 1])


def test_stopped_node_saves_committed_versions_first(dcs: Dcs) -> None:
    dcs.start()
    publish(dcs.publisher(), [1, 2])
    stop(dcs.processes["a"].pid)
    assert dcs.processes["a"].wait(60) == 0
    dcs.start()
    dcs.assert_pulls([1, 2])


def test_corrupt_file_is_never_served_and_another_copy_is_found(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start())
    publish(dcs.publisher(), [1])
    digest = dcs.digests(1)[1]
    dcs.await_saved(wire)
    dcs.kill()
    corrupt = bytearray(dcs.file(digest).read_bytes())
    corrupt[len(corrupt) // 2] ^= 0x10
    dcs.file(digest).write_bytes(corrupt)
    wire = dcs.wire(dcs.start())
    assert wire.call(op="has", digests=[digest])["missing"] == []
    with pytest.raises(ChunkMissing):
        wire.get(digest)
    with pytest.raises(ChunkCorrupt, match=digest):
        dcs.assert_pulls([1])
    with contextlib.closing(HeadHolders(dcs.etcd, dcs.keys, DcsClient(dcs.etcd, dcs.keys, io_timeout_s=20), "policy")
                            ) as holders:
        assert holders.is_lost(), "who has the weights may publish them again"
    assert f"chunk {digest} on disk is dropped" in dcs.log()
    wait_until(lambda: not dcs.file(digest).exists(), what="the removal")
    offset = int(wire.call(op="alloc", nbytes=1)["offset"])  # its region in the arena was freed
    assert offset >= 0 and wire.call(op="stat")["pending"] == 1
    tensor = next(t for t in weights(1).values() if digest_of(t.numpy().tobytes()) == digest)
    other = dcs.wire(dcs.start("b"))
    assert other.call(tensor.numpy().tobytes(), op="put")["digest"] == digest
    dcs.assert_pulls([1])


def test_node_serves_more_versions_than_its_arena_holds(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start(arena_bytes=1 * MIB))
    publish(dcs.publisher(), range(1, 16))
    # saved in the background, so a moment later
    wait_until(lambda: wire.call(op="stat")["unsaved"] == 0, what="all chunks to be on disk")
    stat = wire.call(op="stat")
    assert stat["disk_used_bytes"] > 2 * stat["arena_bytes"] and stat["resident"] < stat["chunks"]
    reported = ("used_bytes", "disk_bytes", "disk_used_bytes", "chunks", "unsaved")

    def record() -> DcsNode:
        return DcsNode.decode(dcs.etcd.range(dcs.keys.dcs_nodes_prefix())[0][0].value)

    wait_until(lambda: [getattr(record(), name) for name in reported] == [stat[name] for name in reported],
               what="the node's record to say the same")
    dcs.assert_pulls([*range(1, 16), *range(15, 0, -1)])


def test_open_version_stays_in_place_while_others_come_and_go(dcs: Dcs) -> None:
    node = dcs.start(arena_bytes=1 * MIB)
    publish(dcs.publisher(), [1])
    wire = dcs.wire(node)
    puller = dcs.puller()
    first, second = puller.pull("policy", 1), puller.pull("policy", 1)
    located = first.chunks()
    fd = os.open(node.arena_path, os.O_RDONLY)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        os.close(fd)

        def unmoved() -> bool:
            return all(digest_of(memory[offset:offset + nbytes]) == d for d, offset, nbytes in located)

        assert unmoved()
        publisher = dcs.publisher()
        publish(publisher, range(2, 12))
        assert unmoved() and wire.call(op="stat")["located"] == len(located)
        assert second.chunks() == located
        first.close()
        publish(publisher, range(12, 20))
        assert unmoved()
        second.confirm()
        puller.close()
        wait_until(lambda: not wire.call(op="stat")["located"], what="the end of the reading")
        publish(publisher, range(20, 30))
        assert not unmoved(), "nothing was spilled: this test shows nothing"
    dcs.assert_pulls([1])


def test_version_larger_than_the_arena_is_refused_and_occupies_nothing(dcs: Dcs) -> None:
    dcs.start("b", arena_bytes=8 * MIB)
    wire = dcs.wire(dcs.start(arena_bytes=1 * MIB, io_timeout_s=3))
    big = {f"{name}{i}": tensor for i in range(8) for name, tensor in weights(i).items()}
    dcs.publisher("b").publish(big.items(), meta={})
    with pytest.raises(ArenaFull):
        dcs.puller().pull("policy", 1)
    wait_until(lambda: not wire.call(op="stat")["pending"], what="regions to be freed")
    assert wire.call(op="stat")["located"] == 0
    publish(dcs.publisher("b"), [2])
    dcs.assert_pulls([2])


def test_disk_at_its_limit_refuses_publishes_until_there_is_room(dcs: Dcs) -> None:
    dcs.start(arena_bytes=2 * MIB, disk_bytes=1 * MIB)
    assert_full_then_room(dcs)


def test_full_file_system_refuses_publishes_until_there_is_room(tmp_path: Path, dcs: Dcs) -> None:
    with small_disk(tmp_path / "disk", "1M") as folder:
        dcs.start(arena_bytes=2 * MIB, disk_dir=folder)
        assert_full_then_room(dcs)
        assert "has no room for a chunk" in dcs.log(), "the file system was never full: this test shows nothing"


def assert_full_then_room(dcs: Dcs) -> None:
    """Publishes to an arena of twice the disk's size until neither has room; all that was committed stays; releasing
    versions makes room again."""
    publisher, committed = dcs.publisher(), list[int]()
    with pytest.raises(DiskFull):
        for number in range(1, 30):
            publish(publisher, [number])
            committed.append(number)
    assert len(committed) in (9, 10), "what fits in the arena needs no disk"
    assert "chunks cannot be saved" in dcs.log()
    dcs.assert_pulls(committed)
    assert not list((dcs.folder / "disk").rglob("*.partial"))
    collector = GarbageCollector(dcs.etcd, dcs.keys, RetentionPolicy(2))
    dcs.closing.append(collector.close)
    wait_until(lambda: any("dropped" in line for line in collector.sweep([])), what="the drop")
    dcs.assert_pulls(committed[-2:])
    number = wait_until(lambda: try_publish(publisher, committed[-1]), what="room", poll_s=0.5)
    with contextlib.closing(dcs.puller()) as puller:
        assert puller.pull("policy", number).version.number == number
    dcs.assert_pulls(committed[-1:])


def try_publish(publisher: Publisher, seed: int) -> int:
    """A new version with new bytes; 0 while there is no room."""
    try:
        return publisher.publish(weights(seed + 100).items(), meta={}).number
    except DiskFull:
        return 0


def test_node_whose_disk_fails_says_why_and_saves_once_it_can(dcs: Dcs) -> None:
    dcs.start()
    publish(dcs.publisher(), [1])
    pid = dcs.processes["a"].pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)

    def record() -> DcsNode:
        found = dcs.etcd.get(dcs.keys.dcs_node("a"))
        assert found is not None
        return DcsNode.decode(found.value)

    wait_until(lambda: not record().unsaved, what="the first version on disk")
    assert record().disk_fault == ""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    publish(dcs.publisher(), [2])
    wait_until(lambda: "disk fails" in record().disk_fault, what="the node's word about its disk")
    dcs.assert_pulls([1, 2])
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    wait_until(lambda: not record().unsaved and not record().disk_fault, what="the second version on disk")


def test_garbage_collector_removes_dropped_chunks_from_disk(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start())
    publish(dcs.publisher(), [1, 2])
    old, new = dcs.digests(1), dcs.digests(2)
    dcs.await_saved(wire)
    assert all(dcs.file(d).exists() for d in (*old, *new))
    collector = GarbageCollector(dcs.etcd, dcs.keys, RetentionPolicy(1))
    dcs.closing.append(collector.close)

    def swept() -> bool:
        collector.sweep([])
        return not any(dcs.file(d).exists() for d in old)

    wait_until(swept, what="the removal of version 1")
    assert all(dcs.file(d).exists() for d in new)
    dcs.assert_pulls([2])


def test_two_nodes_cannot_use_the_same_folder(dcs: Dcs, etcd_servers: EtcdServers) -> None:
    dcs.start()
    for job in (f"{dcs.keys.job}-x", dcs.keys.job):
        elsewhere = spawn_node(etcd_servers.endpoints, Keys(job), "a", dcs.folder / job, arena_bytes=MIB,
                               disk_bytes=MIB,
                               disk_dir=dcs.folder / "disk")
        assert elsewhere.wait(20) == 2
        assert "PreflightFailed" in (dcs.folder / job / "a.log").read_text()
    assert "another process has" in (dcs.folder / f"{dcs.keys.job}-x" / "a.log").read_text()


def test_node_without_a_disk_creates_no_folder(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start(disk_bytes=0))
    digest = wire.call(b"x" * 100, op="put")["digest"]
    assert wire.get(digest)[1] == b"x" * 100
    assert not (dcs.folder / "disk").exists()


# -- registration ------------------------------------------------------------------------------------------------------
def test_node_whose_record_was_deleted_registers_again(dcs: Dcs) -> None:
    node = dcs.start()
    publish(dcs.publisher(), [1])
    before = dcs.etcd.get(dcs.keys.dcs_node("a"))
    dcs.etcd.delete(dcs.keys.dcs_node("a"))
    after = wait_until(lambda: dcs.etcd.get(dcs.keys.dcs_node("a")), what="the record")
    assert before is not None and after.create_revision > before.create_revision, "it counts as another registration"
    assert DcsNode.decode(after.value).pid == node.pid and after.lease
    dcs.assert_pulls([1])
    assert "registering again" in dcs.log()


def test_node_ends_when_another_process_registers_under_its_id(dcs: Dcs) -> None:
    node = dcs.start()
    other = node.replace(pid=node.pid + 1, arena_path="/dev/shm/of-another-host", host="10.0.0.9")
    dcs.etcd.delete(dcs.keys.dcs_node("a"))
    dcs.etcd.put(dcs.keys.dcs_node("a"), other.encode())
    assert dcs.processes["a"].wait(20) == 2
    assert "another process has registered as DCS node a" in dcs.log()
    kept = dcs.etcd.get(dcs.keys.dcs_node("a"))
    assert kept is not None and DcsNode.decode(kept.value) == other, "the record of the other one is gone"


def test_killed_node_restarts_while_its_old_arena_is_mapped_and_read(dcs: Dcs) -> None:
    node = dcs.start(arena_bytes=4 * MIB)
    publish(dcs.publisher(), [1, 2])
    dcs.await_saved(dcs.wire(node))
    pulled = dcs.puller().pull("policy", 1)
    tensors = dict(pulled.tensors())
    fd = os.open(node.arena_path, os.O_RDONLY)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ):  # a process that maps all of it and reads none
        dcs.kill()
        leftovers = Leftovers()  # as every node does when it starts; there may be others on this machine
        assert Path(node.arena_path) in leftovers.removed and not Path(node.arena_path).exists()
        with pytest.raises(NodeUnavailable):
            pulled.confirm()
        dcs.start(arena_bytes=4 * MIB)
        assert os.fstat(fd).st_blocks * 512 < 2 * MIB, "the memory of the old arena is still allocated"
        assert all(torch.equal(t, weights(1)[name]) for name, t in tensors.items()), "bytes changed under their reader"
        tensors.clear()
        leftovers.reclaim()
        assert os.fstat(fd).st_blocks == leftovers.nbytes == 0
    os.close(fd)
    dcs.assert_pulls([1, 2])


# -- trust -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("disk", [False, True])
def test_flipped_bit_after_the_nodes_verification_is_found_by_readers_that_verify(disk: bool, dcs: Dcs) -> None:
    node = dcs.start(verify_every_s=3600, **({} if disk else {"disk_bytes": 0}))
    publish(dcs.publisher(), [1])
    if disk:
        dcs.await_saved(dcs.wire(node))
    with dcs.puller().pull("policy", 1) as pulled, open(node.arena_path, "r+b") as arena:
        digest, offset, nbytes = pulled.chunks()[0]
        arena.seek(offset + nbytes // 2)
        byte = arena.read(1)[0]
        arena.seek(offset + nbytes // 2)
        arena.write(bytes([byte ^ 0x10]))
        arena.flush()
        with pytest.raises(ChunkCorrupt, match=digest):
            list(pulled.tensors())
        with pytest.raises(ChunkCorrupt, match=digest):
            list(load_tensors(pulled.reference(verify=True)))
        assert len(list(load_tensors(pulled.reference()))) == 4, "within verify_every_s the node's word is trusted"
        pulled.confirm()
    dcs.start("b", verify_every_s=3600)
    if disk:  # another node verifies what it receives, and then has this one look at what it has
        with dcs.puller("b").pull("policy", 1) as pulled:
            assert len(list(load_tensors(pulled.reference(verify=True)))) == 4
        return
    with pytest.raises(ChunkCorrupt, match=digest):
        dcs.puller("b").pull("policy", 1)


# -- limits ------------------------------------------------------------------------------------------------------------
def test_peer_that_stops_reading_blocks_no_other_and_is_disconnected(dcs: Dcs) -> None:
    node = dcs.start(arena_bytes=32 * MIB, max_sends=2, max_sends_per_peer=1, io_timeout_s=4)
    owner = dcs.wire(node)
    data = os.urandom(16 * MIB)
    digest = owner.call(data, op="put")["digest"]
    stuck = dcs.wire(node, hello=False, buffer_bytes=64 << 10)
    stuck.call(op="hello", job=dcs.keys.job, id="slow")
    stuck.send(op="get", digest=digest)
    wait_until(lambda: owner.call(op="has", digests=[])["load"] == 1, what="the send that is stuck")
    second = dcs.wire(node, hello=False)
    second.call(op="hello", job=dcs.keys.job, id="slow")
    second.send(op="get", digest=digest)  # the same peer's second: it is queued
    wait_until(lambda: owner.call(op="has", digests=[])["load"] == 2, what="the send that is queued")
    other = dcs.wire(node, hello=False)
    other.call(op="hello", job=dcs.keys.job, id="quick")
    assert other.get(digest)[1] == data
    assert owner.call(op="has", digests=[])["load"] == 2, "the slow peer was gone by itself: this shows nothing"
    with pytest.raises(NodeUnavailable, match="busy"):
        second.answer()
    wait_until(lambda: not owner.call(op="has", digests=[])["load"], what="the end of the stuck send")
    assert second.get(digest)[1] == data, "the freed slot is not used"
    with pytest.raises((OSError, protocol.Closed)):
        while stuck.sock.recv(1 << 20):
            pass
        raise protocol.Closed


def test_long_fetch_reports_progress(dcs: Dcs) -> None:
    source, node = dcs.start("b"), dcs.start("a", io_timeout_s=5)
    digest = dcs.wire(source).call(b"x" * CHUNK, op="put")["digest"]
    wire = dcs.wire(node)
    dcs.processes["b"].send_signal(signal.SIGSTOP)
    dcs.etcd.put(dcs.keys.dcs_node("b"), source.encode())  # without its lease: the node stays registered
    wire.send(op="fetch", digests=[digest], prefer=["b"], hold=False)
    reported = 0
    with pytest.raises(ElasticRLError):
        while True:
            header = wire.answer()[0]
            assert header.keys() == {"progress"}
            reported += 1
    assert reported >= 2


def test_node_sends_a_delta_to_a_caller_that_has_the_base(dcs: Dcs) -> None:
    node = dcs.start()
    wire = dcs.wire(node)
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
    plain = dcs.wire(dcs.start("b", delta="false"))
    base, digest = (plain.call(data, op="put")["digest"] for data in (old, bytes(new)))
    assert plain.get(digest, base=base) == ({}, new)


def test_malformed_request_is_refused_and_the_connection_stays_open(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start())
    for header in ({"op": "alloc"}, {"op": "alloc", "nbytes": -1}, {"op": "get"}, {"op": "what"}, {"op": "fetch"},
                   {"op": "release"}, {"op": "seal", "offset": 0, "nbytes": 1}):
        with pytest.raises(ConfigError):
            wire.call(**header)
    with pytest.raises(ChunkMissing):
        wire.get("0" * 32, base="1" * 32)
    assert wire.call(op="release", use="never opened") == {}
    with pytest.raises(NodeUnavailable, match="does not have that version open"):
        wire.call(op="confirm", use="never opened")
