"""Reads what the live view shows of etcd, in a thread of its own: the view never waits for an etcd that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, Event, JobStatus, PoolStatus

_MAX_ENGINES = 20
_MAX_POOLS = 20
EVENTS_SHOWN = 6
_EVENTS_READ = 32
"""The run begins with some at once: each of its checks may warn of something."""
_LAST_READ_S = 2.0
"""Longest wait for the last reading; the view then shows the one before."""


@dataclass(frozen=True)
class ClusterState:
    """The records of etcd that the view shows. While etcd does not answer, they are the last ones that it gave."""

    status: JobStatus | None = None
    engines: tuple[Engine, ...] = ()
    """The first ones by id."""
    engine_count: int = 0
    events: tuple[Event, ...] = ()
    waiting: tuple[str, ...] = ()
    """What pools wait for."""
    error: str = ""
    """Why etcd does not answer; empty while it does."""
    away_s: float = 0.0
    """Seconds for which etcd has not answered."""


def read_cluster(etcd: EtcdClient, keys: Keys) -> ClusterState:
    """Reads the records that the view shows; those that cannot be read are left out. Raises EtcdUnavailable."""
    status = readable_one(etcd.get(keys.job_status()), JobStatus)
    page = etcd.page(keys.engines_prefix(), limit=_MAX_ENGINES)
    newest, _ = etcd.range(keys.events_prefix(), limit=_EVENTS_READ, newest_first=True)
    return ClusterState(status, tuple(engine for engine, _ in readable(page.kvs, Engine)),
                        etcd.count(keys.engines_prefix()) if page.more else len(page.kvs),
                        tuple(event for event, _ in readable(reversed(newest), Event)), _waiting_pools(etcd, keys))


def _waiting_pools(etcd: EtcdClient, keys: Keys) -> tuple[str, ...]:
    found = etcd.page(keys.pools_prefix(), limit=_MAX_POOLS).kvs
    statuses = readable((kv for kv in found if kv.key.endswith("/status")), PoolStatus)
    return tuple(f"pool {pool.name}: {pool.message}" for pool, _ in statuses if pool.message)


class ClusterReader:
    """Reads again and again until it is closed; ``latest`` never waits."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, interval_s: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._keys, self._interval_s, self._clock = etcd, keys, interval_s, clock
        self._state, self._answered_at = ClusterState(), clock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster-reader", daemon=True)
        self._thread.start()

    def latest(self) -> ClusterState:
        """The last reading, with the time since etcd answered."""
        state = self._state
        return replace(state, away_s=max(0.0, self._clock() - self._answered_at)) if state.error else state

    def close(self) -> None:
        """Ends the thread after a last reading, for which it waits only briefly."""
        self._closing.set()
        self._thread.join(_LAST_READ_S)

    def _run(self) -> None:
        while True:
            last = self._closing.is_set()
            try:
                state = read_cluster(self._etcd, self._keys)
                self._state, self._answered_at = state, self._clock()
            except ElasticRLError as e:
                self._state = replace(self._state, error=e.message)
            if last:
                return
            self._closing.wait(self._interval_s)
