"""State of the engine pool as the actor reads it from etcd."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.errors import DeadlineExceeded
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.runtime import wait_until

ROLLOUT_POOL = "rollout"


def engines(etcd: EtcdClient, keys: Keys) -> list[Engine]:
    items, _ = etcd.range(keys.engines_prefix())
    return [engine for engine, _ in readable(items, Engine)]


def in_sync(found: list[Engine], version: int) -> bool:
    """Whether there is a routable engine, and every routable engine serves ``version`` or newer.

    An engine that is still starting does not count: it becomes routable only at the head.
    """
    ready = [e for e in found if e.state is EngineState.READY]
    updating = [e for e in found if e.state is EngineState.SYNCING and e.version > 0]
    return bool(ready) and not updating and all(e.version >= version and not e.applying for e in ready)


def wait_in_sync(etcd: EtcdClient, keys: Keys, version: int, *, timeout_s: float,
                 report_progress: Callable[[], None] = lambda: None) -> list[Engine]:
    """Waits until the pool serves ``version``; returns its engines. Calls ``report_progress`` at each poll.

    Raises DeadlineExceeded after ``timeout_s``, which names the engines and their versions.
    """
    found: list[Engine] = []

    def ready() -> bool:
        report_progress()
        found[:] = engines(etcd, keys)
        return in_sync(found, version)

    try:
        wait_until(ready, timeout_s=timeout_s, what=f"a rollout pool that serves version {version}", poll_s=0.01)
    except DeadlineExceeded as e:
        listed = ", ".join(f"{x.id} {x.state} v{x.version}" for x in found) or "no engine"
        raise DeadlineExceeded(f"{e.message}: {listed}", hint="see `elastic-rl engines` and the engines' logs") from e
    return found
