"""Keeps etcd's database small: compacts its history, and makes room again once the database is full.

Every write leaves a revision behind, heartbeats too, and an etcd that someone else runs may compact none of them. So
the leader compacts revisions older than ``etcd.history_s``. That is far longer than any watch needs that is only
interrupted; a reader that is further behind gets Compacted and lists its range again. The leaders of several jobs may
share one etcd: each compacts for itself, and a revision that another one has compacted is fine. The shortest history
applies to all of them.

A database at its quota raises the alarm NOSPACE. From then on etcd accepts neither writes nor new leases, and its file
never shrinks by itself, so no replica could become leader, and deletes and compactions alone do not help. Every replica
watches for that, leader or not: it compacts, defragments the members one after the other, and ends the alarm. The same
defragmentation comes before the alarm when a file is near its quota and mostly free.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from elastic_rl.config import EtcdConfig
from elastic_rl.errors import ElasticRLError, EtcdDenied
from elastic_rl.etcd.client import EtcdClient, MemberStatus
from elastic_rl.etcd.revision_clock import RevisionClock
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

NO_SPACE = "NOSPACE"
_MAX_TICK_S = 10.0
_CROWDED = 0.5
"""Part of the quota in use from which on less history is kept."""
_CROWDED_HISTORY_S = 30.0
_NEAR_QUOTA = 0.8
"""Part of the quota from which on a file is defragmented if that helps, and below which all files must be for the alarm
to be ended."""
_MOSTLY_FREE = 0.5
_MAINTENANCE_TIMEOUT_S = 120.0
"""Limit for a compaction that waits for its effect, and for a defragmentation."""
_FOLLOWER_DELAY_S = 20.0
"""How much longer than the leader the other replicas wait before they make room; up to twice that."""
_QUICK_BYTES = 64 << 20
"""Bytes in use that are defragmented without need: about a second of silence, shorter than ``lease_ttl_s``."""
_RETRY_S = (60.0, 1800.0)
_JOIN_TIMEOUT_S = 2.0


def quota_of(member: MemberStatus, assumed_bytes: int) -> int:
    """A member's quota, ``assumed_bytes`` where it is unknown."""
    return member.quota_bytes or assumed_bytes


def in_use(members: Sequence[MemberStatus], assumed_quota: int) -> float:
    """The largest part of a quota that is in use, 0 to 1 or more."""
    return max((m.db_in_use_bytes / quota_of(m, assumed_quota) for m in members), default=0.0)


def kept_history_s(history_s: float, used: float) -> float:
    """How old revisions may get. ``used``: as ``in_use``. Less history is kept when it fills the database."""
    return min(history_s, _CROWDED_HISTORY_S) if used >= _CROWDED else history_s


def is_full(members: Sequence[MemberStatus]) -> bool:
    return any(NO_SPACE in m.alarms for m in members)


def to_defragment(members: Sequence[MemberStatus], assumed_quota: int) -> list[MemberStatus]:
    """Members near their quotas that a defragmentation is likely to help, etcd's leader last.

    Ahead of the alarm only while every member answers, since a member answers nothing while it is defragmented; only
    files that are mostly free; and only when copying what is in use takes about a second, which no lease notices. Once
    the alarm is raised nothing is written, and a member reports space as in use that a compaction has freed until it
    writes again: then it is tried whatever is in use.
    """
    full = is_full(members)
    if not full and any(m.error or m.db_in_use_bytes > _QUICK_BYTES for m in members):
        return []
    near = [m for m in members if not m.error and m.db_bytes >= _NEAR_QUOTA * quota_of(m, assumed_quota)]
    return sorted((m for m in near if full or m.db_in_use_bytes <= _MOSTLY_FREE * m.db_bytes),
                  key=lambda m: m.is_leader)


class EtcdMaintenance:
    """One thread per replica, from ``start`` to ``close``."""

    def __init__(self, etcd: EtcdClient, cfg: EtcdConfig, *, is_leader: Callable[[], bool],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._cfg, self._is_leader, self._clock = etcd, cfg, is_leader, clock
        self._revisions = RevisionClock(clock)
        self._compacted = 0
        self._retry = RetryBackoff(*_RETRY_S)
        self._follower_acts_at: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-maintenance", daemon=True)

    def start(self) -> EtcdMaintenance:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        tick_s = min(_MAX_TICK_S, self._cfg.history_s / 5) if self._cfg.history_s else _MAX_TICK_S
        while not self._stopping.wait(tick_s * random.uniform(0.8, 1.2)):
            try:
                self.tick()
            except ElasticRLError as e:  # without etcd there is nothing to maintain; the next tick tries again
                log.debug("etcd maintenance: %s", e)

    def tick(self) -> None:
        """Makes one pass of maintenance. Raises what etcd's client raises."""
        present = self._etcd.revision()
        self._revisions.observe(present)  # also as a follower, so that a new leader knows the ages
        if present < self._compacted:  # etcd was restored from a backup
            self._compacted = 0
        members = self._etcd.statuses()
        if self._is_leader() and self._cfg.history_s:
            self._compact(kept_history_s(self._cfg.history_s, in_use(members, self._cfg.quota_bytes)))
        if self._cfg.reclaim_space:
            self._reclaim(members)

    def _compact(self, history_s: float) -> None:
        revision = self._revisions.newest_at_least(history_s)
        if revision > self._compacted:
            self._etcd.compact(revision)
            self._compacted = revision

    # -- a database near its quota -------------------------------------------------------------------------------------
    def _reclaim(self, members: Sequence[MemberStatus]) -> None:
        now = self._clock()
        full = is_full(members)
        if not full:
            self._follower_acts_at = None
        elif self._follower_acts_at is None:
            self._follower_acts_at = now + random.uniform(1.0, 2.0) * _FOLLOWER_DELAY_S
        follower_acts = self._follower_acts_at is not None and now >= self._follower_acts_at
        if not self._retry.is_due(now) or not (self._is_leader() or follower_acts):
            return
        if not full and not to_defragment(members, self._cfg.quota_bytes):
            self._retry.reset()
            return
        self._retry.failed(now)  # it counts as failed until a pass finds that there is room
        try:
            self._make_room(full)
        except EtcdDenied as e:
            log.error("etcd's database is near its quota, and etcd.user may not make room in it: %s; give it the role "
                      "root, or run `etcdctl defrag` and `etcdctl alarm disarm`", e.message)

    def _make_room(self, full: bool) -> None:
        if full:
            log.error("etcd's database is full (alarm NOSPACE): compacting and defragmenting it")
            # What watches still need of it is worth less than writes.
            self._etcd.compact(self._etcd.revision(), wait_s=_MAINTENANCE_TIMEOUT_S)
        for member in to_defragment(self._etcd.statuses(), self._cfg.quota_bytes):
            if self._stopping.is_set():
                return
            self._etcd.defragment(member, timeout_s=_MAINTENANCE_TIMEOUT_S)
            log.warning("defragmented etcd member %s, whose file had %d MiB with %d MiB in use", member.endpoint,
                        member.db_bytes >> 20, member.db_in_use_bytes >> 20)
        if not full:
            return
        members = self._etcd.statuses()
        if all(m.error or m.db_bytes < _NEAR_QUOTA * quota_of(m, self._cfg.quota_bytes) for m in members):
            self._etcd.disarm_no_space()
            log.warning("etcd accepts writes again")
        else:
            log.error("etcd stays full: what is stored now needs more than its quota; raise --quota-backend-bytes or "
                      "delete keys")
