"""The leader's part of alerts: keeps them in etcd, and has them delivered.

Everything is written under the leader's fencing token and before it is acted on: an alert before it is told, a message
before it is sent, the marks of what was delivered before the message is taken off its receiver's mailbox. So a leader
that dies between any two of these loses nothing; the next one sends the same message again, or sees that it arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic_rl.config import Config
from elastic_rl.coordinator.alerts import delivery, notifier, receivers, rules, state_machine
from elastic_rl.coordinator.alerts.conditions import Thresholds
from elastic_rl.coordinator.alerts.delivery import Limits, Outcome, ReceiverQueue
from elastic_rl.coordinator.alerts.notifier import Notification
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode_all
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, Severity, Silence
from elastic_rl.etcd.transaction import GuardedWrite, batches

log = logging.getLogger(__name__)


class Sender(Protocol):
    """What delivers (``notify.Notifier``)."""

    @property
    def job(self) -> str: ...

    @property
    def receivers(self) -> list[Receiver]: ...

    def send(self, receiver: str, letter: Notification) -> bool: ...

    def busy(self, receiver: str) -> bool: ...

    def outcome(self, receiver: str) -> Outcome | None: ...


@dataclass(frozen=True)
class Kept:
    """What etcd holds about alerts, with mod revisions."""

    revision: int
    """Of the store at the reading."""
    alerts: dict[str, tuple[Alert, int]]
    boxes: dict[str, tuple[ReceiverQueue, int]]
    silences: list[Silence]
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why a record cannot be read, by key, of those that are left out."""

    @property
    def sending(self) -> set[tuple[str, str]]:
        """Id and receiver of each alert that is on its way."""
        return {(i, box.receiver) for box, _ in self.boxes.values() if box.parcel for i in box.parcel.alerts}


class AlertController:
    """All of it runs in the leader's loop; only the probe of etcd and the notifier have threads of their own."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, notifier: Sender, guarded: GuardedWrite, *,
                 leads: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._etcd, self._keys, self._cfg, self._notifier = etcd, keys, cfg, notifier
        self._guarded, self._leads, self._clock = guarded, leads, clock
        self._limits = Limits(cfg.alerts.group_wait_s, cfg.alerts.messages_per_minute)
        self._thresholds = Thresholds.from_config(cfg)

    def update(self, snapshot: ClusterSnapshot, reports: Sequence[Condition], over: set[str],
               cursor: Sequence[tuple[Compare, Op]] = (), conditions: Sequence[Condition] = ()) -> None:
        """Brings the alerts up to date. ``cursor``: what says that the reports were read; it is written last, since an
        alert that was written without it is found open when its report is read again. ``conditions``: what else is
        wrong now."""
        now, kept = self._clock(), self.read()
        known = [a for a, _ in kept.alerts.values()]
        snapshot = replace(snapshot, unreadable={**snapshot.unreadable, **kept.unreadable})
        found = rules.fold(
            [*conditions, *rules.conditions(snapshot, now, self._thresholds, {a.key for a in known if a.open}).values(),
             *rules.with_causes(reports, snapshot)], known)
        holding: dict[str, Condition] = {}
        for condition in found:
            if not condition.revision:
                holding.setdefault(condition.key, condition)
        todo = state_machine.step(
            now, kept.revision, known, holding, [c for c in found if c.revision],
            lambda alert: rules.released(alert, snapshot, now), self.audience,
            declared=lambda alert: rules.declared_over(alert, over), silences=kept.silences,
            sending=kept.sending)
        self._write(kept, todo, [*cursor, *self._ended_silences(now, kept), *self._given_up(todo)])

    def read(self) -> Kept:
        """Raises EtcdUnavailable."""
        unreadable: dict[str, str] = {}
        silences = [s for s, _ in decode_all(self._range(self._keys.silences_prefix()), Silence, unreadable)]
        boxes = decode_all(self._range(self._keys.receivers_prefix()), ReceiverQueue, unreadable)
        kvs, revision = self._etcd.range(self._keys.alerts_prefix())
        return Kept(revision, {a.id: (a, kv.mod_revision) for a, kv in decode_all(kvs, Alert, unreadable)},
                    {b.receiver: (b, kv.mod_revision) for b, kv in boxes}, silences, unreadable)

    def audience(self, alert: Alert) -> list[str]:
        return receivers.audience(alert, self._notifier.receivers, self._cfg.alerts.tags)

    def deliver(self) -> None:
        """Writes down what was delivered, then sends what is due."""
        now, kept = self._clock(), self.read()
        names = [r.name for r in self._notifier.receivers]
        # Asked before the outcomes: of a receiver that was idle then, the outcome is there.
        idle = [name for name in names if not self._notifier.busy(name)]
        settled: dict[str, ReceiverQueue] = {}
        marks: dict[str, set[str]] = {}
        for name in names:
            before = kept.boxes[name][0] if name in kept.boxes else ReceiverQueue(receiver=name)
            settled[name], arrived, mark = delivery.settle(now, before, self._notifier.outcome(name))
            for alert_id in arrived:
                marks.setdefault(alert_id, set()).add(mark)
        if not self._mark(kept, marks):
            return
        for name in names:
            self._serve(now, kept, settled[name], idle=name in idle)
        for name, (_, revision) in kept.boxes.items():
            if name not in names:  # the configuration does not know it any more
                key = self._keys.receiver(name)
                self._guarded([_unchanged(key, revision)], [Op.delete(key)])

    # -- keeping ------------------------------------------------------------------------------------------------
    def _range(self, prefix: str) -> list[KeyValue]:
        return self._etcd.range(prefix)[0]

    def _write(self, kept: Kept, todo: state_machine.Step, last: Sequence[tuple[Compare, Op]]) -> None:
        writes: list[tuple[Compare, Op]] = []
        for alert, drop in [(a, False) for a in todo.put] + [(a, True) for a in todo.drop]:
            key = self._alert_key(alert)
            revision = kept.alerts[alert.id][1] if alert.id in kept.alerts else 0
            writes.append((_unchanged(key, revision), Op.delete(key) if drop else Op.put(key, alert.encode())))
        writes += last
        if all(self._guarded([c for c, _ in batch], [op for _, op in batch]) for batch in batches(writes)):
            for alert in todo.put:
                log.warning("alert %s %s %s: %s%s", alert.id, alert.phase, alert.key, alert.message,
                            f" (silenced by {alert.silenced_by})" if alert.silenced_by else "")

    def _alert_key(self, alert: Alert) -> str:
        return self._keys.alert(f"{alert.key}/{alert.id}")

    def _ended_silences(self, now: float, kept: Kept) -> list[tuple[Compare, Op]]:
        ended = [self._keys.silence(s.id) for s in kept.silences if s.until <= now]
        return [(Compare.exists(key), Op.delete(key)) for key in ended]

    def _given_up(self, todo: state_machine.Step) -> list[tuple[Compare, Op]]:
        return [(Compare.absent(self._keys.event(e.id)), events.put_op(self._keys, e)) for e in map(
            _undelivered, todo.given_up)]

    # -- delivering ---------------------------------------------------------------------------------------------
    def _serve(self, now: float, kept: Kept, box: ReceiverQueue, *, idle: bool) -> None:
        name = box.receiver
        before, revision = kept.boxes.get(name, (ReceiverQueue(receiver=name), 0))
        known = {i: a for i, (a, _) in kept.alerts.items()}
        box = delivery.without_told(box, known)
        due = [n for a in known.values() if name in self.audience(a) for n in state_machine.unnotified(a, [name])]
        sends = delivery.next_send(now, box, due, known, self._limits) if idle else None
        box, key = sends or box, self._keys.receiver(name)
        if box != before and not self._guarded([_unchanged(key, revision)], [Op.put(key, box.encode())]):
            return
        if sends is not None and sends.parcel is not None:
            told = [known[i] for i in sends.parcel.alerts]
            self._notifier.send(name, notifier.notification(self._notifier.job, sends.parcel, told, self._leads))

    def _mark(self, kept: Kept, marks: Mapping[str, set[str]]) -> bool:
        """Writes what was told of each alert; ``kept`` has the alerts as they are then."""
        writes = []
        for alert_id, fresh in marks.items():
            if alert_id in kept.alerts and not fresh <= set(kept.alerts[alert_id][0].told):
                alert, revision = kept.alerts[alert_id]
                told = state_machine.was_notified(alert, fresh)
                kept.alerts[alert_id] = (told, revision)
                key = self._alert_key(alert)
                writes.append((_unchanged(key, revision), Op.put(key, told.encode())))
        return all(self._guarded([c for c, _ in batch], [op for _, op in batch]) for batch in batches(writes))


def _undelivered(alert: Alert) -> Event:
    return events.build("alerts.undelivered", alert.id, f"alert {alert.key} was given up: not every receiver took it",
                        severity=Severity.WARNING, key=alert.key, told=alert.told)


def _unchanged(key: str, revision: int) -> Compare:
    return Compare.mod(key, "==", revision) if revision else Compare.absent(key)
