"""What the host agent says of itself and its services: a file in the cluster's folder, for commands on this host."""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.cluster_records import ServiceStatus
from elastic_rl.etcd.record import Record
from elastic_rl.host.agent import restart_policy
from elastic_rl.host.agent.restart_policy import RestartLimits, ServiceState
from elastic_rl.host.local_cluster import AGENTS, Cluster
from elastic_rl.host.service_files import job_of_service
from elastic_rl.runtime.files import replace_file

log = logging.getLogger(__name__)

WRITE_EVERY_S = 5.0
"""The active agent writes its status when it has changed, and so often."""
SILENT_AFTER_S = 30.0
"""Without a new status for so long the active agent counts as hung."""
AGENT = "host agent"
"""The name under which the agent's own problems are listed beside those of the services."""
_READ_EVERY_S = 1.0
_BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""


class AgentStatus(Record):
    """The last pass of the active agent."""

    name: str
    pid: int
    at: float
    """When it was written, unix seconds."""
    error: str = ""
    """Why the agent cannot do its work; empty if it can."""
    services: dict[str, ServiceStatus] = {}

    @property
    def waiting(self) -> dict[str, str]:
        """What does not run or work, and why, by name."""
        own = {AGENT: self.error} if self.error else {}
        return own | {name: service.reason for name, service in self.services.items() if service.reason}

    def save(self, path: Path) -> None:
        """Raises OSError. Where a disk is full, the file that is there is overwritten, as far as its blocks go: what
        the agent says then is what an operator looks for. A longer one is marked as written alone, so that the agent
        counts as heard."""
        content = self.encode()
        try:
            replace_file(path, content)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
                raise
            with path.open("r+b") as file:
                if len(content) <= os.fstat(file.fileno()).st_blocks * _BLOCK_BYTES:
                    os.pwrite(file.fileno(), content, 0)
                    file.truncate(len(content))
                else:
                    os.utime(file.fileno())

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None where no agent has written it, and for a damaged file, which an agent replaces."""
        try:
            return cls.decode(path.read_bytes())
        except (OSError, ValidationError):
            return None


def reported_problems(cluster: Cluster) -> str:
    """What of a cluster, and of its job, does not run on this host and why, as its agent has said lately; "" where it
    has said nothing. The services come first: why the agent has no work is often that one of them does not run."""
    status = AgentStatus.load(cluster.paths.agent_status)
    if status is None or abs(time.time() - status.at) > SILENT_AFTER_S:
        return ""
    found = sorted(_of_job(status, cluster).items(), key=lambda one: one[0] == AGENT)
    return "; ".join(f"{name}: {why}" if name == AGENT else f"{name} {why}" for name, why in found)


def _of_job(status: AgentStatus, cluster: Cluster) -> dict[str, str]:
    """What does not run of what the cluster's job needs: neither a standby that is being started nor another job's
    services are what it waits for."""
    return {name: why for name, why in status.waiting.items()
            if name not in AGENTS and job_of_service(name) in ("", cluster.cfg.job)}


class AgentWatch:
    """What a cluster of this host waits for, for a process that uses it. Starts the host agent when neither of its
    processes is left."""

    def __init__(self, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._limits, self._clock = cluster, RestartLimits(), clock
        self._waiting: Mapping[str, str] = {}
        self._read_at = float("-inf")
        self._agent: ServiceState | None = None
        """The two processes of the agent as one service."""
        self._fault = ""
        """Why the agent could not be started."""

    def waiting(self) -> Mapping[str, str]:
        """Name → what it waits for, as of a second ago at most."""
        if (now := self._clock()) - self._read_at >= _READ_EVERY_S:
            self._read_at = now
            try:
                self._waiting = self._read(now)
            except (ElasticRLError, OSError) as e:
                self._waiting = {AGENT: f"its state cannot be read: {e}"}
        return self._waiting

    def _read(self, now: float) -> Mapping[str, str]:
        runs = bool(self._cluster.agents.running())
        self._agent = restart_policy.on_seen(self._agent, runs, now, self._limits, jitter=random.random())
        if not runs:
            if self._agent.due(now):
                self._agent = self._start(self._agent, now)
            return {AGENT: f"has ended and cannot be started: {self._fault}" if self._fault else
                    "has ended and is started again"}
        self._fault = ""
        status = AgentStatus.load(self._cluster.paths.agent_status)
        if status is None:
            return {}
        if (silent_s := time.time() - status.at) > SILENT_AFTER_S:
            return {AGENT: f"has not been heard for {silent_s:.0f} s"}
        if status.at < self._up_since():
            return {}  # what the agent said while the cluster was being started is no longer true
        return _of_job(status, self._cluster)

    def _up_since(self) -> float:
        """When the cluster's addresses were written, unix seconds; 0 where they are not."""
        try:
            return self._cluster.paths.info.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _start(self, state: ServiceState, now: float) -> ServiceState:
        try:
            if not self._cluster.revive(AGENTS[0]):
                return state  # another command is at it, or the cluster was taken down
        except (ElasticRLError, OSError) as e:
            if self._fault != (fault := str(e)):
                log.error("the host agent cannot be started: %s", e)
            self._fault = fault
            return restart_policy.on_start_failed(state, now, self._limits, jitter=random.random())
        self._fault = ""
        return restart_policy.on_started(state, now, self._limits)
