"""Leader election with a fencing token.

Each replica keeps one candidate key under its lease; the key that was created first leads. It leads until it is gone,
because later keys have higher create revisions. So the condition "my key still has its create revision", put into each
write, is the fencing token: it fails from the moment at which anyone else could lead.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_rl.coordinator.election.leader_health import LeaderHealth
from elastic_rl.coordinator.election.protocol import (
    Campaign,
    ElectionProtocol,
    ReadCandidates,
    Step,
    Wait,
    leading,
)
from elastic_rl.errors import ElasticRLError, EtcdUnavailable, Fenced, LeaseLost
from elastic_rl.etcd.client import EtcdClient, Watch
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.records import Leader
from elastic_rl.etcd.transaction import Compare, Op

log = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
_RESTART_PAUSE_S, _ERROR_PAUSE_S = 0.1, 0.5


@dataclass(frozen=True)
class _Candidacy:
    """This replica's present candidacy."""

    protocol: ElectionProtocol
    lease: KeptLease


class Election:
    """This replica's part in the election, run by a background thread between ``start`` and ``stop``."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, replica: str, url: str, ttl_s: int,
                 health: LeaderHealth | None = None) -> None:
        """``replica`` names one process at a time; ``ttl_s`` bounds how long a dead leader is still the leader.
        ``health``: the health of this replica's reconcile passes; a leader whose passes fail for too long resigns."""
        self.replica = replica
        self.health = health or LeaderHealth()
        self.writer = FencedWriter(etcd, keys, lambda: self.guard, f"the term of replica {replica}")
        """Writes under this replica's fencing token."""
        self._etcd, self._keys, self._ttl_s = etcd, keys, ttl_s
        self._me = Leader(replica=replica, url=url, pid=os.getpid())
        self.key = keys.leader(replica)
        """Key of this replica's candidacy."""
        self._candidacy: _Candidacy | None = None
        self._on_elected: Callable[[], None] = lambda: None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def on_elected(self, call: Callable[[], None]) -> None:
        """Calls ``call``, which must not wait, at the beginning of each term of this replica."""
        self._on_elected = call

    def start(self) -> Election:
        self._thread.start()
        return self

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads as far as it can know. Only ``guard`` makes a write safe."""
        candidacy = self._candidacy
        return candidacy is not None and candidacy.protocol.leads

    @property
    def guard(self) -> list[Compare]:
        """The fencing token: conditions that hold only while this replica leads. Raises Fenced when it does not."""
        candidacy = self._candidacy
        if candidacy is None or not candidacy.protocol.leads:
            raise Fenced(f"replica {self.replica} does not lead")
        return [candidacy.protocol.guard]

    @property
    def term(self) -> int:
        """Number of this replica's term: the create revision of its candidate key. Raises Fenced."""
        return int(self.guard[0].operand)

    def current(self) -> Leader | None:
        """The present leader according to etcd; None while there is none whose record can be read."""
        return readable_one(leading(self._etcd.range(self._keys.leader_prefix())[0]), Leader)

    def resign(self) -> None:
        """Ends this candidacy, and the term with it, at once; the next one queues behind the others."""
        candidacy, self._candidacy = self._candidacy, None
        if candidacy is not None:
            candidacy.lease.lost.set()  # ends the term before the key is gone
            self._delete_key(candidacy.protocol)

    def stop(self) -> None:
        """Leaves the election; another replica leads at once."""
        self._stopping.set()
        self.resign()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self.health.may_lead():
                self._stopping.wait(_ERROR_PAUSE_S)
                continue
            try:
                self._run_candidacy()
            except LeaseLost as e:
                log.warning("election: %s; starting over", e)
            except ElasticRLError as e:  # of any kind: without this thread the replica could never lead
                log.warning("election: %s; starting over in %g s", e, _ERROR_PAUSE_S)
                self._stopping.wait(_ERROR_PAUSE_S)
            self._stopping.wait(_RESTART_PAUSE_S)

    def _run_candidacy(self) -> None:
        """One candidacy, from the grant of its lease until that is lost or given back."""
        with self._etcd.keepalive(self._ttl_s) as lease, _CandidateWatch(self._etcd, self._keys) as watch:
            protocol = ElectionProtocol(self.key, self._ttl_s, lambda: lease.alive)
            self._candidacy = _Candidacy(protocol, lease)
            steps, answer, led = protocol.steps(), None, False
            try:
                while not self._stopping.is_set():
                    answer = self._execute(steps.send(answer), lease, watch)
                    if protocol.leads and not led:
                        led = True
                        self.health.leading(True)
                        log.info("replica %s leads from revision %d on", self.replica, protocol.revision)
                        self._on_elected()
                    if protocol.leads and (reason := self.health.reason_to_resign()):
                        log.error("replica %s resigns: %s", self.replica, reason)
                        self.health.resigned()
                        self.resign()
                        return
            except StopIteration:
                return
            finally:
                self._candidacy = None
                self.health.leading(False)

    def _execute(self, step: Step, lease: KeptLease, watch: _CandidateWatch) -> Any:
        """Executes a step of the protocol and returns its answer."""
        match step:
            case Campaign():
                put = Op.put(self.key, self._me.encode(), lease.id)
                created = self._etcd.txn([Compare.absent(self.key)], [put])
                return created.revision if created.succeeded else 0
            case ReadCandidates():
                try:
                    candidates, revision = self._etcd.range(self._keys.leader_prefix())
                except EtcdUnavailable:
                    return None
                watch.follow(revision)
                return candidates
            case Wait(max_s):
                return watch.wait(max_s, self._stopping)

    def _delete_key(self, protocol: ElectionProtocol) -> None:
        try:
            self._etcd.txn([protocol.guard], [Op.delete(self.key)])
        except EtcdUnavailable as e:
            log.warning("cannot delete the candidate key, it expires with its lease: %s", e)


class _CandidateWatch:
    """Makes a change of the candidates known promptly. It may fail without harm: the candidacy depends on the lease
    alone, and the next reading of the candidates opens another watch."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys) -> None:
        self._etcd, self._prefix = etcd, keys.leader_prefix()
        self._watch: Watch | None = None

    def follow(self, revision: int) -> None:
        """Begins to watch the candidates. Call it after each reading of them, with its revision."""
        if self._watch is None:
            self._watch = self._etcd.watch(self._prefix, start_revision=revision + 1)

    def wait(self, max_s: float, stopping: threading.Event) -> None:
        """Waits for a change, or for so many seconds."""
        if self._watch is None:
            stopping.wait(max_s)
            return
        try:
            self._watch.get(max_s)
        except ElasticRLError as e:  # mostly Compacted: it was interrupted, and a compaction overtook it meanwhile
            log.info("the election's watch is opened again: %s", e)
            self.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def __enter__(self) -> _CandidateWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
