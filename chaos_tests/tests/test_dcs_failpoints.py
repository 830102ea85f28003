"""A process of the checkpoint service is killed at every step of publish, pull, garbage collection and storing.

Whichever dies, wherever: committed versions stay whole (I2, I3), nothing incomplete is ever visible, the next publish
works, and after a sweep nothing is left of the dead (I8).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from evidence import broken_rules, observed
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from support.forked import ForkedProcess
from support.tiers import parametrize
from support.waiting import wait_until

from chaos_tests.traffic.dcs import CHUNK_BYTES, content
from elastic_rl.dcs.catalog import pins, reads, transitions
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import NodeUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState
from elastic_rl.host.processes import stop
from elastic_rl.runtime import failpoints

NODE = "a"
KILLED = -signal.SIGKILL


@dataclass
class OneNode:
    """One node, and actors that use it."""

    etcd_servers: EtcdServers
    etcd: EtcdClient
    keys: Keys
    folder: Path
    epoch: int
    since: int
    """Revision of etcd at which it all began."""
    node: subprocess.Popen[bytes] | None = None

    def start_node(self, point: str = "") -> None:
        """Starts the node, which dies at ``point``."""
        with patch.dict(os.environ, {failpoints.ENV: point}):
            self.node = spawn_node(self.etcd_servers.endpoints, self.keys, NODE, self.folder, disk_bytes=64 << 20,
                                   orphan_grace_s=0)
        if point != "node.indexed":
            await_node(self.etcd, self.keys, self.node)

    def stop_node(self) -> None:
        assert self.node is not None
        stop(self.node.pid)
        self.node.wait(timeout=60)

    def run(self, what: str, *args: object, point: str = "") -> int:
        """An actor's step, from start to end; it dies at ``point``. Its exit code."""
        actor = ForkedProcess(
            ["dcs_actor", self.etcd_servers.endpoints[0], self.keys.job, str(self.epoch), NODE, what, *map(str, args)],
            env={**os.environ, failpoints.ENV: point})
        return actor.wait(timeout=300)

    def publish(self, seed: int) -> int:
        """In this process, where no point is reached: it starts faster. It lives until it closes, so its lease may be
        long: no pause of a busy machine ends it."""
        with Publisher(self.etcd, self.keys, "policy", epoch=self.epoch, owner="test", chunk_bytes=CHUNK_BYTES,
                       staging_ttl_s=30, io_timeout_s=10, node=NODE) as publisher:
            return publisher.publish(content(seed), meta={"seed": seed}).number

    def puller(self) -> Puller:
        return Puller(self.etcd, self.keys, "judge", io_timeout_s=10, node=NODE)

    def require_whole(self, number: int | None = None) -> int:
        """Pulls a version, compares every byte with what was published, and returns its number."""
        with self.puller() as puller, puller.pull("policy", number) as pulled:
            found, wanted = dict(pulled.tensors()), dict(content(pulled.version.meta["seed"]))
            assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
            return pulled.version.number

    def require_clean(self) -> None:
        """After enough sweeps there is one version, its chunks, and nothing else."""
        collector = GarbageCollector(self.etcd, self.keys, RetentionPolicy(1))
        client = DcsClient(self.etcd, self.keys, io_timeout_s=5)
        try:
            def swept() -> bool:
                collector.sweep([])
                versions = reads.list_versions(self.etcd, self.keys, "policy")
                living = [v for v in versions if transitions.TRANSITIONS[v.state]]
                stat = client.connect(NODE).stat()
                with self.puller() as puller, puller.pull("policy") as pulled:
                    chunks = len(pulled.manifest.chunks) + 1
                return ([v.state for v in living] == [VersionState.COMMITTED] and stat["chunks"] == chunks
                        and stat["pending"] == 0 and stat["held"] == 0)

            wait_until(swept, what="a node with nothing left of the dead", poll_s=0.3)
        finally:
            collector.close()
            client.close()
        assert len(list(SHM.glob(f"elastic-rl-{self.keys.job}-*"))) == 1
        wait_until(lambda: not list(self.folder.rglob("*.partial")), what="the end of partial files")

    def require_rules(self) -> None:
        """All that etcd held since the beginning kept the rules."""
        events = observed(self.etcd, self.keys, self.since)
        assert any(e["key"] == self.keys.stream_head("policy") for e in events), "the observer saw no commit"
        assert broken_rules(events) == []


EVERY_POINT = {"proved_in": "chaos_tests/tests/test_dcs_failpoints.py tests/integration/dcs/test_catalog_machine.py",
               "why": "a kill at each further point of a process whose first point is killed by default"}


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[OneNode]:
    since = etcd.revision() + 1
    out = OneNode(etcd_servers, etcd, keys, tmp_path, fencing.raise_epoch(etcd, keys, "test").number, since)
    out.start_node()
    try:
        yield out
    finally:
        out.stop_node()
    out.require_rules()


@parametrize("point", failpoints.PUBLISHER, **EVERY_POINT)
def test_killed_publisher_leaves_a_whole_version_or_none(dcs: OneNode, point: str) -> None:
    assert dcs.publish(1) == 1
    assert dcs.run("publish", 2, point=point) == KILLED
    assert dcs.require_whole() == (2 if point == "publish.committed" else 1)
    assert dcs.publish(3) == 3, "a number was used again, or the dead publisher blocked it"
    assert dcs.require_whole() == 3
    dcs.require_clean()


@parametrize("point", failpoints.PULLER, **EVERY_POINT)
def test_killed_puller_leaves_no_pin(dcs: OneNode, point: str) -> None:
    dcs.publish(1)
    assert dcs.run("pull", point=point) == KILLED
    wait_until(lambda: pins.pinned(dcs.etcd, dcs.keys, "policy") == set(), what="the end of its pin")
    dcs.publish(2)
    assert dcs.require_whole() == 2
    dcs.require_clean()  # version 1 goes, too


@parametrize("point", failpoints.OPENING, **EVERY_POINT)
def test_node_killed_during_a_pull_leaves_no_pin(dcs: OneNode, point: str) -> None:
    dcs.publish(1)
    dcs.stop_node()  # which saves what is not on disk yet
    dcs.start_node(point)
    assert dcs.node is not None
    with dcs.puller() as puller, pytest.raises(NodeUnavailable):
        puller.pull("policy")
    assert dcs.node.wait(timeout=300) == KILLED
    assert pins.pinned(dcs.etcd, dcs.keys, "policy") == {1}, "it died before it had pinned: this shows nothing"
    dcs.start_node()
    assert dcs.require_whole() == 1
    dcs.publish(2)
    dcs.require_clean()


@parametrize("point", failpoints.COLLECTOR, **EVERY_POINT)
def test_killed_collector_is_completed_by_the_next_one(dcs: OneNode, point: str) -> None:
    for seed in (1, 2, 3):
        dcs.publish(seed)
    assert dcs.run("sweep", 1, point=point) == KILLED
    assert dcs.require_whole() == 3
    assert dcs.publish(4) == 4
    dcs.require_clean()
    assert dcs.require_whole() == 4


@parametrize("point", failpoints.NODE, **EVERY_POINT)
def test_killed_node_has_every_saved_version_after_its_restart(dcs: OneNode, point: str) -> None:
    dcs.publish(1)
    dcs.publish(2)
    dcs.stop_node()  # which saves what is not on disk yet
    dcs.start_node(point)
    assert dcs.node is not None
    for what, arg in (("publish", 3), ("sweep", 2)):  # which bring the node to each of its points
        if dcs.node.poll() is None:
            dcs.run(what, arg)
    assert dcs.node.wait(timeout=300) == KILLED
    dcs.start_node()
    assert dcs.require_whole(2) == 2  # with one copy, what was published and not saved yet may be gone with the node
    head = reads.head(dcs.etcd, dcs.keys, "policy")
    assert head is not None and head.number in (2, 3)
    assert dcs.publish(4) > head.number
    dcs.require_clean()
