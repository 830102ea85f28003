"""What is wrong now, by the state of the job. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.alerts.state_machine import Condition
from elastic_rl.coordinator.etcd_health import EtcdHealth
from elastic_rl.coordinator.idle_slots import idle_slots
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import ACTOR_ROLE, ClusterSnapshot
from elastic_rl.dcs.catalog.under_replication import UnderReplication, described
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, GenerationCap, PoolSpec, PoolStatus, Severity
from elastic_rl.runtime.words import counted

_ETCD_HOLD_S = 10.0
_ETCD_SLOW_HOLD_S = 30.0
_WAITING_CHARS = 300
"""Characters of what a run waits for that are in an alert."""
_FAILING_HOLD_S = 10.0
_REFORMED_S = 10.0
"""Time from a rank's return within which the loop reports that its group was lost."""
_STAGE_HOLD_S = 5.0
"""A stage of the leader's reconcile pass that fails for so long gives an alert."""
_SWEEP_HOLD_S = 30.0
_NODES = 5
"""Nodes that an alert names."""
_LAG_HOLD_S = 10.0
"""A job of a tiny model makes several versions a second."""
_WAITING_HOLD_S = 120.0
"""Parts of the compute plane wait for less than this long while a run starts, and after a restart."""
_ROUNDING = 1e-6
"""Relative difference of two mean rewards that is no fall."""
_PARTS = 20
"""Most parts of the compute plane of which a driver's report is read."""
_UNREADABLE = 20
"""Records that cannot be read and have an alert of their own; all further ones have one together."""
_FULL_HOLD_S = 15.0
_DISK_HOLD_S = 10.0
"""A node tries again after five seconds."""
_FULL_HYSTERESIS = 0.05
"""An alert about a full node ends this fraction below the limit, so that it does not flap."""
_IDLE, _IDLE_HYSTERESIS = 0.5, 0.1
"""Free share of what engines can process at once from which on they are idle, and how far below that the alert ends."""
_RAISES_CAP = {
    GenerationCap.POOL: "as many groups are in flight as the engines are taken to hold, so most of them are elsewhere: "
                        "in tools and environments of episodes, or in a few of the engines",
    GenerationCap.REQUESTS: "as many requests are in flight as there may be: set a larger rollout.groups_per_request",
    GenerationCap.GROUPS_IN_FLIGHT: "train.max_groups_in_flight groups are in flight: set more",
    GenerationCap.STALENESS: "the groups of all steps that train.max_staleness allows are there, or in flight: the "
                             "trainer is what takes the time. Scale the pool in, give the trainer more devices, or "
                             "set a larger train.max_staleness"}


@dataclass(frozen=True)
class Thresholds:
    """The limits from which on something is an alert."""

    engine_lag_versions: int = 8
    engine_lag_s: float = 120.0
    durable_lag_s: float = 900.0
    full_fraction: float = 0.9
    etcd_slow_s: float = 0.5
    etcd_quota_bytes: int = 2 << 30
    max_staleness: int = 0
    run_waiting_s: float = 60.0
    engines_idle_s: float = 300.0
    update_kl: float = 1.0
    eval_fall_errors: float = 3.0
    pool_hold_s: float = 600.0
    """A pool may be short for so long: an engine needs that to start."""
    pool_holds_s: Mapping[str, float] = field(default_factory=dict)
    """Pool → its ``pool_hold_s``, where it differs."""

    @classmethod
    def from_config(cls, cfg: Config) -> Thresholds:
        a = cfg.alerts
        return cls(a.engine_lag_versions, a.engine_lag_s, a.durable_lag_s, a.full_fraction, a.etcd_slow_s,
                   cfg.etcd.quota_bytes, cfg.train.max_staleness, a.run_waiting_s, a.engines_idle_s, a.update_kl,
                   a.eval_fall_errors, cfg.engine.start_timeout_s,
                   {name: pool.engine.start_timeout_s for name, pool in cfg.pool_settings("").items()})


class CommitClock:
    """The time by the clocks of those who commit versions. That of a leader may be hours ahead of them, and each
    version would count as there for as long before any engine had the time to fetch it."""

    def __init__(self) -> None:
        self._newest, self._seen_at = 0.0, 0.0
        """When the newest version was committed, and when it was seen here, in seconds of the leader clock."""

    def at_most(self, snapshot: ClusterSnapshot) -> float:
        """Unix seconds that it is at most; inf while there is no version."""
        newest = max((head.committed_at for head in snapshot.heads.values()), default=0.0)
        if newest > self._newest:
            self._newest, self._seen_at = newest, snapshot.leader_time
        return self._newest + snapshot.leader_time - self._seen_at if self._newest else math.inf


def conditions(snapshot: ClusterSnapshot, now: float, limits: Thresholds = Thresholds(),
               firing: Set[str] = frozenset(), *, by_commits: float = math.inf) -> dict[str, Condition]:
    """What is wrong now, by key. ``firing``: keys of the alerts that are open. ``by_commits``: what ``CommitClock``
    says."""
    found = [*_returned(snapshot, now, firing), *_members(snapshot), *_compute(snapshot),
             *_pools(snapshot, limits), *_lags(snapshot, now, limits, firing, by_commits),
             *_nodes(snapshot, limits, firing), *_job(snapshot, limits), *_learning(snapshot, limits),
             *_waiting(snapshot, now, limits), *_idle(snapshot, limits, firing), *_unreadable(snapshot),
             *etcd_conditions(snapshot.etcd_health, limits.etcd_slow_s, limits.full_fraction, limits.etcd_quota_bytes)]
    return {c.key: c for c in found}  # what is dead now goes before what has returned


def behind_s(now: float, number: int, committed: Mapping[int, float]) -> float:
    """Seconds for which a later version than ``number`` has been there; 0 when there is none."""
    later = [n for n in committed if n > number]
    return max(0.0, now - committed[min(later)]) if later else 0.0


def _members(snapshot: ClusterSnapshot) -> Iterator[Condition]:
    for s in snapshot.registry.values():
        # The ranks of a trainer fail together, whichever was hit first: one fault, one alert.
        subject = s.role if s.role in TRAINER_GROUPS else s.id
        who = f"{s.role} {s.id} (pid {s.pid} on {s.host})"
        if s.dead and s.role in registry.DURABLE and _registered_again(s, snapshot):
            continue  # the event of its host that it was started again is the alert, and may have been one already
        if s.dead and s.role != event_kinds.ENGINE:  # the death of an engine is reported, often by its runner or driver
            yield Condition(f"{s.role}.dead", subject, f"{who} is dead", cause=s.host)
        elif s.hung_at and not s.dead:
            yield Condition(f"{s.role}.hung", subject, f"{who} sends heartbeats but makes no progress", cause=s.host)


def _registered_again(dead: LastSeen, snapshot: ClusterSnapshot) -> bool:
    """Whether another process of the durable plane has the name of a dead one."""
    if dead.role == registry.DCS:
        node = snapshot.nodes.get(dead.id)
        return node is not None and node.process != dead.incarnation
    return any(registry.member_incarnation(m) != dead.incarnation for m in snapshot.members
               if (m.role, m.id) == dead.name)


def _returned(snapshot: ClusterSnapshot, now: float, firing: Set[str]) -> Iterator[Condition]:
    """A rank may be back before the loop has found its group lost: what it reports then is of the alert that is open,
    and no second one."""
    for s in snapshot.registry.values():
        if s.role in TRAINER_GROUPS and not s.dead and now - s.first_seen < _REFORMED_S:
            for what in ("dead", "hung"):
                if f"{s.role}.{what}/{s.role}" in firing:
                    yield Condition(f"{s.role}.{what}", s.role, f"{s.role} {s.id} has returned", cause=s.host)


def _compute(snapshot: ClusterSnapshot) -> Iterator[Condition]:
    """What the driver of the run reports of its parts. It retries without end, so only a person may end the cause. The
    entry of a driver that was taken over may still be there; the newest one counts."""
    drivers = [m for m in snapshot.members if m.role == registry.DRIVER and m.epoch == snapshot.epoch]
    drivers.sort(key=lambda m: snapshot.created(snapshot.keys.member(m.role, m.id)))
    for driver in [] if snapshot.run_ended else drivers[-1:]:
        for part, why in _texts(driver.info.get("faults")):
            yield Condition("compute.failing", part, f"the driver cannot keep {part} running: {why}",
                            hold_s=_FAILING_HOLD_S, cause=driver.host)
        for part, why in _texts(driver.info.get("waiting")):
            if not part.startswith("pools/"):  # pool.short covers these
                yield Condition("compute.waiting", part, f"{part} waits: {why}", Severity.WARNING,
                                hold_s=_WAITING_HOLD_S)


def _texts(found: object) -> list[tuple[str, str]]:
    """The entries of a mapping that another process wrote."""
    entries = found.items() if isinstance(found, dict) else ()
    return [(str(part), str(why)) for part, why in entries][:_PARTS]


def _pools(snapshot: ClusterSnapshot, limits: Thresholds) -> Iterator[Condition]:
    for name, status in snapshot.statuses.items():
        spec = snapshot.specs.get(name)
        # Released engines wait for the trainer's phase to end, as it should be; those behind have alerts of their own.
        whole = status.ready + status.released + status.behind
        if spec and not snapshot.run_ended and whole < spec.desired and not _waits_for_weights(snapshot, spec, status):
            why = f": {status.message}" if status.message else ""
            ready = f"{status.ready} ready of {counted(spec.desired, 'engine')}"
            yield Condition("pool.short", name, f"pool {name} has {ready}{why}", Severity.WARNING,
                            hold_s=limits.pool_holds_s.get(name, limits.pool_hold_s))


def _waits_for_weights(snapshot: ClusterSnapshot, spec: PoolSpec, status: PoolStatus) -> bool:
    """Whether the pool has nothing to serve yet, as in the supervised phase, and lacks nothing else that its engines
    need to start: their time for that counts from the first version on."""
    return bool(spec.stream) and spec.stream not in snapshot.heads and not (
        status.ready or status.pending or status.message)


def _lags(snapshot: ClusterSnapshot, now: float, limits: Thresholds, firing: Set[str], by_commits: float
          ) -> Iterator[Condition]:
    """A leader that has just begun knows no other clock than its own: an alert that is open goes by that one, and ends
    once what it is about has caught up."""
    def at(key: str) -> float:
        return now if key in firing else min(now, by_commits)

    for engine in snapshot.engines.values():
        # One without a version is starting; pool.short covers that.
        if engine.version == 0 or not engine.state.serving or snapshot.run_ended:
            continue
        committed = snapshot.committed.get(snapshot.follows(engine), {})
        versions, seconds = max(committed, default=0) - engine.version, behind_s(
            at(f"engine.lagging/{engine.id}"), engine.version, committed)
        if (straggler := engine.straggler) is not None:
            doing = (f"gets no requests until it has version {straggler.needs}" if straggler.needs else
                     f"lacked version {straggler.missed} when the others had it; it has caught up, and is not waited "
                     "for until it follows in time")
            message = f"engine {engine.id} has version {engine.version}, and {doing}"
            yield Condition("engine.lagging", engine.id, message, Severity.WARNING, cause=engine.host)
        elif versions >= limits.engine_lag_versions or seconds > limits.engine_lag_s:
            message = (f"engine {engine.id} serves version {engine.version}, {versions} behind the head; a newer one "
                       f"has been available for {seconds:.0f} s")
            yield Condition("engine.lagging", engine.id, message, Severity.WARNING, hold_s=_LAG_HOLD_S,
                            cause=engine.host)
    for stream, number in snapshot.durable.items():
        seconds = behind_s(at(f"durable.behind/{stream}"), number, snapshot.committed.get(stream, {}))
        if seconds > limits.durable_lag_s:
            message = (f"the newest durable version of {stream} is {number or 'none'}; a newer one has "
                       f"waited to be copied for {seconds:.0f} s")
            yield Condition("durable.behind", stream, message, Severity.WARNING)


def fullness(node: DcsNode) -> float:
    """How full a node's storage is, 0 to 1: its disk or, without one, its arena. With a disk the arena is a cache."""
    if node.disk_bytes:
        return 1.0 - node.disk_room_bytes / node.disk_bytes
    return node.used_bytes / node.arena_bytes if node.arena_bytes else 0.0


def _nodes(snapshot: ClusterSnapshot, limits: Thresholds, firing: Set[str]) -> Iterator[Condition]:
    for node in snapshot.nodes.values():
        limit = limits.full_fraction - (_FULL_HYSTERESIS if f"dcs.full/{node.id}" in firing else 0.0)
        if (full := fullness(node)) > limit:
            what = "disk" if node.disk_bytes else "arena"
            yield Condition("dcs.full", node.id, f"the {what} of node {node.id} is {full:.0%} full: set a larger "
                            f"dcs.{what}_bytes or fewer dcs.keep_versions, or make room on its file system",
                            Severity.WARNING, hold_s=_FULL_HOLD_S, cause=node.host)
        if node.disk_fault:
            yield Condition("dcs.disk_failing", node.id, f"node {node.id} cannot save chunks, and has "
                            f"{node.unsaved} of them in memory alone, which its end would lose: {node.disk_fault}. It "
                            "tries again, and saves them once it can", hold_s=_DISK_HOLD_S, cause=node.host)


def _job(snapshot: ClusterSnapshot, limits: Thresholds) -> Iterator[Condition]:
    status, bound = snapshot.status, limits.max_staleness
    if status is None:
        return
    if status.phase == "rl" and status.staleness > bound:
        age = counted(status.staleness, "version")
        message = f"step {status.step} was trained on samples {age} old; the bound is {bound}"
        yield Condition("staleness.exceeded", snapshot.job, message)
    if status.phase == "failed":
        yield Condition("job.failed", snapshot.job, status.message or f"job {snapshot.job} has failed")
    if status.phase == "finished":
        evaluated = ""
        if status.eval_measure == "reward" and status.eval_start is not None and status.eval_accuracy is not None:
            evaluated = f"; the mean reward of evaluations went from {status.eval_start:.3f} to " \
                        f"{status.eval_accuracy:.3f}"
        after = counted(status.step, "step")
        yield Condition("job.finished", snapshot.job, f"job {snapshot.job} has finished after {after}{evaluated}",
                        Severity.INFO, notify_resolved=False)


def _learning(snapshot: ClusterSnapshot, limits: Thresholds) -> Iterator[Condition]:
    """What the updates did to the policy, of a run that trains or is done: one that its operator has stopped is in
    their hands."""
    status = snapshot.status
    if status is None or status.phase not in ("rl", "finished"):
        return
    rate = f"the learning rate is {status.lr:.3g} now" if status.lr is not None else "see train.lr"
    if status.update_kl is not None and status.update_kl >= limits.update_kl:
        yield Condition(
            "update.large", snapshot.job, f"the updates of step {status.update_kl_step} moved the policy by "
            f"{_nats(status.update_kl)} a token from the one that sampled. They are too large: the limit is "
            f"alerts.update_kl={limits.update_kl:g}, and {rate}. Lower train.lr, or raise train.lr_warmup_steps",
            Severity.WARNING)
    if status.eval_measure != "reward" or status.eval_start is None or status.eval_accuracy is None:
        return
    chance = limits.eval_fall_errors * math.hypot(status.eval_start_error, status.eval_error)
    if status.eval_start - status.eval_accuracy > max(chance, _ROUNDING * abs(status.eval_start)):
        entropy = f" (entropy {status.entropy:.3g} nats)" if status.entropy is not None else ""
        if status.worst_kl is not None and status.worst_kl >= limits.update_kl:
            at = f", at a learning rate of {status.worst_kl_lr:.3g}" if status.worst_kl_lr is not None else ""
            cause = (f"Updates were too large: those of step {status.worst_kl_step} moved it by "
                     f"{_nats(status.worst_kl)} a token{at}. Begin again with a lower train.lr")
        else:
            cause = (f"No update was seen to be large{entropy}, and {rate}: compare rewards, their parts and samples "
                     "of the first steps and of now")
        yield Condition(
            "eval.fell", snapshot.job, "the policy is worse than before RL: the mean reward of the evaluation is "
            f"{status.eval_accuracy:.3f}, and was {status.eval_start:.3f} at step 0. {cause}", Severity.WARNING)


def _nats(kl: float) -> str:
    return f"{kl:.3g} nats" if kl < 1000.0 else "1000 nats or more"


def _waiting(snapshot: ClusterSnapshot, now: float, limits: Thresholds) -> Iterator[Condition]:
    """The run does not go on: it waits for something, or there is no actor that could. A role that is dead has an alert
    of its own, which says why."""
    status, limit_s = snapshot.status, limits.run_waiting_s
    if status is None or snapshot.run_ended:
        return
    kind = status.waiting_kind if snapshot.has_actor else ACTOR_ROLE
    if any(s.dead and s.role == kind for s in snapshot.registry.values()):
        return
    if not snapshot.has_actor:
        # Not by the age of the status: a run may be resumed after days, and its actor needs a while to start.
        yield Condition("run.waiting", kind, f"no actor process runs, and step {status.step} was not the last one: "
                        "`elastic-rl jobs` shows the run", Severity.WARNING, hold_s=limit_s)
    elif kind and status.waiting_since > 0 and now - status.waiting_since > limit_s:
        what = status.waiting_for[:_WAITING_CHARS]
        yield Condition("run.waiting", kind, f"the run has waited in {status.stage or status.phase} for more than "
                        f"{limit_s:.0f} s for {what}", Severity.WARNING)


def _idle(snapshot: ClusterSnapshot, limits: Thresholds, firing: Set[str]) -> Iterator[Condition]:
    idle = idle_slots(snapshot)
    limit = _IDLE - (_IDLE_HYSTERESIS if f"pool.idle/{ROLLOUT_POOL}" in firing else 0.0)
    if idle is not None and idle.share >= limit:
        why = _RAISES_CAP.get(idle.cap, f"the limit {idle.cap} binds")
        yield Condition("pool.idle", ROLLOUT_POOL, f"the {idle.engines} routable engines of pool {ROLLOUT_POOL} could "
                        f"process {idle.free} more requests at once, of {idle.slots}, and get none: {why}",
                        Severity.WARNING, hold_s=limits.engines_idle_s)


def leader_conditions(replica: str, stage_errors: Mapping[str, str], sweep_problem: str) -> list[Condition]:
    """What is wrong with the leader's own work. ``stage_errors``: by stage of its reconcile pass; ``sweep_problem``:
    the sweep problem of the checkpoint service's maintenance, "" for none."""
    found = [Condition("reconcile.failing", stage, f"the {stage} stage of the leader's reconcile pass fails: {error}; "
                       f"the log of {replica} has the traceback", hold_s=_STAGE_HOLD_S)
             for stage, error in stage_errors.items()]
    if sweep_problem:
        found.append(Condition("dcs.maintenance_failing", "dcs", "old versions are not released, and lost copies are "
                               f"not made again: {sweep_problem}", Severity.WARNING, hold_s=_SWEEP_HOLD_S))
    return found


def under_replication(copies: UnderReplication, now_s: float, snapshot: ClusterSnapshot, limit_s: float,
                      full_fraction: float) -> tuple[list[Condition], set[str]]:
    """Versions that have had fewer copies than wanted for longer than ``limit_s``: one alert, whatever their number;
    and the kinds that are not known yet: only that there are none ends the alert. ``now_s``: monotonic seconds."""
    if not copies.versions:
        return [], set() if copies.complete else {"dcs.under_replicated"}
    if now_s - copies.since_s <= limit_s:
        return [], {"dcs.under_replicated"}
    away = sorted(s.id for s in snapshot.registry.values() if s.role == registry.DCS and s.dead)
    full = sorted(node.id for node in snapshot.nodes.values() if fullness(node) > full_fraction)
    nodes = "".join(f"; {what}: {', '.join(ids[:_NODES])}{' …' if len(ids) > _NODES else ''}"
                    for what, ids in (("nodes that are away", away), ("full", full)) if ids)
    worst = min(copies.versions, key=lambda v: v.copies)
    if worst.copies:
        what_to_do = ("The loss of another node may lose them: bring the hosts back, make room (dcs.disk_bytes, "
                      "dcs.keep_versions), or add a host")
    else:
        what_to_do = "Nobody can read them: " + ("bring the hosts back" if away else
                                                 "no node is away that could bring them back, and newer versions "
                                                 "take their place")
    message = f"{described(copies.versions)}, for more than {limit_s:.0f} s: {worst.why}{nodes}. {what_to_do}"
    severity = Severity.WARNING if worst.copies else Severity.ERROR
    return [Condition("dcs.under_replicated", "versions", message, severity)], set()


def unreadable_record(keys: Keys, key: str, reason: str, revision: int = 0) -> Condition:
    """The alert about a record that cannot be read. ``revision``: the revision of an event, 0 for a record that
    stays."""
    message = f"{key} cannot be read ({reason}) and is ignored: complete the coordinators' upgrade, or delete the key"
    return Condition("record.unreadable", key.removeprefix(keys.root), message, revision=revision)


def _unreadable(snapshot: ClusterSnapshot) -> Iterator[Condition]:
    found = sorted(snapshot.unreadable)
    for key in found[:_UNREADABLE]:
        yield unreadable_record(snapshot.keys, key, snapshot.unreadable[key])
    if len(found) > _UNREADABLE:
        message = f"{len(found) - _UNREADABLE} more records cannot be read and are ignored, such as {found[-1]}"
        yield Condition("record.unreadable", "others", message)


def etcd_conditions(health: EtcdHealth, slow_s: float, full_fraction: float, assumed_quota: int) -> list[Condition]:
    """What is wrong with etcd, as seen by a replica that still reaches a majority. Pure.

    ``full_fraction``: part of its quota that a member's database may fill; ``assumed_quota``: bytes, for a member whose
    quota is unknown.
    """
    found, n = [], len(health.members)
    silent = [m for m in health.members if m.error]
    margin = n - len(silent) - (n // 2 + 1)
    for member in silent:
        left = "no further member may fail" if margin <= 0 else f"{margin} more may fail"
        # One fault, one alert: the number of further failures that etcd survives is part of the member's own.
        message = f"etcd member {member.endpoint} does not answer; {left}"
        found.append(Condition("etcd.degraded", member.endpoint, message,
                               Severity.ERROR if margin <= 0 else Severity.WARNING, hold_s=_ETCD_HOLD_S))
    for member in health.members:
        for alarm in member.alarms:
            message = f"etcd member {member.endpoint} has an alarm: {alarm}"
            found.append(Condition("etcd.alarm", member.endpoint, message))
    largest = max(health.members, key=lambda m: m.db_bytes / (m.quota_bytes or assumed_quota), default=None)
    if largest is not None and largest.db_bytes > full_fraction * (quota := largest.quota_bytes or assumed_quota):
        found.append(Condition(
            "etcd.full", "etcd", f"the database of etcd member {largest.endpoint} has {largest.db_bytes >> 20} of "
            f"{quota >> 20} MiB, {largest.db_in_use_bytes >> 20} of them in use: defragment it if most of that is "
            "free, else raise --quota-backend-bytes", Severity.WARNING))
    if health.read_s > slow_s:
        found.append(Condition("etcd.slow", "etcd", f"a read of etcd takes {health.read_s:.2f} s: check its disk and "
                               "network", Severity.WARNING, hold_s=_ETCD_SLOW_HOLD_S))
    return found
