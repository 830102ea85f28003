"""A node's record in etcd."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from elastic_rl.dcs.registered_nodes import decoded, read_node
from elastic_rl.dcs.storage import arena
from elastic_rl.errors import Conflict, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd.client import Compare, EtcdClient, KeptLease, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode

log = logging.getLogger(__name__)


class Registration:
    """The node's record in etcd, under a lease. It is created again when it was lost, whether with its lease or by a
    delete, and then has another create revision: commits that relied on the old registration fail.

    Of two processes that register under one id the later one wins, and the earlier one ends.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, record: DcsNode, ttl_s: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._keys, self._record, self._ttl_s, self._clock = etcd, keys, record, ttl_s, clock
        self._key = keys.dcs_node(record.id)
        self._lease: KeptLease | None = None
        self._created = 0
        self._check_at = 0.0

    def check_free(self) -> None:
        """Raises PreflightFailed when another process of this host is that node already. A record that cannot be
        decoded is replaced, with a line in the log."""
        found = read_node(self._etcd, self._keys, self._record.id)
        if found is not None and arena.is_owned(Path(found.node.arena_path)):
            raise PreflightFailed(
                f"DCS node {self._record.id} of job {self._keys.job} runs already, as process {found.node.pid}",
                hint="stop it first, or use another --id")

    def put(self) -> None:
        """Registers. The key is created, not replaced, so that its create revision stands for this registration."""
        if self._lease is not None:
            self._lease.close()
        self._lease = self._etcd.keepalive(self._ttl_s)
        try:
            self._etcd.delete(self._key)
            self._etcd.delete(self._keys.evidence("dcs", self._record.id))
            self._created = self._etcd.put(self._key, self._record.encode(), lease=self._lease.id)
        except BaseException:
            lease, self._lease = self._lease, None  # the next beat registers again
            lease.close()
            raise

    def beat(self, **usage: int | str) -> None:
        """Updates the record, of which ``usage`` are fields, and registers again if it was lost. Raises Conflict when
        another process has registered under this node's id."""
        record = self._record.replace(**usage)
        if self._lease is None or self._lease.lost.is_set():
            self._register_again("its lease ended")
        if record != self._record:
            if not self._update(record):
                self._register_again("it was deleted")
                self._update(record)
        elif self._clock() >= self._check_at:
            if not self._exists():
                self._register_again("it was deleted")
        else:
            return
        self._check_at = self._clock() + self._ttl_s / 2

    def _update(self, record: DcsNode) -> bool:
        assert self._lease is not None
        done = self._etcd.txn([Compare.create(self._key, "==", self._created)],
                              [Op.put(self._key, record.encode(), self._lease.id)]).succeeded
        if done:
            self._record = record
        return done

    def _exists(self) -> bool:
        kv = self._etcd.get(self._key)
        return kv is not None and kv.create_revision == self._created

    def _register_again(self, why: str) -> None:
        kv = self._etcd.get(self._key)
        if kv is not None and kv.create_revision != self._created:
            found = decoded(kv)
            if found is not None and found.node.incarnation == self._record.incarnation:
                self._created = kv.create_revision  # our own, of a write whose answer was lost
                return
            other = (f"process {found.node.pid} at {found.node.host}:{found.node.port}" if found is not None
                     else "its record cannot be decoded")
            raise Conflict(f"another process has registered as DCS node {self._record.id} of job {self._keys.job}: "
                           f"{other}", hint="give every node an --id of its own")
        log.warning("the record of node %s in etcd was lost (%s), registering again", self._record.id, why)
        self.put()

    def remove(self) -> None:
        """Deregisters, so that the end of this node is not taken for a failure."""
        with contextlib.suppress(EtcdUnavailable):
            self._etcd.txn([Compare.create(self._key, "==", self._created)],
                           [Op.delete(self._key), Op.delete(self._keys.registry_entry("dcs", self._record.id))])
        if self._lease is not None:
            self._lease.close()
