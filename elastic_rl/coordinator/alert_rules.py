"""Which faults are alerts, when they begin and when they are over. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.coordinator import roster
from elastic_rl.coordinator.alerts import Alert, Condition
from elastic_rl.coordinator.records import Engine, EngineState, Event, JobStatus, PoolSpec, PoolStatus, Severity
from elastic_rl.coordinator.roster import Sighting

RUN_OVER = ("finished", "failed")
BY_LEADER = "leader"
"""``data["by"]`` of events that the leader made from the roster; the roster opens their alert already."""
QUIET_S = 60.0
"""A report of which nobody says when it is over ends when it was not repeated for so long."""
SETTLE_S = 3.0
"""Reports of one engine's end by its runner, its driver and the leader come within this time."""

_ENGINE = ("engine.dead", "engine.replaced", "engine.quarantined")
_TRAINER = ("trainer.failed", "trainer.agent_ended", "trainer.dead")
_WARNINGS = ("dcs.", "engine.cannot_fetch", "logprob.", "publish.", "staleness.")
_ENDED_BY = {"trainer.recovered": f"trainer.dead/{roster.TRAINER}", "engine.fetch_recovered": "engine.cannot_fetch/{}",
             "dcs.durable_recovered": "dcs.durable_failed/{}"}
"""Kinds of events that declare an alert over, and its key; {} is the event's subject."""


@dataclass(frozen=True)
class World:
    """What the store said in one look."""

    job: str
    engines: Sequence[Engine] = ()
    specs: Mapping[str, PoolSpec] = field(default_factory=dict)
    statuses: Mapping[str, PoolStatus] = field(default_factory=dict)
    status: JobStatus | None = None
    roster: Sequence[Sighting] = ()
    heads: Mapping[str, int] = field(default_factory=dict)
    """Store revision at which each stream's head was last moved."""
    pool_hold_s: float = 180.0
    """A pool may be short for so long: an engine needs that to start."""

    @property
    def run_over(self) -> bool:
        return self.status is not None and self.status.phase in RUN_OVER

    def ready(self, pool: str) -> int:
        return sum(e.pool == pool and e.state is EngineState.READY for e in self.engines)


def conditions(world: World) -> dict[str, Condition]:
    """What is wrong now, by key."""
    found = []
    for sighting in roster.missing(world.roster):
        if sighting.role == roster.ENGINE:
            continue  # reported by an event, which its runner or its driver may have made already
        # Ranks of a trainer fall together, whichever was hit first: one fault, one alert.
        subject = roster.TRAINER if sighting.role == roster.TRAINER else sighting.id
        found.append(Condition(f"{sighting.role}.dead", subject,
                               f"{sighting.role} {sighting.id} (pid {sighting.pid} on {sighting.host}) is gone"))
    for name, status in world.statuses.items():
        spec = world.specs.get(name)
        if spec and not world.run_over and status.ready < spec.desired:
            message = f"pool {name} has {status.ready} ready of {spec.desired} engines"
            found.append(Condition("pool.short", name, message, Severity.WARNING, hold_s=world.pool_hold_s))
    if world.status and world.status.phase == "failed":
        found.append(Condition("job.failed", world.job, world.status.message or f"job {world.job} has failed"))
    if world.status and world.status.phase == "finished":
        message = f"job {world.job} has finished after {world.status.step} steps"
        found.append(Condition("job.finished", world.job, message, Severity.INFO, tell_end=False))
    return {c.key: c for c in found}


def report(event: Event, revision: int, job: str) -> Condition | None:
    """The alert that an event asks for, if any."""
    kind, subject = event.kind, event.subject
    if kind in _ENGINE:
        kind = "engine.dead"
    elif event.data.get("by") == BY_LEADER:
        return None
    elif kind in _TRAINER:
        kind, subject = "trainer.dead", roster.TRAINER
    elif kind == "run.failed":
        kind, subject = "job.failed", job
    elif kind == "version.dropped":
        kind = "publish.failed"
    elif not (event.severity is Severity.ERROR
              or (event.severity is Severity.WARNING and kind.startswith(_WARNINGS)) or kind == "publish.failed"):
        return None
    severity = Severity.ERROR if event.severity is Severity.INFO else event.severity
    return Condition(kind, subject, event.message, severity, revision=revision)


def ends(event: Event) -> str | None:
    """Key of the alert that an event declares over, if any."""
    key = _ENDED_BY.get(event.kind)
    return key.format(event.subject) if key else None


def released(alert: Alert, world: World, now: float) -> bool:
    """Whether the trouble of a reported alert is over, by the state of the world."""
    match alert.kind:
        case "engine.dead":
            whole = all(world.ready(n) >= world.specs[n].desired for n in world.statuses if n in world.specs)
            stale = any(e.id == alert.subject and e.state is EngineState.READY and e.updated_at < alert.last_at
                        for e in world.engines)
            return world.run_over or (whole and not stale and now - alert.last_at >= SETTLE_S)
        case "trainer.dead":
            return world.run_over or any(s.role == roster.TRAINER and s.id == "rank-0" and not s.dead
                                         and s.first_seen > alert.last_at for s in world.roster)
        case "engine.cannot_fetch":
            return world.run_over or all(e.id != alert.subject for e in world.engines)
        case "dcs.durable_failed":
            return world.run_over
        case "publish.failed":
            moved = world.heads.get(alert.subject, max(world.heads.values(), default=0))
            return moved > alert.revision or world.run_over
        case "job.failed":
            return world.status is None or world.status.phase != "failed"
        case _:
            return now - alert.last_at >= QUIET_S
