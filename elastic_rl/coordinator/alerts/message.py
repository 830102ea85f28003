"""The text of a notification. Pure."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from elastic_rl.coordinator.alerts.receiver_queue import NotificationGroup, in_order
from elastic_rl.coordinator.alerts.state_machine import TEST, Alert, Phase
from elastic_rl.etcd.records import Severity

_MAX_IN_FULL = 10
"""Alerts up to this number are listed with their messages; more are summed up by kind and cause."""
_MAX_NAMED = 12


def compose(job: str, group: NotificationGroup, alerts: Sequence[Alert]) -> tuple[str, str]:
    """Title and body of a notification about one or more alerts. Delivery is at least once: ``id=`` in the body
    identifies an alert and ``message=`` a notification, so that a repeated one can be recognised."""
    ordered = in_order(alerts)
    title = f"[{_tag(group, ordered)}] {job}: {_headline(ordered)}"
    if len(ordered) == 1:
        lines, ids = [_full(group.phase, ordered[0])], f"id={ordered[0].id} "
    elif len(ordered) <= _MAX_IN_FULL:
        # A line each: a message may have several, such as the last words of a process.
        lines, ids = [f"{a.kind} {a.subject}: {' '.join(_full(group.phase, a).split())} id={a.id}" for a in ordered], ""
    else:
        lines, ids = _summary(ordered), "ids=" + ",".join(a.id for a in ordered) + " "
    lines.append(f"{ids}phase={group.phase} severity={ordered[0].severity} job={job} host={socket.gethostname()} "
                 f"message={group.id}")
    return title, "\n".join(lines)


def worst(alerts: Sequence[Alert]) -> Severity:
    return in_order(alerts)[0].severity


def _tag(group: NotificationGroup, alerts: Sequence[Alert]) -> str:
    if alerts[0].kind == TEST:
        return "TEST"
    return group.phase.upper() if alerts[0].notify_resolved or len(alerts) > 1 else "EVENT"


def _headline(alerts: Sequence[Alert]) -> str:
    if len(alerts) == 1:
        return f"{alerts[0].kind} {alerts[0].subject}"
    kinds = Counter(a.kind for a in alerts)
    causes = {a.cause for a in alerts}
    where = f" on {causes.pop()}" if len(causes) == 1 and "" not in causes else ""
    return f"{len(alerts)} alerts{where}: " + ", ".join(f"{kind} ×{n}" if n > 1 else kind for kind, n in kinds.items())


def _full(phase: Phase, alert: Alert) -> str:
    if phase is not Phase.RESOLVED:
        return alert.message
    return f"{alert.message} (resolved after {max(0.0, alert.resolved_at - alert.since):.1f} s)"


def _summary(alerts: Sequence[Alert]) -> list[str]:
    lines = []
    for (kind, cause), same in groupby(alerts, key=lambda a: (a.kind, a.cause)):
        subjects = [a.subject for a in same]
        more = f" and {len(subjects) - _MAX_NAMED} more" if len(subjects) > _MAX_NAMED else ""
        where = f" on {cause}" if cause else ""
        lines.append(f"{kind}{where} ×{len(subjects)}: {', '.join(subjects[:_MAX_NAMED])}{more}")
    return lines
