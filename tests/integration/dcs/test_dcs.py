"""The checkpoint service on a real etcd and real node processes."""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers

from elastic_rl.dcs.catalog import catalog
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.tensors import checksum
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import (
    ArenaFull,
    ChunkCorrupt,
    ChunkMissing,
    Conflict,
    Fenced,
    NodeUnavailable,
    VersionNotFound,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, VersionState
from elastic_rl.host.processes import stop
from elastic_rl.runtime import wait_until

CHUNK = 64 << 10


@dataclass
class Cluster:
    """Nodes of one job, and clients that are closed with it."""

    etcd_servers: EtcdServers
    etcd: EtcdClient
    keys: Keys
    folder: Path
    epoch: int = 0
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    closing: list[Callable[[], object]] = field(default_factory=list)
    _names: Iterator[int] = field(default_factory=lambda: itertools.count())

    def launch(self, node_id: str, **dcs: object) -> subprocess.Popen[bytes]:
        options = {"arena_bytes": 4 << 20, "orphan_grace_s": 0, **dcs}
        process = self.nodes[node_id] = spawn_node(self.etcd_servers.endpoints, self.keys, node_id, self.folder,
                                                   **options)
        return process

    def start(self, node_id: str, **dcs: object) -> DcsNode:
        """Starts a node and waits for its registration."""
        return await_node(self.etcd, self.keys, self.launch(node_id, **dcs))

    def registered(self) -> list[DcsNode]:
        return [DcsNode.decode(kv.value) for kv in self.etcd.range(self.keys.dcs_nodes_prefix())[0]]

    def publisher(self, node: str = "a", *, stream: str = "policy", epoch: int | None = None, chunk_bytes: int = CHUNK,
                  replicas: int = 1) -> Publisher:
        out = Publisher(self.etcd, self.keys, stream, epoch=epoch or self.epoch, owner=f"test-{next(self._names)}",
                        chunk_bytes=chunk_bytes, replicas=replicas, staging_ttl_s=2, io_timeout_s=10, node=node)
        self.closing.append(out.close)
        return out

    def puller(self, node: str = "a") -> Puller:
        out = Puller(self.etcd, self.keys, f"test-{next(self._names)}", io_timeout_s=10, node=node)
        self.closing.append(out.close)
        return out

    def janitor(self, keep_versions: int = 2) -> GarbageCollector:
        out = GarbageCollector(self.etcd, self.keys, RetentionPolicy(keep_versions))
        self.closing.append(out.close)
        return out

    def stat(self, node: str = "a") -> dict[str, int]:
        hub = DcsClient(self.etcd, self.keys, io_timeout_s=5)
        try:
            return hub.connect(node).stat()
        finally:
            hub.close()

    def close(self) -> None:
        for close in reversed(self.closing):
            close()
        for process in self.nodes.values():
            stop(process.pid)
            process.wait(10)


@pytest.fixture
def cluster(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Cluster]:
    out = Cluster(etcd_servers, etcd, keys, tmp_path, fencing.raise_epoch(etcd, keys, "test").number)
    try:
        yield out
    finally:
        out.close()
        assert not list(SHM.glob(f"elastic-rl-{keys.job}-*")), "a node left its arena behind"


def model(seed: int, *, nbytes: int = 200_000) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes; the largest spans several chunks."""
    g = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(nbytes // 4, generator=g),
        "bf16": torch.randn(33, 7, generator=g).bfloat16(),
        "fp8": torch.randn(65, generator=g).to(torch.float8_e4m3fn),
        "turned": torch.randn(12, 20, generator=g).t(),
        "scalar": torch.tensor(float(seed), dtype=torch.float64),
        "none": torch.empty(0, 5),
        "flags": torch.rand(100, generator=g) > 0.5,
        "rng": torch.randint(0, 255, (5056,), generator=g, dtype=torch.uint8),
    }


def assert_same(pulled: Pulled, expected: dict[str, torch.Tensor]) -> None:
    got = list(pulled.tensors())
    assert [name for name, _ in got] == list(expected)
    for name, tensor in got:
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert checksum(tensor) == checksum(expected[name]), name


def flip_a_byte(path: str, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 0) as memory:
        memory[offset] ^= 0x40
    os.close(fd)


def test_what_is_published_is_pulled_bit_for_bit(cluster: Cluster) -> None:
    cluster.start("a")
    tensors = model(1)
    version = cluster.publisher().publish(tensors.items(), meta={"step": 3})
    assert (version.number, version.state, version.nodes) == (1, VersionState.COMMITTED, ["a"])
    with cluster.puller().pull("policy") as pulled:
        assert pulled.version == version
        assert pulled.version.meta == {"step": 3}
        assert_same(pulled, tensors)
        assert [name for name, _ in mapping.load_tensors(pulled.reference())] == list(tensors)
        assert catalog.pinned(cluster.etcd, cluster.keys, "policy") == {1}
    wait_until(lambda: catalog.pinned(cluster.etcd, cluster.keys, "policy") == set(), timeout_s=10,
               what="the end of the pin")


def test_a_second_node_gets_the_chunks_over_the_network(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.start("b")
    tensors = model(2)
    version = cluster.publisher("a").publish(tensors.items(), meta={})
    puller = cluster.puller("b")
    with puller.pull("policy", version.number) as pulled:
        assert f"{cluster.keys.job}-b-" in pulled.arena_path
        assert_same(pulled, tensors)
    stop(cluster.nodes["a"].pid)
    with puller.pull("policy", version.number) as pulled:  # from here on b needs nobody
        assert_same(pulled, tensors)


def test_replicas_are_there_before_the_commit(cluster: Cluster) -> None:
    cluster.start("a")
    tensors = model(3)
    with pytest.raises(NodeUnavailable, match="2 copies"):
        cluster.publisher("a", replicas=2).publish(tensors.items(), meta={})
    assert catalog.head(cluster.etcd, cluster.keys, "policy") is None
    cluster.start("b")
    version = cluster.publisher("a", replicas=2).publish(tensors.items(), meta={})
    assert version.nodes == ["a", "b"]
    cluster.nodes["a"].kill()
    cluster.nodes["a"].wait(5)
    with cluster.puller("b").pull("policy") as pulled:
        assert_same(pulled, tensors)
    cluster.start("a")  # which removes the dead one's arena


def test_a_commit_carries_other_writes_with_it(cluster: Cluster) -> None:
    cluster.start("a")
    key = cluster.keys.root + "other"
    version = cluster.publisher().publish(model(1).items(), meta={}, also=[Op.put(key, b"together")])
    other, record = cluster.etcd.get(key), cluster.etcd.get(cluster.keys.version("policy", version.number))
    assert other and record and other.value == b"together" and other.mod_revision == record.mod_revision


def test_the_head_is_watched(cluster: Cluster) -> None:
    cluster.start("a")
    publisher, puller = cluster.publisher(), cluster.puller()
    with puller.watch_head("policy") as heads:
        assert heads.get(0.1) is None
        publisher.publish(model(1).items(), meta={})
        first = heads.get(5)
        assert first and first.number == 1
        publisher.publish(model(2).items(), meta={})
        publisher.publish(model(3).items(), meta={})
        seen = first
        while seen.number < 3:
            version = heads.get(5)
            assert version and version.number > seen.number
            seen = version
        assert heads.get(0.1) is None
    with puller.watch_head("policy") as late:
        version = late.get(5)
        assert version and version.number == 3


def test_a_publisher_killed_in_the_middle_leaves_nothing_visible_and_its_number_is_not_used_again(
        cluster: Cluster) -> None:
    cluster.start("a")
    before = cluster.publisher().publish(model(1).items(), meta={})
    used = cluster.stat()["used_bytes"]
    script = Path(__file__).with_name("dcs_publisher.py")
    doomed = subprocess.Popen([sys.executable, str(script), cluster.etcd_servers.endpoints[0], cluster.keys.job,
                               str(cluster.epoch), "a", str(CHUNK)], stdout=subprocess.PIPE)
    try:
        assert doomed.stdout and doomed.stdout.readline() == b"written\n"
        staged = catalog.get_version(cluster.etcd, cluster.keys, "policy", 2)
        assert staged and staged.state is VersionState.STAGING
        assert cluster.stat()["pending"] > 0 and cluster.stat()["held"] == 2
        head = catalog.head(cluster.etcd, cluster.keys, "policy")
        assert head == before, "a version that is being published was visible"
        with pytest.raises(VersionNotFound, match="staging"):
            cluster.puller().pull("policy", 2)
        janitor = cluster.janitor()
        assert janitor.sweep([]) == [], "the janitor touched a publish in progress"
    finally:
        doomed.kill()
        assert doomed.wait(5) == -9
    wait_until(lambda: cluster.stat()["pending"] == 0 and cluster.stat()["held"] == 0, timeout_s=5,
               what="the node's clean-up after its publisher")
    lines: list[str] = []
    wait_until(lambda: lines.extend(janitor.sweep([])) or "aborted policy version 2: its publisher is gone" in lines,
               timeout_s=10, what="the abort")
    janitor.sweep([])
    assert cluster.stat()["used_bytes"] == used
    aborted = catalog.get_version(cluster.etcd, cluster.keys, "policy", 2)
    assert aborted and aborted.state is VersionState.ABORTED
    after = cluster.publisher().publish(model(2).items(), meta={})
    assert after.number == 3
    with cluster.puller().pull("policy", 1) as pulled:
        assert_same(pulled, model(1))


def test_a_stale_epoch_is_refused_before_and_in_the_middle_of_a_publish(cluster: Cluster) -> None:
    cluster.start("a")
    old = cluster.publisher()
    old.publish(model(1).items(), meta={})

    def overtaken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(10)
        fencing.raise_epoch(cluster.etcd, cluster.keys, "the next driver")

    with pytest.raises(Fenced):
        old.publish(overtaken(), meta={})
    with pytest.raises(Fenced):
        old.publish(model(2).items(), meta={})
    head = catalog.head(cluster.etcd, cluster.keys, "policy")
    assert head and head.number == 1
    new = cluster.publisher(epoch=cluster.epoch + 1).publish(model(3).items(), meta={})
    assert new.number == 3  # 2 was begun by the old one
    # the stale publisher cannot even abort its own; the janitor does once its lease ends
    assert catalog.get_version(cluster.etcd, cluster.keys, "policy", 2).state is VersionState.STAGING  # type: ignore


def test_an_aborted_publish_cannot_commit_late(cluster: Cluster) -> None:
    cluster.start("a")

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(10)
        cluster.etcd.delete(cluster.keys.staging_owner("policy", 1))  # as if the lease had ended
        assert cluster.janitor().sweep([]) == ["aborted policy version 1: its publisher is gone"]

    with pytest.raises(Conflict, match="aborted"):
        cluster.publisher().publish(slow(), meta={})
    assert catalog.head(cluster.etcd, cluster.keys, "policy") is None


def test_a_flipped_byte_is_detected_and_a_good_copy_taken_from_a_peer(cluster: Cluster) -> None:
    cluster.start("a")
    tensors = model(4)
    cluster.publisher("a").publish(tensors.items(), meta={})
    with cluster.puller("a").pull("policy") as pulled:
        digest, offset, nbytes = pulled.chunks()[1]
        flip_a_byte(pulled.arena_path, offset + nbytes // 2)
        with pytest.raises(ChunkCorrupt, match=digest):
            list(pulled.tensors())
    for _ in range(2):  # no other copy: an error, and never wrong bytes
        with pytest.raises(ChunkCorrupt, match=digest):
            cluster.puller("a").pull("policy")

    tensors = model(5)
    version = cluster.publisher("a").publish(tensors.items(), meta={})
    cluster.start("b")
    with cluster.puller("b").pull("policy") as pulled:
        assert_same(pulled, tensors)
    with cluster.puller("a").pull("policy") as pulled:
        flip_a_byte(pulled.arena_path, pulled.chunks()[0][1])
    with cluster.puller("a").pull("policy", version.number) as pulled:
        assert_same(pulled, tensors)
    assert b"is corrupt" in (cluster.folder / "a.log").read_bytes()


def test_a_chunk_that_no_node_has_is_told_as_missing(cluster: Cluster) -> None:
    cluster.start("a")
    version = cluster.publisher("a").publish(model(1).items(), meta={})
    stop(cluster.nodes["a"].pid)
    cluster.start("b")
    with pytest.raises(ChunkMissing, match=version.manifest):
        cluster.puller("b").pull("policy")


def test_a_publish_does_not_rest_on_a_corrupt_copy_of_the_same_chunk(cluster: Cluster) -> None:
    cluster.start("a")
    tensors = model(6)
    publisher = cluster.publisher()
    publisher.publish(tensors.items(), meta={})
    with cluster.puller().pull("policy") as pulled:
        flip_a_byte(pulled.arena_path, pulled.chunks()[0][1] + 100)
    publisher.publish(tensors.items(), meta={})
    with cluster.puller().pull("policy", 2) as pulled:
        assert_same(pulled, tensors)


def test_equal_versions_share_their_chunks(cluster: Cluster) -> None:
    cluster.start("a")
    publisher = cluster.publisher()
    publisher.publish(model(1).items(), meta={})
    used = cluster.stat()["used_bytes"]
    publisher.publish(model(1).items(), meta={})
    assert cluster.stat()["used_bytes"] == used


def test_a_full_arena_refuses_and_keeps_what_it_has(cluster: Cluster) -> None:
    cluster.start("a", arena_bytes=1 << 20)
    publisher = cluster.publisher()
    committed = []
    with pytest.raises(ArenaFull, match="no room"):
        for seed in range(1, 20):
            committed.append(publisher.publish(model(seed).items(), meta={}))
    assert len(committed) >= 3
    head = catalog.head(cluster.etcd, cluster.keys, "policy")
    assert head == committed[-1]
    failed = catalog.get_version(cluster.etcd, cluster.keys, "policy", len(committed) + 1)
    assert failed and failed.state is VersionState.ABORTED
    for version in committed:
        with cluster.puller().pull("policy", version.number) as pulled:
            assert_same(pulled, model(version.number))
    wait_until(lambda: cluster.stat()["held"] == 0, timeout_s=5, what="the end of the holds")
    cluster.janitor(keep_versions=1).sweep([])
    version = publisher.publish(model(50).items(), meta={})
    assert version.number == len(committed) + 2
    with cluster.puller().pull("policy") as pulled:
        assert_same(pulled, model(50))


def test_the_janitor_releases_old_versions_but_none_that_is_pinned(cluster: Cluster) -> None:
    cluster.start("a")
    publisher, puller, janitor = cluster.publisher(), cluster.puller(), cluster.janitor(keep_versions=2)
    publisher.publish(model(1).items(), meta={})
    with puller.pull("policy", 1) as pulled:
        for seed in range(2, 6):
            publisher.publish(model(seed).items(), meta={})
        lines = janitor.sweep([])
        assert [line for line in lines if line.startswith("released")] == [
            "released policy version 2", "released policy version 3"]
        assert_same(pulled, model(1))
        with pytest.raises(VersionNotFound, match="gone"):
            puller.pull("policy", 2)
        with puller.pull("policy", 4) as kept:
            assert_same(kept, model(4))
    assert "released policy version 1" in janitor.sweep([])
    assert cluster.stat()["held"] == 0
    # two versions and their manifests are left
    assert cluster.stat()["chunks"] == len({d for n in (4, 5) for d in _digests(puller, n)})


def _digests(puller: Puller, number: int) -> list[str]:
    with puller.pull("policy", number) as pulled:
        return [pulled.version.manifest, *pulled.manifest.chunks]


def test_a_janitor_that_no_longer_leads_changes_nothing(cluster: Cluster) -> None:
    cluster.start("a")
    publisher = cluster.publisher()
    for seed in range(1, 5):
        publisher.publish(model(seed).items(), meta={})
    over = [Compare.exists(cluster.keys.leader("nobody"))]
    assert cluster.janitor(keep_versions=1).sweep(over) == []
    states = {v.state for v in catalog.list_versions(cluster.etcd, cluster.keys, "policy")}
    assert states == {VersionState.COMMITTED}


def test_a_pull_goes_on_while_versions_are_published_and_swept(cluster: Cluster) -> None:
    """Drop against dedup: every second version has the chunks of one that was released long ago."""
    cluster.start("a")
    publisher, puller, janitor = cluster.publisher(), cluster.puller(), cluster.janitor(keep_versions=1)
    end = time.monotonic() + 3
    for n in itertools.count(1):
        seed = n % 4
        version = publisher.publish(model(seed).items(), meta={})
        with puller.pull("policy", version.number) as pulled:
            janitor.sweep([])
            assert_same(pulled, model(seed))
        if time.monotonic() > end:
            break
    assert n > 8


def test_a_killed_node_leaves_an_arena_that_the_next_start_removes(cluster: Cluster) -> None:
    cluster.start("a")
    publisher = cluster.publisher()
    publisher.publish(model(1).items(), meta={})
    arena = next(SHM.glob(f"elastic-rl-{cluster.keys.job}-a-*"))
    cluster.nodes["a"].kill()
    cluster.nodes["a"].wait(5)
    assert arena.exists(), "the fault did not happen"
    with pytest.raises(NodeUnavailable):
        publisher.publish(model(2).items(), meta={})
    cluster.start("a")
    assert not arena.exists()
    version = publisher.publish(model(3).items(), meta={})  # the same publisher finds the new node
    with cluster.puller().pull("policy", version.number) as pulled:
        assert_same(pulled, model(3))


def test_a_node_that_dies_between_seal_and_commit_makes_the_commit_fail(cluster: Cluster) -> None:
    cluster.start("a")

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(10)
        cluster.nodes["a"].kill()
        cluster.nodes["a"].wait(5)
        cluster.start("a")

    publisher = cluster.publisher()
    with pytest.raises((NodeUnavailable, Conflict)):
        publisher.publish(dying(), meta={})
    assert catalog.head(cluster.etcd, cluster.keys, "policy") is None
    assert publisher.publish(model(1).items(), meta={}).number == 2


def test_a_second_node_of_the_same_name_is_refused(cluster: Cluster) -> None:
    first = cluster.start("a")
    second = cluster.launch("a")
    assert second.wait(20) == 2
    assert b"MachineUnfit" in (cluster.folder / "a.log").read_bytes()
    assert [n.pid for n in cluster.registered()] == [first.pid]
    stop(first.pid)


def test_too_little_shared_memory_is_told_with_numbers(cluster: Cluster) -> None:
    assert cluster.launch("a", arena_bytes=1 << 46).wait(20) == 2
    text = (cluster.folder / "a.log").read_text()
    assert "MachineUnfit" in text and f"dcs.arena_bytes={1 << 46}" in text and "MiB free" in text
    assert not cluster.registered()


def test_a_node_that_ends_says_good_bye(cluster: Cluster) -> None:
    cluster.start("a")
    roster = cluster.keys.roster("dcs", "a")
    cluster.etcd.put(roster, b"{}")
    stop(cluster.nodes["a"].pid)
    assert cluster.nodes["a"].wait(5) == 0
    assert not cluster.registered() and cluster.etcd.get(roster) is None


def test_noise_on_the_port_harms_nobody(cluster: Cluster) -> None:
    import socket
    node = cluster.start("a")
    cluster.publisher().publish(model(1).items(), meta={})
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 3, b"eRL1" + b"\xff" * 12, secrets.token_bytes(4096)):
        with socket.create_connection((node.host, node.port), timeout=5) as s:
            s.sendall(noise)
            try:
                assert s.recv(1) == b""
            except ConnectionResetError:
                pass
    with cluster.puller().pull("policy") as pulled:
        assert_same(pulled, model(1))
