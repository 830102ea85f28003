"""What the leading coordinator does for the checkpoint service, wired from the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.config import Config
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.repair import Repairer, RepairThread
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys


class Maintenance:
    """Cleans up, and has lost copies made again in a thread of its own."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config) -> None:
        """Raises ConfigError when the token or the TLS files cannot be read."""
        dcs = cfg.dcs
        security = Security.from_config(dcs, cfg.cluster_dir / TOKEN_FILE)
        self._janitor = GarbageCollector(etcd, keys, RetentionPolicy(dcs.keep_versions, dcs.keep_age_s, dcs.keep_bytes),
                                security=security)
        self._hub = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        self._repair = RepairThread(Repairer(etcd, keys, self._hub, replicas=dcs.replicas))
        self._repair.start()

    def sweep(self, guard: Sequence[Compare]) -> list[str]:
        """One round under the leader's guard; a line for each thing that was done or could not be. Raises
        EtcdUnavailable."""
        self._repair.kick(guard)
        return self._janitor.sweep(guard)

    def close(self) -> None:
        self._repair.close()
        self._hub.close()
        self._janitor.close()
