"""Agents of hosts of a cluster, in the test's process or, with ``main``, as processes (``support.forked``) with the
arguments ENDPOINTS FOLDER HOST TTL_S; these collect heartbeats as well.

The command of a singleton is that in its arguments, with GENERATION replaced by its generation; without one it sleeps.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import Assignment, HostStatus, RunState, ServiceStatus
from elastic_rl.etcd.heartbeat_folder import HeartbeatFolder
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.host import processes
from elastic_rl.host.agent import heartbeat_collector
from elastic_rl.host.agent.assigned_work import AssignedWork
from elastic_rl.host.agent.heartbeat_collector import HeartbeatCollector
from elastic_rl.host.agent.host_facts import host_record, kept_incarnation
from elastic_rl.host.agent.host_session import HostSession
from elastic_rl.host.agent.preemption_watch import PreemptionWatch
from elastic_rl.host.agent.singletons import Singletons
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.preemption import NoticeSource
from elastic_rl.host.service_files import SERVICE_FILE_ENV, ServiceFiles
from support import forked, killed_at
from support.waiting import wait_until

KEYS = ClusterKeys()
COLLECT_S = 0.5
"""Period of the collection of heartbeats."""
MARK_PERIODS, LEASE_PERIODS = 12, 30
"""In these periods, which are short, an agent on a busy machine may miss several."""


def times(ttl_s: float) -> HostTimes:
    return HostTimes(lease_ttl_s=ttl_s, lost_s=2.0 + ttl_s / 10, agent_pass_s=0.25, stop_s=1.0,
                     start_margin_s=ttl_s / 4)


def command_of(name: str, arguments: Mapping[str, Any], generation: int) -> list[str]:
    command = arguments.get("command", ["sleep", "600"])
    return [part.replace("GENERATION", str(generation)) for part in command]


def work_of(endpoints: Sequence[str], folder: Path, name: str, limits: HostTimes, notices: str = "") -> AssignedWork:
    """The agent of a host, not started. ``notices``: source of its notices of preemption."""
    host = host_record(LocalHost(name=name), kept_incarnation(folder / "incarnation"))
    etcd = EtcdClient(endpoints, call_timeout_s=1.0, retry_budget_s=limits.lease_ttl_s / 3)
    singletons = Singletons(host.id, host.incarnation, ServiceFiles(folder / "singletons"),
                            lambda file_name: folder / f"{file_name}.log", command_of, limits)
    watch = PreemptionWatch(NoticeSource(notices), every_s=0.1) if notices else None
    return AssignedWork(HostSession(etcd, KEYS, host, limits), singletons, ServiceFiles(folder / "services"), limits,
                        watch)


def main() -> None:
    endpoints, folder, name, ttl_s = sys.argv[1:]
    killed_at.install()
    work = work_of(endpoints.split(","), Path(folder), name, times(float(ttl_s))).start()
    etcd = EtcdClient(endpoints.split(","), call_timeout_s=1.0, retry_budget_s=5.0)
    heartbeat_collector._MARK_PERIODS, heartbeat_collector._LEASE_PERIODS = MARK_PERIODS, LEASE_PERIODS
    HeartbeatCollector(etcd, KEYS, name, Path(folder) / "heartbeats", lambda: work.registration,
                       period_s=COLLECT_S).start()
    signal.pause()


class HostUnderTest:
    """A host with its folder, as ``etcd`` and its own processes show it. ``ttl_s``: of its agents' leases."""

    def __init__(self, etcd: EtcdClient, folder: Path, name: str, ttl_s: float = 60.0) -> None:
        folder.mkdir(parents=True)
        self.etcd, self.folder, self.name, self.ttl_s = etcd, folder, name, ttl_s
        self.files, self.incarnation = ServiceFiles(folder / "singletons"), kept_incarnation(folder / "incarnation")
        self.works: list[AssignedWork] = []
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_here(self, notices: str = "") -> AssignedWork:
        """An agent in this process. ``notices``: source of its notices of preemption."""
        self.works.append(work_of(self.etcd.endpoints, self.folder, self.name, times(self.ttl_s), notices).start())
        return self.works[-1]

    def heartbeats(self, job: str) -> HeartbeatFolder:
        """Where the processes of a job leave their heartbeats."""
        return HeartbeatFolder(self.folder / "heartbeats" / job, self.name)

    def start_process(self, *points: killed_at.Point) -> subprocess.Popen[bytes]:
        """An agent as a process that can be killed. ``points``: at which it is."""
        self.agents.append(forked.spawn(
            "support.host_agents", ",".join(self.etcd.endpoints), str(self.folder), self.name, str(self.ttl_s),
            log=self.folder / "agent.log", env=killed_at.environment(points)))
        return self.agents[-1]

    def kill_agents(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait(60)

    def power_off(self) -> None:
        """Kills the agents, and then all that the singletons are and have started."""
        self.kill_agents()
        for record in self.files.all():
            processes.sweep(self.files.mark(record.name), SERVICE_FILE_ENV)

    def close(self) -> None:
        for work in self.works:
            work.close()
        self.power_off()

    # -- what etcd has of it -------------------------------------------------------------------------------------------
    def registration(self, *, after: int = 0) -> KeyValue:
        """The registration under a lease, once there is one that is newer than revision ``after``."""
        def found() -> KeyValue | None:
            kv = self.etcd.get(KEYS.host(self.name))
            return kv if kv is not None and kv.mod_revision > after else None
        return wait_until(found, what=f"the registration of host {self.name}")

    def status(self) -> HostStatus | None:
        kv = self.etcd.get(KEYS.host_status(self.name))
        return HostStatus.decode(kv.value) if kv is not None else None

    def assign(self, singleton: str, *command: str) -> int:
        """Assigns a singleton to this host, as a leader does; returns the generation."""
        record = Assignment(host=self.name, incarnation=self.incarnation,
                            arguments={"command": list(command)} if command else {})
        self.etcd.put(KEYS.assignment(singleton), record.encode())
        kv = self.etcd.get(KEYS.assignment(singleton))
        assert kv is not None
        return kv.version

    def await_service(self, singleton: str, state: RunState = RunState.RUNNING, *, generation: int = 0,
                      registration: int = 0, pid_not: int = 0) -> ServiceStatus:
        """The singleton as the host's agent reports it, once it is in this state; of any generation, or of this one."""
        def found() -> ServiceStatus | None:
            status = self.status()
            service = status.services.get(singleton) if status is not None else None
            if status is None or service is None or registration > status.registration:
                return None
            fits = service.state is state and generation in (0, service.generation)
            return service if fits and (not pid_not or service.pid != pid_not) else None
        return wait_until(found, what=f"{singleton} {state} on host {self.name}")


Hosts = Callable[..., HostUnderTest]
"""Makes a host by its name, with ``folder`` and ``ttl_s`` as options."""


if __name__ == "__main__":
    main()
