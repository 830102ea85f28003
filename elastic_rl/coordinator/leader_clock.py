"""The leader clock: for how long a job has had a leader, counted on from leader to leader.

Deadlines and backoffs of the leader are in seconds of this clock. Wall clocks of two replicas may differ: with one an
hour ahead every deadline would pass at once when it takes over, with one an hour behind none would pass for an hour. A
leader counts its own monotonic seconds and writes the sum to etcd now and then; the next one counts on from there. So
time without a leader does not count, and each change of the leader delays what is due by at most ``PERSIST_EVERY_S``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import LeaderKeys
from elastic_rl.etcd.records import Record
from elastic_rl.etcd.transaction import GuardedWrite

PERSIST_EVERY_S = 3.0


class LeaderTime(Record):
    """``seconds`` of the leader clock."""

    seconds: float


class LeaderClock:
    """Used by the leader's loop. ``monotonic``: seconds that never go back, of this process."""

    def __init__(self, etcd: EtcdClient, keys: LeaderKeys, guarded: GuardedWrite,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._keys, self._guarded, self._monotonic = etcd, keys, guarded, monotonic
        self._base, self._began_at = 0.0, monotonic()
        self._persisted = float("-inf")

    def begin_term(self) -> None:
        """Counts on from where the last leader stopped. Raises EtcdUnavailable."""
        found = self._etcd.get(self._keys.leader_clock())
        last = decode(found, LeaderTime, {}) if found else None
        self._base, self._began_at = last.seconds if last else 0.0, self._monotonic()
        self._persisted = float("-inf")

    def now(self) -> float:
        """Seconds of the leader clock."""
        return self._base + self._monotonic() - self._began_at

    def persist(self) -> None:
        """Writes the time to etcd when that is due. Raises Fenced and EtcdUnavailable."""
        now = self.now()
        if now - self._persisted >= PERSIST_EVERY_S:
            self._guarded([], [Op.put(self._keys.leader_clock(), LeaderTime(seconds=now).encode())])
            self._persisted = now
