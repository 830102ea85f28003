"""One reading of the store, as the leader's loop decides by it.

What has not changed since the last reading is not decoded again: a job of a thousand members is read several times a
second. Nothing else is remembered; each look asks etcd for everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.alerts import facts
from elastic_rl.coordinator.failure.policy import FaultLog
from elastic_rl.coordinator.membership import hang_detection, registry
from elastic_rl.coordinator.membership.hang_detection import Learner, Limits, Pace
from elastic_rl.coordinator.membership.registry import LastSeen, LiveMember
from elastic_rl.coordinator.operations.state_machine import JOB
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    Epoch,
    ExternalEngine,
    JobStatus,
    Member,
    Operation,
    PoolSpec,
    PoolStatus,
    Record,
    RestartRequest,
)

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class ClusterSnapshot:
    """What the store said. Pairs hold a record and its mod revision."""

    now: float
    world: facts.World
    roster: dict[tuple[str, str], tuple[LastSeen, int]]
    living: dict[tuple[str, str], LiveMember]
    engines: dict[str, tuple[Engine, int]]
    epoch: int
    members: list[Member]
    faults: dict[str, tuple[FaultLog, int]]
    restarts: dict[str, RestartRequest]
    operations: dict[str, tuple[Operation, int]]
    adoptions: dict[str, tuple[ExternalEngine, int]]

    @property
    def ended_epoch(self) -> int:
        """Epochs up to this one were ended by a global restart."""
        return self.restarts[JOB].epoch if JOB in self.restarts else 0


class _Decoded:
    """Records of one range, decoded once for each of their revisions."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Any]] = {}

    def of(self, kvs: list[KeyValue], kind: type[R]) -> list[tuple[R, KeyValue]]:
        known: dict[str, tuple[int, Any]] = {}
        for kv in kvs:
            before = self._known.get(kv.key)
            record = before[1] if before and before[0] == kv.mod_revision else kind.decode(kv.value)
            known[kv.key] = (kv.mod_revision, record)
        self._known = known  # what has gone is forgotten
        return [(known[kv.key][1], kv) for kv in kvs]


class SnapshotReader:
    """Makes looks, and learns from each how long members usually are silent. ``begin`` starts a term of leadership."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, clock: Callable[[], float] = time.time) -> None:
        self._etcd, self._keys, self._cfg, self._clock = etcd, keys, cfg, clock
        self._limits, self._learner = Limits.of(cfg.coordinator), Learner({})
        self._decoded: dict[str, _Decoded] = {}

    def begin(self) -> None:
        """Takes up what was learned so far: others may have led meanwhile."""
        kept = [Pace.decode(kv.value) for kv in self._etcd.range(self._keys.paces_prefix())[0]]
        self._learner = Learner({pace.role: pace for pace in kept})

    def read(self) -> ClusterSnapshot:
        """Raises EtcdUnavailable."""
        keys, etcd = self._keys, self._etcd
        # Operations are read before what they are about: their wishes, written with them, are then seen too.
        operations = self._pairs(keys.operations_prefix(), Operation)
        # The roster is read before the members: a member that closes in between is missing in the newer reading, and
        # the compare on its (deleted) roster key then fails instead of making a death of it.
        sightings = self._pairs(keys.roster_prefix(), LastSeen)
        members = self._records(keys.members_prefix(), Member)
        self._learn([m for m, _ in members])
        living = [registry.of_member(m, kv.key, kv.create_revision,
                                   hung=hang_detection.hung(m, self._learner.paces, self._limits)) for m, kv in members]
        nodes = [registry.of_node(node, kv.key, kv.create_revision)
                 for node, kv in self._records(keys.dcs_nodes_prefix(), DcsNode)]
        engines = self._pairs(keys.engines_prefix(), Engine)
        specs, statuses = self._pools()
        job, epoch = etcd.get(keys.job_status()), etcd.get(keys.epoch())
        heads: dict[str, int] = {s: kv.mod_revision for s in Stream if (kv := etcd.get(keys.stream_head(s)))}
        faults = self._pairs(keys.faults_prefix(), FaultLog)
        wishes = self._records(keys.restarts_prefix(), RestartRequest)
        adoptions = self._pairs(keys.adoptions_prefix(), ExternalEngine)
        world = facts.World(
            job=keys.job, engines=[e for e, _ in engines], specs=specs, statuses=statuses,
            status=JobStatus.decode(job.value) if job else None, roster=[s for s, _ in sightings], heads=heads,
            pool_hold_s=self._cfg.engine.start_timeout_s)
        return ClusterSnapshot(
            now=self._clock(), world=world, roster={s.name: (s, revision) for s, revision in sightings},
            living={m.name: m for m in (*nodes, *living)}, engines={e.id: (e, revision) for e, revision in engines},
            epoch=Epoch.decode(epoch.value).number if epoch else 0, members=[m for m, _ in members],
            faults={f.target: (f, revision) for f, revision in faults}, restarts={w.target: w for w, _ in wishes},
            operations={o.id: (o, revision) for o, revision in operations},
            adoptions={a.engine: (a, revision) for a, revision in adoptions})

    def _pools(self) -> tuple[dict[str, PoolSpec], dict[str, PoolStatus]]:
        """Specs and statuses by the pool's name; they lie side by side."""
        kvs = self._etcd.range(self._keys.pools_prefix())[0]
        specs = self._memo("specs").of([kv for kv in kvs if kv.key.endswith("/spec")], PoolSpec)
        statuses = self._memo("statuses").of([kv for kv in kvs if kv.key.endswith("/status")], PoolStatus)
        return {s.name: s for s, _ in specs}, {s.name: s for s, _ in statuses}

    def _records(self, prefix: str, kind: type[R]) -> list[tuple[R, KeyValue]]:
        return self._memo(prefix).of(self._etcd.range(prefix)[0], kind)

    def _pairs(self, prefix: str, kind: type[R]) -> list[tuple[R, int]]:
        return [(record, kv.mod_revision) for record, kv in self._records(prefix, kind)]

    def _memo(self, name: str) -> _Decoded:
        return self._decoded.setdefault(name, _Decoded())

    def _learn(self, members: list[Member]) -> None:
        """What is worth it is kept, unguarded: it is no decision, only experience."""
        for pace in self._learner.see({(m.role, m.id): m for m in members}):
            self._etcd.put(self._keys.pace(pace.role), pace.encode())
