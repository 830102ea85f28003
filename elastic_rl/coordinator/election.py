"""Leader election with a fencing token.

Each replica keeps one candidate key under its lease; the key that was created first leads. A key that leads goes on
leading until it is gone, because later keys have higher create revisions. So the condition "my key still has its create
revision", put into each write, is the fence: it fails from the moment on at which anyone else could lead.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.leases import KeptLease
from elastic_rl.coordinator.ops import Compare, KeyValue, Op
from elastic_rl.coordinator.records import Leader
from elastic_rl.coordinator.store import Store
from elastic_rl.errors import Compacted, ElasticRLError, Fenced, LeaseLost, StoreUnavailable

log = logging.getLogger(__name__)
_JOIN_S = 5.0
_REFUSED_S = 0.5


def leading(candidates: Sequence[KeyValue]) -> KeyValue | None:
    """The candidate that leads: the one created first."""
    return min(candidates, key=lambda kv: kv.create_revision, default=None)


@dataclass(frozen=True)
class _Candidacy:
    """One stay in the queue: a lease and the key that was created under it."""

    lease: KeptLease
    revision: int


class Election:
    """This replica's part in the election, run by a background thread between ``start`` and ``stop``."""

    def __init__(self, store: Store, keys: Keys, replica: str, url: str, ttl_s: int) -> None:
        """``replica`` names one process at a time; ``ttl_s`` bounds how long a dead leader is still the leader."""
        self.replica = replica
        self._store, self._keys, self._ttl_s = store, keys, ttl_s
        self._me = Leader(replica=replica, url=url, pid=os.getpid())
        self._key = keys.leader(replica)
        self._leads: _Candidacy | None = None
        self._candidacy: _Candidacy | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def start(self) -> Election:
        self._thread.start()
        return self

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads as far as it can know. Only ``guard`` makes a write safe."""
        held = self._leads
        return held is not None and held.lease.alive

    @property
    def guard(self) -> list[Compare]:
        """The fencing token: conditions that hold only while this replica leads. Raises Fenced when it does not."""
        held = self._leads
        if held is None or not held.lease.alive:
            raise Fenced(f"replica {self.replica} does not lead")
        return [Compare.create(self._key, "==", held.revision)]

    def current(self) -> Leader | None:
        """Who leads now, by the store. None while nobody does."""
        first = leading(self._store.range(self._keys.leader_prefix())[0])
        return Leader.decode(first.value) if first else None

    def resign(self) -> None:
        """Gives leadership (or the place in the queue) up at once and queues again, behind the others."""
        held, self._leads = self._candidacy, None
        if held is not None:
            held.lease.lost.set()  # ends is_leader and the candidacy before the key is gone
            self._withdraw(held)

    def stop(self) -> None:
        """Leaves the election; another replica leads at once."""
        self._done.set()
        self.resign()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self._take_part()
            except (LeaseLost, Compacted) as e:
                log.warning("election: %s; starting over", e)
            except ElasticRLError as e:  # whatever etcd has against us now: without this thread we would never lead
                log.warning("election: %s; starting over in %g s", e, _REFUSED_S)
                self._done.wait(_REFUSED_S)
            self._leads = None
            self._done.wait(0.1)

    def _take_part(self) -> None:
        """One candidacy, from the grant of its lease until that is lost or given up."""
        with self._store.keepalive(self._ttl_s) as lease:
            queued = self._store.txn([Compare.absent(self._key)], [Op.put(self._key, self._me.encode(), lease.id)])
            if not queued.succeeded:
                # An earlier process of this name died a moment ago and its key still has to run out, or it is alive.
                self._done.wait(self._ttl_s / 4)
                return
            held = _Candidacy(lease, queued.revision)
            self._candidacy = held
            try:
                self._hold(held)
            finally:
                self._leads = self._candidacy = None

    def _hold(self, held: _Candidacy) -> None:
        kvs, revision = self._store.range(self._keys.leader_prefix())
        with self._store.watch(self._keys.leader_prefix(), start_revision=revision + 1) as changes:
            while not self._done.is_set() and held.lease.alive:
                mine = next((kv for kv in kvs if kv.key == self._key), None)
                if mine is None or mine.create_revision != held.revision:
                    return
                first = leading(kvs)
                if self._leads is None and first is not None and first.key == self._key:
                    log.info("replica %s leads from revision %d on", self.replica, held.revision)
                    self._leads = held
                # Also without a change we look again: the watch only makes it quick.
                changes.get(self._ttl_s / 3)
                if held.lease.alive and not self._done.is_set():
                    try:
                        kvs = self._store.range(self._keys.leader_prefix())[0]
                    except StoreUnavailable:
                        self._done.wait(0.1)  # the lease, by its own clock, says how long we may go on believing

    def _withdraw(self, held: _Candidacy) -> None:
        try:
            self._store.txn([Compare.create(self._key, "==", held.revision)], [Op.delete(self._key)])
        except StoreUnavailable as e:
            log.warning("cannot take the candidate key back, it runs out with its lease: %s", e)
