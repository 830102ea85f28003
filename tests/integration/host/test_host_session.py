"""The agent of a host with a real etcd and real processes: its registration, its lease, and what it is assigned."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from support import killed_at
from support.etcd_server import EtcdServers
from support.host_agents import KEYS, Hosts, command_of, times
from support.killed_at import Point
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd import leases
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import Host, RunState, driver_of
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.process_state import machine_id
from elastic_rl.host.agent.__main__ import HostAgent
from elastic_rl.host.agent.assigned_work import AssignedWork
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.local_host import host_name
from elastic_rl.runtime.clock import boottime_s
from elastic_rl.runtime.process import runs

DRIVER, OTHER = driver_of("j"), driver_of("k")
_SINGLETONS = "elastic_rl.host.agent.singletons:Singletons"

def parent(said: Path) -> list[str]:
    """Command of a process that says in a file when it starts and ends, and has a child that leads another session."""
    program = f"""
import signal, subprocess, sys
said = open({str(said)!r}, "a", buffering=1)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
def end(*_):
    print("end GENERATION", file=said)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("start GENERATION", child.pid, file=said)
while True:
    signal.pause()
"""
    return [sys.executable, "-S", "-E", "-c", program]


def said_by(said: Path, lines: int) -> list[list[str]]:
    """What has been said, once there are so many lines, in words."""
    return wait_until(lambda: said.exists() and len(found := said.read_text().splitlines()) >= lines and [
        line.split() for line in found], what=f"{lines} lines of the singleton's processes")


def lives(pid: int) -> bool:
    try:
        return runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


# -- registration ------------------------------------------------------------------------------------------------------
def test_host_registers_under_two_keys_and_reports_under_its_registration(own_etcd: EtcdClient, host: Hosts) -> None:
    h = host()
    h.start_here()
    leased, kept = h.registration(), own_etcd.get(KEYS.host_registration("h1"))
    assert kept is not None and kept.value == leased.value and kept.mod_revision == leased.mod_revision
    assert leased.lease and not kept.lease
    record = Host.decode(leased.value)
    assert (record.id, record.incarnation, record.machine) == ("h1", h.incarnation, machine_id())
    assert record.cpus and record.memory_bytes and record.shm_bytes and record.address and record.release
    status = wait_until(lambda: (s := h.status()) and not s.not_ready and s, what="a host that is ready")
    assert status.registration == leased.mod_revision and status.services == {}
    found = own_etcd.get(KEYS.host_status("h1"))
    assert found is not None and found.lease == leased.lease


def test_host_whose_lease_is_lost_registers_again_and_keeps_what_runs(own_etcd: EtcdClient, host: Hosts) -> None:
    h = host()
    h.start_here()
    h.assign(DRIVER)
    pid = h.await_service(DRIVER).pid
    first = h.registration()
    own_etcd.revoke(first.lease)
    second = h.registration(after=first.mod_revision)
    assert second.lease != first.lease
    service = h.await_service(DRIVER, registration=second.mod_revision)
    assert (service.pid, service.restarts) == (pid, 0) and lives(pid)


def test_registration_that_an_operator_deletes_is_written_again(own_etcd: EtcdClient, host: Hosts) -> None:
    """The lease lives on, so only the refused status tells."""
    h = host()
    h.start_here()
    first = h.registration()
    own_etcd.delete(KEYS.host("h1"))
    assert h.registration(after=first.mod_revision).lease != first.lease


def test_agent_does_not_take_its_own_earlier_registration_for_that_of_another(
        host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may be over by the clock of the agent, and not yet by that of etcd."""
    h = host()
    work = h.start_here()
    first = h.registration()
    monkeypatch.setattr(leases, "revoke", lambda *_, **__: None)  # as where etcd does not answer
    held = work._session._held
    assert held is not None and held.lease.id == first.lease
    held.lease.lost.set()
    assert h.registration(after=first.mod_revision).lease != first.lease and not work.replaced


def test_agent_that_was_replaced_by_a_later_one_writes_and_ends_nothing_more(own_etcd: EtcdClient, host: Hosts) -> None:
    h = host(ttl_s=5.0)
    older = h.start_here()
    h.assign(DRIVER)
    pid = h.await_service(DRIVER).pid
    first = h.registration().mod_revision
    h.start_here()
    second = h.registration(after=first).mod_revision
    wait_until(lambda: older.replaced, what="the older agent to give up")
    assert "started later" in older.waits_for
    wait_until(lambda: not older._thread.is_alive() and older._session.view().lease.ended(boottime_s(), times(5.0)),
               what="the time of the older agent's lease")
    assert h.await_service(DRIVER, registration=second).pid == pid and lives(pid)
    assert h.registration().mod_revision == second


def test_name_that_another_machine_has_is_not_taken_from_it(own_etcd: EtcdClient, host: Hosts) -> None:
    first, second = host("h1", "machine-a"), host("h1", "machine-b")
    first.start_process()
    registered = first.registration()
    waiting = second.start_here()
    wait_until(lambda: waiting.waits_for, what="the second agent to wait")
    assert "h1 is registered at" in waiting.waits_for and "a name of its own" in waiting.waits_for
    assert first.registration().mod_revision == registered.mod_revision
    first.kill_agents()
    own_etcd.revoke(registered.lease)  # as its end does, sooner or later
    assert Host.decode(second.registration(after=registered.mod_revision).value).incarnation == second.incarnation
    wait_until(lambda: not waiting.waits_for, what="the second agent to wait for nothing")
    back = first.start_here()
    wait_until(lambda: back.waits_for, what="the first machine to wait when it is back")
    assert Host.decode(second.registration().value).incarnation == second.incarnation


# -- what it is assigned -----------------------------------------------------------------------------------------------
def test_killed_agent_is_followed_by_one_that_adopts_what_runs(host: Hosts, tmp_path: Path) -> None:
    h, starts = host(), tmp_path / "starts"
    agent = h.start_process()
    generation = h.assign(DRIVER, "bash", "-c", f"echo GENERATION >> {starts}; exec sleep 600")
    pid = h.await_service(DRIVER).pid
    for _ in range(2):
        before = h.registration().mod_revision
        agent.send_signal(signal.SIGKILL)
        agent.wait(60)
        agent = h.start_process()
        registered = h.registration(after=before).mod_revision
        service = h.await_service(DRIVER, registration=registered)
        assert (service.pid, service.generation) == (pid, generation) and lives(pid)
    assert starts.read_text().split() == [str(generation)]
    psutil.Process(pid).kill()
    assert h.await_service(DRIVER, pid_not=pid).generation == generation
    assert starts.read_text().split() == [str(generation)] * 2


@pytest.mark.parametrize("point", [
    partial(killed_at.before, f"{_SINGLETONS}._start"), partial(killed_at.after, "elastic_rl.host.processes:spawn"),
    partial(killed_at.after, f"{_SINGLETONS}._start")],
    ids=["before-it-starts-it", "before-it-has-noted-it", "before-it-reports-it"])
def test_take_over_that_is_killed_is_finished_by_the_next_agent_and_starts_one_process(
        host: Hosts, tmp_path: Path, point: Callable[[Path], Point]) -> None:
    h, starts, kill = host(), tmp_path / "starts", point(tmp_path)
    agent = h.start_process(kill)
    before = h.registration().mod_revision
    generation = h.assign(DRIVER, "bash", "-c", f"echo GENERATION $$ >> {starts}; exec sleep 600")
    assert agent.wait(60) == -signal.SIGKILL and kill.reached
    status = h.status()
    assert status is None or DRIVER not in status.services or status.services[DRIVER].state is not RunState.RUNNING
    h.start_process()
    registered = h.registration(after=before).mod_revision
    service = h.await_service(DRIVER, generation=generation, registration=registered)
    assert starts.read_text().split() == [str(generation), str(service.pid)] and lives(service.pid)


def test_older_generation_ends_with_all_that_it_has_started_before_the_next_one_starts(
        host: Hosts, tmp_path: Path) -> None:
    h, said = host(), tmp_path / "said"
    h.start_here()
    first = h.assign(DRIVER, *parent(said))
    child = int(said_by(said, 1)[0][2])
    second = h.assign(DRIVER, *parent(said))
    assert [line[:2] for line in said_by(said, 3)] == [
        ["start", str(first)], ["end", str(first)], ["start", str(second)]]
    assert not lives(child)
    assert h.await_service(DRIVER, generation=second).restarts == 0


def test_process_that_was_killed_leaves_nothing_beside_its_successor(host: Hosts, tmp_path: Path) -> None:
    h, said = host(), tmp_path / "said"
    h.start_here()
    h.assign(DRIVER, *parent(said))
    pid, left = h.await_service(DRIVER).pid, int(said_by(said, 1)[0][2])
    psutil.Process(pid).kill()
    said_by(said, 2)
    assert not lives(left) and h.await_service(DRIVER, pid_not=pid).restarts == 1


def test_singleton_whose_work_is_done_is_not_started_again_by_a_later_agent(host: Hosts, tmp_path: Path) -> None:
    h = host()
    agent = h.start_process()
    program = (f"import pathlib, time; from elastic_rl.host.service_files import report_completed\n"
               f"while not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.05)\nreport_completed()")
    h.assign(DRIVER, sys.executable, "-c", program)
    pid = h.await_service(DRIVER).pid
    agent.kill()  # nobody sees the exit code
    agent.wait(60)
    (tmp_path / "go").touch()
    wait_until(lambda: not h.files.running(), what="the end of the process")
    registered = h.registration().mod_revision
    h.start_process()
    h.registration(after=registered)
    service = h.await_service(DRIVER, RunState.COMPLETED, registration=registered + 1)
    assert service.pid == 0 and not lives(pid) and not h.files.running()


def test_released_singleton_ends_and_its_host_says_at_which_revision(own_etcd: EtcdClient, host: Hosts) -> None:
    h = host()
    h.start_here()
    h.assign(DRIVER)
    pid = h.await_service(DRIVER).pid
    released = own_etcd.put(KEYS.assignment(DRIVER), b"{}")
    status = wait_until(lambda: (s := h.status()) and s.observed_revision >= released and not s.services and s,
                        what="the report of the release")
    assert not lives(pid) and not status.not_ready and h.files.all() == []


# -- without etcd ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("point", [
    partial(killed_at.before, f"{_SINGLETONS}._end_all"), partial(killed_at.after, f"{_SINGLETONS}._end_all")],
    ids=["before-it-ends-it", "before-it-reports-its-end"])
def test_release_that_is_killed_is_finished_by_the_next_agent(
        own_etcd: EtcdClient, host: Hosts, tmp_path: Path, point: Callable[[Path], Point]) -> None:
    h, kill = host(), point(tmp_path)
    agent = h.start_process(kill)
    h.assign(DRIVER)
    pid = h.await_service(DRIVER).pid
    released = own_etcd.put(KEYS.assignment(DRIVER), b"{}")
    assert agent.wait(60) == -signal.SIGKILL and kill.reached
    status = h.status()
    assert status is None or DRIVER in status.services, "the end of what it held was not reported yet"
    h.start_process()
    wait_until(lambda: (s := h.status()) and s.observed_revision >= released and not s.services and not s.not_ready,
               what="the report of the release")
    assert not lives(pid) and h.files.all() == []


def test_host_without_its_lease_ends_its_singletons_and_starts_them_under_the_next_one(
        own_servers: EtcdServers, host: Hosts, tmp_path: Path) -> None:
    h = host(ttl_s=3.0)
    h.start_here()
    stubborn = "trap '' TERM; while true; do sleep 0.1; done"
    h.assign(OTHER, "bash", "-c", stubborn)
    h.assign(DRIVER)
    pids = [h.await_service(name).pid for name in (OTHER, DRIVER)]
    registered = h.registration().mod_revision
    own_servers.stop(0)
    wait_until(lambda: not h.files.running(), what="the self-fence")
    assert not any(map(lives, pids))
    own_servers.cont(0)
    h.registration(after=registered)
    for name in (OTHER, DRIVER):
        service = h.await_service(name, registration=registered + 1)
        assert service.pid not in pids and service.restarts == 0


def test_etcd_that_was_away_for_less_than_the_lease_changes_nothing(own_servers: EtcdServers, host: Hosts) -> None:
    h = host(ttl_s=300.0)
    h.start_here()
    h.assign(DRIVER)
    pid, registered = h.await_service(DRIVER).pid, h.registration()
    own_servers.kill(0)
    own_servers.restart(0)
    h.assign(OTHER)
    assert h.await_service(OTHER).generation == 1
    assert h.registration().mod_revision == registered.mod_revision
    assert h.await_service(DRIVER).pid == pid and lives(pid)


class Supervisor:
    """Takes the place of the ``ServiceSupervisor``: counts the passes over the services of the host."""

    def __init__(self) -> None:
        self.passes = 0

    def supervise(self, *_: object) -> dict[str, object]:
        self.passes += 1
        return {}


def test_services_are_supervised_while_etcd_does_not_answer(
        own_servers: EtcdServers, own_etcd: EtcdClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(config.parse({"job": "j", "run_dir": str(tmp_path / "runs")}))
    cluster.paths.folder.mkdir(parents=True)
    ClusterInfo("j", own_servers.endpoints, [], "", "", own_etcd=True).save(cluster.paths.info)
    works: list[AssignedWork] = []

    def work_of(where: Cluster, info: ClusterInfo, log_port: int) -> AssignedWork:
        works.append(AssignedWork.of_cluster(where, info, log_port, command_of, times(3.0)))
        return works[-1]

    supervisor = Supervisor()
    agent = HostAgent("agent-0", cluster, work_of)
    monkeypatch.setattr(agent, "_supervisor", supervisor)
    own_servers.stop(0)
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        wait_until(lambda: works and works[0].waits_for, what="the agent to find no etcd")
        before = supervisor.passes
        wait_until(lambda: supervisor.passes > before + 3, what="passes without etcd")
        own_servers.cont(0)
        wait_until(lambda: own_etcd.get(ClusterKeys("j").host(host_name())), what="the registration")
        wait_until(lambda: not works[0].waits_for, what="the agent to wait for nothing")
        assert len(works) == 1
    finally:
        own_servers.cont(0)
        agent._on_signal(signal.SIGTERM, None)
        thread.join(60)
    assert not thread.is_alive()
    assert own_etcd.get(ClusterKeys("j").host(host_name())) is not None, "the next agent takes it over"
