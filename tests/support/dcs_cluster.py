"""A job's checkpoint service on real nodes, and clients of it that are closed with it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from elastic_rl.config.dcs import Replicas
from elastic_rl.dcs.catalog import pins, reads
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.tensors import checksum
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.publish import publisher as publishing
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, Version, VersionState
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.waiting import wait_until

CHUNK = 64 << 10

Tensors = Mapping[str, torch.Tensor]


def model(seed: int, *, nbytes: int = 200_000) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and layouts; the largest spans several chunks."""
    g = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(nbytes // 4, generator=g),
        "bf16": torch.randn(33, 7, generator=g).bfloat16(),
        "fp8": torch.randn(65, generator=g).to(torch.float8_e4m3fn),
        "transposed": torch.randn(12, 20, generator=g).t(),
        "scalar": torch.tensor(float(seed), dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "flags": torch.rand(100, generator=g) > 0.5,
        "rng": torch.randint(0, 255, (5056,), generator=g, dtype=torch.uint8),
    }


def assert_same(pulled: Pulled, expected: Tensors) -> None:
    """Names in order, dtypes, shapes and every byte."""
    got = list(pulled.tensors())
    assert [name for name, _ in got] == list(expected)
    for name, tensor in got:
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert checksum(tensor) == checksum(expected[name]), name


def flip_a_byte(path: str | Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 0) as memory:
        memory[offset] ^= 0x40
    os.close(fd)


@dataclass(kw_only=True)
class DcsCluster(Nodes):
    """Nodes of one job, by default without a grace for orphans, so that garbage goes at once."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    killed: set[str] = field(default_factory=set)
    """Nodes that were killed and not started again."""
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    @contextlib.contextmanager
    def open(cls, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, folder: Path) -> Iterator[Self]:
        out = cls(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=folder)
        fencing.raise_epoch(etcd, keys, "test")
        try:
            yield out
        finally:
            out.close()
            for node in out.killed:  # what the next start on their host would do
                for path in SHM.glob(f"elastic-rl-{keys.job}-{node}-*"):
                    path.unlink()
            assert not list(SHM.glob(f"elastic-rl-{keys.job}-*")), "a node left its arena behind"

    # -- nodes -------------------------------------------------------------------------------------------------------
    def start(self, *nodes: str, **dcs: object) -> None:
        for node in nodes:
            self.start_node(node, **{"orphan_grace_s": 0, **dcs})
            self.killed.discard(node)

    def kill(self, node: str) -> None:
        """Kills a node and ends its registration, as the end of its lease would some seconds later."""
        registered = self.etcd.get(self.keys.dcs_node(node))
        super().kill(node)
        self.killed.add(node)
        if registered is not None:
            self.etcd.revoke(registered.lease)
        self.await_unregistered(node)

    def stop(self, node: str) -> None:
        """Ends a node, which saves its chunks first."""
        self.processes[node].send_signal(signal.SIGTERM)
        assert self.processes[node].wait(timeout=20) == 0
        self.await_unregistered(node)

    def freeze(self, node: str) -> None:
        """SIGSTOP; returns when the kernel has stopped it."""
        process = self.processes[node]
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED,
                   what="the stop")

    def await_unregistered(self, node: str) -> None:
        wait_until(lambda: node not in [n.id for n in self.registered()], what=f"the end of node {node}")

    def registered(self) -> list[DcsNode]:
        return [DcsNode.decode(kv.value) for kv in self.etcd.range(self.keys.dcs_nodes_prefix())[0]]

    def stat(self, node: str = "a") -> dict[str, int]:
        client = DcsClient(self.etcd, self.keys, io_timeout_s=10)
        try:
            return client.connect(node).stat()
        finally:
            client.close()

    def await_stat(self, node: str = "a", **expected: int) -> None:
        wait_until(lambda: expected.items() <= self.stat(node).items(), what=f"node {node} at {expected}")

    # -- clients -----------------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        return fencing.current_epoch(self.etcd, self.keys)

    def client(self, node: str = "", *, io_timeout_s: float = 10) -> DcsClient:
        out = DcsClient(self.etcd, self.keys, io_timeout_s=io_timeout_s, node=node)
        self.stack.callback(out.close)
        return out

    def publisher(self, node: str = "a", *, stream: str = "policy", epoch: int = 0, chunk_bytes: int = CHUNK,
                  replicas: Replicas = 1, staging_ttl_s: int = 10, kind: type[Publisher] = Publisher) -> Publisher:
        return self.stack.enter_context(kind(
            self.etcd, self.keys, stream, epoch=epoch or self.epoch, owner=f"test-{next(self._names)}",
            chunk_bytes=chunk_bytes, replicas=replicas, staging_ttl_s=staging_ttl_s, io_timeout_s=10, node=node))

    def puller(self, node: str = "a") -> Puller:
        return self.stack.enter_context(Puller(
            self.etcd, self.keys, f"test-{next(self._names)}", io_timeout_s=20, node=node))

    def collector(self, keep_versions: int = 2, **options: Any) -> GarbageCollector:
        out = GarbageCollector(self.etcd, self.keys, RetentionPolicy(keep_versions), **options)
        self.stack.callback(out.close)
        return out

    # -- versions ----------------------------------------------------------------------------------------------------
    def publish(self, *seeds: int, **options: Any) -> Version:
        """Publishes ``model(seed)`` for each; the last version."""
        publisher = self.publisher(**options)
        return [publisher.publish(model(seed).items(), meta={"seed": seed}) for seed in seeds][-1]

    def publish_from(self, nodes: str, seed: int = 0, *, replicas: Replicas = 1, stream: str = "policy"
                     ) -> tuple[Version, dict[str, torch.Tensor]]:
        """Publishes a version of which each node is given some tensors by a rank of its host; what it consists of."""
        leader = self.publisher(nodes[0], stream=stream, replicas=replicas)
        staged, parts, tensors = leader.begin({}), [], {}
        clients = [self.client(node) for node in nodes]
        for i, client in enumerate(clients):
            writer = PartWriter(LocalArena(client), chunk_bytes=CHUNK)
            for k in range(4):
                name, tensor = f"{nodes[i]}{k}", torch.full((2000, 8), 1000 * seed + 10 * i + k, dtype=torch.float32)
                writer.add(name, tensor, 4 * i + k)
                tensors[name] = tensor
            parts.append(writer.seal())
        stored = leader.store(staged, parts, hold=True)
        [version] = publishing.commit([stored])
        leader.release_holds(stored, version)
        for client in clients:
            client.local().release_holds()
        return version, tensors

    def require(self, expected: Tensors, number: int | None = None, *, node: str = "a", stream: str = "policy") -> None:
        """Pulls a version (the head by default) and compares every byte."""
        with self.puller(node).pull(stream, number) as pulled:
            assert_same(pulled, expected)

    def head(self, stream: str = "policy") -> Version:
        found = reads.head(self.etcd, self.keys, stream)
        assert found is not None
        return found

    def parts(self, number: int, stream: str = "policy") -> list[list[str]]:
        """Nodes that hold each part of a version, by its replica sets."""
        return reads.read_replica_sets(self.etcd, self.keys, stream, number).replica_sets.parts

    def await_unpinned(self, stream: str = "policy") -> None:
        """Nodes unpin what no reader has open any more, soon after its release."""
        wait_until(lambda: not pins.pinned(self.etcd, self.keys, stream), what="the end of the pins")

    def states(self, stream: str = "policy") -> dict[int, VersionState]:
        return {v.number: v.state for v in reads.list_versions(self.etcd, self.keys, stream)}

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
        self.stack.close()
        super().close()
