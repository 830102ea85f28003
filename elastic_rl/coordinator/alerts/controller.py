"""Keeps the alerts of a job in etcd and has the notifications delivered. Runs on the leader.

Everything is written under the leader's fencing token and before it is acted on: an alert before its notifications, a
notification before it is sent, its delivery to each alert before the receiver's queue is cleared. So a leader that dies
between any two of these loses nothing; the next one sends the same notification again, or finds it delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic_rl.config import Config
from elastic_rl.coordinator.alerts import notifier, receiver_queue, receivers, rules, state_machine
from elastic_rl.coordinator.alerts.conditions import CommitClock, Thresholds, conditions
from elastic_rl.coordinator.alerts.notifier import Notification
from elastic_rl.coordinator.alerts.receiver_queue import AttemptResult, ReceiverQueue, SendLimits
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.state_machine import Alert, Changes, Condition, PendingNotice
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import RangeDecoder
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.known_ranges import KnownRanges
from elastic_rl.etcd.records import Event, Severity, Silence
from elastic_rl.etcd.transaction import GuardedWrite, batches

log = logging.getLogger(__name__)


class Sender(Protocol):
    """What sends notifications (``notifier.Notifier``)."""

    @property
    def job(self) -> str: ...

    @property
    def receivers(self) -> list[Receiver]: ...

    def send(self, receiver: str, notification: Notification) -> bool: ...

    def busy(self, receiver: str) -> bool: ...

    def last_result(self, receiver: str) -> AttemptResult | None: ...


@dataclass(frozen=True)
class StoredAlerts:
    """What etcd holds about alerts, with mod revisions."""

    revision: int
    """Revision of etcd when it was read."""
    alerts: dict[str, tuple[Alert, int]]
    """Id → the alert and its mod revision."""
    queues: dict[str, tuple[ReceiverQueue, int]]
    """Receiver → its queue and the queue's mod revision."""
    silences: list[Silence]
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why a record cannot be read, by key, of those that are left out."""

    @property
    def sending(self) -> set[tuple[str, str]]:
        """Id and receiver of each alert whose notification is in flight."""
        return {(i, queue.receiver) for queue, _ in self.queues.values() if queue.in_flight
                for i in queue.in_flight.alerts}


class AlertController:
    """All of it runs in the leader's loop; only the probe of etcd and the sender have threads of their own."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, sender: Sender, guarded: GuardedWrite, *,
                 leads: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._keys, self._cfg, self._sender = keys, cfg, sender
        self._known = KnownRanges(etcd, [keys.silences_prefix(), keys.receivers_prefix(), keys.alerts_prefix()])
        self._silences, self._queues, self._alerts = (
            RangeDecoder(Silence), RangeDecoder(ReceiverQueue), RangeDecoder(Alert))
        self._guarded, self._leads, self._clock = guarded, leads, clock
        self._limits = SendLimits(cfg.alerts.group_wait_s, cfg.alerts.max_notifications_per_minute)
        self._thresholds, self._commit_clock = Thresholds.from_config(cfg), CommitClock()

    def update(self, snapshot: ClusterSnapshot, reports: Sequence[Condition], over: set[str],
               cursor: Sequence[tuple[Compare, Op]] = (), others: Sequence[Condition] = (),
               unknown: Set[str] = frozenset()) -> None:
        """Brings the alerts up to date. ``reports``: conditions from new events. ``over``: keys of alerts that new
        events declared over. ``cursor``: the writes that record these events as read; they come last, since an alert
        that was written without them is found open when its report is read again. ``others``: what else is
        wrong now. ``unknown``: kinds of which that is not known yet; an alert of one stays as it is."""
        now, stored = self._clock(), self.read()
        known = [a for a, _ in stored.alerts.values()]
        snapshot = replace(snapshot, unreadable={**snapshot.unreadable, **stored.unreadable})
        kept = [Condition(a.kind, a.subject, a.message, a.severity) for a in known if a.open and a.kind in unknown]
        wrong = conditions(snapshot, now, self._thresholds, {a.key for a in known if a.open},
                           by_commits=self._commit_clock.at_most(snapshot))
        found = rules.merge_by_fault([*others, *kept, *wrong.values(), *rules.with_causes(reports, snapshot)], known)
        holding: dict[str, Condition] = {}
        for condition in found:
            if not condition.revision:
                holding.setdefault(condition.key, condition)
        changes = state_machine.advance(
            now, stored.revision, known, holding, [c for c in found if c.revision],
            lambda alert: rules.released(alert, snapshot, now), self.audience,
            declared_over=lambda alert: rules.declared_over(alert, over), silences=stored.silences,
            sending=stored.sending)
        self._write(stored, changes, [*cursor, *self._ended_silences(now, stored), *self._undelivered(changes)])

    def read(self) -> StoredAlerts:
        """Raises EtcdUnavailable."""
        self._known.read()
        unreadable: dict[str, str] = {}
        silences, queues, alerts = (found.values() for found in self._known.ranges.values())
        return StoredAlerts(
            self._known.revision,
            {a.id: (a, kv.mod_revision) for a, kv in self._alerts.decode_with_keys(alerts, unreadable)},
            {q.receiver: (q, kv.mod_revision) for q, kv in self._queues.decode_with_keys(queues, unreadable)},
            self._silences.decode(silences, unreadable), unreadable)

    def audience(self, alert: Alert) -> list[str]:
        return receivers.audience(alert, self._sender.receivers, self._cfg.alerts.severity_tags)

    def deliver(self) -> None:
        """Records what was delivered, then sends what is due."""
        now, stored = self._clock(), self.read()
        names = [r.name for r in self._sender.receivers]
        # Read before the results: those of a receiver that is idle by then are complete.
        idle = [name for name in names if not self._sender.busy(name)]
        queues: dict[str, ReceiverQueue] = {}
        entries: dict[str, set[str]] = {}
        for name in names:
            before = stored.queues[name][0] if name in stored.queues else ReceiverQueue(receiver=name)
            queues[name], delivered, entry = receiver_queue.record_result(
                now, before, self._sender.last_result(name))
            for alert_id in delivered:
                entries.setdefault(alert_id, set()).add(entry)
        if not self._mark_notified(stored, entries):
            return
        known = {i: alert for i, (alert, _) in stored.alerts.items()}
        audiences = {i: self.audience(alert) for i, alert in known.items()}
        for name in names:
            due = [notice for i, alert in known.items() if name in audiences[i]
                   for notice in state_machine.due_notices(alert, [name])]
            self._send_next(now, stored, queues[name], known, due, idle=name in idle)
        for name, (_, revision) in stored.queues.items():
            if name not in names:  # no longer in the configuration
                key = self._keys.receiver(name)
                self._guarded([_unchanged(key, revision)], [Op.delete(key)])

    # -- storing ------------------------------------------------------------------------------------------------
    def _write(self, stored: StoredAlerts, changes: Changes, last: Sequence[tuple[Compare, Op]]) -> None:
        writes: list[tuple[Compare, Op]] = []
        for alert, drop in [(a, False) for a in changes.put] + [(a, True) for a in changes.drop]:
            key = self._alert_key(alert)
            revision = stored.alerts[alert.id][1] if alert.id in stored.alerts else 0
            writes.append((_unchanged(key, revision), Op.delete(key) if drop else Op.put(key, alert.encode())))
        writes += last
        if self._write_all(writes):
            for alert in changes.put:
                log.warning("alert %s %s %s: %s%s", alert.id, alert.phase, alert.key, alert.message,
                            f" (silenced by {alert.silenced_by})" if alert.silenced_by else "")

    def _write_all(self, writes: Sequence[tuple[Compare, Op]]) -> bool:
        """Makes the writes whose conditions hold together; whether all did. Those after one that did not are not made.
        """
        return all(self._guarded([c for c, _ in batch], [op for _, op in batch])
                   for batch in batches(writes, nbytes=lambda write: write[1].nbytes))

    def _alert_key(self, alert: Alert) -> str:
        return self._keys.alert(f"{alert.key}/{alert.id}")

    def _ended_silences(self, now: float, stored: StoredAlerts) -> list[tuple[Compare, Op]]:
        ended = [self._keys.silence(s.id) for s in stored.silences if s.until <= now]
        return [(Compare.exists(key), Op.delete(key)) for key in ended]

    def _undelivered(self, changes: Changes) -> list[tuple[Compare, Op]]:
        return [(Compare.absent(self._keys.event(e.id)), events.put_op(self._keys, e)) for e in map(
            _undelivered_event, changes.undelivered)]

    # -- delivering ---------------------------------------------------------------------------------------------
    def _send_next(self, now: float, stored: StoredAlerts, queue: ReceiverQueue, known: Mapping[str, Alert],
                   due: Sequence[PendingNotice], *, idle: bool) -> None:
        """Writes a receiver's queue and, when the receiver is idle, sends what is due to it. ``known``: all alerts, by
        id."""
        name = queue.receiver
        before, revision = stored.queues.get(name, (ReceiverQueue(receiver=name), 0))
        queue = receiver_queue.without_notified(queue, known)
        sends = receiver_queue.next_send(now, queue, due, self._limits) if idle else None
        queue, key = sends or queue, self._keys.receiver(name)
        if queue != before and not self._guarded([_unchanged(key, revision)], [Op.put(key, queue.encode())]):
            return
        if sends is not None and (group := sends.in_flight) is not None:
            alerts = [known[i] for i in group.alerts]
            self._sender.send(name, notifier.render(self._sender.job, group, alerts, self._leads))

    def _mark_notified(self, stored: StoredAlerts, entries: Mapping[str, set[str]]) -> bool:
        """Writes the delivered notices of each alert, by its id, to etcd and to ``stored``."""
        writes = []
        for alert_id, fresh in entries.items():
            if alert_id in stored.alerts and not fresh <= set(stored.alerts[alert_id][0].notified):
                alert, revision = stored.alerts[alert_id]
                alert = state_machine.mark_notified(alert, fresh)
                stored.alerts[alert_id] = (alert, revision)
                key = self._alert_key(alert)
                writes.append((_unchanged(key, revision), Op.put(key, alert.encode())))
        return self._write_all(writes)


def _undelivered_event(alert: Alert) -> Event:
    return events.build(event_kinds.ALERTS_UNDELIVERED, alert.id, severity=Severity.WARNING, key=alert.key,
                        notified=alert.notified,
                        message=f"alert {alert.key} was dropped before every receiver took it")


def _unchanged(key: str, revision: int) -> Compare:
    return Compare.mod(key, "==", revision) if revision else Compare.absent(key)
