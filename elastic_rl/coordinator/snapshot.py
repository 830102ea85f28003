"""One consistent shape for what etcd says about a job: ``ClusterSnapshot``. Membership, failure policy, operations,
alerts and metrics all decide by it.

What has not changed since the last reading is not decoded again: a job of a thousand members is read several times a
second. Nothing else is remembered; each reading asks etcd for everything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.etcd_health import EtcdProbe, Health
from elastic_rl.coordinator.records import FaultLog, LastSeen
from elastic_rl.coordinator.targets import JOB
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    Epoch,
    ExternalEngine,
    JobStatus,
    Member,
    Operation,
    PoolSpec,
    PoolStatus,
    Record,
    RestartRequest,
    Version,
    VersionState,
)

R = TypeVar("R", bound=Record)

SERVING = (EngineState.READY, EngineState.SYNCING)
"""States in which an engine that has a version may serve it."""
RUN_OVER = ("finished", "failed")
_LAGS_EVERY_S = 1.0
_VERSIONS = 256


class KeyRevisions(NamedTuple):
    """Revisions at which a key was created and last changed."""

    create: int
    mod: int


@dataclass(frozen=True)
class ClusterSnapshot:
    """What etcd said about a job at one reading. Every mapping is by the name that the record itself has."""

    job: str
    now: float = 0.0
    """Unix seconds of the reading, by the reader's clock."""
    status: JobStatus | None = None
    epoch: int = 0
    members: Sequence[Member] = ()
    members_revision: int = 0
    """Revision of etcd at which the members were read."""
    registry: Mapping[tuple[str, str], LastSeen] = field(default_factory=dict)
    """The member registry, by role and id: every member that a leader has seen and not forgotten."""
    nodes: Mapping[str, DcsNode] = field(default_factory=dict)
    engines: Mapping[str, Engine] = field(default_factory=dict)
    external_engines: Mapping[str, ExternalEngine] = field(default_factory=dict)
    """By the id of the engine."""
    specs: Mapping[str, PoolSpec] = field(default_factory=dict)
    statuses: Mapping[str, PoolStatus] = field(default_factory=dict)
    operations: Mapping[str, Operation] = field(default_factory=dict)
    restarts: Mapping[str, RestartRequest] = field(default_factory=dict)
    """By target."""
    faults: Mapping[str, FaultLog] = field(default_factory=dict)
    """By target."""
    heads: Mapping[str, Version] = field(default_factory=dict)
    """By stream."""
    committed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Unix seconds of the commit, by stream and version, of streams in which an engine or the durable store lags."""
    durable: Mapping[str, int] = field(default_factory=dict)
    """Newest durable version, 0 for none, of each stream that is copied to the durable store."""
    etcd_health: Health = Health()
    revisions: Mapping[str, KeyRevisions] = field(default_factory=dict)
    """By key, of every key that was read."""

    @property
    def keys(self) -> Keys:
        return Keys(self.job)

    def revision(self, key: str) -> int:
        """Revision of the key's last change; 0 for a key that was not there."""
        found = self.revisions.get(key)
        return found.mod if found else 0

    def created(self, key: str) -> int:
        """Revision at which the key was created; 0 for a key that was not there."""
        found = self.revisions.get(key)
        return found.create if found else 0

    def unchanged(self, key: str) -> Compare:
        """The condition that a key is still as it was read, absent included."""
        return Compare.mod(key, "==", self.revision(key))

    @property
    def run_over(self) -> bool:
        return self.status is not None and self.status.phase in RUN_OVER

    @property
    def ended_epoch(self) -> int:
        """Epochs up to this one were ended by a global restart."""
        return self.restarts[JOB].epoch if JOB in self.restarts else 0

    def ready(self, pool: str) -> int:
        """Ready engines of the pool's own; external ones are extra."""
        return self._own_engines[pool, EngineState.READY]

    def draining(self, pool: str) -> int:
        return self._own_engines[pool, EngineState.DRAINING]

    @cached_property
    def _own_engines(self) -> Counter[tuple[str, EngineState]]:
        return Counter((e.pool, e.state) for e in self.engines.values() if not e.external)


def newest_number(etcd: EtcdClient, prefix: str) -> int:
    """The highest of the numbers that end the keys under a prefix; 0 for none. Raises EtcdUnavailable."""
    newest = etcd.page(prefix, limit=1, newest_first=True).kvs
    return int(newest[0].key.removeprefix(prefix)) if newest else 0


class _DecodedRange:
    """Records of one range, each revision of which is decoded once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Any]] = {}

    def update(self, kvs: Sequence[KeyValue], kind: type[R]) -> list[R]:
        known: dict[str, tuple[int, Any]] = {}
        for kv in kvs:
            before = self._known.get(kv.key)
            record = before[1] if before and before[0] == kv.mod_revision else kind.decode(kv.value)
            known[kv.key] = (kv.mod_revision, record)
        self._known = known  # keys that are gone are forgotten
        return [record for _, record in known.values()]


class SnapshotReader:
    """Takes snapshots. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, clock: Callable[[], float] = time.time,
                 probe: EtcdProbe | None = None) -> None:
        self._etcd, self._keys, self._clock, self._probe = etcd, keys, clock, probe
        self._durable_streams = sorted(cfg.dcs.durable_streams) if cfg.dcs.durable_url else []
        self._decoded: dict[str, _DecodedRange] = {}
        self._lags: tuple[dict[str, int], dict[str, dict[int, float]]] = {}, {}
        self._lags_at = float("-inf")

    def read(self) -> ClusterSnapshot:
        """Raises EtcdUnavailable."""
        keys, revisions = self._keys, dict[str, KeyRevisions]()
        # Operations are read before what they are about: the requests that were written with them are then seen too.
        operations = self._range(keys.operations_prefix(), Operation, revisions)
        # The registry is read before the members: a member that closes in between is missing in the later reading, and
        # the compare on its (deleted) registry key then fails instead of making a death of it.
        registry = self._range(keys.registry_prefix(), LastSeen, revisions)
        member_keys, members_revision = self._etcd.range(keys.members_prefix())
        members = self._decode("members", member_keys, Member, revisions)
        nodes = self._range(keys.dcs_nodes_prefix(), DcsNode, revisions)
        engines = {e.id: e for e in self._range(keys.engines_prefix(), Engine, revisions)}
        specs, statuses = self._pools(revisions)
        status = self._one(keys.job_status(), JobStatus, revisions)
        epoch = self._one(keys.epoch(), Epoch, revisions)
        heads: dict[str, Version] = {s: head for s in Stream
                                     if (head := self._one(keys.stream_head(s), Version, revisions))}
        faults = self._range(keys.faults_prefix(), FaultLog, revisions)
        restarts = self._range(keys.restarts_prefix(), RestartRequest, revisions)
        external = self._range(keys.external_engines_prefix(), ExternalEngine, revisions)
        durable, committed = self._read_lags(engines, heads)
        return ClusterSnapshot(
            job=keys.job, now=self._clock(), status=status, epoch=epoch.number if epoch else 0, members=members,
            members_revision=members_revision, registry={s.name: s for s in registry},
            nodes={n.id: n for n in nodes}, engines=engines,
            external_engines={e.engine: e for e in external}, specs=specs, statuses=statuses,
            operations={o.id: o for o in operations}, restarts={r.target: r for r in restarts},
            faults={f.target: f for f in faults}, heads=heads, committed=committed, durable=durable,
            etcd_health=self._probe.health() if self._probe else Health(), revisions=revisions)

    def _pools(self, revisions: dict[str, KeyRevisions]) -> tuple[dict[str, PoolSpec], dict[str, PoolStatus]]:
        """Specs and statuses by the pool's name; they lie side by side."""
        kvs = self._etcd.range(self._keys.pools_prefix())[0]
        specs = self._decode("specs", [kv for kv in kvs if kv.key.endswith("/spec")], PoolSpec, revisions)
        statuses = self._decode("statuses", [kv for kv in kvs if kv.key.endswith("/status")], PoolStatus, revisions)
        return {s.name: s for s in specs}, {s.name: s for s in statuses}

    def _read_lags(self, engines: Mapping[str, Engine], heads: Mapping[str, Version]
                   ) -> tuple[dict[str, int], dict[str, dict[int, float]]]:
        """``durable`` and ``committed`` of the snapshot, at most once a second."""
        if time.monotonic() - self._lags_at < _LAGS_EVERY_S:
            return self._lags
        durable = {s: newest_number(self._etcd, self._keys.durable_prefix(s)) for s in self._durable_streams}
        committed = {}
        for stream in sorted({Stream.POLICY, *durable}):
            have = [durable[stream]] if stream in durable else []
            have += [e.version for e in engines.values() if e.version and e.state in SERVING
                     ] if stream == Stream.POLICY else []
            if not have or stream not in heads or heads[stream].number <= min(have):
                continue  # nothing lags, and a listing of all versions is not for each reading
            versions = (Version.decode(kv.value) for kv in self._etcd.range(
                self._keys.versions_prefix(stream), limit=_VERSIONS, newest_first=True)[0])
            committed[stream] = {v.number: v.committed_at for v in versions if v.state is VersionState.COMMITTED}
        self._lags, self._lags_at = (durable, committed), time.monotonic()
        return self._lags

    def _range(self, prefix: str, kind: type[R], revisions: dict[str, KeyRevisions]) -> list[R]:
        return self._decode(prefix, self._etcd.range(prefix)[0], kind, revisions)

    def _one(self, key: str, kind: type[R], revisions: dict[str, KeyRevisions]) -> R | None:
        found = self._etcd.get(key)
        return next(iter(self._decode(key, [found] if found else [], kind, revisions)), None)

    def _decode(self, name: str, kvs: Sequence[KeyValue], kind: type[R], revisions: dict[str, KeyRevisions]) -> list[R]:
        revisions.update((kv.key, KeyRevisions(kv.create_revision, kv.mod_revision)) for kv in kvs)
        return self._decoded.setdefault(name, _DecodedRange()).update(kvs, kind)
