"""An engine that cannot fetch: is it the engine, or the checkpoint service? Pure, but for ``read_evidence``.

An engine that serves old weights for ever is of no use, and one that is replaced because the checkpoint service is away
is a loss. The evidence is what the *other* engines of the pool have: if most of them are ahead of this one for the
whole of the limit, the service works, and this engine (its host, its server, its network) does not. Otherwise everybody
waits, and nobody is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.errors import (
    AccessDenied,
    ArenaFull,
    CatalogMismatch,
    ChunkCorrupt,
    ChunkMissing,
    Conflict,
    DiskFull,
    EtcdUnavailable,
    NodeUnavailable,
    RecordUnreadable,
    StagingFailed,
    VersionNotFound,
)
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState

FETCH_ERRORS = (AccessDenied, ArenaFull, CatalogMismatch, ChunkCorrupt, ChunkMissing, Conflict, DiskFull,
                EtcdUnavailable, NodeUnavailable, RecordUnreadable, StagingFailed, VersionNotFound)
"""A fetch that fails with one of these changed nothing in the engine, which serves on and tries again."""
NO_EVIDENCE = (CatalogMismatch, EtcdUnavailable, RecordUnreadable, VersionNotFound)
"""Errors of a fetch that say nothing about this engine: etcd is away, the catalog is suspended, the version is
released."""
_MAX_PEERS = 32
"""Engines that are asked about: the next ones in the order of the random ids. A pool of 10,000 in which all fail must
not read itself 10,000 times."""
_MAX_PAGES = 16
"""Pages that are read to find them, at most: one for each further pool that is skipped."""
_LAST = "\x7f"
"""The character after all those that keys of engines have."""


@dataclass(frozen=True)
class FetchEvidence:
    """What an engine knows about others. ``ahead`` of ``peers`` serving engines have a newer version than it;
    ``nodes``: whether a checkpoint node is registered."""

    peers: int
    ahead: int
    nodes: bool

    @property
    def blames_engine(self) -> bool:
        """Whether the engine is at fault, and not the checkpoint service."""
        return self.nodes and self.ahead > 0 and 2 * self.ahead >= self.peers


class FetchFailures:
    """Counts the failures of one engine to fetch or load a version, one after the other. The time is passed in."""

    def __init__(self, limit_s: float, *, min_failures: int) -> None:
        """Overdue is an engine that failed at least ``min_failures`` times over ``limit_s`` seconds or more."""
        self._limit_s, self._min_failures = limit_s, min_failures
        self._since: float | None = None
        self.count = 0

    def failed(self, now: float) -> None:
        self.count += 1
        if self._since is None:
            self._since = now

    def excused(self) -> None:
        """A failure that says nothing about the engine, such as of etcd: the time that counts starts again."""
        self._since = None

    def succeeded(self) -> None:
        self.count, self._since = 0, None

    def lasted_s(self, now: float) -> float:
        """Seconds since the first of the failures that count; 0 without one."""
        return 0.0 if self._since is None else now - self._since

    def overdue(self, now: float) -> bool:
        """Whether the limit is reached; then the evidence decides."""
        return self.count >= self._min_failures and self.lasted_s(now) >= self._limit_s


def evidence(own: Engine, others: Sequence[Engine], *, nodes: bool) -> FetchEvidence:
    """``others``: engines of any pool and state, ``own`` included or not."""
    peers = [e for e in others if e.id != own.id and e.pool == own.pool and e.state is EngineState.READY]
    return FetchEvidence(len(peers), sum(e.version > own.version for e in peers), nodes)


def read_evidence(etcd: EtcdClient, keys: Keys, own: Engine) -> FetchEvidence:
    """Reads a bounded number of records. Raises EtcdUnavailable and Compacted."""
    found = _some_of_pool(etcd, keys, own.pool, own.id)
    nodes = bool(etcd.page(keys.dcs_nodes_prefix(), limit=1).kvs)
    return evidence(own, found, nodes=nodes)


def others_serve(etcd: EtcdClient, keys: Keys, pool: str, engine_id: str) -> bool:
    """Whether one of some other engines of the pool serves. Raises EtcdUnavailable."""
    return any(e.id != engine_id and e.state is EngineState.READY for e in _some_of_pool(etcd, keys, pool, engine_id))


def _some_of_pool(etcd: EtcdClient, keys: Keys, pool: str, engine_id: str) -> list[Engine]:
    """Up to ``_MAX_PEERS`` engines of the pool: those after this one, and then the first ones."""
    key = keys.engine(engine_id)
    found = _of_pool(etcd, keys, pool, _MAX_PEERS, after=key)
    return [*found, *_of_pool(etcd, keys, pool, _MAX_PEERS - len(found), before=key)]


def _of_pool(etcd: EtcdClient, keys: Keys, pool: str, most: int, *, after: str = "", before: str = "") -> list[Engine]:
    """The first engines of the pool between two keys. Those of pools whose names begin with its name and a hyphen are
    under the same prefix, and may be many: once one is met, all of its pool are skipped."""
    prefix, found = keys.engines_of_pool(pool), list[Engine]()
    for _ in range(_MAX_PAGES):
        if (limit := most - len(found)) <= 0:
            break
        kvs = etcd.page(prefix, limit=limit, after=after, before=before).kvs
        for engine, kv in readable(kvs, Engine):
            other = keys.engines_of_pool(engine.pool)
            if engine.pool == pool:
                found.append(engine)
            elif other.startswith(prefix) and kv.key.startswith(other):
                after = other + _LAST
                break
        else:
            if len(kvs) < limit:
                break
            after = kvs[-1].key
    return found
