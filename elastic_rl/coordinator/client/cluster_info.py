"""Where a cluster is, and what its clients need to talk to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClusterInfo:
    """How to reach a cluster; kept in ``<cluster_dir>/cluster.json``."""

    job: str
    etcd_endpoints: list[str]
    """``host:port`` of every member."""
    coordinators: list[str]
    """Base URLs of the admin API, one a replica."""
    tokens_file: str
    """JSON file, readable by its owner only: role (viewer, operator) → bearer token of the API."""
    config_file: str
    cluster_dir: str
    ca_file: str = ""
    """PEM file of the authority of the admin API's certificates; empty: the system's, or no TLS."""

    def token(self, role: str) -> str:
        """Bearer token of a role, viewer or operator; empty where there is none (loopback needs none)."""
        path = Path(self.tokens_file)
        return str(json.loads(path.read_text()).get(role, "")) if path.exists() else ""

    def save(self) -> None:
        path = Path(self.cluster_dir) / "cluster.json"
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(json.dumps(asdict(self), indent=2))
        unfinished.rename(path)

    @classmethod
    def load(cls, cluster_dir: Path) -> ClusterInfo | None:
        path = cluster_dir / "cluster.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None
