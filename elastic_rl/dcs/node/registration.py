"""A node's record in etcd."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from elastic_rl.dcs.storage import arena
from elastic_rl.errors import EtcdUnavailable, PreflightFailed
from elastic_rl.etcd.client import Compare, EtcdClient, KeptLease, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode

log = logging.getLogger(__name__)


class Registration:
    """The node's record in etcd, under a lease; put anew when the lease is lost, so that commits which relied on the
    old registration fail."""

    def __init__(self, etcd: EtcdClient, keys: Keys, record: DcsNode, ttl_s: int) -> None:
        self._etcd, self._keys, self._record, self._ttl_s = etcd, keys, record, ttl_s
        self._key = keys.dcs_node(record.id)
        self._lease: KeptLease | None = None
        self._created = 0

    def check_free(self) -> None:
        """Raises MachineUnfit when another process of this host is that node already."""
        kv = self._etcd.get(self._key)
        if kv is not None and arena.is_owned(Path(DcsNode.decode(kv.value).arena_path)):
            raise PreflightFailed(f"DCS node {self._record.id} of job {self._keys.job} runs already, "
                               f"as process {DcsNode.decode(kv.value).pid}", hint="stop it first, or use another --id")

    def put(self) -> None:
        """Registers. The key is made anew, so that its create revision stands for this registration."""
        if self._lease is not None:
            self._lease.close()
        self._lease = self._etcd.keepalive(self._ttl_s)
        try:
            self._etcd.delete(self._key)
            self._created = self._etcd.put(self._key, self._record.encode(), lease=self._lease.id)
        except BaseException:
            lease, self._lease = self._lease, None  # the next beat registers again
            lease.close()
            raise

    def beat(self, **usage: int | str) -> None:
        """Registers again if that was lost, and brings the record up to date: ``usage`` are fields of it."""
        if self._lease is None or self._lease.lost.is_set():
            log.warning("the registration was lost; registering again")
            self.put()
        record = self._record.replace(**usage)
        if record == self._record:
            return
        assert self._lease is not None
        if self._etcd.txn([Compare.create(self._key, "==", self._created)],
                           [Op.put(self._key, record.encode(), self._lease.id)]).succeeded:
            self._record = record

    def remove(self) -> None:
        """Says good-bye: no one may take this for a death."""
        with contextlib.suppress(EtcdUnavailable):
            self._etcd.txn([Compare.create(self._key, "==", self._created)],
                            [Op.delete(self._key), Op.delete(self._keys.roster("dcs", self._record.id))])
        if self._lease is not None:
            self._lease.close()
