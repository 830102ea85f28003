"""One consistent shape for what etcd says about a job: ``ClusterSnapshot``. Membership, failure policy, operations,
alerts and metrics all decide by it.

All of it is as of one revision, and read in one transaction. What has not changed since the last reading is neither
sent nor decoded again (``KnownRanges``): a job of thousands of members is read several times a second. The newest
heartbeat that was seen of a member stays, too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.etcd_health import EtcdHealth, EtcdProbe
from elastic_rl.coordinator.records import COORDINATOR, FaultLog, LastSeen
from elastic_rl.coordinator.targets import JOB
from elastic_rl.dcs.catalog.reads import newest_number
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, RunStatus
from elastic_rl.etcd.decoding import RangeDecoder, decode_all, readable_one
from elastic_rl.etcd.heartbeats import HeartbeatIndex
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.known_ranges import KnownRanges
from elastic_rl.etcd.records import (
    ENDED_PHASES,
    Autoscaler,
    AutoscalerState,
    DcsNode,
    Engine,
    EngineState,
    Evidence,
    ExternalEngine,
    HostHeartbeats,
    JobStatus,
    Member,
    Operation,
    PoolSpec,
    PoolStatus,
    Record,
    RestartRequest,
    Version,
    VersionState,
    Witness,
)

R = TypeVar("R", bound=Record)

ACTOR_ROLE = "actor"
"""Role of the members that run a job's training loop."""
_LAGS_EVERY_S = 1.0
_VERSIONS = 256


class Revisions(Protocol):
    """Revisions at which a key was created and last changed, as a ``KeyValue`` has them."""

    @property
    def create_revision(self) -> int: ...

    @property
    def mod_revision(self) -> int: ...


@dataclass(frozen=True)
class ClusterSnapshot:
    """What etcd said about a job at one reading. Every mapping is by the name that the record itself has."""

    job: str
    now: float = 0.0
    """Unix seconds of the reading, by the reader's clock. For people: what is due goes by ``leader_time``."""
    leader_time: float = 0.0
    """Seconds of the leader clock; 0 on a replica that does not lead."""
    read_at: int = 0
    """Revision of etcd as of which all was read, but for ``committed`` and ``durable``."""
    status: JobStatus | None = None
    stopped: bool = False
    """Whether the operator has stopped the newest submission, which may be ending, or it has ended without an error."""
    epoch: int = 0
    members: Sequence[Member] = ()
    """Each with its newest heartbeat, whether its record has that or its host's agent has collected it."""
    alive_revisions: Mapping[str, int] = field(default_factory=dict)
    """Incarnation of a member whose heartbeats are collected → a revision at which its agent saw the process run."""
    registry: Mapping[tuple[str, str], LastSeen] = field(default_factory=dict)
    """The member registry, by role and id: every member that a leader has seen and not forgotten."""
    evidence: Mapping[tuple[str, str], Evidence] = field(default_factory=dict)
    """What witnesses found out about members that are no longer registered, by role and id."""
    witnesses: Sequence[Witness] = ()
    nodes: Mapping[str, DcsNode] = field(default_factory=dict)
    engines: Mapping[str, Engine] = field(default_factory=dict)
    external_engines: Mapping[str, ExternalEngine] = field(default_factory=dict)
    """Id of the engine → its registration."""
    specs: Mapping[str, PoolSpec] = field(default_factory=dict)
    statuses: Mapping[str, PoolStatus] = field(default_factory=dict)
    autoscalers: Mapping[str, Autoscaler] = field(default_factory=dict)
    """Pool → its autoscaling where that was set through the API."""
    autoscaler_states: Mapping[str, AutoscalerState] = field(default_factory=dict)
    operations: Mapping[str, Operation] = field(default_factory=dict)
    restarts: Mapping[str, RestartRequest] = field(default_factory=dict)
    """Target → the request to restart it."""
    faults: Mapping[str, FaultLog] = field(default_factory=dict)
    """Target → its faults."""
    heads: Mapping[str, Version] = field(default_factory=dict)
    """Stream → its newest version."""
    committed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Unix seconds of the commit, by stream and version, of streams in which an engine or the durable store lags."""
    durable: Mapping[str, int] = field(default_factory=dict)
    """Newest durable version, 0 for none, of each stream that is copied to the durable store."""
    etcd_health: EtcdHealth = EtcdHealth()
    revisions: Mapping[str, Revisions] = field(default_factory=dict)
    """Key → its revisions, of every key that was read."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why the record cannot be read, by key, of records that are left out of the rest."""

    @property
    def keys(self) -> Keys:
        return Keys(self.job)

    @property
    def has_actor(self) -> bool:
        """Whether a training loop runs. Where none does, what the job's status says is of another time."""
        return any(m.role == ACTOR_ROLE for m in self.members)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of the job runs, is suspected or was asked for. Coordinators and DCS nodes do not count: they
        are the cluster's as much as the job's."""
        return not (any(m.role != COORDINATOR for m in self.members) or self.engines or self.external_engines
                    or self.evidence or any(seen.suspected_at and not seen.dead for seen in self.registry.values())
                    or any(not operation.ended_at for operation in self.operations.values())
                    or any(r.observed_generation < r.generation for r in self.restarts.values()))

    def revision(self, key: str) -> int:
        """Revision of the key's last change; 0 for a key that was not there."""
        found = self.revisions.get(key)
        return found.mod_revision if found else 0

    def created(self, key: str) -> int:
        """Revision at which the key was created; 0 for a key that was not there."""
        found = self.revisions.get(key)
        return found.create_revision if found else 0

    def unchanged(self, key: str) -> Compare:
        """The condition that a key is still as it was read, absent included."""
        return Compare.mod(key, "==", self.revision(key))

    @property
    def run_over(self) -> bool:
        return self.status is not None and self.status.phase in ENDED_PHASES

    @property
    def run_ended(self) -> bool:
        """Whether the run is over or was stopped: the end of its compute plane is no fault."""
        return self.run_over or self.stopped

    @property
    def ended_epoch(self) -> int:
        """Epochs up to this one were ended by a global restart."""
        return self.restarts[JOB].epoch if JOB in self.restarts else 0

    def follows(self, engine: Engine) -> str:
        """Stream whose versions an engine serves; empty for one that serves the weights of a folder."""
        spec = self.specs.get(engine.pool)
        return spec.stream if spec is not None else Stream.POLICY

    def ready(self, pool: str) -> int:
        """Ready engines of the pool's own, and those that were ready until they released their memory to the trainer;
        external ones are extra."""
        return self._own_engines[pool, EngineState.READY] + self._released[pool]

    def draining(self, pool: str) -> int:
        return self._own_engines[pool, EngineState.DRAINING]

    @cached_property
    def _own_engines(self) -> Counter[tuple[str, EngineState]]:
        return Counter((e.pool, e.state) for e in self.engines.values() if not e.external)

    @cached_property
    def _released(self) -> Counter[str]:
        """Released engines whose server runs, by pool; another one has yet to show that it starts."""
        return Counter(e.pool for e in self.engines.values() if e.state is EngineState.RELEASED and e.pid)


class SnapshotReader:
    """Takes snapshots. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, clock: Callable[[], float] = time.time,
                 leader_clock: Callable[[], float] = lambda: 0.0, probe: EtcdProbe | None = None) -> None:
        self._etcd, self._keys, self._clock, self._leader_clock = etcd, keys, clock, leader_clock
        self._probe, self._cluster_keys = probe, ClusterKeys(cfg.cluster_name)
        self._durable_streams = sorted(cfg.dcs.durable_streams) if cfg.dcs.durable_url else []
        self._decoders: dict[type[Record], RangeDecoder[Any]] = {
            Operation: RangeDecoder(Operation, lambda r: keys.operation(r.id)),
            LastSeen: RangeDecoder(LastSeen, lambda r: keys.registry_entry(r.role, r.id)),
            Member: RangeDecoder(Member, lambda r: keys.member(r.role, r.id)),
            HostHeartbeats: RangeDecoder(HostHeartbeats, lambda r: keys.heartbeats(r.host)),
            Evidence: RangeDecoder(Evidence, lambda r: keys.evidence(r.role, r.id)),
            Witness: RangeDecoder(Witness, lambda r: keys.witness(r.machine, r.name)),
            DcsNode: RangeDecoder(DcsNode, lambda r: keys.dcs_node(r.id)),
            Engine: RangeDecoder(Engine, lambda r: keys.engine(r.id)),
            ExternalEngine: RangeDecoder(ExternalEngine, lambda r: keys.external_engine(r.url)),
            PoolSpec: RangeDecoder(PoolSpec, lambda r: keys.pool_spec(r.name)),
            PoolStatus: RangeDecoder(PoolStatus, lambda r: keys.pool_status(r.name)),
            Autoscaler: RangeDecoder(Autoscaler, lambda r: keys.autoscaler(r.pool)),
            AutoscalerState: RangeDecoder(AutoscalerState, lambda r: keys.autoscaler_state(r.pool)),
            FaultLog: RangeDecoder(FaultLog, lambda r: keys.fault(r.target)),
            RestartRequest: RangeDecoder(RestartRequest, lambda r: keys.restart(r.target)),
            Version: RangeDecoder(Version, lambda r: keys.stream_head(r.stream)),
            JobStatus: RangeDecoder(JobStatus),
        }
        self._kinds: dict[str, type[Record]] = {
            keys.operations_prefix(): Operation, keys.registry_prefix(): LastSeen, keys.members_prefix(): Member,
            keys.heartbeats_prefix(): HostHeartbeats, keys.dcs_nodes_prefix(): DcsNode,
            keys.evidence_prefix(): Evidence, keys.witnesses_prefix(): Witness, keys.engines_prefix(): Engine,
            keys.faults_prefix(): FaultLog, keys.restarts_prefix(): RestartRequest,
            keys.external_engines_prefix(): ExternalEngine}
        """The kind of the records of each range that has one kind, by prefix."""
        self._head_keys = [keys.stream_head(stream) for stream in Stream]
        cluster = self._cluster_keys
        self._known = KnownRanges(
            etcd, [*self._kinds, keys.pools_prefix(), keys.autoscaling_prefix()],
            [keys.job_status(), keys.epoch(), *self._head_keys, cluster.job(keys.job), cluster.run_status(keys.job)])
        self._records = {prefix: _Records(self._decoders[kind]) for prefix, kind in self._kinds.items()}
        self._heartbeats = HeartbeatIndex()
        self._lags: tuple[dict[str, int], dict[str, dict[int, float]]] = {}, {}
        self._lags_at = float("-inf")

    def forget(self) -> None:
        """Has the next reading ask for all, whether it has changed or not."""
        self._known.forget()

    def read(self) -> ClusterSnapshot:
        """Raises EtcdUnavailable. Records that cannot be read are left out, and named in ``unreadable``."""
        keys, known = self._keys, self._known
        known.read()
        reading = _Reading(known, self._decoders, self._records)
        members = reading.range(keys.members_prefix(), Member)
        self._heartbeats.update(reading.range(keys.heartbeats_prefix(), HostHeartbeats))
        members, beats = self._heartbeats.merged(members), [*map(self._heartbeats.of, members)]
        engines = {e.id: e for e in reading.range(keys.engines_prefix(), Engine)}
        specs = reading.part(keys.pools_prefix(), "/spec", PoolSpec)
        statuses = reading.part(keys.pools_prefix(), "/status", PoolStatus)
        autoscalers = reading.part(keys.autoscaling_prefix(), "/spec", Autoscaler)
        autoscaler_states = reading.part(keys.autoscaling_prefix(), "/state", AutoscalerState)
        status = reading.keys([keys.job_status()], JobStatus)
        epoch = known.keys.get(keys.epoch())
        if epoch is not None:
            reading.revisions[epoch.key] = epoch
        heads: dict[str, Version] = {v.stream: v for v in reading.keys(self._head_keys, Version)}
        frozen = {spec.name for spec in specs if not spec.stream}
        durable, committed = self._read_lags([e for e in engines.values() if e.pool not in frozen], heads)
        return ClusterSnapshot(
            job=keys.job, now=self._clock(), leader_time=self._leader_clock(), read_at=known.revision,
            status=status[0] if status else None, stopped=self._is_stopped(),
            epoch=epoch.version if epoch else 0, members=members,
            alive_revisions={beat.incarnation: beat.revision for beat in beats if beat is not None},
            registry={s.name: s for s in reading.range(keys.registry_prefix(), LastSeen)},
            evidence={(e.role, e.id): e for e in reading.range(keys.evidence_prefix(), Evidence)},
            witnesses=reading.range(keys.witnesses_prefix(), Witness),
            nodes={n.id: n for n in reading.range(keys.dcs_nodes_prefix(), DcsNode)}, engines=engines,
            external_engines={e.engine: e for e in reading.range(keys.external_engines_prefix(), ExternalEngine)},
            specs={s.name: s for s in specs}, statuses={s.name: s for s in statuses},
            autoscalers={a.pool: a for a in autoscalers}, autoscaler_states={a.pool: a for a in autoscaler_states},
            operations={o.id: o for o in reading.range(keys.operations_prefix(), Operation)},
            restarts={r.target: r for r in reading.range(keys.restarts_prefix(), RestartRequest)},
            faults={f.target: f for f in reading.range(keys.faults_prefix(), FaultLog)}, heads=heads,
            committed=committed, durable=durable, etcd_health=self._probe.health() if self._probe else EtcdHealth(),
            revisions=reading.revisions, unreadable=reading.unreadable)

    def _is_stopped(self) -> bool:
        keys, job = self._cluster_keys, self._keys.job
        record = readable_one(self._known.keys.get(keys.job(job)), JobRecord)
        run = readable_one(self._known.keys.get(keys.run_status(job)), RunStatus)
        if record is None or not record.submission:
            return False
        return record.stopped or (run is not None and run.submission == record.submission
                                  and run.phase in (JobPhase.STOPPED, JobPhase.FINISHED))

    def _read_lags(self, engines: Iterable[Engine], heads: Mapping[str, Version]
                   ) -> tuple[dict[str, int], dict[str, dict[int, float]]]:
        """``durable`` and ``committed`` of the snapshot, at most once a second. ``engines``: that serve the policy."""
        if time.monotonic() - self._lags_at < _LAGS_EVERY_S:
            return self._lags
        durable: dict[str, int] = {
            s: newest_number(self._etcd, self._keys.durable_prefix(s)) for s in self._durable_streams}
        committed = {}
        for stream in sorted({Stream.POLICY, *durable}):
            have = [durable[stream]] if stream in durable else []
            have += [e.version for e in engines if e.version and e.state.serving] if stream == Stream.POLICY else []
            if not have or stream not in heads or heads[stream].number <= min(have):
                continue  # nothing lags, and a listing of all versions is not for each reading
            kvs, _ = self._etcd.range(self._keys.versions_prefix(stream), limit=_VERSIONS, newest_first=True)
            committed[stream] = {v.number: v.committed_at for v, _ in decode_all(kvs, Version, {})
                                 if v.state is VersionState.COMMITTED}
        self._lags, self._lags_at = (durable, committed), time.monotonic()
        return self._lags


class _Records(Generic[R]):
    """The records of a range, reading after reading."""

    def __init__(self, decoder: RangeDecoder[R]) -> None:
        self._decoder = decoder
        self._kvs: Mapping[str, KeyValue] = {}
        self.records: list[R] = []
        self.unreadable: dict[str, str] = {}

    def update(self, kvs: Mapping[str, KeyValue]) -> None:
        """``kvs``: the range as it is; the same object as before where nothing has changed."""
        if kvs is not self._kvs:
            self._kvs, self.unreadable = kvs, {}
            self.records = self._decoder.decode(kvs.values(), self.unreadable)


class _Reading:
    """What one reading of etcd makes."""

    def __init__(self, known: KnownRanges, decoders: Mapping[type[Record], RangeDecoder[Any]],
                 records: Mapping[str, _Records[Any]]) -> None:
        """``records``: by prefix, as the reading before has left them."""
        self._known, self._decoders, self._records = known, decoders, records
        self.revisions: dict[str, Revisions] = {}
        self.unreadable: dict[str, str] = {}

    def range(self, prefix: str, kind: type[R]) -> list[R]:
        """The records of a range of one kind."""
        found: _Records[R] = self._records[prefix]
        found.update(self._known.ranges[prefix])
        self.revisions.update(self._known.ranges[prefix])
        self.unreadable.update(found.unreadable)
        return found.records

    def part(self, prefix: str, end: str, kind: type[R]) -> list[R]:
        """The records of a range whose keys end so."""
        return self._decode([kv for key, kv in self._known.ranges[prefix].items() if key.endswith(end)], kind)

    def keys(self, keys: Iterable[str], kind: type[R]) -> list[R]:
        return self._decode([kv for key in keys if (kv := self._known.keys.get(key)) is not None], kind)

    def _decode(self, kvs: Sequence[KeyValue], kind: type[R]) -> list[R]:
        self.revisions.update((kv.key, kv) for kv in kvs)
        found: list[R] = self._decoders[kind].decode(kvs, self.unreadable)
        return found
