"""The alert engine: which alerts are open, and what must still be told to whom. Pure; the clock is an argument.

An alert goes PENDING → FIRING → RESOLVED and is then dropped. PENDING is the time a condition must hold before it
counts; a condition that ends earlier leaves no trace. There is no way from RESOLVED back to FIRING: when the condition
returns, that is a new alert with a new id. So each id has at most two messages, first firing and then resolved.

Two sources open an alert. A *condition* holds as long as the state says so (a member is gone, a pool is short); the
alert ends with it. A *report* is an event that says something happened (a publish failed); the alert stays until
``released`` says that it is over. Both may name the same key, then they are one alert: one fault gives one alert.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_rl.coordinator.records import Record, Severity


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
    """Unix seconds of the last report, or of the beginning."""
    resolved_at: float = 0.0
    hold_s: float = 0.0
    tell_end: bool = True
    revision: int = 0
    """Store revision of the last report; 0 when a condition opened it and nothing was reported."""
    told: list[str] = []
    """``<phase>:<receiver>`` for each notice that was delivered."""

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
    """What to write: alerts that are new or changed, and ids of those that are over."""

    put: list[Alert] = field(default_factory=list)
    drop: list[Alert] = field(default_factory=list)


def step(now: float, known: Iterable[Alert], holding: Mapping[str, Condition], reports: Sequence[Condition],
         released: Callable[[Alert], bool], receivers: Sequence[str]) -> Step:
    """One look at the world.

    ``known``: every alert in the store. ``holding``: conditions by key. ``reports``: conditions from events since the
    last look, each seen once. ``released``: whether the reported trouble of an alert is over. ``receivers``: names of
    those who are told; an alert that is over is kept until each was told.
    """
    out = Step()
    current = {a.key: a for a in known if a.open}
    reported: dict[str, Condition] = {}
    for report in reports:
        reported[report.key] = report
    for key in sorted({*holding, *reported} - set(current)):
        out.put.append(_opened(now, reported.get(key) or holding[key]))
    for key, alert in current.items():
        if (report_now := reported.get(key)) is not None:
            alert = alert.but(last_at=now, revision=report_now.revision)
        elif key not in holding and (alert.revision == 0 or released(alert)):
            if alert.phase is Phase.PENDING:
                out.drop.append(alert)
                continue
            alert = alert.but(phase=Phase.RESOLVED, resolved_at=now)
        if alert.phase is Phase.PENDING and now - alert.since >= alert.hold_s:
            alert = alert.but(phase=Phase.FIRING, fired_at=now)
        if alert != current[key]:
            out.put.append(alert)
    for alert in known:
        if not alert.open and not untold(alert, receivers):
            out.drop.append(alert)
    return out


def untold(alert: Alert, receivers: Sequence[str]) -> list[Notice]:
    """Notices of an alert that still have to be delivered: to each receiver the next one only, so that it hears of the
    beginning before the end."""
    if alert.phase is Phase.PENDING:
        return []
    due = [Phase.FIRING] + ([Phase.RESOLVED] if alert.phase is Phase.RESOLVED and alert.tell_end else [])
    notices = []
    for receiver in receivers:
        for phase in due:
            if f"{phase}:{receiver}" not in alert.told:
                notices.append(Notice(alert, phase, receiver))
                break
    return notices


def was_told(alert: Alert, marks: Iterable[str]) -> Alert:
    """The alert with these notices marked as delivered."""
    return alert.but(told=sorted({*alert.told, *marks}))


def _opened(now: float, c: Condition) -> Alert:
    # The id comes from what opened the alert, not from chance: a leader that repeats the look makes the same alert.
    seed = f"{c.key}@{c.revision or round(now * 1000)}"
    fired = c.hold_s <= 0
    return Alert(id=hashlib.blake2s(seed.encode(), digest_size=6).hexdigest(), kind=c.kind, subject=c.subject,
                 message=c.message, severity=c.severity, phase=Phase.FIRING if fired else Phase.PENDING, since=now,
                 fired_at=now if fired else 0.0, last_at=now, hold_s=c.hold_s, tell_end=c.tell_end,
                 revision=c.revision)
