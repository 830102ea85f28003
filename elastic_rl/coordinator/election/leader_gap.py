"""Times without a leader. While they last they cannot be reported, since only a leader writes events; so each leader
writes a heartbeat, and the next one reports the gap."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.records import COORDINATOR
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Record, Severity
from elastic_rl.etcd.transaction import GuardedWrite

_HEARTBEAT_EVERY_S = 3.0


class LeaderHeartbeat(Record):
    """``term``: create revision of the leader's candidate key. ``at``: unix seconds."""

    replica: str
    term: int
    at: float


def gap_s(last: LeaderHeartbeat | None, term: int, now: float, bound_s: float, *, stopped: bool) -> float:
    """Seconds without a leader that are to be reported, else 0. ``stopped``: the last leader deregistered, so the
    service was stopped on purpose. The times are of two hosts: clocks that differ by more than ``bound_s`` give one
    false report."""
    if last is None or last.term == term or stopped:
        return 0.0
    gap = now - last.at
    return gap if gap > bound_s else 0.0


class LeaderGap:
    """The leader's part: its own heartbeat, and the check of its predecessor's."""

    def __init__(self, etcd: EtcdClient, keys: Keys, election: Election, bound_s: float, guarded: GuardedWrite,
                 clock: Callable[[], float]) -> None:
        """``bound_s``: shortest gap that is reported."""
        self._etcd, self._keys, self._election, self._bound_s = etcd, keys, election, bound_s
        self._guarded, self._clock = guarded, clock
        self._written_term, self._written_at = 0, 0.0
        """Term and unix time of this replica's last heartbeat."""

    def update(self) -> None:
        """Writes the heartbeat when it is due, and the event of a gap before it. To be called before the member
        registry is updated, which forgets who was there. Raises Fenced, EtcdUnavailable."""
        key, now, term = self._keys.leader_heartbeat(), self._clock(), self._election.term
        if self._written_term == term and 0 <= now - self._written_at < _HEARTBEAT_EVERY_S:
            return
        found = self._etcd.get(key)
        last = decode(found, LeaderHeartbeat, {}) if found else None
        if last is not None and last.term == term and 0 <= now - last.at < _HEARTBEAT_EVERY_S:
            return
        stopped = last is not None and self._etcd.get(
            self._keys.registry_entry(COORDINATOR, last.replica)) is None
        ops = [Op.put(key, LeaderHeartbeat(replica=self._election.replica, term=term, at=now).encode())]
        if last is not None and (gap := gap_s(last, term, now, self._bound_s, stopped=stopped)):
            event = events.build(
                event_kinds.LEADER_ABSENT, "leader", f"there was no leader for about {gap:.0f} s after {last.replica}; "
                "faults of that time are reported late", severity=Severity.WARNING, seconds=round(gap, 1))
            ops.append(events.put_op(self._keys, event))
        if self._guarded([Compare.mod(key, "==", found.mod_revision if found else 0)], ops):
            self._written_term, self._written_at = term, now
