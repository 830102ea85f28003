"""What the driver's take-over and a restart of Ray's head rely on: what a killed driver has made, and what runs on a
worker, survives the driver, the GCS and the whole head.

All tests use one cluster: a head without CPUs and a worker, and on it the parts of a job, made by a driver that was
killed. They leave it as they found it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from support.ray_services import AGENTS, WORKER, Driver, RayCluster, RayService, Timing, ray_cluster
from support.tiers import full
from support.waiting import wait_until

pytestmark = [full(proved_in="tests/integration/driver/test_parts_on_ray.py",
                   why="what the design relies on of Ray itself, which an upgrade may change"),
              pytest.mark.timeout(1200)]
ENGINE, TRAINER = "job/1/engine-0", "job/1/trainer"
AWAY_S = 15.0


class Job:
    """The parts of a job on Ray, and drivers that look at them."""

    def __init__(self, cluster: RayCluster, worker: RayService) -> None:
        self.cluster, self.worker = cluster, worker
        self.files = cluster.folder / "ranks"
        self.files.mkdir()

    def driver(self) -> Driver:
        return self.cluster.driver(WORKER)

    def steps(self) -> int:
        """All-reduces that the ranks have done."""
        return int((self.files / "rank-0").read_text() or 0)

    def assert_ranks_work(self) -> None:
        before = self.steps()
        wait_until(lambda: self.steps() > before + 2, what="further all-reduces")


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Job, dict[str, Any]]]:
    with ray_cluster() as cluster:
        cluster.head.start()
        worker = cluster.worker()
        worker.start()
        job = Job(cluster, worker)
        first = job.driver()
        parts = first.call("make", str(job.files))
        first.kill()
        yield job, parts


@pytest.fixture
def job(made: tuple[Job, dict[str, Any]]) -> Iterator[Job]:
    job, _ = made
    yield job
    job.cluster.end_drivers()


@pytest.fixture
def parts(made: tuple[Job, dict[str, Any]]) -> dict[str, Any]:
    """The parts as the first driver made them: names, pids, nodes and ranks."""
    return made[1]


def controller(driver: Driver) -> dict[str, Any]:
    (found,) = (a for a in driver.call("serve_actors") if a["class"] == "ServeController")
    return dict(found)


def test_second_driver_finds_what_a_killed_driver_has_made(job: Job, parts: dict[str, Any], timing: Timing) -> None:
    began = time.monotonic()
    second = job.driver()
    assert second.call("look") == parts
    timing("take-over with the start of the driver", began)
    assert parts["group"] == 2 and len(parts["parts"][TRAINER]["ranks"]) == 2
    job.assert_ranks_work()
    calls = second.call("take_calls")
    assert calls["errors"] == [] and calls["pids"] == [second.call("call_app")]
    assert second.call("app_status") == "RUNNING"


def test_all_but_the_controller_of_serve_runs_on_the_worker(job: Job, parts: dict[str, Any]) -> None:
    """Ray binds Serve's controller to the head's node by a resource that no other node may offer."""
    driver = job.driver()
    nodes = driver.call("nodes")
    assert {part["node"] for part in parts["parts"].values()} == {nodes["worker"]}
    of_serve = {(a["class"], a["node"]) for a in driver.call("serve_actors")}
    assert of_serve == {("ServeController", nodes["head"]), ("ServeReplica:app:App", nodes["worker"])}


def test_actors_that_ask_for_no_cpus_are_put_on_the_head_too(job: Job) -> None:
    """So whatever is to survive the head asks for a part of a CPU."""
    driver = job.driver()
    assert driver.call("nodes")["head"] in driver.call("nodes_of_actors_without_cpus")


def test_gcs_is_restarted_under_everything_that_runs(job: Job, parts: dict[str, Any], timing: Timing) -> None:
    """A driver that is connected stays connected, a call that runs returns, and no call of Serve fails."""
    connected = job.driver()
    connected.call("long_call", ENGINE, 30)
    replica, before = connected.call("call_app"), controller(connected)
    connected.call("take_calls")

    (gcs,) = job.cluster.head.family()["gcs_server"]
    began = time.monotonic()
    gcs.kill()
    assert job.cluster.head.wait() != 0, "the head ends with its GCS"
    timing("end of the head after its GCS", began)
    wait_until(lambda: job.cluster.head.left() <= AGENTS, what="the end of all but the agents, which wait for a GCS")

    job.cluster.head.start()
    timing("head restarted after", began)
    third = job.driver()
    assert third.call("look") == parts
    timing("third driver has found everything after", began)
    assert connected.call("look") == parts
    wait_until(lambda: controller(third)["restarts"] > before["restarts"] and controller(third)["state"] == "ALIVE",
               what="the controller of Serve")
    timing("controller of Serve after", began)
    assert connected.call("end_of_long_call") == parts["parts"][ENGINE]["pid"]
    assert connected.call("call_app") == third.call("call_app") == replica
    calls = third.call("take_calls")
    assert calls["errors"] == [] and calls["pids"] == [replica]
    print(f"{calls['answers']} calls of Serve, the longest time without an answer: {calls['longest_gap_s']:.2f} s")
    job.assert_ranks_work()


def test_worker_outlives_a_head_that_is_away(job: Job, parts: dict[str, Any], timing: Timing) -> None:
    connected = job.driver()
    replica, before = connected.call("call_app"), controller(connected)
    connected.call("take_calls")
    raylet = job.worker.family()["raylet"]

    job.cluster.head.kill()
    began = time.monotonic()
    done = job.steps()
    wait_until(lambda: time.monotonic() - began > AWAY_S, what="the time without a head")
    without_head = connected.call("take_calls")
    assert without_head["errors"] == [] and without_head["pids"] == [replica]
    assert job.worker.family()["raylet"] == raylet
    assert job.steps() > done, "the ranks have worked without a head"

    restarted = time.monotonic()
    job.cluster.head.start()
    timing("start of the head", restarted)
    fourth = job.driver()
    assert fourth.call("look") == parts
    timing("fourth driver has found everything after", restarted)
    assert connected.call("look") == parts
    wait_until(lambda: controller(fourth)["restarts"] > before["restarts"] and controller(fourth)["state"] == "ALIVE",
               what="the controller of Serve")
    timing("controller of Serve after", restarted)
    calls = fourth.call("take_calls")
    assert calls["errors"] == [] and calls["pids"] == [replica]
    print(f"{without_head['answers'] + calls['answers']} calls of Serve, the longest time without an answer: "
          f"{max(without_head['longest_gap_s'], calls['longest_gap_s']):.2f} s")
    assert connected.call("call_app") == replica


def test_head_does_not_start_beside_its_worker_unless_the_note_of_its_address_is_deleted(job: Job) -> None:
    """``ray start --head`` takes the worker's raylet, whose arguments have the address, for a head that runs."""
    head = job.cluster.head
    head.kill()
    refused = head.start_once(fresh=False)
    assert refused and "already running at" in refused
    head.start()


def test_part_refuses_calls_of_an_older_epoch_or_generation(job: Job) -> None:
    old, new = job.driver(), job.driver()
    assert old.call("start_part", ENGINE, 1, 1) == "done"
    assert new.call("start_part", ENGINE, 1, 2) == "done"
    assert old.call("start_part", ENGINE, 1, 1) == "refused"
    assert new.call("start_part", ENGINE, 2, 1) == "done"
    assert new.call("start_part", ENGINE, 1, 3) == "refused"


def test_ray_kill_by_an_older_driver_ends_a_part_all_the_same(job: Job, parts: dict[str, Any]) -> None:
    """Nothing can refuse it, so a driver has to read its assignment before. Comes last: it ends a part."""
    old, new = job.driver(), job.driver()
    assert new.call("start_part", ENGINE, 9, 9) == "done"
    old.call("kill_part", ENGINE)
    wait_until(lambda: not psutil.pid_exists(parts["parts"][ENGINE]["pid"]), what="the end of the part")
    wait_until(lambda: ENGINE not in new.call("names"), what="the end of its name")
