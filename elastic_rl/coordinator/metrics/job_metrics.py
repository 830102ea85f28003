"""The metrics of jobs: the metric families that follow from a snapshot of each.

Read at each scrape, so that every replica, leader or not, shows the same jobs. Counters come from what etcd counts (the
version of a key) or from the leader's fault statistics, so they survive every replica.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from elastic_rl.config import Stream
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.failure.statistics import DETECT_S, RECOVER_S, EventCursor, FaultStatistics, Histogram
from elastic_rl.coordinator.idle_slots import idle_slots
from elastic_rl.coordinator.membership.hang_detection import is_idle, stalled_s
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.dcs.catalog.reads import newest_number
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import decode, decode_all
from elastic_rl.etcd.records import ENDED_PHASES, EngineState, Member, StepMetrics
from elastic_rl.telemetry.metrics import JOB_LABEL, PREFIX

_MAX_NAMES = 16
"""Series of one metric whose label is a name that users choose, such as that of a part of the reward."""
_MAX_UPDATE_NAMES = 64
"""The same of metrics of an update: more than a step has, since the actor limits those of an algorithm."""
_MAX_NAME_CHARS = 64
_SERVES = (EngineState.READY, EngineState.SYNCING, EngineState.DRAINING)


@dataclass(frozen=True)
class JobCounters:
    """What etcd says at one scrape, beyond the snapshot."""

    leader_terms: int = 0
    """Leaders so far."""
    leader_lease_s: int | None = None
    lease_s: Mapping[str, int] = field(default_factory=dict)
    """Role → seconds left of the lease of the member with the oldest heartbeat."""
    alerts: Sequence[Alert] = ()
    last_step: StepMetrics | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    """Stream → versions with a record."""
    durable: Mapping[str, int] = field(default_factory=dict)
    """Stream → newest version in the durable store, where there is one."""
    statistics: FaultStatistics = FaultStatistics()
    events_kept: int = 0


def read_counters(etcd: EtcdClient, snapshot: ClusterSnapshot) -> JobCounters:
    """Raises EtcdUnavailable."""
    keys, status = snapshot.keys, snapshot.status
    leadership, cursor = etcd.get(keys.leadership()), etcd.get(keys.event_cursor())
    counted = decode(cursor, EventCursor, {}) if cursor else None
    last_step = etcd.get(keys.step_metrics(status.step)) if status else None
    leader = etcd.get(keys.leader())
    oldest: dict[str, Member] = {}
    for m in snapshot.members:
        if m.role not in oldest or m.beat_at < oldest[m.role].beat_at:
            oldest[m.role] = m
    leases = {role: kv.lease for role, m in oldest.items() if (kv := etcd.get(keys.member(role, m.id)))}
    durable: dict[str, int] = {s: newest for s in Stream if (newest := newest_number(etcd, keys.durable_prefix(s)))}
    return JobCounters(
        # etcd counts the writes of a key, and this one is written once by each new leader.
        leader_terms=leadership.version if leadership else 0,
        leader_lease_s=etcd.lease_left(leader.lease) if leader else None,
        lease_s={role: etcd.lease_left(lease) for role, lease in leases.items()},
        alerts=[a for a, _ in decode_all(etcd.range(keys.alerts_prefix())[0], Alert, {})],
        last_step=decode(last_step, StepMetrics, {}) if last_step else None,
        kept={s: etcd.count(keys.versions_prefix(s)) for s in Stream},
        durable=durable,
        statistics=counted.statistics if counted else FaultStatistics(),
        events_kept=etcd.count(keys.events_prefix()))


def families(s: ClusterSnapshot, c: JobCounters) -> list[Metric]:
    """Every metric of the job. One whose value is not known has no sample, so that it is not taken for 0. Pure."""
    return [*_control(s, c), *_members(s, c), *_faults(c.statistics), *_run(s, c.last_step), *_waiting(s),
            *_last_step(c.last_step), *_pools(s), *_engines(s),
            *_versions(s, c), *_nodes(s)]


def merged(jobs: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """The families of several jobs, by their names, as one list in which each family is once: its samples have the
    label ``JOB_LABEL``. Pure."""
    found: dict[str, Metric] = {}
    for job, of_job in jobs.items():
        for family in of_job:
            whole = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [s._replace(labels={JOB_LABEL: job, **s.labels}) for s in family.samples]
    return list(found.values())


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


def _histogram(name: str, help_text: str, histograms: Mapping[str, Histogram], bounds: Iterable[float]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=["part"])
    edges = [*(f"{b:g}" for b in bounds), "+Inf"]
    for part, histogram in histograms.items():
        family.add_metric([part], list(zip(edges, accumulate(histogram.counts), strict=True)), histogram.total_s)
    return family


def _control(s: ClusterSnapshot, c: JobCounters) -> list[Metric]:
    elections = CounterMetricFamily(PREFIX + "leader_elections", "Leader elections so far", value=c.leader_terms)
    firing = Counter(a.kind for a in c.alerts if a.phase == "firing")
    active = Counter(str(o.kind) for o in s.operations.values() if not o.state.ended)
    return [
        _one("job_info", "Always 1, for each job", 1), elections,
        _one("epoch", "Fencing epoch of the run", s.epoch),
        _one("leader_lease_left_seconds", "Time that the leader's lease has left if it is not renewed",
             c.leader_lease_s),
        _gauge("alerts_firing", "Alerts that are firing", "kind", firing),
        _gauge("operations_active", "Operations that run", "kind", active),
        _one("events_kept", "Events in etcd", c.events_kept)]


def _members(s: ClusterSnapshot, c: JobCounters) -> list[Metric]:
    beats: dict[str, float] = {}
    progress_ages: dict[str, float] = {}
    for m in s.members:
        beats[m.role] = max(beats.get(m.role, 0.0), s.now - m.beat_at)
        if not is_idle(m.phase):
            progress_ages[m.role] = max(progress_ages.get(m.role, 0.0), stalled_s(m))
    in_flight = [float(m.in_flight) for m in s.members if m.in_flight is not None]
    return [
        _gauge("members", "Registered processes", "role", Counter(m.role for m in s.members)),
        _gauge("members_suspected", "Members that send no heartbeats and may be slow or dead", "role",
               Counter(e.role for e in s.registry.values() if e.suspected)),
        _gauge("member_heartbeat_age_seconds", "Age of the oldest last heartbeat among a role's members", "role",
               beats),
        _gauge("member_progress_age_seconds", "Longest time without progress among a role's members", "role",
               progress_ages),
        _gauge("member_lease_left_seconds",
               "Time that the lease of a role's member with the oldest heartbeat has left if it is not renewed",
               "role", c.lease_s),
        _one("rollout_groups_in_flight", "Prompt groups that the rollout role waits for", sum(in_flight)
             if in_flight else None)]


def _faults(t: FaultStatistics) -> list[Metric]:
    return [
        _counter("events", "Events by kind", "kind", t.events),
        _counter("faults", "Faults by the part that failed", "part", t.faults),
        _counter("restarts", "Restarts by part", "part", t.restarts),
        _gauge("faults_open", "Faults without a recovery so far", "part",
               Counter(fault.partition("/")[0] for fault in t.open)),
        _histogram("fault_detection_seconds", "From the last sign of life of a part to the event of its fault",
                   t.detect, DETECT_S),
        _histogram("fault_recovery_seconds", "From the event of a fault to the event that the part works again",
                   t.recover, RECOVER_S)]


def _run(snapshot: ClusterSnapshot, p: StepMetrics | None) -> list[Metric]:
    s = snapshot.status
    ratio = None
    if s is not None and s.started_at > 0:
        wall_s = (s.updated_at if s.phase in ENDED_PHASES else snapshot.now) - s.started_at
        ratio = min(1.0, s.productive_s / wall_s) if wall_s > 0 else None
    stages = {k: v for k, v in p.seconds.items() if k not in ("total", "publish_stall")} if p else {}
    return [
        _gauge("job_phase", "1 for the phase that the job is in", "phase", {s.phase: 1} if s else {}),
        _one("job_step", "Completed RL steps", s.step if s else None),
        _one("job_steps", "RL steps that the run is to do", s.steps if s else None),
        _one("job_updated_timestamp_seconds", "When the job's status was last written", s.updated_at if s else None),
        _one("job_reward", "Mean reward of the last step", s.reward if s else None),
        _one("job_eval_accuracy", "Last evaluation: mean reward, in the supervised phase exact match",
             s.eval_accuracy if s else None),
        _one("job_staleness_versions", "Staleness of the oldest sample of the last step, in versions",
             s.staleness if s else None),
        _one("policy_version", "Newest policy version that the trainer began to publish",
             s.policy_version if s else None),
        _one("job_effective_time_ratio", "Fraction of the time since the start of the job spent in steps that counted",
             ratio),
        _one("step_seconds", "Wall time of the last step", p.seconds.get("total") if p else None),
        _gauge("step_stage_seconds", "Wall time of the stages of the last step", "stage", stages),
        _one("step_publish_stall_seconds", "Time of the last step in which training waited for the publish",
             p.seconds.get("publish_stall") if p else None),
        _one("step_samples", "Samples that the last step was trained on", p.samples if p else None),
        _one("step_tokens", "Tokens that the last step was trained on, prompts included", p.tokens if p else None)]


def _waiting(snapshot: ClusterSnapshot) -> list[Metric]:
    s = snapshot.status
    waits = s is not None and not snapshot.run_ended and bool(s.waiting_kind)
    kind = s.waiting_kind[:_MAX_NAME_CHARS] if s is not None else ""
    since = s.waiting_since if s is not None else 0.0
    cap = s.generation_cap[:_MAX_NAME_CHARS] if s is not None else ""
    idle = idle_slots(snapshot)
    return [
        _gauge("run_waiting", "1 for the part of the system that the run waits for", "kind",
               {kind: 1} if waits else {}),
        _gauge("run_waiting_seconds", "For how long the run has been waiting for it", "kind",
               {kind: max(0.0, snapshot.now - since)} if waits and since > 0 else {}),
        _gauge("generation_cap", "1 for the limit that has kept the run for a while from asking its engines for "
               "more samples", "cap", {cap: 1} if cap and not snapshot.run_ended else {}),
        _gauge("engine_slots_idle_ratio", "Share, 0 to 1, of the requests that the routable engines of the policy's "
               "pool can process at once and do not, while there is a generation cap", "cap",
               {cap: idle.share} if idle is not None else {}),
        _gauge("groups_dropped", "Prompt groups dropped on the record instead of being trained on, without those of "
               "steps that were undone", "reason", _named(s.dropped_groups) if s is not None else {})]


def _last_step(p: StepMetrics | None) -> list[Metric]:
    lengths = p.response_tokens if p else {}
    measured = p.throughput if p else {}
    tflops = measured.get("tflops_per_rank")
    return [
        _gauge("step_update", "Metric of the last step's updates by its name in the docs", "metric",
               _named(p.update, _MAX_UPDATE_NAMES) if p else {}),
        _gauge("step_tokens_per_second", "Tokens of the last step by the time of the stage that made or trained them",
               "stage", {stage: measured.get(f"{stage}_tokens_per_s") for stage in ("generate", "train")}),
        _one("step_rank_flops_per_second", "Operations that the model needed for the last step's updates, of one rank",
             tflops * 1e12 if tflops is not None else None),
        _one("step_mfu_ratio", "Model FLOPs utilisation of the last step's updates", measured.get("mfu")),
        _one("trainer_peak_memory_bytes", "Most memory that a rank of the trainer has used",
             measured.get("peak_memory_bytes")),
        _gauge("step_idle_seconds", "Part of the last step in which a stage waited for something else", "stage",
               _named(p.idle_s) if p else {}),
        _gauge("step_reward_part", "Mean of a part of the reward over the samples of the last step", "part",
               _named(p.reward_parts) if p else {}),
        _gauge("step_response_tokens", "Length of the responses of the last step", "statistic",
               {name: lengths.get(name) for name in ("mean", "max")}),
        _one("step_truncated_ratio", "Share of the last step's samples that ended at the limit of their length",
             p.truncated if p and lengths else None),
        _one("step_dropped_groups", "Prompt groups that the last step dropped instead of being trained on them",
             p.dropped_groups if p else None)]


def _named(values: Mapping[str, float], limit: int = _MAX_NAMES) -> dict[str, float]:
    """The first ones by name, whose names become labels: nobody can make a Prometheus keep any number of series."""
    return {name[:_MAX_NAME_CHARS]: values[name] for name in sorted(values)[:limit]}


def _pools(s: ClusterSnapshot) -> list[Metric]:
    actual = {(name, state): float(getattr(s.statuses.get(name), state, 0)) for name in s.specs
              for state in ("ready", "starting", "draining", "released", "behind")}
    return [
        _gauge("pool_desired", "Desired engines of a pool", "pool",
               {name: spec.desired for name, spec in s.specs.items()}),
        _gauge("pool_engines", "Engines of a pool by state", "pool state", actual)]


def _engines(s: ClusterSnapshot) -> list[Metric]:
    states = Counter(e.state for e in s.engines.values())
    heads = {stream: version.number for stream, version in s.heads.items()}
    serving = [e for e in s.engines.values() if e.state in _SERVES and e.version]
    return [
        _gauge("engines", "Engines by state", "state", {state.value: states[state] for state in EngineState}),
        _gauge("engine_version", "Version verified in an engine", "engine", {e.id: e.version for e in serving}),
        _gauge("engine_version_lag", "Versions by which an engine lags behind the newest committed one", "engine",
               {e.id: max(0, heads.get(s.follows(e), 0) - e.version) for e in serving}),
        _gauge("engine_update_seconds", "Last update of an engine, from seeing the version to its verification",
               "engine", {e.id: e.pull_apply_s for e in serving}),
        _gauge("engine_pull_seconds", "Part of the last update in which the engine kept serving", "engine",
               {e.id: max(0.0, e.pull_apply_s - e.pause_s) for e in serving}),
        _gauge("engine_pause_seconds", "Part of the last update in which the engine generated no tokens", "engine",
               {e.id: e.pause_s for e in serving}),
        _gauge("engine_requests_running", "Requests that an engine is processing", "engine",
               {e.id: e.running for e in serving}),
        _gauge("engine_requests_waiting", "Requests queued in an engine", "engine",
               {e.id: e.waiting for e in serving})]


def _versions(s: ClusterSnapshot, c: JobCounters) -> list[Metric]:
    return [
        _gauge("version_head", "Newest committed version of a stream", "stream",
               {stream: v.number for stream, v in s.heads.items()}),
        _gauge("version_age_seconds", "Time since the newest version of a stream was committed", "stream",
               {stream: max(0.0, s.now - v.committed_at) for stream, v in s.heads.items()}),
        _gauge("version_bytes", "Size of the newest version of a stream", "stream",
               {stream: v.nbytes for stream, v in s.heads.items()}),
        _gauge("versions_kept", "Versions of a stream that have a record", "stream", c.kept),
        _gauge("durable_lag_versions", "Versions by which the durable store lags behind, where there is one", "stream",
               {stream: max(0, s.heads[stream].number - n) for stream, n in c.durable.items()
                if stream in s.heads})]


def _nodes(s: ClusterSnapshot) -> list[Metric]:
    columns: dict[str, dict[str, float]] = defaultdict(dict)
    for n in s.nodes.values():
        for name, value in (("arena_bytes", n.arena_bytes), ("arena_used_bytes", n.used_bytes),
                            ("disk_bytes", n.disk_bytes), ("disk_used_bytes", n.disk_used_bytes),
                            ("chunks", n.chunks), ("unsaved_chunks", n.unsaved)):
            columns[name][n.id] = value
    help_texts = {
        "arena_bytes": "Shared-memory arena of a node of the checkpoint service",
        "arena_used_bytes": "Used part of the arena", "disk_bytes": "Disk space that a node may use",
        "disk_used_bytes": "Used part of the disk space", "chunks": "Chunks on a node",
        "unsaved_chunks": "Chunks of a node that are not on its disk yet"}
    return [_gauge(f"dcs_{name}", text, "node", columns[name]) for name, text in help_texts.items()]
