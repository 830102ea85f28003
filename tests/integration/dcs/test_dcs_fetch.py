"""Nodes that fetch chunks from each other, over links with a fixed speed that fail."""

from __future__ import annotations

import itertools
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dcs_nodes import await_node
from support.etcd_server import EtcdServers
from support.forked import spawn
from support.tcp_link import Link, Links, Tamper
from support.waiting import wait_until

from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.tensors import checksum
from elastic_rl.dcs.fetch.mapping import load_tensors
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import ChunkMissing, ElasticRLError, NodeUnavailable, StagingFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, Version
from elastic_rl.host.processes import stop
from elastic_rl.net.addresses import free_port

MIB = 1 << 20
CHUNK = 128 << 10
SOURCE = "source"


@dataclass
class Fleet:
    """Nodes of one job, each behind a link of its own, and clients that are closed with it."""

    etcd_servers: EtcdServers
    etcd: EtcdClient
    keys: Keys
    folder: Path
    links: Links
    epoch: int
    bytes_per_s: float = 8 * MIB
    """Rate of the links of nodes that are started from now on."""
    link: dict[str, Link] = field(default_factory=dict)
    port: dict[str, int] = field(default_factory=dict)
    process: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    closing: list[Callable[[], object]] = field(default_factory=list)
    _names: Iterator[int] = field(default_factory=itertools.count)

    def start(self, *node_ids: str, **dcs: object) -> list[DcsNode]:
        """Starts nodes, or starts them again, and waits for them."""
        for node_id in node_ids:
            self._launch(node_id, **dcs)
        return [await_node(self.etcd, self.keys, self.process[n]) for n in node_ids]

    def _launch(self, node_id: str, **dcs: object) -> None:
        if node_id not in self.link:
            self.port[node_id] = free_port()
            self.link[node_id] = self.links.add(self.port[node_id], self.bytes_per_s)
        settings = {"arena_bytes": 32 * MIB, "disk_bytes": 0, "disk_dir": self.folder / "disk", "orphan_grace_s": 0,
                    "delta": "false", "port": self.port[node_id], "advertise_port": self.link[node_id].port, **dcs}
        self.process[node_id] = spawn(
            "elastic_rl.dcs.node.service", "--etcd", ",".join(self.etcd_servers.endpoints), "--id", node_id,
            "--no-token", f"--job={self.keys.job}", f"--run_dir={self.folder / 'runs'}",
            "--coordinator.lease_ttl_s=10", "--etcd.call_timeout_s=2",
            *(f"--dcs.{key}={value}" for key, value in settings.items()), log=self.folder / f"{node_id}.log")

    def publisher(self, node: str = SOURCE) -> Publisher:
        out = Publisher(self.etcd, self.keys, "policy", epoch=self.epoch, owner=f"test-{next(self._names)}",
                        chunk_bytes=CHUNK, staging_ttl_s=10, io_timeout_s=30, node=node)
        self.closing.append(out.close)
        return out

    def puller(self, node: str) -> Puller:
        out = Puller(self.etcd, self.keys, f"test-{next(self._names)}", io_timeout_s=30, node=node)
        self.closing.append(out.close)
        return out

    def publish(self, tensors: dict[str, torch.Tensor]) -> Version:
        return self.publisher().publish(tensors.items(), meta={})

    def sent(self, *node_ids: str) -> int:
        """Bytes out of nodes, over their links."""
        return sum(self.link[n].sent.nbytes for n in node_ids)

    def stat(self, node: str) -> dict[str, int]:
        client = DcsClient(self.etcd, self.keys, io_timeout_s=10)
        try:
            return client.connect(node).stat()
        finally:
            client.close()

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text()

    def kill(self, node: str) -> None:
        self.process[node].kill()
        self.process[node].wait(60)

    def close(self) -> None:
        for close in reversed(self.closing):
            close()
        for process in self.process.values():
            stop(process.pid)
            process.wait(60)


@pytest.fixture
def fleet(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Fleet]:
    with Links() as links:
        out = Fleet(etcd_servers, etcd, keys, tmp_path, links, fencing.raise_epoch(etcd, keys, "test").number)
        try:
            yield out
        finally:
            out.close()
    for path in SHM.glob(f"elastic-rl-{keys.job}-*"):
        path.unlink()  # of a node that a test killed


def weights(seed: int, nbytes: int = 4 * MIB) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randint(0, 256, (nbytes // 4,), generator=g, dtype=torch.uint8).view(torch.bfloat16)
            for i in range(4)}


def assert_same(pulled: Pulled, expected: dict[str, torch.Tensor]) -> None:
    assert {name: checksum(t) for name, t in pulled.tensors()} == {n: checksum(t) for n, t in expected.items()}


class InBackground:
    """A pull in a thread."""

    def __init__(self, puller: Puller) -> None:
        self.seen: list[tuple[int, int]] = []
        self._pool = ThreadPoolExecutor(1)
        self._pull = self._pool.submit(puller.pull, "policy", on_progress=lambda *p: self.seen.append(p))
        self._pool.shutdown(wait=False)

    @property
    def over(self) -> bool:
        return self._pull.done()

    def result(self) -> Pulled:
        return self._pull.result(60)

    def error(self) -> BaseException | None:
        return self._pull.exception(60)


def test_fleet_of_eight_fills_mostly_from_one_another(fleet: Fleet) -> None:
    names = [f"n{i}" for i in range(8)]
    fleet.start(SOURCE, *names)
    tensors = weights(1)
    nbytes = fleet.publish(tensors).nbytes
    before = fleet.sent(SOURCE)
    with ThreadPoolExecutor(len(names)) as pool:
        pulls = list(pool.map(lambda n: fleet.puller(n).pull("policy"), names))
    for pulled in pulls:
        assert_same(pulled, tensors)
    # About two copies on a quiet machine, as in the simulated fleets of the unit tests; on a busy one nodes learn of
    # each other's chunks late.
    assert fleet.sent(SOURCE) - before <= 5 * nbytes
    assert fleet.sent(SOURCE, *names) >= 8 * nbytes, "the bytes did not go over the links"


def test_pull_survives_a_node_killed_while_it_sends(fleet: Fleet) -> None:
    fleet.bytes_per_s = MIB
    fleet.start(SOURCE, "a", "b")
    tensors = weights(2)
    fleet.publish(tensors)
    fleet.puller("a").pull("policy").close()
    before = fleet.sent("a")
    pull = InBackground(fleet.puller("b"))
    wait_until(lambda: fleet.sent("a") > before + 2 * CHUNK, what="a to send to b")
    fleet.kill("a")
    assert not pull.over, "the fault came too late"
    with pull.result() as pulled:
        assert_same(pulled, tensors)
    # It was killed in the middle of a chunk, or while b asked for the next one.
    assert re.search("not received from node a|a at .* does not answer: .*reset", fleet.log("b"))


def test_chunks_of_a_stalled_node_come_from_another(fleet: Fleet) -> None:
    fleet.bytes_per_s = MIB
    fleet.start(SOURCE, "a", "b", hedge_after_s=0.5)
    tensors = weights(3)
    fleet.publish(tensors)
    fleet.puller("a").pull("policy").close()
    before = fleet.sent("a")
    pull = InBackground(fleet.puller("b"))
    wait_until(lambda: fleet.sent("a") > before + 2 * CHUNK, what="a to send to b")
    fleet.link["a"].pause()
    wait_until(lambda: fleet.link["a"].held, what="bytes that are held back")
    assert not pull.over, "the fault came too late"
    with pull.result() as pulled:  # long before the node gives up on a, after 30 s
        assert_same(pulled, tensors)
    assert fleet.link["a"].held, "a was no longer stalled"
    assert "does not answer" not in fleet.log("b")


def test_pull_after_a_restart_of_its_node_fetches_only_what_is_missing(fleet: Fleet) -> None:
    fleet.start(SOURCE, "a", disk_bytes=64 * MIB)
    tensors = weights(4)
    nbytes = fleet.publish(tensors).nbytes
    before = fleet.sent(SOURCE)
    pull = InBackground(fleet.puller("a"))
    wait_until(lambda: fleet.sent(SOURCE) - before > nbytes // 2, what="half of the version")
    fleet.link[SOURCE].pause()
    wait_until(lambda: _saved(fleet, "a") > nbytes // 4, what="chunks on disk")
    fleet.kill("a")
    fleet.link[SOURCE].resume()
    assert isinstance(pull.error(), NodeUnavailable)
    kept = sum(p.stat().st_size for p in (fleet.folder / "disk" / "a").glob("??/*") if "." not in p.name)
    assert kept > nbytes // 4
    fleet.start("a", disk_bytes=64 * MIB)
    before = fleet.sent(SOURCE)
    with fleet.puller("a").pull("policy") as pulled:
        assert_same(pulled, tensors)
    assert fleet.sent(SOURCE) - before < nbytes - kept + nbytes // 10


def _saved(fleet: Fleet, node: str) -> int:
    stat = fleet.stat(node)
    return 0 if stat["unsaved"] else stat["disk_used_bytes"]


def test_concurrent_pulls_of_one_version_make_one_transfer_and_one_pin(fleet: Fleet) -> None:
    fleet.start(SOURCE, "a")
    tensors = weights(5)
    nbytes = fleet.publish(tensors).nbytes
    before = fleet.sent(SOURCE)
    pulls = [InBackground(fleet.puller("a")) for _ in range(4)]
    found = [pull.result() for pull in pulls]
    for pulled in found:
        assert_same(pulled, tensors)
    assert fleet.sent(SOURCE) - before < 1.2 * nbytes
    prefix = fleet.keys.pins_prefix("policy")
    assert [kv.key.rpartition("/")[2] for kv in fleet.etcd.range(prefix)[0]] == ["node-a.1"]
    assert fleet.stat("a")["located"] == len(found[0].manifest.chunks), "each chunk is in the arena once"
    assert len({tuple(pulled.reference()["map"]) for pulled in found}) == 1, "the manifest was decoded more than once"
    for pulled in found:
        pulled.confirm()
        pulled.close()
    wait_until(lambda: not fleet.etcd.range(prefix)[0], what="the end of the pin")
    assert fleet.stat("a")["pending"] == 0


def test_long_pull_reports_progress(fleet: Fleet) -> None:
    fleet.bytes_per_s = MIB
    fleet.start(SOURCE, "a")
    tensors = weights(6)
    nbytes = fleet.publish(tensors).nbytes
    pull = InBackground(fleet.puller("a"))
    assert_same(pull.result(), tensors)
    assert pull.seen[-1] == (nbytes, nbytes)
    assert any(0 < done < nbytes for done, _ in pull.seen)
    assert [done for done, _ in pull.seen] == sorted(done for done, _ in pull.seen)


def test_pull_hands_out_complete_tensors_while_the_rest_is_fetched(fleet: Fleet) -> None:
    fleet.bytes_per_s = 2 * MIB
    fleet.start(SOURCE, "a")
    tensors = weights(6)
    fleet.publish(tensors)
    parts: list[dict[str, str]] = []
    lacking: list[int] = []
    client = DcsClient(fleet.etcd, fleet.keys, io_timeout_s=10)
    fleet.closing.append(client.close)
    with fleet.puller(SOURCE).pull("policy") as pulled:
        digests = list(pulled.manifest.chunks)

    def on_part(reference: dict[str, Any]) -> None:
        parts.append({name: checksum(t) for name, t in load_tensors(reference)})
        lacking.append(len(client.connect("a").has(digests)))

    with fleet.puller("a").pull("policy", on_part=on_part) as pulled:
        assert_same(pulled, tensors)
    assert lacking[0] > len(digests) // 4, "the first tensor came with the last one: this test shows nothing"
    assert [item for part in parts for item in part.items()] == [(n, checksum(t)) for n, t in tensors.items()]


def test_refused_part_ends_the_pull_and_the_next_one_continues(fleet: Fleet) -> None:
    fleet.bytes_per_s = 2 * MIB
    fleet.start(SOURCE, "a")
    tensors = weights(6)
    nbytes = fleet.publish(tensors).nbytes
    puller = fleet.puller("a")

    def refuse(reference: dict[str, Any]) -> None:
        raise StagingFailed(next(load_tensors(reference))[0])

    with pytest.raises(StagingFailed, match="w0"):
        puller.pull("policy", on_part=refuse)
    assert fleet.sent(SOURCE) < 0.9 * nbytes, "it was refused too late: this test shows nothing"
    with puller.pull("policy") as pulled:
        assert_same(pulled, tensors)
    assert fleet.sent(SOURCE) < 1.3 * nbytes
    wait_until(lambda: fleet.stat("a")["located"] == 0, what="the end of the reading")


def test_tensor_of_several_chunks_is_contiguous_after_a_pull(fleet: Fleet) -> None:
    fleet.start(SOURCE, "a")
    fleet.publish(weights(7))
    with fleet.puller("a").pull("policy") as pulled:
        first = next(iter(pulled.tensors()))[1]
        assert len(pulled.manifest.tensors[0].slices) > 1
        assert first.untyped_storage().nbytes() == 32 * MIB, "a copy"


# -- deltas ------------------------------------------------------------------------------------------------------------
def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with one element in a hundred changed."""
    out = {}
    for name, tensor in tensors.items():
        bits = tensor.clone().view(torch.int16)
        bits[::100] ^= 1
        out[name] = bits.view(torch.bfloat16)
    return out


def test_only_the_difference_to_the_last_version_is_sent(fleet: Fleet) -> None:
    fleet.start(SOURCE, "a", delta="true")
    old = weights(8)
    fleet.publish(old)
    puller = fleet.puller("a")
    puller.pull("policy").close()
    new = changed(old)
    nbytes = fleet.publish(new).nbytes
    before = fleet.sent(SOURCE)
    with puller.pull("policy") as pulled:
        assert_same(pulled, new)
    assert fleet.sent(SOURCE) - before < nbytes / 10
    before = fleet.sent(SOURCE, "a")
    fleet.start("b", delta="true")  # has no base
    with fleet.puller("b").pull("policy") as pulled:
        assert_same(pulled, new)
    assert fleet.sent(SOURCE, "a") - before > nbytes


class DeltaCorrupter:
    """Changes the last byte of each delta's first piece."""

    def __init__(self) -> None:
        self.corrupted = 0
        self._lock = threading.Lock()

    def __call__(self) -> Tamper:
        armed = False

        def tamper(data: bytearray) -> None:
            nonlocal armed
            at = data.find(b'{"delta":')
            payload = len(data) - data.find(b"}", at) - 1 if at >= 0 else len(data) if armed else 0
            armed = at >= 0 and not payload
            if payload:
                data[-1] ^= 0x55
                with self._lock:
                    self.corrupted += 1

        return tamper


def test_corrupt_delta_is_replaced_by_the_whole_chunk(fleet: Fleet) -> None:
    fleet.start(SOURCE, "a", delta="true")
    old = weights(9)
    fleet.publish(old)
    puller = fleet.puller("a")
    puller.pull("policy").close()
    new = changed(old)
    nbytes = fleet.publish(new).nbytes
    corrupter = fleet.link[SOURCE].tamper = DeltaCorrupter()
    fleet.link[SOURCE].cut()  # those that are kept run without it
    before = fleet.sent(SOURCE)
    with puller.pull("policy") as pulled:
        assert_same(pulled, new)
    assert corrupter.corrupted, "the fault did not happen"
    assert "requesting all of it" in fleet.log("a")
    assert fleet.sent(SOURCE) - before > nbytes / 2


def test_node_whose_memory_has_rotted_sends_what_its_disk_has(fleet: Fleet) -> None:
    """It does not compare each chunk that it sends with its digest; who gets other bytes has it do so."""
    [source] = fleet.start(SOURCE, disk_bytes=64 * MIB)
    expected = weights(11)
    fleet.publish(expected)
    wait_until(lambda: not fleet.stat(SOURCE)["unsaved"], what="the chunks on disk")
    first = bytes(expected["w0"].view(torch.uint8)[:4096].numpy())
    with open(source.arena_path, "r+b") as arena:
        at = arena.read().index(first)
        arena.seek(at)
        arena.write(bytes([first[0] ^ 0x20]))
    fleet.start("a")
    with fleet.puller("a").pull("policy") as pulled:
        assert_same(pulled, expected)
    assert "the copy on disk replaces it" in fleet.log(SOURCE) and "verified there" in fleet.log("a")


def test_chunk_on_no_node_is_reported_missing_though_others_are_found(fleet: Fleet) -> None:
    fleet.start(SOURCE, "a", "b")
    fleet.publish(weights(10))
    with fleet.puller("a").pull("policy") as pulled:
        manifest = pulled.version.manifest
    client = DcsClient(fleet.etcd, fleet.keys, io_timeout_s=10)
    try:
        with pytest.raises(ChunkMissing, match="0" * 32):
            client.connect("b").fetch([manifest, "0" * 32])
        assert client.connect("b").fetch([manifest]), "the node takes no harm"
    finally:
        client.close()


def test_full_arena_is_reported_before_anything_is_sent(fleet: Fleet) -> None:
    fleet.start(SOURCE)
    fleet.start("small", arena_bytes=2 * MIB)
    fleet.publish(weights(11))
    before = fleet.sent(SOURCE)
    with pytest.raises(ElasticRLError, match="no room"):
        fleet.puller("small").pull("policy")
    assert fleet.sent(SOURCE) - before < MIB
    assert fleet.stat("small")["pending"] == 0
