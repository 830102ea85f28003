"""What ends with a worker's raylet, with the process that has started a node, and with a head that stays away; what is
left of it, and what Ray starts again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.ray_services import AGENTS, HEAD, Driver, RayCluster, RayService, Timing, ray_cluster
from support.tiers import full
from support.waiting import wait_until

pytestmark = [full(proved_in="tests/integration/driver/test_parts_on_ray.py",
                   why="what the design relies on of Ray itself, which an upgrade may change"),
              pytest.mark.timeout(1200)]
ENGINE, TRAINER = "job/1/engine-0", "job/1/trainer"
RECONNECT_S = 5


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(RAY_gcs_rpc_server_reconnect_timeout_s=str(RECONNECT_S)) as made:
        made.head.start()
        (made.folder / "ranks").mkdir()
        yield made


@pytest.fixture
def worker(cluster: RayCluster) -> RayService:
    worker = cluster.worker()
    worker.start()
    return worker


@pytest.fixture
def driver(cluster: RayCluster, worker: RayService) -> Driver:
    return cluster.driver(HEAD)


def make(cluster: RayCluster, driver: Driver) -> dict[str, Any]:
    """A trainer with ranks, which Ray may restart, and an engine, which it may not."""
    return dict(driver.call("make", str(cluster.folder / "ranks"), 2, False, [TRAINER]))


def shared_memory(process: psutil.Process) -> set[str]:
    return {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}


def assert_ended(processes: list[psutil.Process]) -> None:
    assert psutil.wait_procs(processes, timeout=120)[1] == []


def test_killed_raylet_ends_everything_on_its_node_and_a_new_one_can_start_at_once(
        cluster: RayCluster, worker: RayService, driver: Driver, timing: Timing) -> None:
    before, old = make(cluster, driver), worker.processes()
    ranks = [psutil.Process(pid) for pid in before["parts"][TRAINER]["ranks"]]
    (raylet,) = worker.family()["raylet"]
    segments = shared_memory(raylet)

    began = time.monotonic()
    raylet.kill()
    assert worker.wait() != 0
    timing("end of `ray start --block` after its raylet", began)
    assert_ended(ranks)
    timing("end of the ranks", began)
    assert_ended(old)
    timing("end of everything on the node", began)
    assert segments and not any(Path(path).exists() for path in segments), "nothing is left in /dev/shm"

    worker.start()
    timing("new raylet after", began)
    restarted = wait_until(lambda: driver.call("look_at", TRAINER), what="the part that Ray may restart")
    timing("part is restarted after", began)
    assert restarted["pid"] != before["parts"][TRAINER]["pid"]
    assert restarted["ranks"] == [], "what it had started is to be started again"
    assert driver.call("names") == [TRAINER], "what Ray may not restart is gone, with its name"


def test_node_ends_with_the_process_that_has_started_it(cluster: RayCluster, worker: RayService, driver: Driver,
                                                        timing: Timing) -> None:
    make(cluster, driver)
    assert worker.process and cluster.head.process
    of_worker, began = worker.processes(), time.monotonic()
    worker.process.kill()
    assert_ended(of_worker)
    timing("end of the worker after its `ray start --block`", began)

    began = time.monotonic()
    cluster.head.process.kill()
    cluster.head.wait()
    wait_until(lambda: cluster.head.left() <= AGENTS, what="the end of all but the agents, which wait for a GCS")
    timing("end of the head but its agents", began)


def test_worker_ends_when_its_head_is_away_for_longer_than_the_reconnect_timeout(
        cluster: RayCluster, worker: RayService, driver: Driver, timing: Timing) -> None:
    make(cluster, driver)
    others = [p for name, found in worker.family().items() if name not in AGENTS for p in found]
    began = time.monotonic()
    cluster.head.kill()
    assert worker.wait() != 0
    assert time.monotonic() - began > RECONNECT_S
    timing(f"end of the worker with a reconnect timeout of {RECONNECT_S} s", began)
    assert_ended(others)
    timing("end of everything on it but the agents", began)
    assert worker.left() <= AGENTS
