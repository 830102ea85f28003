"""What the host agent says of itself and its services: a file in the cluster's folder, for commands on this host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_rl.host.local_cluster import Cluster
from elastic_rl.runtime.files import replace_file


@dataclass(frozen=True)
class ServiceStatus:
    """How one service is."""

    state: str
    """``running`` or ``ended``."""
    pid: int = 0
    restarts: int = 0
    """How often the agent's present process has started it again."""
    reason: str = ""
    """What a service that has ended waits for."""


@dataclass(frozen=True)
class AgentStatus:
    """The last pass of the active agent."""

    name: str
    pid: int
    services: Mapping[str, ServiceStatus]

    @property
    def waiting(self) -> dict[str, str]:
        """The services that do not run, and why, by name."""
        return {name: s.reason for name, s in self.services.items() if s.reason}

    def save(self, path: Path) -> None:
        """Raises OSError."""
        replace_file(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> AgentStatus | None:
        """None where no agent has written it, and for a damaged file, which the next pass replaces."""
        try:
            values = json.loads(path.read_text())
            services = {name: ServiceStatus(**value) for name, value in values.pop("services").items()}
            return cls(services=services, **values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def waiting_services(cluster: Cluster) -> Mapping[str, str]:
    """What a cluster of this host waits for, by the name of the service that does not run."""
    if not cluster.agents.running():
        return {"host agent": "does not run, so what ends stays down; `elastic-rl up` starts it"}
    status = AgentStatus.load(cluster.paths.agent_status)
    return status.waiting if status is not None else {}
