"""What the actor knows of the engine pool: read from etcd, so that it holds after any restart of the actor."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.errors import DeadlineExceeded
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.runtime import wait_until

ROLLOUT_POOL = "rollout"


def engines(etcd: EtcdClient, keys: Keys) -> list[Engine]:
    items, _ = etcd.range(keys.engines_prefix())
    return [Engine.decode(kv.value) for kv in items]


def in_sync(found: list[Engine], version: int) -> bool:
    """Whether every routable engine serves ``version`` or newer, and there is one.

    An engine that is still starting does not hold the step up: it becomes routable only at the head.
    """
    ready = [e for e in found if e.state is EngineState.READY]
    updating = [e for e in found if e.state is EngineState.SYNCING and e.version > 0]
    return bool(ready) and not updating and all(e.version >= version and not e.applying for e in ready)


def wait_in_sync(etcd: EtcdClient, keys: Keys, version: int, *, timeout_s: float,
                 sign: Callable[[], None] = lambda: None) -> list[Engine]:
    """Waits until the pool serves ``version``; returns its engines. Calls ``sign`` at each look.

    Should an engine lag for ``timeout_s`` while others are ready, raises DeadlineExceeded naming the laggards.
    """
    found: list[Engine] = []

    def ready() -> bool:
        sign()
        found[:] = engines(etcd, keys)
        return in_sync(found, version)

    try:
        wait_until(ready, timeout_s=timeout_s, what=f"a rollout pool that serves version {version}", poll_s=0.01)
    except DeadlineExceeded as e:
        seen = ", ".join(f"{x.id} {x.state} v{x.version}" for x in found) or "no engine at all"
        raise DeadlineExceeded(f"{e.message}: {seen}", hint="see `elastic-rl engines` and the engines' logs") from e
    return found
