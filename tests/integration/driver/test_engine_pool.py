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
from support.tiers import full
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.pool_removal import remove_pools_except
from elastic_rl.errors import Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine, PoolSpec, PoolStatus
from elastic_rl.etcd.run_context import RunContext

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

        wait_until(passed, what=what, poll_s=0.1)

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
    wait_until(lambda: placement_group_table(taken)["state"] == "CREATED", what="the room")
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


@full(proved_in="tests/unit/driver/test_driver_plan.py", why="the rule with real actors of Ray")
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


@full(proved_in="tests/unit/driver/test_driver_plan.py", why="the rule with real actors of Ray")
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
    two.pool._cfg = two.ctx.config.engine.model_copy(update={"start_timeout_s": 8.0})
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


def test_nothing_is_left_of_a_pool_that_the_settings_have_no_more(etcd: EtcdClient, keys: Keys) -> None:
    epoch = fencing.raise_epoch(etcd, keys, holder="test").number
    for name in ("judge", "judge-2"):  # one's engines have ids that begin with the name of the other one
        etcd.put(keys.pool_spec(name), PoolSpec(name=name, desired=2).encode())
        etcd.put(keys.pool_status(name), PoolStatus(name=name, ready=1, starting=0, draining=0).encode())
        etcd.put(keys.engine(f"{name}-a1"), Engine(id=f"{name}-a1", pool=name, state=EngineState.READY,
                                                   epoch=epoch - 1).encode())
        etcd.put(keys.external_engine(f"http://{name}:1"), ExternalEngine(
            engine=f"{name}-external-1", pool=name, url=f"http://{name}:1", by="me", at=1.0).encode())
    remove_pools_except(etcd, keys, epoch, {"rollout", "judge-2"})
    left = [kv.key for prefix in (keys.pools_prefix(), keys.engines_prefix(), keys.external_engines_prefix())
            for kv in etcd.range(prefix)[0]]
    assert sorted(left) == sorted([keys.pool_spec("judge-2"), keys.pool_status("judge-2"), keys.engine("judge-2-a1"),
                                   keys.external_engine("http://judge-2:1")])
    assert [e.subject for e in events.recent(etcd, keys) if e.kind == "pool.removed"] == ["judge"]
    with pytest.raises(Fenced):
        remove_pools_except(etcd, keys, epoch - 1, {"rollout"})
    assert etcd.get(keys.pool_spec("judge-2")) is not None
