"""Nodes are killed, one at a time, while a publisher publishes two copies of each version and eight pullers follow.

Judged by I2 (what is seen is whole), I3 (no committed version is lost while one node of two copies is), I8 and I10
(every pull ends, with the version or a typed error, and the pullers catch up).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dcs_publisher_loop import CHUNK_BYTES, content
from follower import Follower
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState

NODES = ("a", "b", "c")
PULLERS = 8
KILLS = 6


class Fleet(Nodes):
    """Three nodes on one etcd."""

    def start(self, node: str) -> None:
        self.start_node(node, disk_bytes=256 << 20, orphan_grace_s=0)


class Trainer(threading.Thread):
    """Publishes through node a, as a trainer on its host would; a publish that fails is skipped."""

    def __init__(self, etcd: EtcdClient, keys: Keys, epoch: int) -> None:
        super().__init__(name="trainer", daemon=True)
        self.publisher = Publisher(etcd, keys, "policy", epoch=epoch, owner="trainer", chunk_bytes=CHUNK_BYTES,
                                   replicas=2, staging_ttl_s=2, io_timeout_s=10, node="a")
        self.committed: list[int] = []
        self.failed = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        seed = 0
        while not self.stopping.wait(0.1):
            seed += 1
            try:
                self.committed.append(self.publisher.publish(content(seed), meta={"seed": seed}).number)
            except ElasticRLError:
                self.failed += 1

    def close(self) -> None:
        self.stopping.set()
        self.join(timeout=60)
        self.publisher.close()


@pytest.fixture
def fleet(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Fleet]:
    out = Fleet(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path)
    try:
        for node in NODES:
            out.start(node)
        yield out
    finally:
        out.close()


@full(proved_in="tests/integration/dcs/test_dcs_fetch.py tests/integration/dcs/test_publish.py",
      why="kills of any node for as long as eight pullers follow, in place of one")
def test_pullers_follow_the_head_while_nodes_are_killed(fleet: Fleet, etcd: EtcdClient, keys: Keys) -> None:
    rng = random.Random(11)
    trainer = Trainer(etcd, keys, fencing.raise_epoch(etcd, keys, "test").number)
    followers = [Follower(etcd, keys, NODES[i % 3], f"follower-{i}") for i in range(PULLERS)]
    threads = [trainer, *followers]
    for thread in threads:
        thread.start()
    interrupted = 0
    try:
        wait_until(lambda: all(f.seen for f in followers), what="a first version everywhere")
        for _ in range(KILLS):
            victim = rng.choice(NODES)
            wait_until(lambda: any(f.pulling for f in followers), what="a pull in progress", poll_s=0.001)
            interrupted += any(f.pulling for f in followers)
            fleet.kill(victim)
            before = len(trainer.committed)
            fleet.start(victim)
            wait_until(lambda before=before: len(trainer.committed) > before, what="the next commit")
        trainer.close()
        last = trainer.committed[-1]
        wait_until(lambda: all(f.seen[-1] >= last for f in followers), what="every follower at the head")
    finally:
        for thread in threads:
            thread.close()
    assert interrupted == KILLS
    assert sum(sum(f.failures.values()) for f in followers) + trainer.failed > 0, "no kill had an effect"
    assert [f.torn for f in followers] == [[]] * PULLERS                                        # I2
    assert all(f.seen == sorted(set(f.seen)) for f in followers)                                # I3: never back
    assert trainer.committed == sorted(set(trainer.committed))
    assert len(list(SHM.glob(f"elastic-rl-{keys.job}-*"))) == len(NODES)                        # I8


@parametrize("lost", NODES, by_default=0,
             proved_in="tests/integration/dcs/test_dcs_repair.py",
             why="the loss of each node")
def test_loss_of_one_node_loses_no_committed_version(fleet: Fleet, etcd: EtcdClient, keys: Keys, lost: str) -> None:
    epoch = fencing.raise_epoch(etcd, keys, "test").number
    with Publisher(etcd, keys, "policy", epoch=epoch, owner="trainer", chunk_bytes=CHUNK_BYTES, replicas=2,
                   staging_ttl_s=30, io_timeout_s=10, node="a") as publisher:
        for seed in (1, 2, 3):
            publisher.publish(content(seed), meta={"seed": seed})
    fleet.kill(lost)  # and it does not come back
    kept = [v.number for v in reads.list_versions(etcd, keys, "policy") if v.state is VersionState.COMMITTED]
    assert kept == [1, 2, 3]
    survivor = next(n for n in NODES if n != lost)
    follower = Follower(etcd, keys, survivor)
    for number in kept:
        wait_until(lambda n=number: follower.pull(n), what=f"version {number}", poll_s=0.2)
    assert (follower.seen, follower.torn) == (kept, [])
    follower.puller.close()
