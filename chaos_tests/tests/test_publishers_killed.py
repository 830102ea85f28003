"""Publishers are killed during publishes while a puller follows the head and the garbage collector runs.

Judged by I1 (no commit of a stale epoch), I2 (what is seen is whole), I3 (numbers only grow, none is used twice) and I8
(nothing is left of the dead); by the model of a catalog over what all clients were told, those that were killed
included, and by the replay checkers over what the observer saw.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from evidence import broken_rules, observed
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from support.forked import ForkedProcess
from support.tiers import full
from support.waiting import wait_until

from chaos_tests import history
from chaos_tests.history import Recorder
from chaos_tests.traffic.dcs import Follower, raise_epoch, sweep
from chaos_tests.traffic.dcs_publisher import FENCED_EXIT
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, Version, VersionState
from elastic_rl.host.processes import stop

KILLS = 10
NODE = "a"


@pytest.fixture
def node(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsNode]:
    process = spawn_node(etcd_servers.endpoints, keys, NODE, tmp_path)
    try:
        yield await_node(etcd, keys, process)
    finally:
        stop(process.pid)
        process.wait(timeout=60)


def publisher(etcd_servers: EtcdServers, keys: Keys, epoch: int, histories: Path) -> subprocess.Popen[str]:
    """A process that publishes; ``histories``: the folder where it writes down what it does, in a file of its own."""
    path = histories / f"{len(list(histories.iterdir()))}.jsonl"
    path.touch()
    return ForkedProcess(["chaos_tests.traffic.dcs_publisher", etcd_servers.endpoints[0], keys.job, str(epoch), NODE,
                          str(path)], stdout=subprocess.PIPE, text=True)


def versions(etcd: EtcdClient, keys: Keys) -> list[Version]:
    return reads.list_versions(etcd, keys, "policy")


@full(proved_in="chaos_tests/tests/test_dcs_failpoints.py tests/integration/dcs/test_dcs.py",
      why="many kills at random moments, with a puller and the collector beside them")
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_killed_publishers_never_show_incomplete_versions_and_leave_nothing(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, node: DcsNode, tmp_path: Path, seed: int) -> None:
    rng, collector = random.Random(seed), GarbageCollector(etcd, keys, RetentionPolicy(2))
    recorder, histories = Recorder(), tmp_path / "histories"
    histories.mkdir()
    epoch = raise_epoch(etcd, keys, "first", recorder)
    follower = Follower(etcd, keys, NODE, pins=True, recorder=recorder).start()
    interrupted = 0
    for _ in range(KILLS):
        victim = publisher(etcd_servers, keys, epoch, histories)
        assert victim.stdout is not None
        for _ in range(rng.randint(1, 4)):
            assert victim.stdout.readline(), "the publisher must have committed before it is killed"
        wait_until(lambda: any(v.state is VersionState.STAGING for v in versions(etcd, keys)),
                   what="the next publish", poll_s=0.001)
        victim.kill()
        assert victim.wait(timeout=60) == -9
        victim.stdout.close()
        interrupted += any(v.state is VersionState.STAGING for v in versions(etcd, keys))
        sweep(etcd, keys, collector, recorder)
    assert interrupted, "no kill hit a publish in progress: this shows nothing"

    zombie = publisher(etcd_servers, keys, epoch, histories)
    assert zombie.stdout is not None and zombie.stdout.readline()
    raised = raise_epoch(etcd, keys, "second", recorder)
    before = {v.number for v in versions(etcd, keys) if v.state is VersionState.COMMITTED}
    assert zombie.wait(timeout=300) == FENCED_EXIT
    zombie.stdout.close()
    assert {v.number for v in versions(etcd, keys) if v.state is VersionState.COMMITTED} <= before
    successor = publisher(etcd_servers, keys, raised, histories)
    assert successor.stdout is not None
    last = int(successor.stdout.readline())
    successor.kill()
    successor.wait(timeout=60)
    successor.stdout.close()

    wait_until(lambda: follower.seen and follower.seen[-1] >= last, what="the follower at the head")
    follower.close()
    assert (follower.torn, dict(follower.failures)) == ([], {})         # I2
    assert follower.seen == sorted(set(follower.seen))                 # I3: the head only moves forward
    assert last > max(before)                                          # I3: over the epochs too

    def settled() -> bool:
        sweep(etcd, keys, collector, recorder)
        return all(v.state is not VersionState.STAGING for v in versions(etcd, keys))

    wait_until(settled, what="the abort of what the dead publishers had staged", poll_s=0.2)
    kept = versions(etcd, keys)
    assert len({v.number for v in kept}) == len(kept)
    by_number = sorted((v.number, v.epoch) for v in kept if v.committed_at)
    assert [e for _, e in by_number] == sorted(e for _, e in by_number)  # I1
    collector.close()
    told = [*recorder.operations(), *(o for path in histories.iterdir() for o in history.read(path))]
    assert broken_rules(observed(etcd, keys, 1), told) == []


def test_stopped_node_removes_its_segment(node: DcsNode) -> None:
    segment = Path(node.arena_path)
    assert segment.parent == SHM and segment.exists()
    stop(node.pid)
    wait_until(lambda: not segment.exists(), what="the end of the segment")
