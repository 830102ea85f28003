"""Ray over two hosts that share nothing but a network: a head and a worker, each in namespaces of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts import IsolatedHost, isolated_hosts
from support.ray_services import RayCluster, Timing, ray_cluster
from support.tiers import full
from support.waiting import wait_until

pytestmark = [full(proved_in="tests/integration/driver/test_parts_on_ray.py",
                   why="what the design relies on of Ray itself, which an upgrade may change"),
              pytest.mark.timeout(1200)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[IsolatedHost, IsolatedHost]]:
    with isolated_hosts(("head", "worker"), tmp_path) as made:
        yield IsolatedHost(made, "head"), IsolatedHost(made, "worker")


@pytest.fixture
def cluster(hosts: tuple[IsolatedHost, IsolatedHost]) -> Iterator[RayCluster]:
    with ray_cluster(head=hosts[0].address, inside=hosts[0].inside) as made:
        yield made


def test_power_cut_of_a_workers_host_ends_all_of_it_and_nothing_else(
        hosts: tuple[IsolatedHost, IsolatedHost], cluster: RayCluster, timing: Timing) -> None:
    head_host, worker_host = hosts
    began = time.monotonic()
    cluster.head.start()
    worker = cluster.worker(address=worker_host.address, inside=worker_host.inside)
    worker.start()
    timing("head and worker", began)
    driver = cluster.driver(head_host.address, head_host.inside)
    made = driver.call("make", "/tmp", 0, False)
    assert {part["node"] for part in made["parts"].values()} == {driver.call("nodes")["worker"]}
    on_head, on_worker = head_host.processes(), worker_host.processes()
    assert any(p.name() == "raylet" for p in on_worker)

    began = time.monotonic()
    worker_host.power_off()
    assert psutil.wait_procs(on_worker, timeout=10)[1] == []
    print(f"end of {len(on_worker)} processes: {1000 * (time.monotonic() - began):.0f} ms")
    wait_until(lambda: "worker" not in driver.call("nodes"), what="Ray's notice of the loss")
    timing("Ray has noticed the loss", began)
    wait_until(lambda: driver.call("names") == [], what="the end of the parts in Ray")
    assert all(p.is_running() for p in on_head)


def test_worker_on_another_host_outlives_a_power_cut_of_the_heads_host(
        hosts: tuple[IsolatedHost, IsolatedHost], cluster: RayCluster) -> None:
    head_host, worker_host = hosts
    cluster.head.start()
    worker = cluster.worker(address=worker_host.address, inside=worker_host.inside)
    worker.start()
    driver = cluster.driver(worker_host.address, worker_host.inside)
    driver.call("make", "/tmp", 0, False)
    pids = driver.call("pids")
    (raylet,) = worker.family()["raylet"]

    head_host.power_off()
    assert driver.call("pids") == pids, "a driver that is connected calls its parts without a head"
    assert worker.process and worker.process.poll() is None and raylet.is_running()
