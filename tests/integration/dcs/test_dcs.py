"""The checkpoint service on a real etcd and real node processes: publish, pull, garbage collection."""

from __future__ import annotations

import itertools
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.dcs_cluster import CHUNK, DcsCluster, assert_same, flip_a_byte, model
from support.etcd_server import EtcdServers
from support.forked import ForkedProcess
from support.waiting import wait_until

from elastic_rl.dcs.catalog import pins, reads
from elastic_rl.dcs.catalog.pairs import BEGINNING
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import (
    ArenaFull,
    ChunkCorrupt,
    ChunkMissing,
    Conflict,
    Fenced,
    NodeUnavailable,
    RecordUnreadable,
    VersionNotFound,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.host.processes import stop


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsCluster]:
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path) as out:
        yield out


@pytest.fixture(scope="module")
def one_node(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcsCluster]:
    """A running node ``a``, for tests that leave it as it is; each uses a stream of its own."""
    with EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0) as etcd:
        keys = Keys(f"t-{secrets.token_hex(6)}")
        with DcsCluster.open(etcd_servers, etcd, keys, tmp_path_factory.mktemp("one_node")) as out:
            out.start("a", arena_bytes=32 << 20)
            yield out


# -- publish and pull --------------------------------------------------------------------------------------------------
def test_version_is_pulled_bit_for_bit(one_node: DcsCluster) -> None:
    tensors = model(1)
    version = one_node.publisher(stream="whole").publish(tensors.items(), meta={"step": 3})
    assert (version.number, version.state, version.sources) == (1, VersionState.COMMITTED, ["a"])
    assert one_node.parts(1, "whole") == [["a"]]
    with one_node.puller().pull("whole") as pulled:
        assert pulled.version == version
        assert pulled.version.meta == {"step": 3}
        assert_same(pulled, tensors)
        assert [name for name, _ in mapping.load_tensors(pulled.reference())] == list(tensors)
        assert pins.pinned(one_node.etcd, one_node.keys, "whole") == {1}
    one_node.await_unpinned("whole")


def test_second_node_fetches_chunks_over_the_network(dcs: DcsCluster) -> None:
    dcs.start("a", "b")
    tensors = model(2)
    version = dcs.publisher("a").publish(tensors.items(), meta={})
    puller = dcs.puller("b")
    with puller.pull("policy", version.number) as pulled:
        assert f"{dcs.keys.job}-b-" in pulled.arena_path
        assert_same(pulled, tensors)
    dcs.stop("a")
    with puller.pull("policy", version.number) as pulled:  # from here on b needs no other node
        assert_same(pulled, tensors)


def test_commit_waits_for_replicas(dcs: DcsCluster) -> None:
    dcs.start("a")
    tensors = model(3)
    with pytest.raises(NodeUnavailable, match="2 copies"):
        dcs.publisher("a", replicas=2).publish(tensors.items(), meta={})
    assert reads.head(dcs.etcd, dcs.keys, "policy") is None
    dcs.start("b")
    version = dcs.publisher("a", replicas=2).publish(tensors.items(), meta={})
    assert version.sources == ["a", "b"] and dcs.parts(version.number) == [["a", "b"]]
    dcs.kill("a")
    dcs.require(tensors, node="b")
    dcs.start("a")  # which removes the dead one's arena


def test_second_copy_is_made_where_there_is_a_second_node(dcs: DcsCluster) -> None:
    dcs.start("a")
    publisher, tensors = dcs.publisher("a", replicas="auto"), model(3)
    assert dcs.parts(publisher.publish(tensors.items(), meta={}).number) == [["a"]]
    dcs.start("b")
    assert dcs.parts(publisher.publish(tensors.items(), meta={}).number) == [["a", "b"]]
    dcs.kill("b")  # which is still registered
    assert dcs.parts(publisher.publish(tensors.items(), meta={}).number) == [["a"]], "the loss of a host stops nobody"


def test_commit_carries_other_writes(one_node: DcsCluster) -> None:
    key = one_node.keys.root + "other"
    version = one_node.publisher(stream="also").publish(model(1).items(), meta={}, also=[Op.put(key, b"together")])
    other, record = one_node.etcd.get(key), one_node.etcd.get(one_node.keys.version("also", version.number))
    assert other and record and other.value == b"together" and other.mod_revision == record.mod_revision


def test_head_watch_follows_commits(one_node: DcsCluster) -> None:
    publisher, puller = one_node.publisher(stream="watched"), one_node.puller()
    with puller.watch_head("watched") as heads:
        assert heads.get(0.1) is None
        publisher.publish(model(1).items(), meta={})
        first = heads.get(30)
        assert first and first.number == 1
        publisher.publish(model(2).items(), meta={})
        publisher.publish(model(3).items(), meta={})
        seen = first
        while seen.number < 3:
            version = heads.get(30)
            assert version and version.number > seen.number
            seen = version
        assert heads.get(0.1) is None
    with puller.watch_head("watched") as late:
        version = late.get(30)
        assert version and version.number == 3


def test_publisher_killed_during_publish_leaves_nothing_visible(dcs: DcsCluster) -> None:
    dcs.start("a")
    before = dcs.publish(1)
    used = dcs.stat()["used_bytes"]
    doomed = ForkedProcess(["dcs_publisher", dcs.etcd_servers.endpoints[0], dcs.keys.job, str(dcs.epoch), "a",
                            str(CHUNK)], stdout=subprocess.PIPE)
    try:
        assert doomed.stdout and doomed.stdout.readline() == b"written\n"
        assert dcs.states()[2] is VersionState.STAGING
        assert dcs.stat()["pending"] > 0 and dcs.stat()["held"] == 2
        assert dcs.head() == before, "a version that is being published was visible"
        with pytest.raises(VersionNotFound, match="staging"):
            dcs.puller().pull("policy", 2)
        collector = dcs.collector()
        assert collector.sweep([]) == [], "a publish in progress was touched"
    finally:
        doomed.kill()
        assert doomed.wait(60) == -9
    dcs.await_stat(pending=0, held=0)
    lines: list[str] = []
    wait_until(lambda: lines.extend(collector.sweep([])) or "aborted policy version 2: its publisher is gone" in lines,
               what="the abort")
    collector.sweep([])
    assert dcs.stat()["used_bytes"] == used
    assert dcs.states()[2] is VersionState.ABORTED
    assert dcs.publish(2).number == 3, "its number was used again"
    dcs.require(model(1), 1)


def test_stale_epoch_is_fenced_before_and_during_a_publish(one_node: DcsCluster) -> None:
    old = one_node.publisher(stream="fenced")
    old.publish(model(1).items(), meta={})

    def overtaken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(10)
        fencing.raise_epoch(one_node.etcd, one_node.keys, "the next driver")

    with pytest.raises(Fenced):
        old.publish(overtaken(), meta={})
    with pytest.raises(Fenced):
        old.publish(model(2).items(), meta={})
    assert one_node.head("fenced").number == 1
    new = one_node.publisher(stream="fenced").publish(model(3).items(), meta={})
    assert new.number == 3  # 2 was begun by the old one
    # The stale publisher cannot abort its own version; the garbage collector does once its lease ends.
    assert one_node.states("fenced")[2] is VersionState.STAGING


def test_aborted_version_cannot_be_committed(dcs: DcsCluster) -> None:
    dcs.start("a")

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(10)
        dcs.etcd.delete(dcs.keys.staging_owner("policy", 1))  # as if the lease had ended
        assert dcs.collector().sweep([]) == ["aborted policy version 1: its publisher is gone"]

    with pytest.raises(Conflict, match="aborted"):
        dcs.publisher().publish(slow(), meta={})
    assert reads.head(dcs.etcd, dcs.keys, "policy") is None


# -- corruption and loss -----------------------------------------------------------------------------------------------
def test_flipped_byte_is_detected_and_a_valid_copy_fetched_from_a_peer(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.publish(4)
    with dcs.puller("a").pull("policy") as pulled:
        digest, offset, nbytes = pulled.chunks()[1]
        flip_a_byte(pulled.arena_path, offset + nbytes // 2)
        with pytest.raises(ChunkCorrupt, match=digest):
            list(pulled.tensors())
    for _ in range(2):  # no other copy: an error, and never wrong bytes
        with pytest.raises(ChunkCorrupt, match=digest):
            dcs.puller("a").pull("policy")

    version = dcs.publish(5)
    dcs.start("b")
    dcs.require(model(5), node="b")
    with dcs.puller("a").pull("policy") as pulled:
        flip_a_byte(pulled.arena_path, pulled.chunks()[0][1])
    dcs.require(model(5), version.number, node="a")
    assert b"is corrupt" in (dcs.folder / "a.log").read_bytes()


def test_chunk_that_no_node_has_raises_chunk_missing(dcs: DcsCluster) -> None:
    dcs.start("a")
    version = dcs.publish(1)
    dcs.stop("a")
    dcs.start("b")
    with pytest.raises(ChunkMissing, match=version.manifest):
        dcs.puller("b").pull("policy")


def test_publish_does_not_rely_on_a_corrupt_copy_of_the_same_chunk(one_node: DcsCluster) -> None:
    tensors = model(6)
    publisher = one_node.publisher(stream="again")
    publisher.publish(tensors.items(), meta={})
    with one_node.puller().pull("again") as pulled:
        flip_a_byte(pulled.arena_path, pulled.chunks()[0][1] + 100)
    publisher.publish(tensors.items(), meta={})
    one_node.require(tensors, 2, stream="again")


def test_equal_versions_share_their_chunks(one_node: DcsCluster) -> None:
    publisher = one_node.publisher(stream="equal")
    publisher.publish(model(7).items(), meta={})
    used = one_node.stat()["used_bytes"]
    publisher.publish(model(7).items(), meta={})
    assert one_node.stat()["used_bytes"] == used


def test_full_arena_refuses_and_keeps_its_versions(dcs: DcsCluster) -> None:
    dcs.start("a", arena_bytes=1 << 20)
    publisher = dcs.publisher()
    committed = []
    with pytest.raises(ArenaFull, match="no room"):
        for seed in range(1, 20):
            committed.append(publisher.publish(model(seed).items(), meta={}))  # noqa: PERF401  # it ends by an error
    assert len(committed) >= 3
    assert dcs.head() == committed[-1]
    assert dcs.states()[len(committed) + 1] is VersionState.ABORTED
    for version in committed:
        dcs.require(model(version.number), version.number)
    dcs.await_stat(held=0)
    dcs.collector(keep_versions=1).sweep([])
    version = publisher.publish(model(50).items(), meta={})
    assert version.number == len(committed) + 2
    dcs.require(model(50))


# -- garbage collection ------------------------------------------------------------------------------------------------
def test_collector_releases_old_versions_but_no_pinned_one(dcs: DcsCluster) -> None:
    dcs.start("a")
    publisher, puller, collector = dcs.publisher(), dcs.puller(), dcs.collector(keep_versions=2)
    publisher.publish(model(1).items(), meta={})
    with puller.pull("policy", 1) as pulled:
        for seed in range(2, 6):
            publisher.publish(model(seed).items(), meta={})
        lines = collector.sweep([])
        assert [line for line in lines if line.startswith("released")] == [
            "released policy version 2", "released policy version 3"]
        assert_same(pulled, model(1))
        with pytest.raises(VersionNotFound, match="gone"):
            puller.pull("policy", 2)
        with puller.pull("policy", 4) as kept:
            assert_same(kept, model(4))
    dcs.await_unpinned()
    assert "released policy version 1" in collector.sweep([])
    assert dcs.stat()["held"] == 0
    needed = set()
    for number in (4, 5):  # two versions and their manifests are left
        with puller.pull("policy", number) as pulled:
            needed |= {pulled.version.manifest, *pulled.manifest.chunks}
    assert dcs.stat()["chunks"] == len(needed)


def test_collector_keeps_the_newest_pair_of_two_streams_until_there_is_a_newer_one(dcs: DcsCluster) -> None:
    dcs.start("a")
    policy, critic = dcs.publisher(stream="trainer_state"), dcs.publisher(stream="critic_state")
    collector = dcs.collector(keep_versions=1, paired=[("trainer_state", "critic_state")])

    def kept() -> list[list[int]]:
        collector.sweep([])
        return [[v.number for v in reads.list_versions(dcs.etcd, dcs.keys, stream)
                 if v.state is VersionState.COMMITTED] for stream in ("trainer_state", "critic_state")]

    for pair in (BEGINNING, "2/a", "4/b"):
        policy.publish(model(1).items(), meta={"pair": pair})
    assert kept() == [[1, 3], []], "the critic's beginning is not published"
    critic.publish(model(1).items(), meta={"pair": "4/b"})
    assert kept() == [[3], [1]]
    policy.publish(model(1).items(), meta={"pair": "6/c"})
    critic.publish(model(1).items(), meta={"pair": "6/again"})
    assert kept() == [[3, 4], [1, 2]], "they were made by different updates"
    policy.publish(model(1).items(), meta={"pair": "6/again"})
    assert kept() == [[5], [2]]


def test_collector_that_no_longer_leads_changes_nothing(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.publish(1, 2, 3, 4)
    not_leading = [Compare.exists(ClusterKeys(dcs.keys.job).leader("nobody"))]
    assert dcs.collector(keep_versions=1).sweep(not_leading) == []
    assert set(dcs.states().values()) == {VersionState.COMMITTED}


def test_unreadable_record_stops_the_drop_and_nothing_else(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.publish(1, 2, 3)
    key, chunks = dcs.keys.version("policy", 1), dcs.stat()["chunks"]
    record = dcs.etcd.get(key)
    assert record is not None
    dcs.etcd.put(key, b'{"stream": "policy", "number": 1, "state": "resting"}')
    with pytest.raises(RecordUnreadable, match=f"{key} cannot be decoded"):
        dcs.collector(keep_versions=1).sweep([])
    gone = Version.decode(dcs.etcd.get(dcs.keys.version("policy", 2)).value)
    assert gone.state is VersionState.GONE, "the other versions wait for a person"
    assert dcs.stat()["chunks"] == chunks
    dcs.etcd.put(key, record.value)
    dcs.require(model(1), 1)


def test_pull_continues_while_versions_are_published_and_swept(dcs: DcsCluster) -> None:
    """Drop against deduplication: every second version has the chunks of one that was released long ago."""
    dcs.start("a")
    publisher, puller, collector = dcs.publisher(), dcs.puller(), dcs.collector(keep_versions=1)
    end = time.monotonic() + 3
    for n in itertools.count(1):
        seed = n % 4
        version = publisher.publish(model(seed).items(), meta={})
        with puller.pull("policy", version.number) as pulled:
            collector.sweep([])
            assert_same(pulled, model(seed))
        if n > 8 and time.monotonic() > end:
            break


# -- nodes -------------------------------------------------------------------------------------------------------------
def test_arena_of_a_killed_node_is_removed_by_the_next_start(dcs: DcsCluster) -> None:
    dcs.start("a")
    publisher = dcs.publisher()
    publisher.publish(model(1).items(), meta={})
    arena = next(SHM.glob(f"elastic-rl-{dcs.keys.job}-a-*"))
    dcs.processes["a"].kill()
    dcs.processes["a"].wait(60)
    assert arena.exists(), "the fault did not happen"
    with pytest.raises(NodeUnavailable):
        publisher.publish(model(2).items(), meta={})
    dcs.start("a")
    assert not arena.exists()
    version = publisher.publish(model(3).items(), meta={})  # the same publisher finds the new node
    dcs.require(model(3), version.number)


def test_node_that_dies_between_seal_and_commit_fails_the_commit(dcs: DcsCluster) -> None:
    dcs.start("a")

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(10)
        dcs.processes["a"].kill()
        dcs.processes["a"].wait(60)
        dcs.start("a")

    publisher = dcs.publisher()
    with pytest.raises((NodeUnavailable, Conflict)):
        publisher.publish(dying(), meta={})
    assert reads.head(dcs.etcd, dcs.keys, "policy") is None
    assert publisher.publish(model(1).items(), meta={}).number == 2


def test_second_node_of_the_same_id_is_refused(dcs: DcsCluster) -> None:
    first = dcs.start_node("a")
    process = dcs.processes["a"]
    assert dcs.launch("a").wait(20) == 2
    dcs.processes["a"] = process
    assert b"PreflightFailed" in (dcs.folder / "a.log").read_bytes()
    assert [n.pid for n in dcs.registered()] == [first.pid]


def test_too_little_shared_memory_is_reported_with_numbers(dcs: DcsCluster) -> None:
    assert dcs.launch("a", arena_bytes=1 << 46).wait(20) == 2
    text = (dcs.folder / "a.log").read_text()
    assert "PreflightFailed" in text and f"dcs.arena_bytes={1 << 46}" in text and "MiB free" in text
    assert not dcs.registered()


def test_node_that_ends_deregisters(dcs: DcsCluster) -> None:
    dcs.start("a")
    roster = dcs.keys.registry_entry("dcs", "a")
    dcs.etcd.put(roster, b"{}")
    stop(dcs.processes["a"].pid)
    assert dcs.processes["a"].wait(60) == 0
    assert not dcs.registered() and dcs.etcd.get(roster) is None


def test_noise_on_the_port_is_ignored(one_node: DcsCluster) -> None:
    [node] = one_node.registered()
    one_node.publish(1, stream="noise")
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 3, b"eRL1" + b"\xff" * 12, secrets.token_bytes(4096)):
        with socket.create_connection((node.host, node.port), timeout=5) as s:
            s.sendall(noise)
            try:
                assert s.recv(1) == b""
            except ConnectionResetError:
                pass
    one_node.require(model(1), stream="noise")
