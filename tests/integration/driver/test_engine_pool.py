"""The driver's pool of engines on real Ray and etcd: the engines have no servers, all else is real."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from support.etcd_server import EtcdServers
from support.stub_actors import FAIL, StubEngine

from elastic_rl import config
from elastic_rl.driver.pool import EnginePool
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, PoolSpec, PoolStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import wait_until

pytestmark = pytest.mark.usefixtures("on_ray")
POOL = "rollout"


class PoolOfTwo:
    """A pool that wants two engines, and its records."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient) -> None:
        self.ctx, self.etcd, self.keys = ctx, etcd, ctx.keys
        self.pool = EnginePool(ctx, etcd, body=StubEngine)
        self.pool.take_over()

    def scale(self, desired: int) -> None:
        self.etcd.put(self.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=desired).encode())

    def ready(self) -> dict[str, int]:
        """Process id of each ready engine."""
        found = readable(self.etcd.range(self.keys.engines_prefix())[0], Engine)
        return {e.id: e.pid for e, _ in found if e.state is EngineState.READY}

    def status(self) -> PoolStatus:
        return PoolStatus.decode(self.etcd.get(self.keys.pool_status(POOL)).value)

    def until(self, check: Callable[[], object], what: str) -> None:
        def passed() -> object:
            self.pool.reconcile({})
            return check()

        wait_until(passed, timeout_s=120, what=what, poll_s=0.1)

    def until_ready(self, count: int, *, without: frozenset[str] = frozenset()) -> dict[str, int]:
        self.until(lambda: len(self.ready()) == count and not self.ready().keys() & without and
                   self.status().ready == count, f"{count} ready engines")
        return self.ready()

    def events(self, kind: str) -> int:
        return sum(e.kind == kind for e in events.recent(self.etcd, self.keys))


@pytest.fixture
def two(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[PoolOfTwo]:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"},
                        "rollout": {"engines": 2}})
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                     epoch=fencing.raise_epoch(etcd, keys, holder="test").number)
    cfg.cluster_dir.mkdir(parents=True)
    made = PoolOfTwo(ctx, etcd)
    yield made
    made.pool.close()


@pytest.fixture
def full_cluster() -> Iterator[PlacementGroup]:
    """Takes two of the cluster's four CPUs until it is removed."""
    taken = placement_group([{"CPU": 2}])
    wait_until(lambda: placement_group_table(taken)["state"] == "CREATED", timeout_s=60, what="the room")
    yield taken
    remove_placement_group(taken)


def test_engines_that_die_at_the_same_time_are_all_replaced(two: PoolOfTwo) -> None:
    before = two.until_ready(2)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    after = two.until_ready(2, without=frozenset(before))
    assert len(after) == 2 and two.events("engine.replaced") == 2


def test_engine_without_room_is_pending_while_the_pool_works_and_starts_when_there_is_room(
        two: PoolOfTwo, full_cluster: PlacementGroup) -> None:
    two.scale(3)
    two.until(lambda: two.status().pending == 1, "an engine without room")
    two.until_ready(2)
    assert "no room" in two.status().message and "CPU 1" in two.status().message
    assert two.pool.waiting == two.status().message

    # The rest goes on: an engine that dies is replaced by one of the two that want its place.
    victim = next(iter(two.ready()))
    os.kill(two.ready()[victim], signal.SIGKILL)
    two.until_ready(2, without=frozenset({victim}))
    two.until(lambda: two.status().pending == 1, "an engine without room")

    remove_placement_group(full_cluster)
    two.until_ready(3)
    assert (two.status().pending, two.status().message) == (0, "")


def test_engine_without_room_is_cancelled_when_fewer_are_desired(two: PoolOfTwo, full_cluster: PlacementGroup) -> None:
    two.scale(4)
    two.until(lambda: two.status().pending == 2, "engines without room")
    serving = two.until_ready(2)
    two.scale(2)
    two.until(lambda: two.status() == PoolStatus(name=POOL, ready=2, starting=0, draining=0), "a whole pool")
    assert two.ready() == serving, "those that serve are kept"
    assert two.events("engine.cancelled") == 2 and two.events("engine.draining") == 0
    states = [group["state"] for group in placement_group_table().values()]
    assert "PENDING" not in states, "its placement group is removed too"


def test_starts_that_fail_are_repeated_with_backoff_until_one_succeeds(two: PoolOfTwo) -> None:
    fail = two.ctx.config.cluster_dir / FAIL
    fail.touch()
    two.until(lambda: "3 starts failed, the last: RuntimeError: no weights" in two.status().message, "three failures")
    assert two.events("engine.replaced") <= 2 * 3, "two at a time, and none without a wait"
    fail.unlink()
    two.until_ready(2)


def test_engine_that_does_not_report_is_replaced(two: PoolOfTwo) -> None:
    """Its process runs, or seems to, and it never writes its record."""
    class Mute:
        def __init__(self, *args: object) -> None:
            pass

        def run(self) -> None:
            import threading
            threading.Event().wait()

        def stop(self) -> None:
            pass

    two.pool._body = Mute
    two.pool.ctx = two.ctx.model_copy(update={"config": two.ctx.config.model_copy(update={
        "engine": two.ctx.config.engine.model_copy(update={"start_timeout_s": 8.0})})})
    two.until(lambda: "did not report within 8 s" in two.status().message, "the end of one")
    two.pool._body = StubEngine
    two.until_ready(2)


def test_stale_driver_starts_and_replaces_nothing(two: PoolOfTwo, etcd: EtcdClient, keys: Keys) -> None:
    from elastic_rl.errors import Fenced
    before = two.until_ready(2)
    fencing.raise_epoch(etcd, keys, holder="a newer driver")
    os.kill(next(iter(before.values())), signal.SIGKILL)
    with pytest.raises(Fenced):
        two.until(lambda: False, "being fenced off")
    assert ray.is_initialized()
