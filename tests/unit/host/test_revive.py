"""When a service of a local cluster may be started again: nothing is started here, only whether it would be."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import PreflightFailed
from elastic_rl.etcd import events
from elastic_rl.host import cluster_settings, processes
from elastic_rl.host.agent.restart_policy import RestartLimits, ServiceState
from elastic_rl.host.agent.supervisor import ServiceSupervisor
from elastic_rl.host.local_cluster import AGENTS, Cluster
from elastic_rl.net.addresses import free_port


class Ended:
    """A cluster whose services have all ended; what it starts is written down."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = Cluster(config.parse({"job": "j", "run_dir": str(folder), "coordinator": {"replicas": 1}}))
        self.cluster.dir.mkdir(parents=True)
        (self.cluster.dir / "etcd" / "member" / "wal").mkdir(parents=True)
        (self.cluster.dir / "etcd" / "member" / "wal" / "0.wal").touch()
        cluster_settings.save(self.cluster.cfg, self.cluster.paths.settings)
        self.port = free_port()
        self.info = ClusterInfo("j", [f"127.0.0.1:{self.port}"], [f"http://127.0.0.1:{free_port()}"], "",
                                own_etcd=True)
        self.info.save(self.cluster.paths.info)
        for name, url in (("etcd-0", self.info.etcd_endpoints[0]), ("coordinator-0", self.info.coordinators[0]),
                          ("dcs-j", f"127.0.0.1:{free_port()}")):
            self._start(name, url, ["true"])
        wait_until(lambda: not self.cluster.services.running(), what="the end of the services")
        self.started: list[tuple[str, str]] = []
        self.agents: list[str] = []
        monkeypatch.setattr(self.cluster, "_spawn", self._spawn)
        monkeypatch.setattr(self.cluster, "_start_agent", self.agents.append)

    def _spawn(self, name: str, cmd: list[str], *, url: str = "", env: dict[str, str] | None = None) -> int:
        self.started.append((name, url))
        return self._start(name, url, ["sleep", "600"])

    def _start(self, name: str, url: str, cmd: list[str]) -> int:
        return self.cluster.services.start(name, cmd, log=self.cluster.paths.logs / "log", url=url)

    def tick(self, supervisor: ServiceSupervisor) -> Mapping[str, str]:
        """One pass; returns what the services that do not run wait for."""
        status = supervisor.supervise(self.cluster, self.info, AGENTS[1])
        return {name: service.reason for name, service in status.items()
                if service.state == "ended" and name not in AGENTS}

    def url(self, name: str) -> str:
        record = self.cluster.services.get(name)
        assert record is not None
        return record.url


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ended]:
    out = Ended(tmp_path, monkeypatch)
    yield out
    for record in out.cluster.services.running():
        processes.stop(record.pid)


@pytest.mark.parametrize("name", ["etcd-0", "coordinator-0", "dcs-j"])
def test_ended_service_is_started_once_at_its_address(ended: Ended, name: str) -> None:
    url = ended.url(name)
    assert ended.cluster.revive(name)
    assert ended.started == [(name, url)]
    assert not ended.cluster.revive(name), "it runs now"
    assert len(ended.started) == 1 and ClusterInfo.load(ended.cluster.paths.info) == ended.info


def test_nothing_is_started_beside_a_command_that_holds_the_lock(ended: Ended) -> None:
    with ended.cluster._locked(0.0):
        assert not ended.cluster.revive("dcs-j")
    assert ended.started == []


@pytest.mark.parametrize("taken_down", [
    lambda e: (e.cluster.dir / "cluster.json").unlink(), lambda e: e.cluster.services.forget("dcs-j")])
def test_service_that_was_taken_down_stays_down(ended: Ended, taken_down: Callable[[Ended], None]) -> None:
    taken_down(ended)
    assert not ended.cluster.revive("dcs-j") and ended.started == []


def test_etcd_without_its_data_is_not_started(ended: Ended) -> None:
    shutil.rmtree(ended.cluster.dir / "etcd" / "member" / "wal")
    with pytest.raises(PreflightFailed, match="are gone"):
        ended.cluster.revive("etcd-0")
    assert ended.started == []


def test_coordinator_whose_port_was_taken_gets_another_one_that_clients_find(ended: Ended) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ended.info.coordinators[0].rpartition(":")[2])))
        taken.listen()
        assert ended.cluster.revive("coordinator-0")
    found = ClusterInfo.load(ended.cluster.paths.info)
    assert found is not None and found.coordinators == [ended.started[0][1]] != ended.info.coordinators


def test_supervisor_starts_etcd_first_and_the_others_once_it_answers(ended: Ended,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False]
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: answers[0])
    supervisor = ServiceSupervisor()
    monkeypatch.setattr(supervisor, "_report", lambda *_: None)
    waiting = ended.tick(supervisor)
    assert [name for name, _ in ended.started] == ["etcd-0"]
    assert waiting == dict.fromkeys(("coordinator-0", "dcs-j"), "has ended and is started again when etcd answers")
    answers[0] = True
    ended.tick(supervisor)
    assert ended.tick(supervisor) == {}
    assert sorted(name for name, _ in ended.started) == ["coordinator-0", "dcs-j", "etcd-0"]


def test_supervisor_waits_for_a_command_that_holds_the_lock(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: False)
    limits = RestartLimits()
    supervisor = ServiceSupervisor(limits=limits, clock=lambda: 5.0)
    monkeypatch.setattr(supervisor, "_report", lambda *_: None)
    with ended.cluster._locked(0.0):
        ended.tick(supervisor)
    assert ended.started == [] and supervisor._unreported == {}
    assert supervisor._states["etcd-0"] == ServiceState.ended(5.0, limits), "no start was counted"
    ended.tick(supervisor)
    assert [name for name, _ in ended.started] == ["etcd-0"] and supervisor._unreported == {"etcd-0": 1}


def test_supervisor_says_why_etcd_cannot_be_started_and_starts_it_once_it_can(ended: Ended,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: False)
    now, limits = [5.0], RestartLimits()
    supervisor = ServiceSupervisor(limits=limits, clock=lambda: now[0])
    monkeypatch.setattr(supervisor, "_report", lambda *_: None)
    wal = ended.cluster.dir / "etcd" / "member" / "wal"
    wal.rename(wal.with_name("away"))
    gone = f"the data of this cluster's etcd in {ended.cluster.dir / 'etcd'} are gone"
    assert gone in ended.tick(supervisor)["etcd-0"]
    wal.with_name("away").rename(wal)
    now[0] += limits.longest_wait_s
    assert "etcd-0" not in ended.tick(supervisor) and [name for name, _ in ended.started] == ["etcd-0"]


def test_restart_is_reported_with_the_time_of_its_start_once_it_has_run_for_a_while(
        ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: True)
    monkeypatch.setattr(ended.cluster, "etcd", lambda *_, **__: contextlib.nullcontext())
    reported: list[tuple[str, float]] = []
    monkeypatch.setattr(events, "emit", lambda *args, started_at, **_: reported.append((args[3], started_at)))
    now = [5.0]
    supervisor = ServiceSupervisor(clock=lambda: now[0])
    ended.tick(supervisor)
    ended.tick(supervisor)
    assert not reported
    now[0] += 100.0
    before = time.time()
    ended.tick(supervisor)
    assert {subject for subject, _ in reported} == {"etcd-0", "coordinator-0", ended.cluster.host.node}
    assert all(before - 100.0 <= started_at <= time.time() - 100.0 for _, started_at in reported)


def test_supervisor_starts_its_standby_with_backoff(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: True)
    supervisor = ServiceSupervisor(clock=lambda: 5.0)
    monkeypatch.setattr(supervisor, "_report", lambda *_: None)
    for _ in range(5):
        ended.tick(supervisor)
    assert ended.agents == [AGENTS[1]], "it has not come up: the next start has to wait"


def test_defect_with_one_service_leaves_no_other_one_down(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: True)
    shutil.copy(ended.cluster.services.folder / "coordinator-0.json",
                ended.cluster.services.folder / "coordinator-x.json")
    spawn = ended.cluster._spawn

    def fail_for_node(name: str, cmd: list[str], **more: str) -> int:
        if name.startswith("dcs-"):
            raise ValueError("a defect")
        return spawn(name, cmd, **more)

    monkeypatch.setattr(ended.cluster, "_spawn", fail_for_node)
    supervisor = ServiceSupervisor()
    monkeypatch.setattr(supervisor, "_report", lambda *_: None)
    assert ended.tick(supervisor).keys() >= {"coordinator-x", "dcs-j"}
    assert [name for name, _ in ended.started] == ["etcd-0", "coordinator-0"]


def test_restart_is_reported_once_the_service_has_run_for_a_while(
        ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps ending would be an event, and an alert, every half a minute."""
    monkeypatch.setattr("elastic_rl.host.etcd_server.healthy", lambda endpoint, access, timeout_s=0.5: True)
    now, reported = [5.0], []
    monkeypatch.setattr(Cluster, "etcd", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("elastic_rl.host.agent.supervisor.events.emit",
                        lambda etcd, keys, kind, subject, text, **more: reported.append((subject, more["restarts"])))
    supervisor = ServiceSupervisor(limits=RestartLimits(backoff_initial_s=0.0), clock=lambda: now[0])
    for _ in range(3):
        ended.tick(supervisor)
        record = ended.cluster.services.get("etcd-0")
        assert record is not None
        processes.stop(record.pid)
        ended.tick(supervisor)
    assert reported == []
    now[0] += 1.0
    ended.tick(supervisor)
    now[0] += 5.0
    ended.tick(supervisor)
    assert [restarts for subject, restarts in reported if subject == "etcd-0"] == [supervisor._restarts["etcd-0"]]
