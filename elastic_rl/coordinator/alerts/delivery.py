"""What is sent to a receiver next: alerts of one moment as one message, not too many messages, again after a failure.
Pure; the clock is an argument.

Each receiver has a mailbox in etcd with at most one message on its way. The message is written there before it is
sent, so a leader that takes over sends the same one again (under the same id) or, if its delivery was written down, not
at all; and the rate holds over a change of the leader, because the times of sending are in the mailbox too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_rl.coordinator.alerts.state_machine import TEST, Alert, Notice, Phase
from elastic_rl.etcd.records import Record, Severity

MOST = 100
"""Alerts in one message."""
WINDOW_S = 60.0
BACKOFF_S = (2.0, 60.0)
"""First and longest pause after a failure; doubled each time. A message is sent again until its alerts are given up
(``alerts.UNTOLD_KEEP_S``)."""

_RANK = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


class NotificationGroup(Record):
    """A message on its way."""

    id: str
    phase: Phase
    alerts: list[str]
    """Ids, the worst first."""
    created_at: float
    attempts: int = 1
    failed: int = 0
    """Number of the last attempt that is known to have failed."""


class ReceiverQueue(Record):
    """What a receiver was sent. Times are unix seconds."""

    receiver: str
    parcel: NotificationGroup | None = None
    sent: list[float] = []
    """Times of the attempts within the last minute."""
    failures: int = 0
    """Attempts that failed since the last one that did not."""
    not_before: float = 0.0
    """The next attempt waits until then."""
    last_ok: float = 0.0
    error: str = ""
    """Why the last attempt failed; empty after one that did not."""


@dataclass(frozen=True)
class Limits:
    group_wait_s: float
    per_minute: int


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    parcel: str
    attempt: int
    ok: bool
    error: str = ""


def settle(now: float, box: ReceiverQueue, outcome: Outcome | None) -> tuple[ReceiverQueue, list[str], str]:
    """Takes note of how an attempt ended. Returns the mailbox as it is then, and the ids of the alerts that arrived
    with their mark (empty when none did); the marks must be written before the mailbox."""
    parcel = box.parcel
    if parcel is None or outcome is None or outcome.parcel != parcel.id:
        return box, [], ""
    if outcome.ok:  # of whichever attempt: it is the same message
        return box.replace(parcel=None, failures=0, not_before=0.0, last_ok=now, error=""), parcel.alerts, (
            f"{parcel.phase}:{box.receiver}")
    if outcome.attempt != parcel.attempts or outcome.attempt == parcel.failed:
        return box, [], ""
    failures = box.failures + 1
    pause = min(BACKOFF_S[1], BACKOFF_S[0] * 2.0 ** min(failures - 1, 8))
    return box.replace(parcel=parcel.replace(failed=outcome.attempt), failures=failures, not_before=now + pause,
                   error=outcome.error), [], ""


def without_told(box: ReceiverQueue, known: Mapping[str, Alert]) -> ReceiverQueue:
    """The mailbox without what of its parcel is told or forgotten: a leader that died may have written some marks, or
    all, and not the mailbox."""
    if box.parcel is None:
        return box
    mark = f"{box.parcel.phase}:{box.receiver}"
    left = [i for i in box.parcel.alerts if (alert := known.get(i)) is not None and mark not in alert.told]
    return box.replace(parcel=box.parcel.replace(alerts=left) if left else None)


def next_send(now: float, box: ReceiverQueue, due: Sequence[Notice], known: Mapping[str, Alert], limits: Limits
              ) -> ReceiverQueue | None:
    """The mailbox with the parcel that shall be sent now, or None when none shall. Only for a receiver to which this
    process sends nothing at the moment.

    ``due``: notices to this receiver. ``known``: every alert in the store, by id.
    """
    # A leader before us may have had another clock.
    sent = [at for at in (min(t, now) for t in box.sent) if now - at < WINDOW_S]
    if len(sent) >= limits.per_minute:
        return None
    tests = [n for n in due if n.alert.kind == TEST]
    # A test asks whether it works now; it does not wait for the end of a pause that began before it.
    asked = max((n.alert.since for n in tests), default=0.0)
    hurry = bool(tests) and asked >= max(box.sent, default=0.0)
    if now < box.not_before <= now + BACKOFF_S[1] and not hurry:
        return None
    if box.parcel is not None:
        return box.replace(parcel=box.parcel.replace(attempts=box.parcel.attempts + 1), sent=[*sent, now])
    bundle = tests or _bundle(now, due, limits.group_wait_s)
    if not bundle:
        return None
    ids = [n.alert.id for n in bundle[:MOST]]
    seed = "\n".join([bundle[0].mark, *ids])
    parcel = NotificationGroup(id=hashlib.blake2s(seed.encode(), digest_size=6).hexdigest(), phase=bundle[0].phase,
                               alerts=ids,
                    created_at=now)
    return box.replace(parcel=parcel, sent=[*sent, now])


def in_order(alerts: Sequence[Alert]) -> list[Alert]:
    """The worst first, like beside like."""
    return sorted(alerts, key=lambda a: (_RANK[a.severity], a.kind, a.cause, a.subject, a.id))


def _bundle(now: float, due: Sequence[Notice], wait_s: float) -> list[Notice]:
    """The notices of one phase that go together: of the phase that waits longest."""
    if not due:
        return []
    oldest = min(due, key=_due_at)
    if 0 <= now - _due_at(oldest) < wait_s:
        return []
    chosen = {n.alert.id: n for n in due if n.phase is oldest.phase}
    return [chosen[a.id] for a in in_order([n.alert for n in chosen.values()])]


def _due_at(notice: Notice) -> float:
    return notice.alert.fired_at if notice.phase is Phase.FIRING else notice.alert.resolved_at
