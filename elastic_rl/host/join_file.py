"""What a machine needs to become a host of a cluster: a file that an operator carries to it.

It has the cluster's secret, from which the machine derives its certificate and every token. So who has the file has the
cluster; there is no service that admits hosts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.config.root import CLUSTER_SECTIONS
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.record import Record
from elastic_rl.net import secret_file
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import replace_file

_MAX_BYTES = 1 << 20


class JoinFile(Record):
    cluster: str
    secret: str
    etcd_endpoints: list[str]
    """``host:port`` of each member."""
    coordinators: list[str]
    """URLs of the admin API, for commands on the host."""
    settings: dict[str, Any]
    """The sections of the cluster, as `up` has stored them."""

    @classmethod
    def of(cls, cfg: Config, secret: ClusterSecret, etcd_endpoints: list[str], coordinators: list[str]) -> Self:
        """``cfg``: the settings of the cluster, without what holds on one host alone."""
        return cls(cluster=cfg.cluster, secret=secret.value, etcd_endpoints=etcd_endpoints, coordinators=coordinators,
                   settings=cfg.model_dump(mode="json", include=set(CLUSTER_SECTIONS)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a join file. Raises ConfigError for a file that is none, or that others than its owner may read."""
        text = secret_file.private_text(
            path, what="the join file", made_by="`elastic-rl up --cluster=NAME --address=IP` on the first host",
            how_to_replace=f"`chmod 600 {path}`, as the user who runs this", max_bytes=_MAX_BYTES)
        try:
            found = cls.decode(text.encode())
            if found.cluster and found.etcd_endpoints:
                found.config()
                return found
        except (ValidationError, ConfigError):
            pass
        raise ConfigError(f"{path} is no join file of this release",
                          hint="copy cluster.join from the folder of the cluster on its first host again")

    def config(self, run_dir: object = None) -> Config:
        """The settings of the cluster, for a host with this folder; None: the default one. Raises ConfigError."""
        folder = {} if run_dir is None else {"run_dir": run_dir}
        return config.parse({**self.settings, "cluster": self.cluster, **folder})

    def save(self, path: Path) -> None:
        """Writes the file, which its owner alone may read. Raises OSError."""
        replace_file(path, self.encode(), private=True, durable=True)
