"""Nodes are killed, one at a time, while a publisher publishes two copies of each version and eight pullers follow.

Judged by I2 (what is seen is whole), I3 (no committed version is lost while one node of two copies is), I8 and I10
(every pull ends, with the version or a typed error, and the pullers catch up); by the model of a catalog over what the
clients were told, and by the replay checkers over what the observer saw.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from evidence import broken_rules, observed
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.tiers import full, parametrize
from support.waiting import wait_until

from chaos_tests.history import Recorder
from chaos_tests.traffic.dcs import Follower, Publishers, SteppedPublisher, raise_epoch
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.storage.arena import SHM
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
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_pullers_follow_the_head_while_nodes_are_killed(fleet: Fleet, etcd: EtcdClient, keys: Keys, seed: int) -> None:
    rng, recorder = random.Random(seed), Recorder()
    epoch = raise_epoch(etcd, keys, "test", recorder)
    trainer = Publishers(  # through node a, as a trainer on its host would
        lambda name, recorder: SteppedPublisher(etcd, keys, epoch, name, recorder, node="a", replicas=2),
        recorder=recorder)
    followers = [Follower(etcd, keys, NODES[i % 3], f"follower-{i}", recorder=recorder) for i in range(PULLERS)]
    traffic = [trainer, *followers]
    for clients in traffic:
        clients.start()
    try:
        wait_until(lambda: all(f.seen for f in followers), what="a first version everywhere")
        for _ in range(KILLS):
            victim = rng.choice(NODES)
            wait_until(lambda: any(f.pulling for f in followers), what="a pull in progress", poll_s=0.001)
            fleet.kill(victim)
            fleet.start(victim)
            trainer.more(1)
        trainer.close()
        last = trainer.committed[-1]
        wait_until(lambda: all(f.seen[-1] >= last for f in followers), what="every follower at the head")
    finally:
        for clients in traffic:
            clients.close()
    assert any(clients.failures for clients in traffic), "no kill had an effect"
    assert [f.torn for f in followers] == [[]] * PULLERS                                        # I2
    assert all(f.seen == sorted(set(f.seen)) for f in followers)                                # I3: never back
    assert trainer.committed == sorted(set(trainer.committed))
    assert len(list(SHM.glob(f"elastic-rl-{keys.job}-*"))) == len(NODES)                        # I8
    assert broken_rules(observed(etcd, keys, 1), recorder.operations()) == []


@parametrize("lost", NODES, by_default=0,
             proved_in="tests/integration/dcs/test_dcs_repair.py",
             why="the loss of each node")
def test_loss_of_one_node_loses_no_committed_version(fleet: Fleet, etcd: EtcdClient, keys: Keys, lost: str) -> None:
    recorder = Recorder()
    epoch = raise_epoch(etcd, keys, "test", recorder)
    publisher = SteppedPublisher(etcd, keys, epoch, "trainer", recorder, node="a", replicas=2, staging_ttl_s=30)
    for seed in (1, 2, 3):
        publisher.publish(seed)
    publisher.close()
    fleet.kill(lost)  # and it does not come back
    kept = [v.number for v in reads.list_versions(etcd, keys, "policy") if v.state is VersionState.COMMITTED]
    assert kept == [1, 2, 3]
    survivor = next(n for n in NODES if n != lost)
    follower = Follower(etcd, keys, survivor, recorder=recorder)
    for number in kept:
        wait_until(lambda n=number: follower.pull(n), what=f"version {number}", poll_s=0.2)
    assert (follower.seen, follower.torn) == (kept, [])
    follower.close()
    assert broken_rules(observed(etcd, keys, 1), recorder.operations()) == []
