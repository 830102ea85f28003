"""What is sent to a receiver next: groups the alerts of one moment, limits the rate, retries after a failure. Pure; the
clock is an argument.

Each receiver has a queue record in etcd with at most one notification in flight. It is written there before it is sent,
so a new leader sends the same one again under the same id or, if its delivery was recorded, does not. The rate limit
holds over a change of the leader, because the times of the attempts are in the record too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_rl.coordinator.alerts.state_machine import TEST, Alert, PendingNotice, Phase, notified_entry
from elastic_rl.etcd.records import Record
from elastic_rl.runtime.backoff import doubled_s

MAX_ALERTS = 100
"""Alerts in one notification."""
WINDOW_S = 60.0
BACKOFF_S = (2.0, 60.0)
"""First and longest pause after a failure; doubled each time. A notification is retried until its alerts are dropped
(``state_machine.UNNOTIFIED_KEEP_S``)."""


class NotificationGroup(Record):
    """Alerts that are sent as one notification."""

    id: str
    phase: Phase
    alerts: list[str]
    """Ids, the most severe first."""
    created_at: float
    attempts: int = 1
    failed_attempt: int = 0
    """Number of the last attempt that is known to have failed."""


class ReceiverQueue(Record):
    """What was sent to a receiver. Times are unix seconds."""

    receiver: str
    in_flight: NotificationGroup | None = None
    sent_at: list[float] = []
    """Times of the attempts within the last minute."""
    failures: int = 0
    """Failed attempts since the last one that succeeded."""
    not_before: float = 0.0
    """Earliest time of the next attempt."""
    error: str = ""
    """Why the last attempt failed; empty after one that succeeded."""


@dataclass(frozen=True)
class SendLimits:
    group_wait_s: float
    per_minute: int


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt to send a notification ended."""

    group_id: str
    attempt: int
    ok: bool
    error: str = ""


def record_result(now: float, queue: ReceiverQueue, result: AttemptResult | None
                  ) -> tuple[ReceiverQueue, list[str], str]:
    """Applies the result of an attempt. Returns the new queue, the ids of the alerts that were delivered, and the entry
    to add to their ``notified`` (empty when none was); write the entries before the queue."""
    group = queue.in_flight
    if group is None or result is None or result.group_id != group.id:
        return queue, [], ""
    if result.ok:  # of whichever attempt: it is the same notification
        done = queue.replace(in_flight=None, failures=0, not_before=0.0, error="")
        return done, group.alerts, notified_entry(group.phase, queue.receiver)
    if result.attempt != group.attempts or result.attempt == group.failed_attempt:
        return queue, [], ""
    failures = queue.failures + 1
    return queue.replace(in_flight=group.replace(failed_attempt=result.attempt), failures=failures,
                         not_before=now + doubled_s(failures, *BACKOFF_S), error=result.error), [], ""


def without_notified(queue: ReceiverQueue, known: Mapping[str, Alert]) -> ReceiverQueue:
    """The queue without the alerts of its group that were delivered or no longer exist: a leader may die after it wrote
    some or all ``notified`` entries and before it wrote the queue."""
    if queue.in_flight is None:
        return queue
    entry = notified_entry(queue.in_flight.phase, queue.receiver)
    left = [i for i in queue.in_flight.alerts if (alert := known.get(i)) is not None and entry not in alert.notified]
    return queue.replace(in_flight=queue.in_flight.replace(alerts=left) if left else None)


def next_send(now: float, queue: ReceiverQueue, due: Sequence[PendingNotice], limits: SendLimits
              ) -> ReceiverQueue | None:
    """The queue with the group to send now, or None when nothing is to be sent. ``due``: notices for this receiver.
    Only for a receiver to which this process sends nothing at the moment."""
    # The clock of an earlier leader may have been ahead.
    sent_at = [at for at in (min(t, now) for t in queue.sent_at) if now - at < WINDOW_S]
    if len(sent_at) >= limits.per_minute:
        return None
    tests = [n for n in due if n.alert.kind == TEST]
    # A test asks whether delivery works now, so it does not wait out a backoff that started before it.
    tested_at = max((n.alert.since for n in tests), default=0.0)
    skip_backoff = bool(tests) and tested_at >= max(queue.sent_at, default=0.0)
    if now < queue.not_before <= now + BACKOFF_S[1] and not skip_backoff:
        return None
    if queue.in_flight is not None:
        again = queue.in_flight.replace(attempts=queue.in_flight.attempts + 1)
        return queue.replace(in_flight=again, sent_at=[*sent_at, now])
    chosen = tests or _group(now, due, limits.group_wait_s)
    if not chosen:
        return None
    ids = [n.alert.id for n in chosen[:MAX_ALERTS]]
    seed = "\n".join([chosen[0].entry, *ids])
    group = NotificationGroup(id=hashlib.blake2s(seed.encode(), digest_size=6).hexdigest(), phase=chosen[0].phase,
                              alerts=ids, created_at=now)
    return queue.replace(in_flight=group, sent_at=[*sent_at, now])


def in_order(alerts: Sequence[Alert]) -> list[Alert]:
    """The most severe first, then by kind and cause."""
    return sorted(alerts, key=lambda a: (-a.severity.rank, a.kind, a.cause, a.subject, a.id))


def _group(now: float, due: Sequence[PendingNotice], wait_s: float) -> list[PendingNotice]:
    """The notices that are sent together: all of the phase that has waited longest."""
    if not due:
        return []
    oldest = min(due, key=_due_at)
    if 0 <= now - _due_at(oldest) < wait_s:
        return []
    chosen = {n.alert.id: n for n in due if n.phase is oldest.phase}
    return [chosen[a.id] for a in in_order([n.alert for n in chosen.values()])]


def _due_at(notice: PendingNotice) -> float:
    return notice.alert.fired_at if notice.phase is Phase.FIRING else notice.alert.resolved_at
