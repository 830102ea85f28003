"""What the leading coordinator does for the checkpoint service, built from the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.pairs import PAIRED
from elastic_rl.dcs.catalog.repair import Repairer, RepairThread
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.catalog.under_replication import ShortVersion
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.security import Security
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys


class Maintenance:
    """Garbage collection, and repair in a thread of its own."""

    def __init__(self, etcd: EtcdClient, keys: Keys, dcs: DcsConfig, security: Security) -> None:
        self._collector = GarbageCollector(
            etcd, keys, RetentionPolicy(dcs.keep_versions, dcs.keep_age_s, dcs.keep_bytes), security=security,
            paired=PAIRED)
        self._client = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        self._repair = RepairThread(Repairer(etcd, keys, self._client, replicas=dcs.replicas))
        self._repair.start()

    def sweep(self, guard: Sequence[Compare]) -> list[str]:
        """One round under the leader's guard; a line for each thing that was done or could not be done.

        Calls all nodes in parallel, each with a timeout of seconds, and those that did not answer lately only now and
        then; so it takes seconds at most. Raises EtcdUnavailable and RecordUnreadable.
        """
        self._repair.request(guard)
        return self._collector.sweep(guard)

    def short(self, guard: Sequence[Compare]) -> tuple[list[ShortVersion], bool]:
        """Committed versions with fewer copies than wanted (``Repairer.short``). Never blocks."""
        return self._repair.short(guard)

    def close(self) -> None:
        self._repair.close()
        self._client.close()
        self._collector.close()
