"""Which Ray a driver ends, and when a node counts as working. Services are real processes, which stand for Ray."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.stub_service import StubService
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.driver.ray_service import RayNodeSupervisor, RayService
from elastic_rl.errors import EngineFailed, Fenced
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes, ray_node
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER, compute_services, ray_epoch
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.ray_node import RayNode
from elastic_rl.host.service_files import SERVICE_FILE_ENV
from elastic_rl.net.addresses import LOOPBACK

_STARTS_A_RAYLET = """
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, lambda *_: None)
child = subprocess.Popen([sys.argv[1], "600"])
child.wait()
signal.pause()
"""
_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.mark.parametrize(("epoch", "is_ended"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize("node", [RAY_HEAD, RAY_WORKER])
@pytest.mark.parametrize("begins", [False, True])
def test_driver_ends_the_ray_of_its_epoch_and_of_earlier_ones(tmp_path: Path, node: str, epoch: int, is_ended: bool,
                                                              begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayNodeSupervisor, "start", lambda self: None)
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    job = JobPaths.of(cfg)
    pid = compute_services(job).start(node, _WAITS, log=job.log(node), url="127.0.0.2:1", generation=3)
    child = processes.spawn(["sleep", "600"], log=job.log(node),
                            env={SERVICE_FILE_ENV: compute_services(job).mark(node)})
    service = RayService(RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=epoch, model_dir="",
                                    host=LOOPBACK))
    try:
        assert ray_epoch(job) == (3 if node == RAY_HEAD else 0)
        job.ray_store(3).mkdir(parents=True)
        if begins:
            service.start(adopts=False)
        else:
            service.end()
        assert (compute_services(job).get(node) is None) == is_ended
        assert (not psutil.pid_exists(pid)) == (child.poll() is not None) == is_ended
        assert job.ray_store(3).exists() != (is_ended or node == RAY_WORKER and epoch > 3)
    finally:
        child.kill()
        child.wait()
        processes.stop(pid)
        shutil.rmtree(job.temp, ignore_errors=True)


def test_driver_that_adopts_ray_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayNodeSupervisor, "start", lambda self: None)
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    job = JobPaths.of(cfg)
    pid = compute_services(job).start(RAY_WORKER, _WAITS, log=job.log(RAY_WORKER), url="127.0.0.2:1", generation=3)
    try:
        RayService(RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=3, model_dir="",
                              host=LOOPBACK)).start(adopts=True)
        assert psutil.pid_exists(pid)
    finally:
        processes.stop(pid)


@pytest.mark.parametrize(("is_up", "failing_s", "was_up", "is_lost"), [
    (False, 899.0, True, False), (False, 900.0, True, True), (False, 3600.0, False, False),
    (True, 3600.0, True, False)])
def test_head_is_lost_that_does_not_come_up_again_for_long(tmp_path: Path, is_up: bool, failing_s: float, was_up: bool,
                                                           is_lost: bool) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    service = RayService(RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=3, model_dir="",
                                    host=LOOPBACK))
    if was_up:
        folder = JobPaths.of(cfg).compute_services
        folder.mkdir(parents=True)
        (folder / f"{RAY_HEAD}.complete").write_text("1")
    service._supervisors[RAY_HEAD] = SimpleNamespace(is_up=is_up, failing_s=failing_s)  # type: ignore[assignment]
    assert service.is_lost == is_lost


def test_process_is_cut_off_by_the_end_of_the_worker_that_it_is_connected_to(tmp_path: Path) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    job = JobPaths.of(cfg)
    pid = compute_services(job).start(RAY_WORKER, _WAITS, log=job.log(RAY_WORKER), url="127.0.0.2:1", generation=3)
    try:
        service = RayService(RunContext(config=cfg, etcd_endpoints=["127.0.0.1:1"], job="j", epoch=3, model_dir="",
                                        host=LOOPBACK))
        service._connected_to = pid
        assert not service.is_cut_off
        processes.stop(pid)
        assert service.is_cut_off
    finally:
        processes.stop(pid)


def test_node_without_its_raylet_does_not_work_although_its_command_runs(tmp_path: Path) -> None:
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    job = JobPaths.of(cfg)
    raylet = tmp_path / "raylet"
    shutil.copy("/bin/sleep", raylet)
    pid = compute_services(job).start(RAY_WORKER, [sys.executable, "-c", _STARTS_A_RAYLET, str(raylet)],
                                      log=job.log(RAY_WORKER), url="127.0.0.2:1", generation=3)
    try:
        node = RayNode(cfg, 3, compute_services(job), RAY_WORKER, ray_node.WORKER, tmp_path / "rw",
                       log=job.log(RAY_WORKER), gcs=str, address="", host="n")
        assert node.alive() and node.pid == pid
        wait_until(lambda: not node.missing(), what="the raylet")
        supervisor = RayNodeSupervisor(node)
        with pytest.raises(EngineFailed, match="has not started everything"):
            supervisor._check()
        (tmp_path / "rw").mkdir()
        (tmp_path / "rw" / "ray_current_cluster").touch()
        supervisor._check()
        (tmp_path / "rw" / "ray_current_cluster").unlink()  # as what tidies temporary folders does
        supervisor._check()
        child = psutil.Process(pid).children()[0]
        child.suspend()
        wait_until(lambda: node.missing() == {"raylet"}, what="its suspension")
        child.resume()
        wait_until(lambda: not node.missing(), what="its resumption")
        child.terminate()
        wait_until(lambda: node.missing() == {"raylet"}, what="its end")
        assert node.alive()
        with pytest.raises(EngineFailed, match="raylet does not run"):
            RayNodeSupervisor(node)._check()
    finally:
        processes.stop(pid)


@pytest.mark.parametrize("node", [RAY_HEAD, RAY_WORKER])
def test_nodes_of_a_replaced_driver_are_left_alone(tmp_path: Path, node: str) -> None:
    def require() -> None:
        raise Fenced("driver 1 has been replaced by driver 2")

    service = RayService(RunContext(config=config.parse({"job": "j", "run_dir": str(tmp_path)}),
                                    etcd_endpoints=["127.0.0.1:1"], job="j", epoch=3, model_dir="", host=LOOPBACK),
                         require)
    supervisor = service._supervisors[node]
    supervisor._head = None
    with pytest.raises(Fenced):
        supervisor._pass()


def test_worker_is_started_once_the_head_is_up() -> None:
    head, service = SimpleNamespace(is_up=False), StubService()
    supervisor = RayNodeSupervisor(service, head)  # type: ignore[arg-type]
    supervisor._pass()
    assert not service.launched and not supervisor.fault
    head.is_up = True
    supervisor._pass()
    assert service.launched == 1
