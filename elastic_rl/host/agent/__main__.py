"""``python -m elastic_rl.host.agent --name NAME --run_dir=DIR --job=JOB``: one of the two processes of a host agent.

The active one holds the agent's lock, keeps the services of the cluster running and starts the other one, its standby,
which takes the lock the moment the active one ends, however that ends; the services run on meanwhile. Exit codes: 0
after SIGTERM, which leaves the services running, and when the cluster is down; 2 for a location that is none.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.host import cluster_settings, kept_state
from elastic_rl.host.agent.assigned_work import AssignedWork
from elastic_rl.host.agent.heartbeat_collector import HeartbeatCollector
from elastic_rl.host.agent.job_services import JobServices
from elastic_rl.host.agent.log_server import LogServer
from elastic_rl.host.agent.status import SILENT_AFTER_S, WRITE_EVERY_S, AgentStatus
from elastic_rl.host.agent.supervisor import ServiceSupervisor
from elastic_rl.host.agent.upkeep import Upkeep
from elastic_rl.host.file_lock import taken
from elastic_rl.host.local_cluster import AGENTS, Cluster
from elastic_rl.runtime.waiting import ProgressLimit
from elastic_rl.telemetry import logs
from elastic_rl.telemetry.log_files import LogRotation

log = logging.getLogger(__name__)

_ETCD_BUDGET_S = 1.0
"""Longest time in which a pass waits for etcd."""
_LOGS_RETRY_S = 10.0
"""Pause between two starts of the server of the logs."""
_PASS_S = 0.5
"""Longest time between two passes; the end of a service starts one at once."""
_STANDBY_PASS_S = 2.0
"""Longest time between two looks of the standby at the active agent, whose end it notices at once."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic_rl.host.agent", description=__doc__)
    parser.add_argument("--name", required=True, choices=AGENTS)
    args, location = parser.parse_known_args(argv)
    logs.setup(args.name)
    try:
        agent = HostAgent(args.name, Cluster(config.load(None, location)), AssignedWork.of_cluster)
        with agent.active():
            agent.run()
        return 0
    except ConfigError as e:
        log.error("%s", e)
        return 2


class HostAgent:
    """One process of the agent of a cluster that is up, or being started."""

    def __init__(self, name: str, where: Cluster,
                 work_of: Callable[[Cluster, ClusterInfo, int], AssignedWork] | None = None) -> None:
        """``where``: the cluster by its location alone. Its settings are read from its folder, and again when a command
        has changed them. ``work_of``: makes what carries out the cluster's assignments to this host, such as
        ``AssignedWork.of_cluster``, from these, the addresses and the port of the host's logs; None: this host is not
        registered and is assigned nothing."""
        self._name, self._cluster = name, where
        self._settings_version: tuple[int, int] | None = None
        self._settings_error = ""
        self._supervisor = ServiceSupervisor()
        self._rotation: LogRotation | None = None
        self._stopping = False
        # It may expire, and its files may be damaged or gone.
        self._certificate = Upkeep(lambda: self._cluster.renew_certificate(),
                                   "the certificate of this host cannot be renewed")
        self._member = Upkeep(self._keep_member, "this host's member of etcd cannot be kept")
        self._etcd: EtcdClient | None = None
        """A client for the list of etcd's members."""
        self._etcd_endpoints: list[str] = []
        self._status: AgentStatus | None = None
        self._work_of = work_of
        self._work: AssignedWork | None = None
        self._job_services: JobServices | None = None
        self._heartbeats: HeartbeatCollector | None = None
        self._logs: LogServer | None = None
        self._logs_at, self._logs_error = 0.0, ""
        """When the server of the logs is tried again, monotonic seconds; why it did not start."""
        self._log_port = 0
        """Port of the logs that this host is registered with."""
        self._endpoints: list[str] = []
        """Endpoints of the etcd that has the assignments."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Waits until this process is the active one, which it is within the block. Any signal ends it until then: it
        has nothing to clean up. An active one that hangs, or is stopped (SIGSTOP), would keep the lock and restart
        nothing, so it is killed; what it kept running runs on."""
        # Time in which this process was itself suspended does not count.
        silence = ProgressLimit(SILENT_AFTER_S, gap_s=4 * _STANDBY_PASS_S)
        with self._cluster.paths.active_agent_lock.open("w", encoding="utf-8") as lock:
            while not taken(lock):
                pids = [r.pid for r in self._cluster.agents.running() if r.pid not in (0, os.getpid())]
                silence.update({"status": _modified_s(self._cluster.paths.agent_status)})
                if silence.expired:
                    silence = ProgressLimit(SILENT_AFTER_S, gap_s=4 * _STANDBY_PASS_S)
                    for pid in pids if self._expects_status() else ():
                        log.warning("the active agent %d is not heard: it is killed", pid)
                        os.kill(pid, signal.SIGKILL)
                _await_end(pids, _STANDBY_PASS_S if pids else _PASS_S)
            log.info("%s (pid %d) is the active agent", self._name, os.getpid())
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            yield

    def _expects_status(self) -> bool:
        """Whether an active agent that works would say so: not while it starts the cluster or takes it down, and not
        where the disk takes nothing from anybody, as one that is mounted read-only since it has failed."""
        try:
            os.utime(self._cluster.paths.active_agent_lock)
        except OSError:
            return False
        return self._cluster.paths.info.exists()

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True

    def run(self) -> None:
        """Keeps the services running until a signal, or until the cluster is down: by a command, or by this agent where
        a command was killed that owned the cluster or stopped it."""
        failed = ""
        while not self._stopping and not (self._work is not None and self._work.replaced):
            pids: list[int] = []
            try:
                if self._cluster.down_if_abandoned():
                    break
                pids, failed = self._pass(), ""
            except Exception as e:  # the services are worth more than this pass
                if failed != (failed := f"{type(e).__name__}: {e}"):
                    log.exception("a pass of the agent failed")
            _await_end(pids)
        self._close_work()
        self._close_etcd()
        if self._logs is not None:
            self._logs.close()
        if self._rotation is not None:
            self._rotation.close()
        self._cluster.paths.agent_status.unlink(missing_ok=True)

    def _pass(self) -> list[int]:
        """One pass; returns the pids of what runs."""
        error = self._read_settings()
        try:
            info = ClusterInfo.load(self._cluster.paths.info)
            error = error or ("" if info else "the cluster's start is not complete; `elastic-rl up "
                              f"{kept_state.cluster_options(self._cluster.cfg)}` completes it")
        except ConfigError as e:
            info, error = None, str(e)
        if info is not None:
            error = error or self._certificate.run_if_due()
        services = self._supervisor.supervise(self._cluster, info, _other(self._name))
        if info is not None:
            error = error or self._member.run_if_due()
        status = AgentStatus(name=self._name, pid=os.getpid(), at=time.time(), services=services,
                             error=error or self._waits_for(info))
        before = self._status
        if before is None or status.replace(at=before.at) != before or not 0 <= status.at - before.at < WRITE_EVERY_S:
            status.save(self._cluster.paths.agent_status)
            self._status = status
        return [service.pid for service in status.services.values() if service.pid]

    def _waits_for(self, info: ClusterInfo | None) -> str:
        """Begins to carry out assignments once the cluster is up. Returns why this host takes none; empty if it does,
        or is to take none."""
        if self._work_of is not None and info is not None:
            self._serve_logs()
        log_port = self._logs.port if self._logs is not None else 0
        if self._work is not None and info is not None and (
                log_port != self._log_port or set(self._endpoints).isdisjoint(info.etcd_endpoints)):
            self._close_work()  # etcd or the logs have other addresses now: the singletons run on, and are adopted
        if self._work is None and self._work_of is not None and info is not None:
            try:
                self._work = self._work_of(self._cluster, info, log_port).start()
                if self._cluster.named:
                    self._job_services = JobServices(lambda: self._cluster, self._cluster.etcd(info), lambda: (
                        self._work is not None and self._work.registered)).start()
                self._heartbeats = HeartbeatCollector.of_cluster(self._cluster, info, lambda: (
                    self._work.registration if self._work is not None else 0)).start()
                self._endpoints, self._log_port = info.etcd_endpoints, log_port
            except (ElasticRLError, OSError) as e:
                return f"this host cannot take work: {e}"
        if self._work is None:
            return ""
        if info is not None:  # its members may all change, one after the other
            self._endpoints = info.etcd_endpoints
        return self._work.waits_for or (self._job_services.waits_for if self._job_services is not None else "")

    def _serve_logs(self) -> None:
        """Serves the logs of this host to others, if there can be any. Where that fails, the host does without."""
        if not self._cluster.named or time.monotonic() < self._logs_at or (
                self._logs is not None and self._logs.running):
            return
        before, self._logs = self._logs, None
        self._logs_at = time.monotonic() + _LOGS_RETRY_S
        if before is not None:
            before.close()
        try:
            if not self._cluster.host.is_local:
                self._logs = LogServer.of_cluster(lambda: self._cluster).start()
            self._logs_error = ""
        except Exception as e:  # a host without that is of more use than one that takes no work
            if self._logs_error != (error := f"{type(e).__name__}: {e}"):
                log.error("the logs of this host cannot be served: %s", e,
                          exc_info=None if isinstance(e, ElasticRLError | OSError) else e)
            self._logs_error = error

    def _close_work(self) -> None:
        for part in (self._heartbeats, self._job_services, self._work):
            if part is not None:
                part.close()
        self._heartbeats = self._job_services = self._work = None

    def _keep_member(self) -> bool:
        """Keeps what etcd knows of this host's member, and this host of the others, right. Raises ElasticRLError and
        OSError."""
        info = ClusterInfo.load(self._cluster.paths.info)
        if info is None or self._cluster.cfg.etcd.endpoints:
            return True
        if self._etcd is not None and set(self._etcd_endpoints).isdisjoint(info.etcd_endpoints):
            self._close_etcd()
        if self._etcd is None:
            self._etcd = self._cluster.etcd(info, retry_budget_s=_ETCD_BUDGET_S)
            self._etcd_endpoints = info.etcd_endpoints
        self._cluster.keep_member(self._etcd)
        return True

    def _close_etcd(self) -> None:
        if self._etcd is not None:
            self._etcd.close()
        self._etcd = None

    def _read_settings(self) -> str:
        """Reads the cluster's settings if they have changed. Returns why they cannot be used: those before then hold.
        """
        try:
            found = self._cluster.paths.settings.stat()
        except FileNotFoundError:
            return self._settings_error
        version = (found.st_ino, found.st_mtime_ns)  # a change replaces the file
        if version == self._settings_version:
            return self._settings_error
        self._settings_version, self._settings_error = version, ""
        cfg = self._cluster.cfg
        location = {"job": cfg.job, "run_dir": str(cfg.run_dir), "cluster": cfg.cluster}
        try:
            self._cluster = Cluster(cluster_settings.on_top(self._cluster.paths.settings, location))
        except ElasticRLError as e:
            log.error("the settings of the cluster cannot be used: %s", e)
            self._settings_error = str(e)
            return self._settings_error
        self._close_etcd()  # how it is reached may have changed
        if self._rotation is not None:
            self._rotation.close()
        self._rotation = LogRotation(self._cluster.paths.logs, self._cluster.cfg.telemetry)
        return ""


def _other(name: str) -> str:
    return next(other for other in AGENTS if other != name)


def _modified_s(path: Path) -> float:
    """When a file was written last, unix seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _await_end(pids: Sequence[int], longest_s: float = _PASS_S) -> None:
    """Returns when one of the processes has ended, and after ``longest_s`` at the latest; after ``_PASS_S`` where the
    end of one of them could not be seen."""
    poll, opened = select.poll(), []
    try:
        for pid in pids:
            try:
                opened.append(os.pidfd_open(pid))
            except OSError:  # it has ended, or there is no descriptor left
                longest_s = min(longest_s, _PASS_S)
            else:
                poll.register(opened[-1], select.POLLIN)
        poll.poll(longest_s * 1000)
    finally:
        for fd in opened:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
