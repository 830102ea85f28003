"""What the alert rules look at: the state of the job as the store tells it in one look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.etcd_health import Health
from elastic_rl.coordinator.membership.registry import LastSeen
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    JobStatus,
    PoolSpec,
    PoolStatus,
    Version,
    VersionState,
)

SERVING = (EngineState.READY, EngineState.SYNCING)
RUN_OVER = ("finished", "failed")
_VERSIONS = 256


@dataclass(frozen=True)
class Thresholds:
    """From when on something is an alert."""

    engine_lag_versions: int = 8
    engine_lag_s: float = 120.0
    durable_lag_s: float = 900.0
    full_fraction: float = 0.9
    etcd_slow_s: float = 0.5
    etcd_quota_bytes: int = 2 << 30
    max_staleness: int = 0

    @classmethod
    def of(cls, cfg: Config) -> Thresholds:
        a = cfg.alerts
        return cls(a.engine_lag_versions, a.engine_lag_s, a.durable_lag_s, a.full_fraction, a.etcd_slow_s,
                   cfg.etcd.quota_bytes, cfg.train.max_staleness)


@dataclass(frozen=True)
class Facts:
    """What only the alert rules want to know."""

    nodes: Sequence[DcsNode] = ()
    committed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Unix seconds of the commit, by stream and version, of streams in which somebody is behind the head."""
    durable: Mapping[str, int] = field(default_factory=dict)
    """Newest durable version, 0 for none, of each stream that is copied."""
    etcd_health: Health = Health()
    epoch_revision: int = 0
    """Store revision at which the run's epoch was raised last."""
    status_revision: int = 0
    """Store revision at which the job's status was written last."""
    limits: Thresholds = Thresholds()


@dataclass(frozen=True)
class World:
    """What the store said in one look."""

    job: str
    engines: Sequence[Engine] = ()
    specs: Mapping[str, PoolSpec] = field(default_factory=dict)
    statuses: Mapping[str, PoolStatus] = field(default_factory=dict)
    status: JobStatus | None = None
    roster: Sequence[LastSeen] = ()
    heads: Mapping[str, int] = field(default_factory=dict)
    """Store revision at which each stream's head was last moved."""
    pool_hold_s: float = 180.0
    """A pool may be short for so long: an engine needs that to start."""
    facts: Facts = Facts()

    @property
    def run_over(self) -> bool:
        return self.status is not None and self.status.phase in RUN_OVER

    def ready(self, pool: str) -> int:
        """Engines of the pool's own; adopted ones are extra."""
        return sum(e.pool == pool and e.state is EngineState.READY and not e.adopted for e in self.engines)

    def engine(self, engine_id: str) -> Engine | None:
        return next((e for e in self.engines if e.id == engine_id), None)


def behind_s(now: float, number: int, committed: Mapping[int, float]) -> float:
    """Seconds for which a later version than ``number`` has been there; 0 when there is none."""
    later = [n for n in committed if n > number]
    return max(0.0, now - committed[min(later)]) if later else 0.0


def read_facts(etcd: EtcdClient, keys: Keys, cfg: Config, engines: Sequence[Engine], etcd_health: Health) -> Facts:
    """Reads them. Raises EtcdUnavailable."""
    streams = set(cfg.dcs.durable_streams) if cfg.dcs.durable_url else set()
    durable = {s: max((int(kv.key.rpartition("/")[2]) for kv in etcd.range(keys.durable_prefix(s))[0]), default=0)
               for s in sorted(streams)}
    committed = {}
    for stream in sorted({Stream.POLICY, *streams}):
        have = [durable[stream]] if stream in durable else []
        have += [e.version for e in engines if e.version and e.state in SERVING] if stream == Stream.POLICY else []
        found = etcd.get(keys.stream_head(stream)) if have else None
        if found is None or Version.decode(found.value).number <= min(have):
            continue  # nothing lags, and a listing of all versions is not for each look
        versions = (Version.decode(kv.value) for kv in etcd.range(
            keys.versions_prefix(stream), limit=_VERSIONS, newest_first=True)[0])
        committed[stream] = {v.number: v.committed_at for v in versions if v.state is VersionState.COMMITTED}
    nodes = [DcsNode.decode(kv.value) for kv in etcd.range(keys.dcs_nodes_prefix())[0]]
    epoch, status = etcd.get(keys.epoch()), etcd.get(keys.job_status())
    return Facts(nodes, committed, durable, etcd_health, epoch.mod_revision if epoch else 0,
                 status.mod_revision if status else 0, Thresholds.of(cfg))
