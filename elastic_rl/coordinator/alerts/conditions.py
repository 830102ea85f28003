"""What is wrong now, by the state of the job. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Set

from elastic_rl.config import Stream
from elastic_rl.coordinator import etcd_health
from elastic_rl.coordinator.alerts.facts import SERVING, World, behind_s
from elastic_rl.coordinator.alerts.state_machine import Condition
from elastic_rl.coordinator.membership import registry
from elastic_rl.etcd.records import DcsNode, Severity

_FULL_HOLD_S = 15.0
_FULL_HYSTERESIS = 0.05
"""An alert about a full node ends this fraction below the limit, so that it does not flap."""


def conditions(world: World, now: float, firing: Set[str] = frozenset()) -> dict[str, Condition]:
    """What is wrong now, by key. ``firing``: keys of the alerts that are open."""
    limits = world.facts.limits
    found = [*_members(world), *_pools(world), *_lags(world, now), *_nodes(world, firing), *_job(world),
             *etcd_health.conditions(world.facts.etcd_health, limits.etcd_slow_s, limits.full_fraction,
                                     limits.etcd_quota_bytes)]
    return {c.key: c for c in found}


def _members(world: World) -> Iterator[Condition]:
    for s in world.roster:
        # The ranks of a trainer fail together, whichever was hit first: one fault, one alert.
        subject = registry.TRAINER if s.role == registry.TRAINER else s.id
        who = f"{s.role} {s.id} (pid {s.pid} on {s.host})"
        if s.dead and s.role != registry.ENGINE:  # the death of an engine is reported, often by its runner or driver
            yield Condition(f"{s.role}.dead", subject, f"{who} is dead", cause=s.host)
        elif s.hung_at and not s.dead:
            yield Condition(f"{s.role}.hung", subject, f"{who} sends heartbeats but makes no progress", cause=s.host)


def _pools(world: World) -> Iterator[Condition]:
    for name, status in world.statuses.items():
        spec = world.specs.get(name)
        if spec and not world.run_over and status.ready < spec.desired:
            yield Condition("pool.short", name, f"pool {name} has {status.ready} ready of {spec.desired} engines",
                            Severity.WARNING, hold_s=world.pool_hold_s)


def _lags(world: World, now: float) -> Iterator[Condition]:
    limits, policy = world.facts.limits, world.facts.committed.get(Stream.POLICY, {})
    head = max(policy, default=0)
    for engine in world.engines:
        # An engine without a version is starting; pool.short covers that.
        if engine.version == 0 or engine.state not in SERVING or world.run_over:
            continue
        versions, seconds = head - engine.version, behind_s(now, engine.version, policy)
        if versions >= limits.engine_lag_versions or seconds > limits.engine_lag_s:
            message = (f"engine {engine.id} serves version {engine.version}, {versions} behind the head; a newer one "
                       f"has been available for {seconds:.0f} s")
            yield Condition("engine.lagging", engine.id, message, Severity.WARNING, cause=engine.host)
    for stream, number in world.facts.durable.items():
        seconds = behind_s(now, number, world.facts.committed.get(stream, {}))
        if seconds > limits.durable_lag_s:
            message = (f"the newest durable version of {stream} is {number or 'none'}; a newer one has "
                       f"waited to be copied for {seconds:.0f} s")
            yield Condition("durable.behind", stream, message, Severity.WARNING)


def fullness(node: DcsNode) -> float:
    """How full a node's storage is, 0 to 1: its disk or, without one, its arena. With a disk the arena is a cache."""
    if node.disk_bytes:
        return 1.0 - node.disk_room_bytes / node.disk_bytes
    return node.used_bytes / node.arena_bytes if node.arena_bytes else 0.0


def _nodes(world: World, firing: Set[str]) -> Iterator[Condition]:
    for node in world.facts.nodes:
        limit = world.facts.limits.full_fraction - (_FULL_HYSTERESIS if f"dcs.full/{node.id}" in firing else 0.0)
        if (full := fullness(node)) > limit:
            what = "disk" if node.disk_bytes else "arena"
            yield Condition("dcs.full", node.id, f"the {what} of node {node.id} is {full:.0%} full: set a larger "
                            f"dcs.{what}_bytes or fewer dcs.keep_versions, or make room on its file system",
                            Severity.WARNING, hold_s=_FULL_HOLD_S, cause=node.host)


def _job(world: World) -> Iterator[Condition]:
    status, bound = world.status, world.facts.limits.max_staleness
    if status is None:
        return
    if status.phase == "rl" and status.staleness > bound:
        message = f"step {status.step} was trained on samples {status.staleness} versions old; the bound is {bound}"
        yield Condition("staleness.exceeded", world.job, message)
    if status.phase == "failed":
        yield Condition("job.failed", world.job, status.message or f"job {world.job} has failed")
    if status.phase == "finished":
        yield Condition("job.finished", world.job, f"job {world.job} has finished after {status.step} steps",
                        Severity.INFO, notify_resolved=False)
