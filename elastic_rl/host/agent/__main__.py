"""``python -m elastic_rl.host.agent --name NAME --run_dir=DIR --job=JOB``: one of the two processes of a host agent.

The active one holds the agent's lock, keeps the services of the cluster running and starts the other one, its standby,
which takes the lock the moment the active one ends, however that ends; the services run on meanwhile. Exit codes: 0
after SIGTERM, which leaves the services running, and when the cluster was taken down; 2 for damaged settings.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.host import cluster_settings
from elastic_rl.host.agent.status import AgentStatus
from elastic_rl.host.agent.supervisor import ServiceSupervisor
from elastic_rl.host.cluster_lock import taken
from elastic_rl.host.local_cluster import AGENTS, Cluster
from elastic_rl.host.processes import StoppedProcesses, is_stopped
from elastic_rl.telemetry import logs
from elastic_rl.telemetry.log_files import LogRotation

log = logging.getLogger(__name__)

_STOPPED_LIMIT_S = 10.0
"""Time after which a stopped active agent counts as lost."""
_PASS_S = 0.5
"""Longest time between two passes; the end of a service starts one at once."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic_rl.host.agent", description=__doc__)
    parser.add_argument("--name", required=True, choices=AGENTS)
    args, location = parser.parse_known_args(argv)
    logs.setup(args.name)
    try:
        agent = HostAgent(args.name, Cluster(config.load(None, location)))
        with agent.active():
            agent.run()
        return 0
    except ConfigError as e:
        log.error("%s", e)
        return 2


class HostAgent:
    """One process of the agent of a cluster that is up, or being started."""

    def __init__(self, name: str, where: Cluster) -> None:
        """``where``: the cluster by its location alone. Its settings are read from its folder, and again when a command
        has changed them."""
        self._name, self._cluster = name, where
        self._settings_version: tuple[int, int] | None = None
        self._supervisor = ServiceSupervisor()
        self._stopping = False
        self._status: AgentStatus | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Waits until this process is the active one, which it is within the block. Any signal ends it until then: it
        has nothing to clean up. An active one that is stopped (SIGSTOP) would keep the lock and restart nothing, so it
        is killed."""
        stopped = StoppedProcesses(_STOPPED_LIMIT_S)
        with self._cluster.paths.active_agent_lock.open("w") as lock:
            while not taken(lock):
                _await_end(pids := [r.pid for r in self._cluster.agents.running() if r.pid not in (0, os.getpid())])
                for pid in stopped.lost(time.monotonic(), list(filter(is_stopped, pids))):
                    log.warning("the active agent %d is stopped: it is killed", pid)
                    os.kill(pid, signal.SIGKILL)
            log.info("%s (pid %d) is the active agent", self._name, os.getpid())
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            yield

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True

    def run(self) -> None:
        """Keeps the services running until a signal, or until the cluster is taken down: by a command, or by this agent
        because its owner has ended."""
        with contextlib.closing(LogRotation(self._cluster.paths.logs, self._cluster.cfg.telemetry)):
            while not self._stopping and not self._cluster.is_down:
                pids: list[int] = []
                try:
                    if self._cluster.down_if_abandoned():
                        return
                    pids = self._pass()
                except (ElasticRLError, OSError) as e:  # the services are worth more than this pass
                    log.warning("a pass failed: %s", e)
                _await_end(pids)
        self._cluster.paths.agent_status.unlink(missing_ok=True)

    def _pass(self) -> list[int]:
        """One pass; returns the pids of the services that run. Raises ElasticRLError and OSError."""
        self._read_settings()
        info = ClusterInfo.load(self._cluster.paths.info)
        if info is None:  # a command is starting the cluster
            return []
        status = AgentStatus(name=self._name, pid=os.getpid(),
                             services=self._supervisor.tick(self._cluster, info))
        if status != self._status:
            status.save(self._cluster.paths.agent_status)
            self._status = status
        self._cluster.start_agent_again(next(name for name in AGENTS if name != self._name))
        return [service.pid for service in status.services.values() if service.pid]

    def _read_settings(self) -> None:
        try:
            found = self._cluster.paths.settings.stat()
        except FileNotFoundError:
            return
        version = (found.st_ino, found.st_mtime_ns)  # a change replaces the file
        if version != self._settings_version:
            location = {"job": self._cluster.cfg.job, "run_dir": str(self._cluster.cfg.run_dir)}
            self._cluster = Cluster(cluster_settings.on_top(self._cluster.paths.settings, location))
            self._settings_version = version


def _await_end(pids: Sequence[int]) -> None:
    """Returns when one of the processes has ended, and after ``_PASS_S`` at the latest."""
    poll, opened = select.poll(), []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                opened.append(os.pidfd_open(pid))
                poll.register(opened[-1], select.POLLIN)
        poll.poll(_PASS_S * 1000)
    finally:
        for fd in opened:
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
