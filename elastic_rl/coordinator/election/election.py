"""Leader election with a fencing token.

Each replica keeps one candidate key under its lease; the key that was created first leads. A key that leads goes on
leading until it is gone, because later keys have higher create revisions. So the condition "my key still has its create
revision", put into each write, is the fence: it fails from the moment on at which anyone else could lead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

from elastic_rl.coordinator.election.leader_health import LeaderHealth
from elastic_rl.coordinator.election.protocol import ElectionProtocol, Enter, Look, Step, Wait, leading
from elastic_rl.errors import Compacted, ElasticRLError, EtcdUnavailable, Fenced, LeaseLost
from elastic_rl.etcd.client import EtcdClient, Watch
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.records import Leader
from elastic_rl.etcd.transaction import Compare, Op

log = logging.getLogger(__name__)
_JOIN_S = 5.0
_REFUSED_S = 0.5


@dataclass(frozen=True)
class _Held:
    """What this replica has in the election now."""

    stay: ElectionProtocol
    lease: KeptLease


class Election:
    """This replica's part in the election, run by a background thread between ``start`` and ``stop``."""

    def __init__(self, etcd: EtcdClient, keys: Keys, replica: str, url: str, ttl_s: int,
                 health: LeaderHealth | None = None) -> None:
        """``replica`` names one process at a time; ``ttl_s`` bounds how long a dead leader is still the leader.
        ``health``: of this replica's reconcile passes; a leader whose passes fail for too long resigns."""
        self.replica = replica
        self.health = health or LeaderHealth()
        self._etcd, self._keys, self._ttl_s = etcd, keys, ttl_s
        self._me = Leader(replica=replica, url=url, pid=os.getpid())
        self._key = keys.leader(replica)
        self._held: _Held | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def start(self) -> Election:
        self._thread.start()
        return self

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads as far as it can know. Only ``guard`` makes a write safe."""
        held = self._held
        return held is not None and held.stay.leads

    @property
    def guard(self) -> list[Compare]:
        """The fencing token: conditions that hold only while this replica leads. Raises Fenced when it does not."""
        held = self._held
        if held is None or not held.stay.leads:
            raise Fenced(f"replica {self.replica} does not lead")
        return [held.stay.guard]

    def current(self) -> Leader | None:
        """Who leads now, by the store. None while nobody does."""
        first = leading(self._etcd.range(self._keys.leader_prefix())[0])
        return Leader.decode(first.value) if first else None

    def resign(self) -> None:
        """Gives leadership (or the place in the queue) up at once and queues again, behind the others."""
        held, self._held = self._held, None
        if held is not None:
            held.lease.lost.set()  # ends the lead before the key is gone
            self._withdraw(held.stay)

    def stop(self) -> None:
        """Leaves the election; another replica leads at once."""
        self._done.set()
        self.resign()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        while not self._done.is_set():
            if not self.health.may_lead():
                self._done.wait(_REFUSED_S)
                continue
            try:
                self._take_part()
            except (LeaseLost, Compacted) as e:
                log.warning("election: %s; starting over", e)
            except ElasticRLError as e:  # whatever etcd has against us now: without this thread we would never lead
                log.warning("election: %s; starting over in %g s", e, _REFUSED_S)
                self._done.wait(_REFUSED_S)
            self._done.wait(0.1)

    def _take_part(self) -> None:
        """One stay in the queue, from the grant of its lease until that is lost or given up."""
        with self._etcd.keepalive(self._ttl_s) as lease, contextlib.ExitStack() as watching:
            stay = ElectionProtocol(self._key, self._ttl_s, lambda: lease.alive)
            self._held, changes = _Held(stay, lease), list[Watch]()
            steps, answer, led = stay.steps(), None, False
            try:
                while not self._done.is_set():
                    answer = self._carry(steps.send(answer), lease, watching, changes)
                    if stay.leads and not led:
                        led = True
                        self.health.leading(True)
                        log.info("replica %s leads from revision %d on", self.replica, stay.revision)
                    if stay.leads and (reason := self.health.reason_to_resign()):
                        log.error("replica %s resigns: %s", self.replica, reason)
                        self.health.resigned()
                        self.resign()
                        return
            except StopIteration:
                return
            finally:
                self._held = None
                self.health.leading(False)

    def _carry(self, step: Step, lease: KeptLease, watching: contextlib.ExitStack, changes: list[Watch]) -> Any:
        """Does what the protocol asks for; the answer. ``changes``: the watch, from the first look on."""
        match step:
            case Enter():
                put = Op.put(self._key, self._me.encode(), lease.id)
                queued = self._etcd.txn([Compare.absent(self._key)], [put])
                return queued.revision if queued.succeeded else 0
            case Look():
                try:
                    kvs, revision = self._etcd.range(self._keys.leader_prefix())
                except EtcdUnavailable:
                    return None
                if not changes:
                    watch = self._etcd.watch(self._keys.leader_prefix(), start_revision=revision + 1)
                    changes.append(watching.enter_context(watch))
                return kvs
            case Wait() if changes:
                return changes[0].get(step.longest_s)
            case Wait():
                return self._done.wait(step.longest_s)

    def _withdraw(self, stay: ElectionProtocol) -> None:
        try:
            self._etcd.txn([stay.guard], [Op.delete(self._key)])
        except EtcdUnavailable as e:
            log.warning("cannot take the candidate key back, it runs out with its lease: %s", e)
