"""The words of a message about alerts. Pure."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from elastic_rl.coordinator.alerts.delivery import NotificationGroup, in_order
from elastic_rl.coordinator.alerts.state_machine import TEST, Alert, Phase
from elastic_rl.etcd.records import Severity

_IN_FULL = 10
"""Up to so many alerts each have their message; more are summed up by kind and cause."""
_NAMED = 12


def compose(job: str, parcel: NotificationGroup, alerts: Sequence[Alert]) -> tuple[str, str]:
    """Title and body of a message about one or more alerts. Delivery is at least once; the ids in the body tell a
    repetition from a new alert, and ``message=`` tells it of the whole message."""
    ordered = in_order(alerts)
    title = f"[{_word(parcel, ordered)}] {job}: {_headline(ordered)}"
    if len(ordered) == 1:
        lines, ids = [_full(parcel.phase, ordered[0])], f"id={ordered[0].id} "
    elif len(ordered) <= _IN_FULL:
        lines, ids = [f"{a.kind} {a.subject}: {_full(parcel.phase, a)} id={a.id}" for a in ordered], ""
    else:
        lines, ids = _summed_up(ordered), "ids=" + ",".join(a.id for a in ordered) + " "
    lines.append(f"{ids}phase={parcel.phase} severity={ordered[0].severity} job={job} host={socket.gethostname()} "
                 f"message={parcel.id}")
    return title, "\n".join(lines)


def worst(alerts: Sequence[Alert]) -> Severity:
    return in_order(alerts)[0].severity


def _word(parcel: NotificationGroup, alerts: Sequence[Alert]) -> str:
    if alerts[0].kind == TEST:
        return "TEST"
    return parcel.phase.upper() if alerts[0].tell_end or len(alerts) > 1 else "NEWS"


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
    return f"{alert.message} (over after {max(0.0, alert.resolved_at - alert.since):.1f} s)"


def _summed_up(alerts: Sequence[Alert]) -> list[str]:
    lines = []
    for (kind, cause), group in groupby(alerts, key=lambda a: (a.kind, a.cause)):
        subjects = [a.subject for a in group]
        more = f" and {len(subjects) - _NAMED} more" if len(subjects) > _NAMED else ""
        where = f" on {cause}" if cause else ""
        lines.append(f"{kind}{where} ×{len(subjects)}: {', '.join(subjects[:_NAMED])}{more}")
    return lines
