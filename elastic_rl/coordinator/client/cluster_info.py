"""Where a cluster is, and what its clients need to connect to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.files import replace_file


@dataclass(frozen=True)
class ClusterInfo:
    """How to connect to a cluster; kept in a file while the cluster is up."""

    job: str
    """Name of the job that is addressed; empty where none was named."""
    etcd_endpoints: list[str]
    """``host:port`` of every member."""
    coordinators: list[str]
    """Base URLs of the admin API, one a replica."""
    tokens_file: str
    """File with the bearer tokens of the API, as ``credentials.read_token`` takes it; empty: there is none."""
    ca_file: str = ""
    """PEM file of the authority of the admin API's certificates; empty: the system's, or no TLS."""
    own_etcd: bool = False
    """Whether ``up`` has started the cluster's etcd."""

    def token(self, role: str) -> str:
        """Bearer token of a role, viewer or operator; empty where no file is named. Raises ConfigError for a file
        without one."""
        return read_token(Path(self.tokens_file), role) if self.tokens_file else ""

    def save(self, path: Path) -> None:
        replace_file(path, json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> ClusterInfo | None:
        """The cluster that a file describes; None if there is none. Raises ConfigError for a damaged file."""
        try:
            info = cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as e:
            raise ConfigError(f"{path} cannot be read: {e}", hint="`elastic-rl up` writes it again") from e
        return info
