"""The loop of the cluster's leader: reads the cluster, decides by ``cluster_pass`` and writes, on real etcd.

Level-triggered, as ``reconciler``: each pass reads everything, so a leader that takes over continues where the last one
stopped. A write whose conditions no longer hold is refused by etcd and costs nothing: the next pass decides by what is
there then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_rl.coordinator.cluster_pass import ClusterLimits, ClusterReading, cluster_pass
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.leader_clock import LeaderClock
from elastic_rl.errors import ElasticRLError, EtcdFull, Fenced
from elastic_rl.etcd.client import EtcdClient, Watch
from elastic_rl.etcd.decoding import RangeDecoder
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.known_ranges import KnownRanges

log = logging.getLogger(__name__)

_LOOP = "the cluster"
_INTERVAL_S = 1.0
"""Longest pause between two passes: some of what is due depends on time alone."""
_POLL_S = 0.2
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0
"""Pauses between two passes: a burst of changes is one pass."""


class ClusterReconciler:
    """Runs passes in a thread while this replica leads: one after each interval, and one when something has changed."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, election: Election,
                 limits: ClusterLimits = ClusterLimits(), *, monotonic: Callable[[], float] = time.monotonic,
                 clock: Callable[[], float] = time.time) -> None:
        self._etcd, self._keys, self._election, self._limits = etcd, keys, election, limits
        self._unix_s = clock
        self._read_prefixes = (
            keys.hosts_prefix(), keys.host_registrations_prefix(), keys.host_statuses_prefix(),
            keys.host_specs_prefix(), keys.host_states_prefix(), keys.assignments_prefix(), keys.jobs_prefix(),
            keys.job_states_prefix(), keys.run_statuses_prefix(), keys.spec())
        """What a pass decides by."""
        self._known = KnownRanges(etcd, self._read_prefixes)
        self._clock = LeaderClock(etcd, keys, election.writer, monotonic)
        self._term = self._revision = 0
        self._watch: Watch | None = None
        self._decoders: dict[str, RangeDecoder[Any]] = {}
        self.unreadable: dict[str, str] = {}
        """Records that the last pass could not read, and why, by key."""
        self._error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-reconciler", daemon=True)

    def start(self) -> None:
        self._election.health.expect(_LOOP, essential=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._election.health.ended(_LOOP)

    # -- the loop ------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._election.is_leader:
                began = time.monotonic()
                self._run_pass()
                # In a large cluster something changes all the time: passes may take half of a core, and no more.
                self._stopping.wait(min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, time.monotonic() - began)))
                self._wait()
            else:
                self._close_watch()
                self._stopping.wait(_POLL_S)
        self._close_watch()

    def _run_pass(self) -> None:
        """One pass, whatever it raises; the next one reads everything again."""
        health = self._election.health
        health.pass_began(_LOOP)
        try:
            self.reconcile_once()
        except Fenced as e:  # another replica leads: nothing has failed
            health.pass_failed(_LOOP, str(e))
            log.info("the pass over the cluster ended: %s", e)
        except Exception as e:  # a bug must not end the replica: the others would meet it next
            error = f"{type(e).__name__}: {e}"
            health.pass_failed(_LOOP, error, stays=isinstance(e, EtcdFull))
            if self._error != error:
                expected = isinstance(e, ElasticRLError)
                log.log(logging.WARNING if expected else logging.ERROR, "the pass over the cluster failed: %s", error,
                        exc_info=None if expected else e)
            self._error = error
        else:
            self._error = ""
            health.pass_succeeded(_LOOP)

    def _wait(self) -> None:
        """Waits for a change of what a pass decides by, after the last one has read it, or for the interval."""
        end = time.monotonic() + _INTERVAL_S
        while not self._stopping.is_set() and (left_s := end - time.monotonic()) > 0:
            if self._watch is None:
                self._stopping.wait(left_s)
                return
            try:
                change = self._watch.get(min(left_s, _POLL_S))
            except ElasticRLError as e:  # mostly Compacted: it was interrupted, and a compaction overtook it meanwhile
                log.info("the watch of the cluster is opened again: %s", e)
                self._close_watch()
                return
            if (change is not None and change.kv.mod_revision > self._revision
                    and change.kv.key.startswith(self._read_prefixes)):
                return

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # -- one pass ------------------------------------------------------------------------------------------------------
    def reconcile_once(self) -> int:
        """One pass. Returns the number of records that were written. Raises Fenced when the leadership is over, and
        EtcdUnavailable."""
        if self._term != (term := self._election.term):
            self._clock.begin_term()
            self._known.forget()
            self._term = term
        self._clock.persist()
        reading = self._read()
        return sum(self._election.writer(write.compares, [write.op, *write.also])
                   for write in cluster_pass(reading, self._limits))

    def _read(self) -> ClusterReading:
        """The cluster at one revision."""
        self._known.read()
        leader_s = self._clock.now()  # not before: what it shows may have begun while it was read
        kvs = [kv for found in self._known.ranges.values() for kv in found.values()]
        revision = self._known.revision
        self._revision, before, self.unreadable = revision, self.unreadable, {}
        if self._watch is None:
            self._watch = self._etcd.watch(self._keys.root, start_revision=revision + 1)
        reading = ClusterReading.of(self._keys, kvs, revision, leader_s, self.unreadable, self._decoders,
                                    unix_s=self._unix_s())
        for key, why in self.unreadable.items():
            if before.get(key) != why:
                log.error("the record at %s cannot be read, and what it is about is left as it is: %s", key, why)
        return reading
