"""State of the pool that serves the policy, as the actor reads it from etcd."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import Engine, EngineState

_NAMED = 8
"""Engines that a text names."""


class PoolWatch:
    """The engines of the pool, of which etcd sends those that change: with 10,000 engines a look that read all records
    would take seconds. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._records = Mirror(etcd, keys.engines_of_pool(ROLLOUT_POOL), lambda kv: readable_one(kv, Engine))

    def engines(self, timeout_s: float) -> list[Engine]:
        """The pool's engines, as soon as one has changed since the last call, and after ``timeout_s`` at the latest.
        Raises EtcdUnavailable while etcd is away."""
        return [engine for engine in self._records.read_current(timeout_s).values() if engine.pool == ROLLOUT_POOL]

    def close(self) -> None:
        self._records.close()


def unserved(etcd: EtcdClient, keys: Keys) -> list[Engine] | None:
    """The engines of the pool while none of them is routable; else None. Reads no further than to the first page with
    one that is."""
    found: list[Engine] = []
    for page in etcd.pages(keys.engines_of_pool(ROLLOUT_POOL)):
        found += [engine for engine, _ in readable(page.kvs, Engine) if engine.pool == ROLLOUT_POOL]
        if any(e.state is EngineState.READY for e in found):
            return None
    return found


def in_sync(found: list[Engine], version: int) -> bool:
    """Whether there is a routable engine, and every routable engine serves ``version`` or newer.

    An engine that is still starting does not count: it becomes routable only at the head. Nor does one that is out of
    the router since it is behind (``coordinator.stragglers``): it comes back by itself. One that shares devices with
    the trainer counts as soon as its server is up: in each phase all of them load the version at the same time, and
    with the first one alone a whole step's requests would go to it.
    """
    ready = [e for e in found if e.state is EngineState.READY]
    updating = [e for e in found if e.state is EngineState.RELEASED
                or (e.state is EngineState.SYNCING and (e.version > 0 or e.holds_device) and not e.is_behind)]
    return bool(ready) and not updating and all(e.version >= version and not e.applying for e in ready)


def serves(found: list[Engine], version: int) -> bool:
    """Whether there is a routable engine, and no request can reach one that serves an older version. Others may take
    new weights meanwhile: what generates beside the steps need not wait for them."""
    ready = [e for e in found if e.state is EngineState.READY]
    return bool(ready) and all(e.version >= version for e in ready)


def living(found: Sequence[Engine]) -> int:
    """How many engines serve, or will once they have a version."""
    return sum(e.state in (EngineState.READY, EngineState.SYNCING) for e in found)


def behind(found: list[Engine], version: int) -> list[Engine]:
    """Engines that run and lack the version: they should be fetching it."""
    return [e for e in found if e.state in (EngineState.READY, EngineState.SYNCING) and e.version < version]


def describe(found: list[Engine], version: int) -> str:
    """What a run that needs ``version`` waits for, for people: the engines that lack it, a few of them by name."""
    lacking = [e for e in found if e.state is not EngineState.READY or e.version < version or e.applying]
    named = ", ".join(f"{e.id} {'behind' if e.is_behind else e.state} v{e.version}"
                      + (f" applying v{e.applying}" if e.applying else "") for e in lacking[:_NAMED])
    more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    return f"engines that serve version {version}: {named or 'there is none'}{more}"
