"""The job's metrics: a reading of the store, and the metric families that follow from it.

Read at each scrape, so that every replica shows the same job, whoever leads. What counts up comes from what etcd counts
(the version of a key) or from the leader's tally, so it survives every replica.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from elastic_rl.config import Stream
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.election.election import leading
from elastic_rl.coordinator.failure.statistics import DETECT_S, RECOVER_S, EventCursor, FaultStatistics, Histogram
from elastic_rl.coordinator.membership.hang_detection import at_rest, silence_s
from elastic_rl.coordinator.pools import PoolView, all_pools
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    Epoch,
    JobStatus,
    Member,
    Operation,
    StepMetrics,
    Version,
)
from elastic_rl.telemetry.metrics import PREFIX

_OVER = ("finished", "failed")
_SERVES = (EngineState.READY, EngineState.SYNCING, EngineState.DRAINING)


@dataclass(frozen=True)
class Reading:
    """What the store says at one moment. ``now``: unix seconds."""

    job: str
    now: float
    epoch: int = 0
    elections: int = 0
    """Leaders that there have been."""
    leader_lease_s: int | None = None
    lease_s: Mapping[str, int] = field(default_factory=dict)
    """Role → seconds that the lease of the member with the oldest heartbeat has left."""
    members: Sequence[Member] = ()
    engines: Sequence[Engine] = ()
    pools: Sequence[PoolView] = ()
    alerts: Sequence[Alert] = ()
    operations: Sequence[Operation] = ()
    nodes: Sequence[DcsNode] = ()
    status: JobStatus | None = None
    point: StepMetrics | None = None
    """Of the last step."""
    heads: Mapping[str, Version] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)
    """Stream → versions with a record."""
    durable: Mapping[str, int] = field(default_factory=dict)
    """Stream → newest version in the durable store."""
    tally: FaultStatistics = FaultStatistics()
    events_kept: int = 0


def read(etcd: EtcdClient, keys: Keys, now: float) -> Reading:
    """Raises EtcdUnavailable."""
    def all_of(prefix: str) -> list[bytes]:
        return [kv.value for kv in etcd.range(prefix)[0]]

    epoch, job, leadership = etcd.get(keys.epoch()), etcd.get(keys.job_status()), etcd.get(keys.leadership())
    status = JobStatus.decode(job.value) if job else None
    point = etcd.get(keys.step_metrics(status.step)) if status else None
    cursor = etcd.get(keys.event_cursor())
    leader = leading(etcd.range(keys.leader_prefix())[0])
    found = [(Member.decode(kv.value), kv.lease) for kv in etcd.range(keys.members_prefix())[0]]
    oldest = {m.role: lease for m, lease in sorted(found, key=lambda f: -f[0].beat_at)}
    heads: dict[str, Version] = {s: Version.decode(kv.value) for s in Stream if (kv := etcd.get(keys.stream_head(s)))}
    durable = {s: [int(kv.key.removeprefix(keys.durable_prefix(s))) for kv in etcd.range(keys.durable_prefix(s))[0]]
               for s in Stream}
    return Reading(
        job=keys.job, now=now, epoch=Epoch.decode(epoch.value).number if epoch else 0,
        # etcd counts the writes of a key, and this one is written once by each new leader.
        elections=leadership.version if leadership else 0,
        leader_lease_s=etcd.lease_left(leader.lease) if leader else None,
        lease_s={role: etcd.lease_left(lease) for role, lease in oldest.items()}, members=[m for m, _ in found],
        engines=[Engine.decode(raw) for raw in all_of(keys.engines_prefix())], pools=all_pools(etcd, keys),
        alerts=[Alert.decode(raw) for raw in all_of(keys.alerts_prefix())],
        operations=[Operation.decode(raw) for raw in all_of(keys.operations_prefix())],
        nodes=[DcsNode.decode(raw) for raw in all_of(keys.dcs_nodes_prefix())],
        status=status, point=StepMetrics.decode(point.value) if point else None, heads=heads,
        kept={s: etcd.count(keys.versions_prefix(s)) for s in Stream},
        durable={s: max(numbers) for s, numbers in durable.items() if numbers},
        tally=EventCursor.decode(cursor.value).tally if cursor else FaultStatistics(),
        events_kept=etcd.count(keys.events_prefix()))


def families(r: Reading) -> list[Metric]:
    """Every metric of the job. One whose value is not known has no sample, so that nobody takes it for 0. Pure."""
    return [*_control(r), *_members(r), *_faults(r), *_run(r), *_pools(r), *_engines(r), *_versions(r), *_nodes(r)]


Rows = Mapping[str, float | None] | Mapping[tuple[str, str], float | None]


def _one(name: str, help_text: str, value: float | None) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(PREFIX + name, help_text, value=value)


def _gauge(name: str, help_text: str, labels: str, rows: Rows) -> Metric:
    """A gauge with ``labels``, separated by blanks, in the order of each row's key."""
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=labels.split())
    for key, value in rows.items():
        if value is not None:
            family.add_metric([key] if isinstance(key, str) else key, value)
    return family


def _counter(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help_text, labels=[label])
    for key, value in counts.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, help_text: str, spreads: Mapping[str, Histogram], bounds: Iterable[float]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=["part"])
    edges = [*(f"{b:g}" for b in bounds), "+Inf"]
    for part, spread in spreads.items():
        family.add_metric([part], list(zip(edges, accumulate(spread.counts), strict=True)), spread.total_s)
    return family


def _control(r: Reading) -> list[Metric]:
    elections = CounterMetricFamily(PREFIX + "leader_elections", "Leaders that there have been", value=r.elections)
    firing = Counter(a.kind for a in r.alerts if a.phase == "firing")
    active = Counter(str(o.kind) for o in r.operations if not o.state.ended)
    return [
        _gauge("job_info", "Always 1; which job this is", "name", {r.job: 1}), elections,
        _one("epoch", "Fencing epoch of the run", r.epoch),
        _one("leader_lease_left_seconds", "Time that the leader's lease has left if it is not renewed",
             r.leader_lease_s),
        _gauge("alerts_firing", "Alerts that are firing", "kind", firing),
        _gauge("operations_active", "Operations that are not over", "kind", active),
        _one("events_kept", "Events in the store", r.events_kept)]


def _members(r: Reading) -> list[Metric]:
    beats: dict[str, float] = {}
    silences: dict[str, float] = {}
    for m in r.members:
        beats[m.role] = max(beats.get(m.role, 0.0), r.now - m.beat_at)
        if not at_rest(m.phase):
            silences[m.role] = max(silences.get(m.role, 0.0), silence_s(m))
    waiting = [float(m.info["in_flight"]) for m in r.members if "in_flight" in m.info]
    return [
        _gauge("members", "Registered processes", "role", Counter(m.role for m in r.members)),
        _gauge("member_heartbeat_age_seconds", "Age of the oldest last heartbeat among a role's members", "role",
               beats),
        _gauge("member_silence_seconds", "Longest time that the working thread of a role's member gave no sign", "role",
               silences),
        _gauge("member_lease_left_seconds",
               "Time that the lease of a role's member with the oldest heartbeat has left if it is not renewed",
               "role", r.lease_s),
        _one("rollout_groups_in_flight", "Prompt groups that the rollout role waits for", sum(waiting)
             if waiting else None)]


def _faults(r: Reading) -> list[Metric]:
    t = r.tally
    return [
        _counter("events", "Events by kind", "kind", t.events),
        _counter("faults", "Faults by the part that failed", "part", t.faults),
        _counter("restarts", "Times that a part was started anew", "part", t.restarts),
        _gauge("faults_open", "Faults that are not mended yet", "part",
               Counter(fault.partition("/")[0] for fault in t.open)),
        _histogram("fault_detection_seconds", "From the last sign of life of a part to the event of its fault",
                   t.detect, DETECT_S),
        _histogram("fault_recovery_seconds", "From the event of a fault to the one that the part works again",
                   t.recover, RECOVER_S)]


def _run(r: Reading) -> list[Metric]:
    s, p = r.status, r.point
    ratio = None
    if s is not None and s.started_at > 0:
        wall_s = (s.updated_at if s.phase in _OVER else r.now) - s.started_at
        ratio = min(1.0, s.productive_s / wall_s) if wall_s > 0 else None
    phases = {k: v for k, v in p.seconds.items() if k not in ("total", "publish_stall")} if p else {}
    return [
        _gauge("job_phase", "1 for the phase that the job is in", "phase", {s.phase: 1} if s else {}),
        _one("job_step", "Optimiser steps of RL that are done", s.step if s else None),
        _one("job_steps", "Optimiser steps that the run shall do", s.steps if s else None),
        _one("job_updated_timestamp_seconds", "When the job's status was last written", s.updated_at if s else None),
        _one("job_reward", "Mean reward of the last step", s.reward if s else None),
        _one("job_eval_accuracy", "Last eval accuracy, 0 to 1", s.eval_accuracy if s else None),
        _one("job_staleness_versions", "Versions the oldest sample of the last step lay behind",
             s.staleness if s else None),
        _one("policy_version", "Newest policy version that the trainer began to publish",
             s.policy_version if s else None),
        _one("job_effective_time_ratio", "Share of the time since the job began that went into steps that counted",
             ratio),
        _one("step_seconds", "Wall time of the last step", p.seconds.get("total") if p else None),
        _gauge("step_phase_seconds", "Wall time of the phases of the last step", "phase", phases),
        _one("step_publish_stall_seconds", "Time of the last step that the training waited for the publish",
             p.seconds.get("publish_stall") if p else None),
        _one("step_samples", "Samples that the last step was trained on", p.samples if p else None),
        _one("step_tokens", "Tokens that the last step was trained on, prompts included", p.tokens if p else None)]


def _pools(r: Reading) -> list[Metric]:
    actual = {(p.name, state): float(getattr(p, state)) for p in r.pools for state in ("ready", "starting", "draining")}
    return [
        _gauge("pool_desired", "Engines that the operator wants", "pool", {p.name: p.desired for p in r.pools}),
        _gauge("pool_engines", "Engines of a pool by what they do", "pool state", actual)]


def _engines(r: Reading) -> list[Metric]:
    states = Counter(e.state for e in r.engines)
    head = r.heads[Stream.POLICY].number if Stream.POLICY in r.heads else 0
    serving = [e for e in r.engines if e.state in _SERVES and e.version]
    return [
        _gauge("engines", "Engines by state", "state", {s.value: states[s] for s in EngineState}),
        _gauge("engine_version", "Policy version verified in an engine", "engine", {e.id: e.version for e in serving}),
        _gauge("engine_version_lag", "Versions that an engine lies behind the newest committed one", "engine",
               {e.id: max(0, head - e.version) for e in serving}),
        _gauge("engine_update_seconds", "Last update of an engine, from seeing the version to its verification",
               "engine", {e.id: e.pull_apply_s for e in serving}),
        _gauge("engine_pull_seconds", "Part of the last update in which the engine went on serving", "engine",
               {e.id: max(0.0, e.pull_apply_s - e.pause_s) for e in serving}),
        _gauge("engine_pause_seconds", "Part of the last update in which the engine made no token", "engine",
               {e.id: e.pause_s for e in serving}),
        _gauge("engine_requests_running", "Requests that an engine works on", "engine",
               {e.id: e.running for e in serving}),
        _gauge("engine_requests_waiting", "Requests that wait in an engine", "engine",
               {e.id: e.waiting for e in serving})]


def _versions(r: Reading) -> list[Metric]:
    return [
        _gauge("version_head", "Newest committed version of a stream", "stream",
               {s: v.number for s, v in r.heads.items()}),
        _gauge("version_age_seconds", "Time since the newest version of a stream was committed", "stream",
               {s: max(0.0, r.now - v.committed_at) for s, v in r.heads.items()}),
        _gauge("version_bytes", "Size of the newest version of a stream", "stream",
               {s: v.nbytes for s, v in r.heads.items()}),
        _gauge("versions_kept", "Versions of a stream that have a record", "stream", r.kept),
        _gauge("durable_lag_versions", "Versions that the durable store lies behind, where there is one", "stream",
               {s: max(0, r.heads[s].number - n) for s, n in r.durable.items() if s in r.heads})]


def _nodes(r: Reading) -> list[Metric]:
    columns: dict[str, dict[str, float]] = defaultdict(dict)
    for n in r.nodes:
        for name, value in (("arena_bytes", n.arena_bytes), ("arena_used_bytes", n.used_bytes),
                            ("disk_bytes", n.disk_bytes), ("disk_used_bytes", n.disk_used_bytes),
                            ("chunks", n.chunks), ("unsaved_chunks", n.unsaved)):
            columns[name][n.id] = value
    help_texts = {
        "arena_bytes": "Shared-memory arena of a node of the checkpoint service",
        "arena_used_bytes": "Of the arena, what is used", "disk_bytes": "Disk that a node may fill",
        "disk_used_bytes": "Of the disk, what is used", "chunks": "Chunks that a node has",
        "unsaved_chunks": "Chunks of a node that are still to be copied to its disk"}
    return [_gauge(f"dcs_{name}", text, "node", columns[name]) for name, text in help_texts.items()]
