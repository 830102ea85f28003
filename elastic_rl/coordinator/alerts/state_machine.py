"""The alert engine: which alerts are open, and what must still be told to whom. Pure; the clock is an argument.

An alert goes PENDING → FIRING → RESOLVED and is then dropped. PENDING is the time a condition must hold before it
counts; a condition that ends earlier leaves no trace. There is no way from RESOLVED back to FIRING: when the condition
returns, that is a new alert with a new id. So each id has at most two messages, first firing and then resolved.

Two sources open an alert. A *condition* holds as long as the state says so (a member is gone, a pool is short); the
alert ends with it. A *report* is an event that says something happened (a publish failed); the alert stays until
``released`` says that it is over. Both may name the same key, then they are one alert: one fault gives one alert.

A silence stops the telling, not the alert: who was told of a beginning is told of the end once the silence is over, and
who was not told of an alert that ended under a silence never hears of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_rl.etcd.records import Record, Severity, Silence

TEST = "alerts.test"
"""Kind of an alert that only asks whether the receivers take one: every one is told, whatever the routes and silences
say."""
TEST_KEEP_S = 300.0
UNNOTIFIED_KEEP_S = 24 * 3600.0
"""An alert that is over waits so long for a receiver that takes nothing; then it is given up, on the record."""
UNNOTIFIED_MOST = 1000
"""And so many wait at most; the oldest are given up first."""


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
    """It must hold so long before it counts."""
    tell_end: bool = True
    """False for news (a run has finished), whose end is nothing to tell."""
    cause: str = ""
    """What several alerts may have in common, such as a host; those of one message are told together by it."""
    revision: int = 0
    """Store revision of the event for a report, 0 for a condition."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.subject}"


class Alert(Record):
    """An alert as it is kept in etcd."""

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
    """Unix seconds of the last report or of the beginning; of one that is over, of the end of its silence."""
    resolved_at: float = 0.0
    hold_s: float = 0.0
    tell_end: bool = True
    revision: int = 0
    """Store revision of the last report; 0 when a condition opened it and nothing was reported."""
    cause: str = ""
    told: list[str] = []
    """``<phase>:<receiver>`` for each notice that was delivered."""
    silenced_by: str = ""
    """Id of the silence that keeps it from being told now."""
    spared: list[str] = []
    """Receivers that never hear of it: it began and ended without a word to them, under a silence."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.subject}"

    @property
    def open(self) -> bool:
        return self.phase is not Phase.RESOLVED


@dataclass(frozen=True)
class Notice:
    """One message to one receiver."""

    alert: Alert
    phase: Phase
    receiver: str

    @property
    def mark(self) -> str:
        return f"{self.phase}:{self.receiver}"


@dataclass
class Step:
    """What to write: alerts that are new or changed, and those that are over."""

    put: list[Alert] = field(default_factory=list)
    drop: list[Alert] = field(default_factory=list)
    given_up: list[Alert] = field(default_factory=list)
    """Those of ``drop`` whose end not every receiver took."""


Audience = Callable[[Alert], Sequence[str]]
"""Names of the receivers that an alert is for."""


def step(now: float, revision: int, known: Sequence[Alert], holding: Mapping[str, Condition],
         reports: Sequence[Condition], released: Callable[[Alert], bool], audience: Audience, *,
         declared: Callable[[Alert], bool] = lambda alert: False, silences: Sequence[Silence] = (),
         sending: Set[tuple[str, str]] = frozenset()) -> Step:
    """One look at the world.

    ``revision``: of the store when it was read. ``known``: every alert in the store. ``holding``: conditions by key.
    ``reports``: conditions from events since the last look, each seen once. ``released``: whether the reported trouble
    of an alert is over. ``declared``: whether an event said so, later than any report. ``sending``: id and receiver of
    each alert that is on its way to one. An alert that is over is kept until its audience was told.
    """
    out = Step()
    current = {a.key: a for a in known if a.open}
    reported = {report.key: report for report in sorted(reports, key=lambda r: r.revision)}
    for key in sorted({*holding, *reported} - set(current)):
        new = _silenced(now, _opened(now, revision, reported.get(key) or holding[key]), silences)
        out.put.append(new.replace(revision=0) if declared(new) else new)
    for key, alert in current.items():
        new = _silenced(now, alert, silences)
        if (report_now := reported.get(key)) is not None:
            new = new.replace(last_at=now, revision=0 if declared(new) else report_now.revision)
        elif key in holding:
            if new.revision and (declared(new) or released(new)):
                new = new.replace(revision=0)  # what was reported is over; from here on the condition says how long
        elif new.revision == 0 or declared(new) or released(new):
            if new.phase is Phase.PENDING:
                out.drop.append(alert)
                continue
            new = _resolved(now, new, audience(new), sending)
        if new.phase is Phase.PENDING and now - new.since >= new.hold_s:
            new = new.replace(phase=Phase.FIRING, fired_at=now)
        if new != alert:
            out.put.append(new)
    _put_away(now, [a for a in known if not a.open], audience, silences, out)
    return out


def _put_away(now: float, over: Sequence[Alert], audience: Audience, silences: Sequence[Silence], out: Step) -> None:
    """Drops what is over and told, and gives up what nobody takes."""
    waiting = []
    for alert in over:
        if alert.kind == TEST:
            if now - alert.fired_at >= TEST_KEEP_S:
                out.drop.append(alert)
        elif not any(pending(alert, r) for r in audience(alert)):
            out.drop.append(alert)
        else:
            waiting.append(alert)
    waiting.sort(key=lambda a: a.resolved_at)
    excess = max(0, len(waiting) - UNNOTIFIED_MOST)
    for n, alert in enumerate(waiting):
        new = _silenced(now, alert, silences)
        if n < excess or (not alert.silenced_by and now - max(alert.resolved_at, alert.last_at) >= UNNOTIFIED_KEEP_S):
            out.drop.append(alert)
            out.given_up.append(alert)
        elif new != alert:
            out.put.append(new.replace(last_at=now))


def pending(alert: Alert, receiver: str) -> Phase | None:
    """What a receiver has to be told next of an alert, now or after a silence: first of its beginning, then of its
    end."""
    if alert.phase is Phase.PENDING or receiver in alert.spared:
        return None
    for phase in (Phase.FIRING, Phase.RESOLVED):
        if f"{phase}:{receiver}" not in alert.told:
            return phase if phase is Phase.FIRING or (not alert.open and alert.tell_end) else None
    return None


def unnotified(alert: Alert, receivers: Sequence[str]) -> list[Notice]:
    """Notices of an alert that are due now, one a receiver."""
    if alert.silenced_by:
        return []
    return [Notice(alert, phase, r) for r in receivers if (phase := pending(alert, r)) is not None]


def was_notified(alert: Alert, marks: Iterable[str]) -> Alert:
    """The alert with these notices marked as delivered."""
    return alert.replace(told=sorted({*alert.told, *marks}))


def make_test_alert(now: float, alert_id: str, by: str) -> Alert:
    """News that goes to every receiver and ends by itself."""
    message = f"This is a test, asked for by {by}. Nothing is wrong."
    return Alert(id=alert_id, kind=TEST, subject=alert_id, message=message, severity=Severity.INFO,
                 phase=Phase.RESOLVED, since=now, fired_at=now, last_at=now, resolved_at=now, tell_end=False)


def _silenced(now: float, alert: Alert, silences: Sequence[Silence]) -> Alert:
    found = next((s.id for s in silences if s.matches(alert.kind, alert.subject, now)), "")
    return alert if found == alert.silenced_by else alert.replace(silenced_by=found)


def _resolved(now: float, alert: Alert, receivers: Sequence[str], sending: Set[tuple[str, str]]) -> Alert:
    alert = alert.replace(phase=Phase.RESOLVED, resolved_at=now)
    if not alert.silenced_by:
        return alert
    return alert.replace(spared=[r for r in receivers if f"{Phase.FIRING}:{r}" not in alert.told
                             and (alert.id, r) not in sending])


def _opened(now: float, revision: int, c: Condition) -> Alert:
    # The id comes from what opened the alert and the store's revision, not from chance or a clock: a leader that
    # repeats the look makes the same alert, and no later look can make an id again.
    seed = f"{c.key}@{c.revision or f'r{revision}'}"
    fired = c.hold_s <= 0
    return Alert(id=hashlib.blake2s(seed.encode(), digest_size=6).hexdigest(), kind=c.kind, subject=c.subject,
                 message=c.message, severity=c.severity, phase=Phase.FIRING if fired else Phase.PENDING, since=now,
                 fired_at=now if fired else 0.0, last_at=now, hold_s=c.hold_s, tell_end=c.tell_end, cause=c.cause,
                 revision=c.revision)
