"""What the host agent says of itself and its services: a file in the cluster's folder, for commands on this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from elastic_rl.etcd.cluster_records import ServiceStatus
from elastic_rl.etcd.record import Record
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.runtime.files import replace_file


class AgentStatus(Record):
    """The last pass of the active agent."""

    name: str
    pid: int
    services: dict[str, ServiceStatus]

    @property
    def waiting(self) -> dict[str, str]:
        """The services that do not run, and why, by name."""
        return {name: service.reason for name, service in self.services.items() if service.reason}

    def save(self, path: Path) -> None:
        """Raises OSError."""
        replace_file(path, self.encode())

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None where no agent has written it, and for a damaged file, which the next pass replaces."""
        try:
            return cls.decode(path.read_bytes())
        except (OSError, ValidationError):
            return None


def waiting_services(cluster: Cluster) -> Mapping[str, str]:
    """What a cluster of this host waits for, by the name of the service that does not run."""
    if not cluster.agents.running():
        return {"host agent": "does not run, so what ends stays down; `elastic-rl up` starts it"}
    status = AgentStatus.load(cluster.paths.agent_status)
    return status.waiting if status is not None else {}
