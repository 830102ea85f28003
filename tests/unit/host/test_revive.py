"""When a service of a local cluster may be started again: nothing is started here, only whether it would be."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import PreflightFailed
from elastic_rl.host import cluster_lock, cluster_settings
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.restart_policy import RestartLimits, ServiceState
from elastic_rl.host.service_supervisor import ServiceSupervisor
from elastic_rl.net.addresses import free_port


class Ended:
    """A cluster whose services have all ended; what it starts is written down."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = Cluster(config.parse({"job": "j", "run_dir": str(folder), "coordinator": {"replicas": 1}}))
        self.cluster.dir.mkdir(parents=True)
        (self.cluster.dir / "etcd" / "member").mkdir(parents=True)
        cluster_settings.save(self.cluster.cfg, self.cluster.dir)
        self.port = free_port()
        self.info = ClusterInfo("j", [f"127.0.0.1:{self.port}"], [f"http://127.0.0.1:{free_port()}"], "",
                                str(self.cluster.dir), own_etcd=True)
        self.info.save()
        child = subprocess.Popen(["sleep", "600"])
        for name, url in (("etcd-0", self.info.etcd_endpoints[0]), ("coordinator-0", self.info.coordinators[0]),
                          ("dcs-node-0", f"127.0.0.1:{free_port()}")):
            self.cluster.book.add(name, child.pid, url)
        child.kill()
        child.wait()
        self.started: list[tuple[str, str]] = []
        monkeypatch.setattr(self.cluster, "_spawn", self._spawn)

    def _spawn(self, name: str, cmd: list[str], *, url: str = "", env: dict[str, str] | None = None) -> int:
        self.started.append((name, url))
        self.cluster.book.add(name, os.getpid(), url)
        return os.getpid()

    def url(self, name: str) -> str:
        return next(r.url for r in self.cluster.book.all() if r.name == name)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    return Ended(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["etcd-0", "coordinator-0", "dcs-node-0"])
def test_ended_service_is_started_once_at_its_address(ended: Ended, name: str) -> None:
    url = ended.url(name)
    assert ended.cluster.revive(name)
    assert ended.started == [(name, url)]
    assert not ended.cluster.revive(name), "it runs now"
    assert len(ended.started) == 1 and ClusterInfo.load(ended.cluster.dir) == ended.info


def test_nothing_is_started_beside_a_command_that_holds_the_lock(ended: Ended) -> None:
    with cluster_lock.held(ended.cluster.dir, timeout_s=0.0):
        assert not ended.cluster.revive("dcs-node-0")
    assert ended.started == []


@pytest.mark.parametrize("taken_down", [
    lambda e: (e.cluster.dir / "cluster.json").unlink(), lambda e: e.cluster.book.forget("dcs-node-0")])
def test_service_that_was_taken_down_stays_down(ended: Ended, taken_down: Callable[[Ended], None]) -> None:
    taken_down(ended)
    assert not ended.cluster.revive("dcs-node-0") and ended.started == []


def test_etcd_without_its_data_is_not_started(ended: Ended) -> None:
    (ended.cluster.dir / "etcd" / "member").rmdir()
    with pytest.raises(PreflightFailed, match="are gone"):
        ended.cluster.revive("etcd-0")
    assert ended.started == []


def test_coordinator_whose_port_was_taken_gets_another_one_that_clients_find(ended: Ended) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ended.info.coordinators[0].rpartition(":")[2])))
        taken.listen()
        assert ended.cluster.revive("coordinator-0")
    found = ClusterInfo.load(ended.cluster.dir)
    assert found is not None and found.coordinators == [ended.started[0][1]] != ended.info.coordinators


def test_supervisor_starts_etcd_first_and_the_others_once_it_answers(ended: Ended,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False]
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, timeout_s=0.5: answers[0])
    supervisor = ServiceSupervisor(ended.cluster, ended.info)
    monkeypatch.setattr(supervisor, "_report", lambda: None)
    supervisor.tick()
    assert [name for name, _ in ended.started] == ["etcd-0"]
    assert supervisor.waiting().keys() == {"coordinator-0", "dcs-node-0"}
    answers[0] = True
    supervisor.tick()
    supervisor.tick()
    assert sorted(name for name, _ in ended.started) == ["coordinator-0", "dcs-node-0", "etcd-0"]
    assert supervisor.waiting() == {}


def test_supervisor_waits_for_a_command_that_holds_the_lock(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, timeout_s=0.5: False)
    limits = RestartLimits()
    supervisor = ServiceSupervisor(ended.cluster, ended.info, limits=limits, clock=lambda: 5.0)
    monkeypatch.setattr(supervisor, "_report", lambda: None)
    with cluster_lock.held(ended.cluster.dir, timeout_s=0.0):
        supervisor.tick()
    assert ended.started == [] and supervisor._unreported == {}
    assert supervisor._states["etcd-0"] == ServiceState.ended(5.0, limits), "no start was counted"
    supervisor.tick()
    assert [name for name, _ in ended.started] == ["etcd-0"] and supervisor._unreported.keys() == {"etcd-0"}


def test_supervisor_says_why_etcd_cannot_be_started_and_starts_it_once_it_can(ended: Ended,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, timeout_s=0.5: False)
    now, limits = [5.0], RestartLimits()
    supervisor = ServiceSupervisor(ended.cluster, ended.info, limits=limits, clock=lambda: now[0])
    monkeypatch.setattr(supervisor, "_report", lambda: None)
    (ended.cluster.dir / "etcd" / "member").rmdir()
    supervisor.tick()
    assert f"the data of this cluster's etcd in {ended.cluster.dir / 'etcd'} are gone" in supervisor.waiting()["etcd-0"]
    (ended.cluster.dir / "etcd" / "member").mkdir()
    now[0] += limits.longest_wait_s
    supervisor.tick()
    assert [name for name, _ in ended.started] == ["etcd-0"] and "etcd-0" not in supervisor.waiting()


def test_supervisor_leaves_services_of_another_boot_alone(ended: Ended) -> None:
    """They may run on another host that shares the folder."""
    for path in ended.cluster.book.folder.glob("*.json"):
        path.write_text(path.read_text().replace('"boot": "', '"boot": "x'))
    supervisor = ServiceSupervisor(ended.cluster, ended.info)
    supervisor.tick()
    assert ended.started == [] and supervisor.waiting() == {}
