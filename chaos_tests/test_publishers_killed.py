"""Publishers are killed in mid-publish, again and again, while a puller follows the head and the janitor cleans up.

Judged by I1 (no commit of a stale epoch), I2 (what is seen is whole), I3 (numbers only grow, none is used twice) and I8
(nothing is left of the dead).
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dcs_nodes import await_node, spawn_node
from etcd_server import EtcdServers
from follower import Follower
from hub_publisher import FENCED_EXIT

from elastic_rl.coordinator import epochs
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import DcsNode, Version, VersionState
from elastic_rl.coordinator.store import Store
from elastic_rl.dcs import catalog
from elastic_rl.dcs.arena import SHM
from elastic_rl.dcs.janitor import Janitor
from elastic_rl.dcs.retention import Keep
from elastic_rl.processes import stop, wait_until

KILLS = 10
NODE = "a"


@pytest.fixture
def node(etcd: EtcdServers, store: Store, keys: Keys, tmp_path: Path) -> Iterator[DcsNode]:
    process = spawn_node(etcd.endpoints, keys, NODE, tmp_path)
    try:
        yield await_node(store, keys, process)
    finally:
        stop(process.pid)
        process.wait(timeout=10)


def publisher(etcd: EtcdServers, keys: Keys, epoch: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(Path(__file__).with_name("hub_publisher.py")), etcd.endpoints[0],
                             keys.job, str(epoch), NODE], stdout=subprocess.PIPE, text=True)


def versions(store: Store, keys: Keys) -> list[Version]:
    return catalog.list_versions(store, keys, "policy")


@pytest.mark.timeout(180)
def test_killed_publishers_never_show_half_a_version_and_leave_nothing(
        etcd: EtcdServers, store: Store, keys: Keys, node: DcsNode) -> None:
    rng, janitor = random.Random(7), Janitor(store, keys, Keep(2))
    epoch = epochs.raise_epoch(store, keys, "first").number
    follower = Follower(store, keys, NODE)
    follower.start()
    interrupted = 0
    for _ in range(KILLS):
        victim = publisher(etcd, keys, epoch)
        assert victim.stdout is not None
        for _ in range(rng.randint(1, 4)):
            assert victim.stdout.readline(), "the publisher must have committed before it is killed"
        threading.Event().wait(rng.uniform(0.0, 0.02))  # somewhere in the next publish
        victim.kill()
        assert victim.wait(timeout=10) == -9
        victim.stdout.close()
        interrupted += any(v.state is VersionState.STAGING for v in versions(store, keys))
        janitor.sweep([])
    assert interrupted, "no kill hit a publish in progress: this test has shown nothing"

    zombie = publisher(etcd, keys, epoch)
    assert zombie.stdout is not None and zombie.stdout.readline()
    raised = epochs.raise_epoch(store, keys, "second").number
    before = {v.number for v in versions(store, keys) if v.state is VersionState.COMMITTED}
    assert zombie.wait(timeout=20) == FENCED_EXIT
    zombie.stdout.close()
    assert {v.number for v in versions(store, keys) if v.state is VersionState.COMMITTED} <= before
    successor = publisher(etcd, keys, raised)
    assert successor.stdout is not None
    last = int(successor.stdout.readline())
    successor.kill()
    successor.wait(timeout=10)
    successor.stdout.close()

    wait_until(lambda: follower.seen and follower.seen[-1] >= last, timeout_s=20, what="the follower at the head")
    follower.close()
    assert (follower.torn, dict(follower.failures)) == ([], {})         # I2
    assert follower.seen == sorted(set(follower.seen))                 # I3: the head only moves forward
    assert last > max(before)                                          # I3: over the epochs too

    def settled() -> bool:
        janitor.sweep([])
        return all(v.state is not VersionState.STAGING for v in versions(store, keys))

    wait_until(settled, timeout_s=20, what="the abort of what the dead had staged", poll_s=0.2)
    kept = versions(store, keys)
    assert len({v.number for v in kept}) == len(kept)
    by_number = sorted((v.number, v.epoch) for v in kept if v.committed_at)
    assert [e for _, e in by_number] == sorted(e for _, e in by_number)  # I1
    janitor.close()


@pytest.mark.timeout(60)
def test_the_segment_of_a_stopped_node_is_gone(node: DcsNode) -> None:
    segment = Path(node.arena_path)
    assert segment.parent == SHM and segment.exists()
    stop(node.pid)
    wait_until(lambda: not segment.exists(), timeout_s=10, what="the end of the segment")
