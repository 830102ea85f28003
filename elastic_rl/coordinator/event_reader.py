"""Reads the events since the last pass: what they mean to the alerts, the registry and the fault statistics.

The cursor moves in the transaction that writes the alerts (``AlertController.update``), so each event counts once,
whichever leader dies in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_rl.coordinator.alerts import rules
from elastic_rl.coordinator.alerts.conditions import unreadable_record
from elastic_rl.coordinator.alerts.state_machine import Condition
from elastic_rl.coordinator.failure.statistics import EventCursor, count
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode, decode_all
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event

_MAX_NEW = 64
"""Most events that are read in one answer; where there are more, all are read, in pages."""
MAX_BATCH = 2000
"""Events of one batch. More are left to the next pass: a leader that follows a long absence finds thousands."""


@dataclass
class EventBatch:
    """The events that are new to this pass, with the revisions at which they were written, the oldest first."""

    events: Sequence[tuple[Event, int]] = ()
    reports: list[Condition] = field(default_factory=list)
    """Alerts that the events ask for."""
    over: set[str] = field(default_factory=set)
    """Keys of the alerts that the events end."""
    cursor: list[tuple[Compare, Op]] = field(default_factory=list)
    """The write that moves the cursor past the events; none where there are none."""

    @property
    def full(self) -> bool:
        """Whether there may be more events than these."""
        return len(self.events) >= MAX_BATCH


class EventReader:
    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._read_to = 0
        """Revision up to which events had been processed at the last reading."""

    def read(self) -> EventBatch:
        """Raises EtcdUnavailable."""
        found, cursor, kvs = self._new()
        if not kvs:
            return EventBatch()
        unreadable: dict[str, str] = {}
        events = [(event, kv.mod_revision) for event, kv in decode_all(kvs, Event, unreadable)]
        batch = EventBatch(events)
        for event, revision in events:
            if (condition := rules.report(event, revision)) is not None:
                batch.reports.append(condition)
                batch.over.discard(condition.key)
            if (key := rules.resolved_key(event, self._keys.job)) is not None:
                batch.over.add(key)
        revisions = {kv.key: kv.mod_revision for kv in kvs}
        batch.reports += [unreadable_record(self._keys, key, reason, revisions[key])
                          for key, reason in unreadable.items()]
        moved = EventCursor(revision=kvs[-1].mod_revision,
                            statistics=count(cursor.statistics, (event for event, _ in events)))
        key = self._keys.event_cursor()
        batch.cursor.append((Compare.mod(key, "==", found.mod_revision if found else 0), Op.put(key, moved.encode())))
        return batch

    def _cursor(self, found: KeyValue | None) -> EventCursor:
        if found is None:
            return EventCursor(revision=0)
        # A cursor that cannot be read was written when all earlier events had been read.
        return decode(found, EventCursor, {}) or EventCursor(revision=found.mod_revision)

    def _new(self) -> tuple[KeyValue | None, EventCursor, list[KeyValue]]:
        """The key of the cursor, the cursor, and the next events after it, the oldest first; at most a batch of them.
        One answer of etcd, which mostly has no event: it is asked for those after the cursor as it was last."""
        prefix, since = self._keys.events_prefix(), self._read_to
        answer = self._etcd.changed([prefix], [self._keys.event_cursor()], since=since, limit=_MAX_NEW)
        [events], found = answer.ranges, next(iter(answer.kvs), None)
        cursor = self._cursor(found)
        self._read_to = cursor.revision
        # A cursor that has gone back is that of an etcd that was restored from a backup.
        is_whole = not events.more and cursor.revision >= since
        kvs = events.kvs if is_whole else self._backlog(prefix, cursor.revision)
        return found, cursor, sorted((kv for kv in kvs if kv.mod_revision > cursor.revision), key=_mod_revision)

    def _backlog(self, prefix: str, revision: int) -> list[KeyValue]:
        """The oldest events after ``revision``. Keys sort by the writers' clocks, so every event is read; all as of one
        revision, or an event whose key sorts into an earlier page would be missed, and the cursor move past it. Raises
        Compacted when the pages take longer than etcd's history; the next pass starts over."""
        oldest: list[KeyValue] = []
        for page in self._etcd.pages(prefix):
            fresh = (kv for kv in page.kvs if kv.mod_revision > revision)
            oldest = heapq.nsmallest(MAX_BATCH, [*oldest, *fresh], key=_mod_revision)
        return oldest


def _mod_revision(kv: KeyValue) -> int:
    return kv.mod_revision
