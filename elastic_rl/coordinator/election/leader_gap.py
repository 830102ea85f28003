"""Times without a leader. Nobody can tell of them while they last, since only a leader tells; so each leader leaves a
sign of life, and the next one tells of the gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.membership import registry
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Record, Severity

KIND = "leader.absent"
_EVERY_S = 3.0


class SignOfLife(Record):
    """``term``: create revision of the leader's candidate key. ``at``: unix seconds."""

    replica: str
    term: int
    at: float


def gap_s(before: SignOfLife | None, term: int, now: float, bound_s: float, *, closed: bool) -> float:
    """Seconds without a leader that are worth telling, else 0. ``closed``: the last leader said good-bye, so the
    service was stopped on purpose."""
    if before is None or before.term == term or closed:
        return 0.0
    gap = now - before.at
    return gap if gap > bound_s else 0.0


class LeaderGap:
    """The leader's part: its own sign of life, and the look at its predecessor's."""

    def __init__(self, etcd: EtcdClient, keys: Keys, election: Election, bound_s: float,
                 guarded: Callable[[Sequence[Compare], Sequence[Op]], bool], clock: Callable[[], float]) -> None:
        self._etcd, self._keys, self._election, self._bound_s = etcd, keys, election, bound_s
        self._guarded, self._clock = guarded, clock

    def look(self) -> None:
        """To be called before the roster is brought up to date, which forgets who was there. Raises Fenced."""
        key, now, term = self._keys.leader_alive(), self._clock(), int(self._election.guard[0].operand)
        found = self._etcd.get(key)
        before = decode(found, SignOfLife, {}) if found else None
        if before is not None and before.term == term and 0 <= now - before.at < _EVERY_S:
            return
        closed = before is not None and self._etcd.get(
            self._keys.registry_entry(registry.COORDINATOR, before.replica)) is None
        ops = [Op.put(key, SignOfLife(replica=self._election.replica, term=term, at=now).encode())]
        if before is not None and (gap := gap_s(before, term, now, self._bound_s, closed=closed)):
            event = events.build(KIND, "leader", f"nobody led for about {gap:.0f} s after {before.replica}; faults of "
                                 "that time are told late", severity=Severity.WARNING, seconds=round(gap, 1))
            ops.append(events.put_op(self._keys, event))
        self._guarded([Compare.mod(key, "==", found.mod_revision if found else 0)], ops)
