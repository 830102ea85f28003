"""The alert state machine: which alerts are open, and which notices each receiver still has to get. Pure; the clock is
an argument.

An alert goes PENDING → FIRING → RESOLVED and is then dropped. It is PENDING until its condition has held for
``hold_s``; a condition that ends earlier leaves no trace. There is no way from RESOLVED back to FIRING: when the
condition returns, that is a new alert with a new id. So each id has at most two notices per receiver, firing and then
resolved.

Two sources open an alert. A *condition* holds as long as the state says so (a member is gone, a pool is short); the
alert ends with it. A *report* is an event that says something happened (a publish failed); the alert stays open until
``released`` or ``declared_over`` says that it is over. When both have the same key they are one alert: one fault gives
one alert.

A one-time event (``notify_resolved`` False) is one notice. Its alert must not resolve while its condition holds: the
next pass would open it again under a new id, and notify again, for as long as the state of a finished run is kept. So
it stays open, over days and leaders, and resolves without a notice.

A silence stops the notices, not the alert. A receiver that was notified of the start is notified of the end once the
silence is over; one that was not notified of an alert that ended under a silence gets no notice of it at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_rl.etcd.records import Record, Severity, Silence

TEST = "alerts.test"
"""Kind of an alert that tests the receivers: each is notified, whatever the routes and silences say."""
TEST_KEEP_S = 300.0
RESOLVED_KEEP_S = 30.0
"""A resolved alert is known for so long: events of what happened while it was open may come after its end."""
UNNOTIFIED_KEEP_S = 24 * 3600.0
"""A resolved alert waits this long for a receiver that takes nothing; then it is dropped with an event."""
UNNOTIFIED_MAX = 1000
"""Resolved alerts that wait for their receivers; beyond it the oldest are dropped with an event."""


class Phase(StrEnum):
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True)
class Condition:
    """Something that is wrong now. ``kind/subject`` is its key: at most one open alert has it."""

    kind: str
    subject: str
    message: str
    severity: Severity = Severity.ERROR
    hold_s: float = 0.0
    """It must hold for this long before it counts."""
    notify_resolved: bool = True
    """False for one-time events (a run has finished), which have no end to report."""
    cause: str = ""
    """What several alerts may have in common, such as a host; a notification groups its alerts by it."""
    revision: int = 0
    """Store revision of the event for a report, 0 for a condition."""
    at: float = 0.0
    """Unix seconds at which what an event reports happened; 0 for a condition."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.subject}"


class Alert(Record):
    """An alert as stored in etcd."""

    id: str
    kind: str
    subject: str
    message: str
    severity: Severity
    phase: Phase
    since: float
    """Unix seconds at which the condition began to hold."""
    fired_at: float = 0.0
    last_at: float = 0.0
    """Unix seconds of the last report, or of the start without one; of a resolved alert, of the end of its silence."""
    resolved_at: float = 0.0
    hold_s: float = 0.0
    notify_resolved: bool = True
    revision: int = 0
    """Store revision of the last report; 0 when a condition opened it and nothing was reported."""
    cause: str = ""
    notified: list[str] = []
    """``<phase>:<receiver>`` for each notice that was delivered."""
    silenced_by: str = ""
    """Id of the silence that holds back its notices now."""
    suppressed: list[str] = []
    """Receivers that get no notice of it: it began and ended under a silence before they got one."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.subject}"

    @property
    def open(self) -> bool:
        return self.phase is not Phase.RESOLVED


def notified_entry(phase: Phase, receiver: str) -> str:
    """What ``Alert.notified`` holds once a receiver has the notice of a phase."""
    return f"{phase}:{receiver}"


@dataclass(frozen=True)
class PendingNotice:
    """A notice that a receiver still has to get."""

    alert: Alert
    phase: Phase
    receiver: str

    @property
    def entry(self) -> str:
        return notified_entry(self.phase, self.receiver)


@dataclass
class Changes:
    """What to write: alerts that are new or changed, and those to delete."""

    put: list[Alert] = field(default_factory=list)
    drop: list[Alert] = field(default_factory=list)
    undelivered: list[Alert] = field(default_factory=list)
    """Alerts of ``drop`` whose end not every receiver took."""


Audience = Callable[[Alert], Sequence[str]]
"""Names of the receivers that an alert is for."""


def advance(now: float, revision: int, known: Sequence[Alert], holding: Mapping[str, Condition],
            reports: Sequence[Condition], released: Callable[[Alert], bool], audience: Audience, *,
            declared_over: Callable[[Alert], bool] = lambda alert: False, silences: Sequence[Silence] = (),
            sending: Set[tuple[str, str]] = frozenset()) -> Changes:
    """One pass over the alerts.

    ``revision``: the revision of etcd when it was read. ``known``: every alert in etcd. ``holding``: conditions by key.
    ``reports``: conditions from events since the last pass, each seen once. ``released``: whether the state says that
    what an alert reported is over. ``declared_over``: whether an event said so, later than any report. ``sending``: id
    and receiver of each alert in flight. A resolved alert is kept until its audience was notified, and for
    ``RESOLVED_KEEP_S``.
    """
    out = Changes()
    current = {a.key: a for a in known if a.open}
    reported = {report.key: report for report in sorted(reports, key=lambda r: r.revision)}
    for key in sorted({*holding, *reported} - set(current)):
        new = _silenced(now, _opened(now, revision, reported.get(key) or holding[key]), silences)
        out.put.append(new.replace(revision=0) if declared_over(new) else new)
    for key, alert in current.items():
        new = _silenced(now, alert, silences)
        if (report_now := reported.get(key)) is not None:
            new = new.replace(last_at=now, revision=0 if declared_over(new) else report_now.revision)
        elif key in holding:
            if new.revision and (declared_over(new) or released(new)):
                new = new.replace(revision=0)  # what was reported is over; from here on the condition decides
        elif new.revision == 0 or declared_over(new) or released(new):
            if new.phase is Phase.PENDING:
                out.drop.append(alert)
                continue
            new = _resolved(now, new, audience(new), sending)
        if new.phase is Phase.PENDING:
            # What else it may stand for now may hold for a shorter time, or none.
            new = new.replace(hold_s=min(new.hold_s, *(c.hold_s for c in (reported.get(key), holding.get(key)) if c)))
            # A clock that was set back, or another leader's, may be behind: the condition holds from now on at least.
            new = new.replace(since=min(new.since, now))
            if now - new.since >= new.hold_s:
                new = new.replace(phase=Phase.FIRING, fired_at=now)
        if new != alert:
            out.put.append(new)
    _drop_resolved(now, [a for a in known if not a.open], audience, silences, out)
    return out


def _drop_resolved(now: float, resolved: Sequence[Alert], audience: Audience, silences: Sequence[Silence],
                   out: Changes) -> None:
    """Drops resolved alerts whose audience was notified, once events about them are no longer to come, and those that
    waited too long for it."""
    waiting = []
    for alert in resolved:
        if alert.kind == TEST:
            if now - alert.fired_at >= TEST_KEEP_S:
                out.drop.append(alert)
        elif not any(pending(alert, r) for r in audience(alert)):
            # One of the future is of a clock that was set back: what happens from now on would pass for older.
            if not alert.notify_resolved or abs(now - alert.resolved_at) >= RESOLVED_KEEP_S:
                out.drop.append(alert)
        else:
            waiting.append(alert)
    waiting.sort(key=lambda a: a.resolved_at)
    excess = max(0, len(waiting) - UNNOTIFIED_MAX)
    for n, alert in enumerate(waiting):
        new = _silenced(now, alert, silences)
        if n < excess or (not alert.silenced_by and now - max(alert.resolved_at, alert.last_at) >= UNNOTIFIED_KEEP_S):
            out.drop.append(alert)
            out.undelivered.append(alert)
        elif new != alert:
            out.put.append(new.replace(last_at=now))


def pending(alert: Alert, receiver: str) -> Phase | None:
    """Phase of the next notice that a receiver has to get of an alert, now or after a silence; None for no notice."""
    if alert.phase is Phase.PENDING or receiver in alert.suppressed:
        return None
    for phase in (Phase.FIRING, Phase.RESOLVED):
        if notified_entry(phase, receiver) not in alert.notified:
            return phase if phase is Phase.FIRING or (not alert.open and alert.notify_resolved) else None
    return None


def due_notices(alert: Alert, receivers: Sequence[str]) -> list[PendingNotice]:
    """Notices of an alert that are due now, at most one a receiver."""
    if alert.silenced_by:
        return []
    return [PendingNotice(alert, phase, r) for r in receivers if (phase := pending(alert, r)) is not None]


def mark_notified(alert: Alert, entries: Iterable[str]) -> Alert:
    """The alert with these notices recorded as delivered."""
    return alert.replace(notified=sorted({*alert.notified, *entries}))


def make_test_alert(now: float, alert_id: str, by: str) -> Alert:
    """A one-time alert that goes to every receiver and is dropped by itself."""
    message = f"This is a test notification, requested by {by}. Nothing is wrong."
    return Alert(id=alert_id, kind=TEST, subject=alert_id, message=message, severity=Severity.INFO,
                 phase=Phase.RESOLVED, since=now, fired_at=now, last_at=now, resolved_at=now, notify_resolved=False)


def _silenced(now: float, alert: Alert, silences: Sequence[Silence]) -> Alert:
    found = next((s.id for s in silences if s.matches(alert.kind, alert.subject, now)), "")
    return alert if found == alert.silenced_by else alert.replace(silenced_by=found)


def _resolved(now: float, alert: Alert, receivers: Sequence[str], sending: Set[tuple[str, str]]) -> Alert:
    alert = alert.replace(phase=Phase.RESOLVED, resolved_at=now)
    if not alert.silenced_by:
        return alert
    return alert.replace(suppressed=[r for r in receivers if notified_entry(Phase.FIRING, r) not in alert.notified
                                     and (alert.id, r) not in sending])


def _opened(now: float, revision: int, c: Condition) -> Alert:
    # The id comes from what opened the alert and etcd's revision, not from chance or a clock: a leader that
    # repeats the pass makes the same alert, and no later pass can make an id again.
    seed = f"{c.key}@{c.revision or f'r{revision}'}"
    fired = c.hold_s <= 0
    return Alert(id=hashlib.blake2s(seed.encode(), digest_size=6).hexdigest(), kind=c.kind, subject=c.subject,
                 message=c.message, severity=c.severity, phase=Phase.FIRING if fired else Phase.PENDING, since=now,
                 fired_at=now if fired else 0.0, last_at=now, hold_s=c.hold_s, notify_resolved=c.notify_resolved,
                 cause=c.cause, revision=c.revision)
