"""Which events and states are alerts, which of them are signs of one fault, and when they are over. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition, Phase
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import DRIVER, JOB
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import WORKING_PHASES, EngineState, Event, Severity

QUIET_S = 60.0
"""A report whose end nothing announces is over when it was not repeated for this long."""
SETTLE_S = 3.0
"""Reports of one part's death by its runner, its driver, its host and the leader arrive within this time."""

_ENDS_WITH = {also: kind.ends_alert for kind in event_kinds.KINDS.values() for also in kind.also_ends}
"""Kind of an alert that may stand for one of another kind (see ``merge_by_fault``) → that kind, whose end is its end
too."""
_RUN = "run"
_WAITS_FOR = {**{group: group for group in TRAINER_GROUPS}, "actor": _RUN}
"""What a run waits for → the fault that it is a sign of, where there is just one."""


def report(event: Event, revision: int) -> Condition | None:
    """The alert that an event opens, if any. An error opens one in any case, also one of a newer release's kind: no
    error goes unseen."""
    known = event_kinds.find(event.kind)
    if (known is not None and known.by_state) or event.data.get(event_kinds.ALREADY_REPORTED):
        return None
    kind = known.alert if known is not None else ""
    if not kind and event.severity is not Severity.ERROR:
        return None
    one_time = known is not None and known.one_time
    severity = Severity.ERROR if event.severity is Severity.INFO and not one_time else event.severity
    return Condition(kind or event.kind, event.subject, event.message, severity, notify_resolved=not one_time,
                     revision=revision, at=_happened_at(event))


def _happened_at(event: Event) -> float:
    """When what the event reports happened: a host reports the start of a service once that has run for a while."""
    started = event.data.get("started_at")
    # A whole second may be an integer in JSON.
    return float(started) if isinstance(started, int | float) else event.at


def resolved_key(event: Event, job: str) -> str | None:
    """Key of the alert that an event declares over, if any."""
    known = event_kinds.find(event.kind)
    if known is None or not known.ends_alert:
        return None
    if known is event_kinds.OPERATION_CANCELLED:
        return f"{known.ends_alert}/{job}" if event.subject == JOB else None
    return f"{known.ends_alert}/{event.subject}"


def fault_of(kind: str, subject: str) -> str:
    """Key of the fault that an alert is a sign of, so that several signs of one fault are one alert: a member that
    hangs, is killed for it and dies; a driver's death and the global restart that may follow; a durable store that
    fails and so falls behind."""
    part, _, what = kind.partition(".")
    match kind:
        case "restart.requested":
            if subject in (DRIVER, JOB):
                return _RUN
            group, _, name = subject.partition("/")
            return {"engines": f"engine/{name}", "roles": f"{name}/"}.get(group, subject)
        case "run.global_restart" | "run.restarted":
            return _RUN
        case "run.waiting" if subject in _WAITS_FOR:
            return _WAITS_FOR[subject]
        case "run.crash_loop" | "job.failed":
            return "job"
        case "durable.behind" | "dcs.durable_failed":
            return "durable"
    if part == "driver":
        return _RUN
    if part in TRAINER_GROUPS and what in ("dead", "hung"):
        return part
    if part == event_kinds.ENGINE or what in ("dead", "hung") or kind in ("dcs.restarted", "coordinator.restarted"):
        return f"{part}/{subject}"
    return f"{kind}/{subject}"


def merge_by_fault(found: Iterable[Condition], known: Sequence[Alert]) -> list[Condition]:
    """Gives each sign of a fault that has an open alert the key of that alert, unless the sign is more severe:
    receivers of errors only must get the error. An alert that is pending gives way to one that fires: what it would
    have said is said. Leaves out one-time events about a fault that has another alert, or had one until after it
    happened: a part may be back before its host says that it was restarted. An event whose own alert is open stays:
    without it the alert would resolve, and the next pass would notify of the same event as a new alert."""
    open_by_fault: dict[str, list[tuple[str, str, Severity]]] = {}
    for alert in sorted((a for a in known if a.open), key=lambda a: (a.phase is Phase.PENDING, -a.severity.rank,
                                                                     a.since, a.id)):
        of_fault = open_by_fault.setdefault(fault_of(alert.kind, alert.subject), [])
        if not of_fault or alert.phase is not Phase.PENDING:
            of_fault.append((alert.kind, alert.subject, alert.severity))
    over_at: dict[str, float] = {}
    for alert in known:
        if not alert.open and alert.notify_resolved:
            fault = fault_of(alert.kind, alert.subject)
            over_at[fault] = max(over_at.get(fault, 0.0), alert.resolved_at)
    out = []
    for c in sorted(found, key=lambda c: (not c.notify_resolved, -c.severity.rank)):  # the worst opens the alert
        fault = fault_of(c.kind, c.subject)
        first = next(iter(open_by_fault.get(fault, ())), None)
        same = any((c.kind, c.subject) == (k, s) for k, s, _ in open_by_fault.get(fault, ()))
        if not c.notify_resolved:
            prefix = fault if fault.endswith("/") else ""  # a role: any of its members
            has_one = first is not None or c.at <= over_at.get(fault, float("-inf")) or any(
                prefix and f.startswith(prefix) for f in open_by_fault)
            if same or not has_one:
                out.append(c)
            continue
        if first is not None and not same and first[2].rank >= c.severity.rank:
            c = replace(c, kind=first[0], subject=first[1])
        elif not same:
            open_by_fault.setdefault(fault, []).insert(0, (c.kind, c.subject, c.severity))
        out.append(c)
    return out


def with_causes(reports: Iterable[Condition], snapshot: ClusterSnapshot) -> list[Condition]:
    """The reports, those about an engine with its host as their cause."""
    return [replace(c, cause=engine.host) if c.kind.startswith("engine.") and (
                engine := snapshot.engines.get(c.subject)) else c
            for c in reports]


def declared_over(alert: Alert, over: Set[str]) -> bool:
    """Whether an event declared an alert over. ``over``: keys of the alerts that new events declared over."""
    if alert.key in over:
        return True
    twin = _ENDS_WITH.get(alert.kind)
    fault = fault_of(alert.kind, alert.subject)
    return twin is not None and any(
        k == twin and fault_of(k, s) == fault for k, _, s in (key.partition("/") for key in over))


def released(alert: Alert, snapshot: ClusterSnapshot, now: float) -> bool:
    """Whether the state of the job says that what an alert reported is over."""
    if not alert.notify_resolved:
        return True
    part, _, what = alert.kind.partition(".")
    if part in TRAINER_GROUPS and what in ("dead", "hung"):
        return snapshot.run_ended or any(s.role == part and s.id == "rank-0" and not s.dead
                                     and s.first_seen > alert.last_at for s in snapshot.registry.values())
    match alert.kind:
        case "engine.dead" | "engine.hung":
            pools = [snapshot.specs[n] for n in snapshot.statuses if n in snapshot.specs]
            whole = all(snapshot.ready(spec.name) >= spec.desired for spec in pools)
            e = snapshot.engines.get(alert.subject)
            stale = e is not None and e.state is EngineState.READY and e.updated_at < alert.last_at
            return snapshot.run_ended or (whole and not stale and now - alert.last_at >= SETTLE_S)
        case "driver.dead" | "driver.hung":
            # The one that the report is about has its entry until the registry has its successor.
            drivers = [s for s in snapshot.registry.values() if s.role == registry.DRIVER]
            newer = bool(drivers) and all(s.registered_revision > alert.revision for s in drivers)
            took_over = snapshot.revision(snapshot.keys.epoch()) < alert.revision
            return snapshot.run_ended or (newer and (took_over or _makes_progress(snapshot)))
        case "run.global_restart":
            return snapshot.run_ended or (alert.revision < snapshot.revision(snapshot.keys.epoch())
                                         and _makes_progress(snapshot))
        case "engine.cannot_fetch" | "engine.lagging":
            return snapshot.run_ended or alert.subject not in snapshot.engines
        case "dcs.durable_failed" | "durable.behind":
            return snapshot.run_over
        case "publish.failed":
            group = TRAINER_GROUPS.get(alert.subject)
            streams = (group.weights, group.state) if group is not None else (alert.subject,)
            moved = max(snapshot.revision(snapshot.keys.stream_head(s)) for s in streams)
            return moved > alert.revision or snapshot.run_ended
        case "run.refused":
            written = snapshot.revision(snapshot.keys.job_status())
            return written > alert.revision and not snapshot.run_ended
        case "job.failed" | "run.crash_loop":
            return snapshot.status is None or snapshot.status.phase != "failed"
        case _:
            return now - alert.last_at >= QUIET_S


def _makes_progress(snapshot: ClusterSnapshot) -> bool:
    """Whether the training loop has written the job's status in the epoch of the run."""
    written, begun = (snapshot.revision(key) for key in (snapshot.keys.job_status(), snapshot.keys.epoch()))
    return written > begun and snapshot.status is not None and snapshot.status.phase in WORKING_PHASES
