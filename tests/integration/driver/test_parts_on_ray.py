"""Parts that the driver places on Ray: pools of engines, trainer groups, and both on the same GPUs. Ray and etcd are
real; engines have no servers, Ray counts GPUs that are not there, and nothing computes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from support.etcd_server import EtcdServers
from support.ray_cluster import HERE, start_ray
from support.stub_actors import (
    FAIL,
    HungTrainer,
    KilledTrainer,
    LingeringEngine,
    RefusedEngine,
    StubEngine,
    StubTrainer,
)
from support.tiers import full
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.config.groups import ACTOR
from elastic_rl.driver.external_engines import ExternalEngines
from elastic_rl.driver.hosts_of_ray import HostNode, RayHosts
from elastic_rl.driver.placement import stop_all, told_to_stop
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.pool_removal import remove_pools_except
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.driver.trainer_group import GroupState, TrainerGroup, TrainerHost
from elastic_rl.errors import Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine, PoolSpec, PoolStatus, RestartRequest
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK

pytestmark = pytest.mark.usefixtures("on_ray")
POOL = "rollout"
CPUS, GPUS, RANKS = 5, 4, 2
ONE_CPU_EACH = {"engine": {"cpus": 1}, "trainer": {"cpus_per_rank": 1}}


@pytest.fixture(scope="module")
def on_ray() -> Iterator[None]:
    """Ray for all tests of this file, with few enough CPUs that a test can fill it."""
    with pytest.MonkeyPatch.context() as patch:  # for the workers, which import the tests' actors
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        start_ray(CPUS, GPUS)
    yield
    ray.shutdown()


# -- pools of engines --------------------------------------------------------------------------------------------------
class PoolOfTwo:
    """A pool that wants two engines, and its records."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient) -> None:
        self.ctx, self.etcd, self.keys = ctx, etcd, ctx.keys
        self.unrouted: list[str] = []
        self.hosts = RayHosts()
        self.next_driver()

    def next_driver(self, body: type = StubEngine) -> EnginePool | None:
        """Begins the pool of the next driver, and returns that of the one before it."""
        before = getattr(self, "pool", None)
        self.ctx = self.ctx.model_copy(update={
            "generation": fencing.begin_driver(self.etcd, self.keys, self.ctx.epoch, "test")})
        self.pool = EnginePool(self.ctx, self.etcd, body=body, unroute=self.unrouted.append)
        self.pool.take_over()
        return before

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
            self.pool.reconcile({}, self.hosts)
            return check()

        wait_until(passed, what=what, poll_s=0.1)

    def until_ready(self, count: int, *, without: frozenset[str] = frozenset()) -> dict[str, int]:
        self.until(lambda: len(self.ready()) == count and not self.ready().keys() & without and
                   self.status().ready == count, f"{count} ready engines")
        return self.ready()

    def until_ended(self, engine_id: str) -> None:
        """Waits, without a pass, until Ray knows that the engine's actor has ended."""
        wait_until(lambda: engine_id not in str(ray.util.list_named_actors()), what="the end of the actor", poll_s=0.1)

    def events(self, kind: str) -> int:
        return sum(e.kind == kind for e in events.recent(self.etcd, self.keys))


@pytest.fixture
def two(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[PoolOfTwo]:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"},
                        "rollout": {"engines": 2}, **ONE_CPU_EACH})
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                     epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK)
    JobPaths.of(cfg).private.mkdir(parents=True)
    made = PoolOfTwo(ctx, etcd)
    yield made
    made.pool.close()


@pytest.fixture
def full_cluster() -> Iterator[PlacementGroup]:
    """Takes all but two of the cluster's CPUs until it is removed."""
    taken = placement_group([{"CPU": CPUS - 2}])
    wait_until(lambda: placement_group_table(taken)["state"] == "CREATED", what="the room")
    yield taken
    remove_placement_group(taken)


def test_engines_that_die_at_the_same_time_are_all_replaced(two: PoolOfTwo) -> None:
    before = two.until_ready(2)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    after = two.until_ready(2, without=frozenset(before))
    assert len(after) == 2 and two.events("engine.replaced") == 2


def test_engines_of_a_host_whose_time_is_over_are_told_so(two: PoolOfTwo, tmp_path: Path) -> None:
    two.next_driver(LingeringEngine)
    engines = two.until_ready(2)
    two.hosts = overdue(HERE)
    two.until(lambda: all((tmp_path / engine_id).exists() for engine_id in engines), "the word to both")


def overdue(host: str) -> RayHosts:
    """The hosts when the time is over in which the only one was to be emptied."""
    node = ray.get_runtime_context().get_node_id()
    return RayHosts(closed=frozenset({host}), drains={host: 1.0}, leaving={node: host}, overdue=frozenset({host}))


def test_engine_without_room_is_pending_until_there_is_room(two: PoolOfTwo, full_cluster: PlacementGroup) -> None:
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


def test_engines_are_placed_on_hosts_with_the_labels_of_their_pool_alone(two: PoolOfTwo) -> None:
    two.pool.close()
    rollout = two.ctx.config.rollout.model_copy(update={"host_selector": {"zone": "a"}})
    two.ctx = two.ctx.model_copy(update={"config": two.ctx.config.model_copy(update={"rollout": rollout})})
    two.next_driver()
    labels = {HERE: {"zone": "b"}, "elsewhere": {"zone": "a"}}
    two.hosts = RayHosts(open=frozenset({HERE}), closed=frozenset({"elsewhere"}), labels=labels)
    two.until(lambda: two.status().pending == 2, "what the pool lacks")
    assert two.status().message == "hosts with zone=a are cordoned, drained or lost: elsewhere" and not two.pool._slots

    two.hosts = RayHosts(open=frozenset({HERE, "elsewhere"}), labels=labels)
    two.until(lambda: "no room on hosts with zone=a" in two.status().message, "engines that would have room here alone")
    assert not two.ready()
    two.hosts = RayHosts(open=two.hosts.open, labels={**labels, HERE: {"zone": "a"}})
    two.until_ready(2)


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
    fail = JobPaths.of(two.ctx.config).private / FAIL
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
    two.pool._body, mute = StubEngine, set(two.pool._slots)
    two.until(lambda: not mute & two.pool._slots.keys(), "the end of the other one")
    two.pool._cfg = two.ctx.config.engine  # on a busy machine an engine that does report may take longer than 8 s
    two.until_ready(2)


def test_stale_driver_starts_and_replaces_nothing(two: PoolOfTwo, etcd: EtcdClient, keys: Keys) -> None:
    before = two.until_ready(2)
    fencing.raise_epoch(etcd, keys, holder="a newer driver")
    os.kill(next(iter(before.values())), signal.SIGKILL)
    with pytest.raises(Fenced):
        two.until(lambda: False, "being fenced off")
    assert ray.is_initialized()


def test_next_driver_of_the_epoch_adopts_the_engines_and_the_older_one_changes_nothing(two: PoolOfTwo) -> None:
    before = two.until_ready(2)
    groups = {group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"}
    old = two.next_driver()
    assert two.until_ready(2) == before and two.events("engine.starting") == 2
    assert groups == {group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"}

    # The older driver runs on for a while: its writes, its kills and its calls of parts are refused.
    [engine_id, *_] = before
    slot = old._slots[engine_id]
    for stale in (lambda: old.reconcile({}), slot.placed.kill,
                  lambda: old._placer.place("engines/rollout", "one-more", StubEngine, cpus=1.0, gpus=0)):
        with pytest.raises(Fenced):
            stale()
    with pytest.raises(Fenced):
        ray.get(slot.placed.call("drain"))
    assert "one-more" not in str(ray.util.list_named_actors())
    two.until(lambda: True, "one more pass")
    assert two.ready() == before

    # The newer one drains and replaces them as its own.
    two.scale(1)
    left = two.until_ready(1)
    os.kill(next(iter(left.values())), signal.SIGKILL)
    two.until_ready(1, without=frozenset(before))


def test_engine_that_ends_while_no_driver_runs_is_replaced_by_the_next_one(two: PoolOfTwo) -> None:
    before = two.until_ready(2)
    victim, kept = sorted(before)
    record = Engine.decode(two.etcd.get(two.keys.engine(victim)).value)
    two.etcd.put(two.keys.engine(victim), record.replace(url="http://a:1").encode())
    os.kill(before[victim], signal.SIGKILL)
    two.until_ended(victim)
    two.next_driver()
    two.pool._placer.remove_unused_groups()
    after = two.until_ready(2, without=frozenset({victim}))
    assert after[kept] == before[kept] and two.unrouted == ["http://a:1"]
    assert two.events("engine.replaced") == 1
    rooms = [group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert not [name for name in rooms if victim in name], "its placement group is gone too"


def test_nothing_is_left_of_a_pool_that_the_settings_have_no_more(etcd: EtcdClient, keys: Keys) -> None:
    epoch = fencing.raise_epoch(etcd, keys, holder="test").number
    stale, writer = (FencedWriter.of_driver(etcd, keys, number, 0) for number in (epoch - 1, epoch))
    for name in ("judge", "judge-2"):  # one's engines have ids that begin with the name of the other one
        etcd.put(keys.pool_spec(name), PoolSpec(name=name, desired=2).encode())
        etcd.put(keys.pool_status(name), PoolStatus(name=name, ready=1, starting=0, draining=0).encode())
        etcd.put(keys.engine(f"{name}-a1"), Engine(id=f"{name}-a1", pool=name, state=EngineState.READY,
                                                   epoch=epoch - 1).encode())
        etcd.put(keys.external_engine(f"http://{name}:1"), ExternalEngine(
            engine=f"{name}-external-1", pool=name, url=f"http://{name}:1", by="me", at=1.0).encode())
    remove_pools_except(etcd, keys, writer, {"rollout", "judge-2"})
    left = [kv.key for prefix in (keys.pools_prefix(), keys.engines_prefix(), keys.external_engines_prefix())
            for kv in etcd.range(prefix)[0]]
    assert sorted(left) == sorted([keys.pool_spec("judge-2"), keys.pool_status("judge-2"), keys.engine("judge-2-a1"),
                                   keys.external_engine("http://judge-2:1")])
    assert [e.subject for e in events.recent(etcd, keys) if e.kind == "pool.removed"] == ["judge"]
    with pytest.raises(Fenced):
        remove_pools_except(etcd, keys, stale, {"rollout"})
    assert etcd.get(keys.pool_spec("judge-2")) is not None


# -- external engines --------------------------------------------------------------------------------------------------
class ExternalOnes:
    """The drivers of one job, one after the other, and the servers that are registered with it."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient) -> None:
        self.ctx, self.etcd, self.keys = ctx, etcd, ctx.keys
        self.unrouted: list[str] = []
        self.hosts = RayHosts()
        self.driver = self._driver()

    def _driver(self, body: type = StubEngine) -> ExternalEngines:
        return ExternalEngines(self.ctx, self.etcd, POOL, unroute=self.unrouted.append, body=body)

    def begin_epoch(self, body: type = StubEngine) -> None:
        """Ends the driver as its own end does, and begins with the next one."""
        self.close()
        self.ctx = self.ctx.model_copy(update={"epoch": fencing.raise_epoch(self.etcd, self.keys, "test").number})
        self.driver = self._driver(body)

    def begin_driver(self) -> None:
        self.ctx = self.ctx.model_copy(update={
            "generation": fencing.begin_driver(self.etcd, self.keys, self.ctx.epoch, "test")})
        self.driver = self._driver()
        assert list(self.driver.take_over(self.records())) == ["x0"]

    def register(self, engine: str, url: str, host: str = "") -> None:
        self.etcd.put(self.keys.external_engine(url),
                      ExternalEngine(engine=engine, pool=POOL, url=url, host=host).encode())

    def registration(self, url: str) -> ExternalEngine:
        return ExternalEngine.decode(self.etcd.get(self.keys.external_engine(url)).value)

    def records(self) -> dict[str, Engine]:
        return {e.id: e for e, _ in readable(self.etcd.range(self.keys.engines_prefix())[0], Engine)}

    def until(self, check: Callable[[int], object], what: str) -> Any:
        """Passes until ``check`` of the number of ready engines."""
        return wait_until(lambda: check(self.driver.reconcile({}, self.records(), self.hosts)), what=what, poll_s=0.1)

    def until_ended(self, url: str) -> str:
        """Why the registration has ended, once it has."""
        def reason(_: int) -> str:
            return self.registration(url).ended

        return str(self.until(reason, f"the end of the engine at {url}"))

    def kinds(self, engine: str) -> list[str]:
        return [e.kind for e in events.recent(self.etcd, self.keys) if e.subject == engine]

    def close(self) -> None:
        stop_all(self.driver.placed, timeout_s=10.0)
        self.driver.forget()


@pytest.fixture
def external(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[ExternalOnes]:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"}, **ONE_CPU_EACH})
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                     epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK)
    JobPaths.of(cfg).private.mkdir(parents=True)
    with contextlib.closing(ExternalOnes(ctx, etcd)) as made:
        yield made


def test_external_engine_is_served_by_one_driver_after_the_other_until_it_ends(external: ExternalOnes) -> None:
    external.register("x0", "http://a:1")
    external.until(lambda ready: ready == 1, "an engine")
    external.begin_epoch()
    external.until(lambda ready: ready == 1, "the engine of the next driver")
    assert external.records()["x0"].epoch == external.ctx.epoch

    # The next driver of the same epoch adopts its runner.
    incarnation = external.records()["x0"].incarnation
    external.begin_driver()
    external.until(lambda ready: ready == 1, "the engine of the driver that has taken over")
    assert external.records()["x0"].incarnation == incarnation and external.kinds("x0").count("engine.starting") == 2

    # Its runner is killed: the server is unrouted, and the driver does not serve it again.
    record = external.records()["x0"]
    external.driver._served["x0"].placed.kill()
    assert external.until_ended("http://a:1") and external.unrouted == ["http://a:1"]
    assert external.records() == {} and not external.driver.placed
    assert external.kinds("x0")[-2:] == ["engine.dead", "engine.removed"]
    [death] = [e for e in events.recent(external.etcd, external.keys) if e.kind == "engine.dead"]
    assert death.data["incarnation"] == record.incarnation

    # Deregistered, it is drained.
    external.register("x1", "http://a:1")
    external.until(lambda ready: ready == 1, "the engine that was registered again")
    external.etcd.delete(external.keys.external_engine("http://a:1"))
    external.until(lambda _: not external.driver.placed, "the end of the drain")
    assert external.records() == {} and external.kinds("x1") == ["engine.starting"], "its end is no event of the driver"

    # One that cannot be used is refused, and that is no death.
    external.begin_epoch(RefusedEngine)
    external.register("x2", "http://b:1")
    assert external.until_ended("http://b:1") == "its server cannot be used"
    assert external.kinds("x2") == ["engine.starting", "engine.removed"] and external.records() == {}


def test_external_engine_stays_on_its_host_and_leaves_with_it(external: ExternalOnes) -> None:
    """The host of the run is the only node of this Ray."""
    here = external.driver.run_host
    external.register("x0", "http://a:1")
    external.until(lambda ready: ready == 1, "an engine on the host of the run")
    assert external.registration("http://a:1").host == here

    # It goes on while nothing more is placed there; what is not begun waits. When the host is emptied, both leave.
    external.hosts = RayHosts(closed=frozenset({here}))
    external.register("x1", "http://a:2")
    external.until(lambda ready: ready == 1 and "cordoned" in external.registration("http://a:2").waits_for, "the wait")
    assert "x1" in external.driver.waiting and "x0" not in external.driver.waiting
    external.hosts = RayHosts(closed=frozenset({here}), drains={here: 1.0})
    assert external.until_ended("http://a:1") == external.until_ended("http://a:2") == f"its host {here} is drained"
    assert external.records() == {} and external.driver.waiting == ""
    assert external.kinds("x0") == ["engine.starting", "engine.removed"] and external.kinds("x1") == ["engine.removed"]

    # Its host is lost while it is served, and the next driver is elsewhere.
    external.hosts = RayHosts()
    external.register("x2", "http://a:1")
    external.until(lambda ready: ready == 1, "the engine that was registered again")
    external.hosts = RayHosts(closed=frozenset({here}), lost=frozenset({here}))
    assert "is lost" in external.until_ended("http://a:1")
    assert external.kinds("x2") == ["engine.starting", "engine.dead", "engine.removed"] and external.records() == {}
    external.hosts = RayHosts()
    external.register("x3", "http://a:1")
    external.until(lambda ready: ready == 1, "the engine that was registered once more")
    external.begin_epoch()
    external.driver.run_host, external.hosts = "elsewhere", RayHosts(lost=frozenset({here}))
    assert "is lost" in external.until_ended("http://a:1") and not external.driver.placed

    # One on another host waits until that has joined, and then for room on it.
    url = "https://10.0.0.2:1"
    external.register("x4", url, host="b")
    external.until(lambda _: "not joined" in external.registration(url).waits_for, "the wait for the host")
    external.hosts = RayHosts(open=frozenset("b"), nodes={"b": HostNode("node-b", "10.0.0.2")})
    external.until(lambda _: "no room" in external.registration(url).waits_for, "the wait for room")
    external.hosts = replace(external.hosts, drains={"b": 1.0})
    assert "b is drained" in external.until_ended(url) and not external.driver.placed


def test_external_engine_of_a_host_whose_time_is_over_is_told_so(external: ExternalOnes, tmp_path: Path) -> None:
    external.begin_epoch(LingeringEngine)
    external.register("x0", "http://a:1")
    external.until(lambda ready: ready == 1, "an engine on the host of the run")
    here = external.registration("http://a:1").host
    external.hosts = overdue(here)
    assert external.until_ended("http://a:1") == f"its host {here} is drained"
    assert (tmp_path / "x0").exists()


def test_replaced_driver_deregisters_no_external_engine_that_the_newer_one_serves(external: ExternalOnes) -> None:
    external.register("x0", "http://a:1")
    fencing.begin_driver(external.etcd, external.keys, external.ctx.epoch, "newer")
    with Membership(external.etcd, external.keys, "engine", "x0", ttl_s=30, epoch=external.ctx.epoch).start():
        with pytest.raises(Fenced):
            external.driver.reconcile({}, {}, RayHosts())
        assert members(external.etcd, external.keys, "engine")


# -- trainer groups ----------------------------------------------------------------------------------------------------
MakeGroup = Callable[[type], TrainerGroup]


@pytest.fixture
def make_group(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[MakeGroup]:
    made: list[TrainerGroup] = []

    def make(body: type) -> TrainerGroup:
        cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"}, **ONE_CPU_EACH})
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job,
                         model_dir=str(tmp_path / "none"), host=LOOPBACK,
                         epoch=fencing.raise_epoch(etcd, keys, holder="test").number)
        made.append(TrainerGroup(ctx, etcd, body))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.fixture
def group(make_group: MakeGroup) -> TrainerGroup:
    """A trainer group whose agent cannot start: its context names no model."""
    return make_group(TrainerHost)


def reports(etcd: EtcdClient, keys: Keys) -> list[str]:
    return [e.message for e in events.recent(etcd, keys) if e.kind == "trainer.agent_ended"]


def until(group: TrainerGroup, check: Callable[[], object], what: str, request: RestartRequest | None = None) -> None:
    wait_until(lambda: group.reconcile(request) or check(), what=what, poll_s=0.1)


def starts(group: TrainerGroup) -> list[str]:
    notes = Path(group.ctx.config.run_dir) / "trainers"
    return notes.read_text().split() if notes.exists() else []


def request_restart(etcd: EtcdClient, keys: Keys) -> RestartRequest:
    request = RestartRequest(target=ACTOR.name, generation=1, reason="a rank hangs")
    etcd.put(keys.restart(ACTOR.name), request.encode())
    return request


def test_agent_that_ends_is_reported_and_started_again_without_end(group: TrainerGroup, etcd: EtcdClient, keys: Keys
                                                                   ) -> None:
    until(group, lambda: len(reports(etcd, keys)) == 2, "two ends of the agent")
    assert all("exit code 2" in message for message in reports(etcd, keys))
    assert "after 2 that failed" in group.waiting


@full(proved_in="tests/integration/driver/test_trainer_group_passes.py", why="an actor of Ray that is killed")
def test_temporary_files_of_a_killed_agent_are_removed(make_group: MakeGroup) -> None:
    group = make_group(KilledTrainer)
    until(group, lambda: len(starts(group)) == 2, "the next group")
    assert not Path(starts(group)[0]).exists()


def test_end_of_the_agent_after_a_global_restart_is_not_reported(group: TrainerGroup, etcd: EtcdClient, keys: Keys
                                                                 ) -> None:
    """The agent ends because the epoch is over; `trainer.dead` would be an alert about a restart on purpose."""
    group.reconcile()
    fencing.raise_epoch(etcd, keys, holder="global restart")
    with pytest.raises(Fenced):
        until(group, lambda: False, "the end of the agent")
    assert all(placed.has_ended() for placed in group._placed.values()), "the end of the agent was not seen"
    assert reports(etcd, keys) == []


def test_closed_group_deregisters_ranks_that_its_agent_has_left_registered(make_group: MakeGroup, etcd: EtcdClient,
                                                                           keys: Keys) -> None:
    """An agent that hangs is killed, and cannot deregister its ranks itself; their end would count as a death."""
    group = make_group(StubTrainer)
    group.reconcile()
    rank = Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start()
    rank._stopping.set()  # as a killed process: no heartbeat any longer, and not deregistered
    other = Membership(etcd, keys, "trainer", "rank-1", ttl_s=30, epoch=group.ctx.epoch + 1).start()
    group.close()
    assert [m.id for m in members(etcd, keys, "trainer")] == ["rank-1"], "of a newer epoch"
    other.close()


@full(proved_in="tests/integration/driver/test_trainer_group_passes.py tests/unit/driver/test_placed_actor.py "
                "tests/integration/coordinator/test_leader_decides.py", why="an actor of Ray that hangs")
def test_requested_restart_of_a_hung_group_is_carried_out_by_later_passes(make_group: MakeGroup, etcd: EtcdClient,
                                                                          keys: Keys) -> None:
    """No pass waits for it: the pass that asks it to stop returns while it still runs."""
    group = make_group(HungTrainer)
    until(group, lambda: starts(group), "the group")
    rank = Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start()
    rank._stopping.set()
    request = request_restart(etcd, keys)
    group.reconcile(request)
    assert group.state is GroupState.STOPPING and open_requests(etcd, keys), "it has not ended yet"
    until(group, lambda: len(starts(group)) == 2, "the next group", request)
    assert not open_requests(etcd, keys)
    assert members(etcd, keys, "trainer") == [], "its end must not count as a death"
    assert reports(etcd, keys) == []


def test_next_driver_adopts_the_agent_and_restarts_one_that_ended_meanwhile(make_group: MakeGroup, etcd: EtcdClient,
                                                                           keys: Keys) -> None:
    first = make_group(StubTrainer)
    until(first, lambda: starts(first), "the group")

    def next_group() -> TrainerGroup:
        ctx = first.ctx.model_copy(update={
            "generation": fencing.begin_driver(etcd, keys, first.ctx.epoch, holder="test")})
        made = TrainerGroup(ctx, etcd, StubTrainer)
        made._placer.remove_unused_groups()
        made.take_over()
        return made

    second = next_group()
    for _ in range(3):
        second.reconcile()
    assert second.state is GroupState.RUNNING and len(starts(first)) == 1
    for stale in (next(iter(first._placed.values())).kill, lambda: [first.reconcile() for _ in range(50)]):
        with pytest.raises(Fenced):
            stale()
    second.reconcile()
    assert second.state is GroupState.RUNNING and len(starts(first)) == 1, "the older driver has ended nothing"
    next(iter(second._placed.values())).kill()
    wait_until(lambda: "trainer-hosts" not in str(ray.util.list_named_actors()), what="the end of the actor")
    third = next_group()
    until(third, lambda: len(starts(first)) == 2, "the next agent")
    placed = [*third._placed.values()]
    assert not told_to_stop(placed)
    placed[0].ask("stop")
    wait_until(lambda: told_to_stop(placed), what="the word of a driver that would take over now")
    third.close()
    first._placed = {}  # which the driver of the first one has no more


@full(proved_in="tests/integration/driver/test_trainer_group_passes.py tests/integration/driver/test_parts_on_ray.py",
      why="Ray's room for a trainer group; by default for a pool")
def test_group_without_room_waits_and_starts_when_there_is_room(make_group: MakeGroup, etcd: EtcdClient, keys: Keys
                                                                ) -> None:
    taken = placement_group([{"CPU": CPUS - 1}])
    assert taken.wait(60)
    group = make_group(StubTrainer)
    until(group, lambda: "no room in the cluster: CPU 2" in group.waiting, "the report")
    assert group.state is GroupState.PLACING and not starts(group)

    # A request to restart it does not wait for the room either.
    request = request_restart(etcd, keys)
    until(group, lambda: not open_requests(etcd, keys), "the acknowledgement", request)

    remove_placement_group(taken)
    until(group, lambda: starts(group), "the group")
    assert group.state is GroupState.RUNNING and group.waiting == ""
    assert reports(etcd, keys) == [], "nothing has failed"


# -- engines on the GPUs of a trainer group ---------------------------------------------------------------------------
class ColocatedPlane:
    """The pool and the trainer group of a job on GPUs, two of each."""

    def __init__(self, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, folder: Path) -> None:
        self.etcd, self.keys, self.folder = etcd, keys, folder
        cfg = config.parse({
            "job": keys.job, "run_dir": str(folder), "placement": "colocated", "device": {"type": "cuda"},
            "rollout": {"engines": 2}, "trainer": {"data_parallel": RANKS},
            "engine": {"request_timeout_s": 0.2, "drain_timeout_s": 0.5, "apply_timeout_s": 0.5,
                       "release_timeout_s": 1.0}})
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                         epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK)
        JobPaths.of(cfg).private.mkdir(parents=True)
        self.shared = SharedGpus.of(ctx, etcd)
        self.pool = EnginePool(ctx, etcd, body=StubEngine, shared=self.shared)
        self.pool.take_over()
        self.trainer = TrainerGroup(ctx, etcd, body=StubTrainer, shared=self.shared)

    def until(self, check: Callable[[], object], what: str) -> None:
        def passed() -> object:
            self.shared.reconcile()
            self.pool.reconcile({})
            self.trainer.reconcile()
            return check()

        wait_until(passed, what=what, poll_s=0.1)

    def engines(self) -> dict[str, Engine]:
        return {e.id: e for e, _ in readable(self.etcd.range(self.keys.engines_prefix())[0], Engine)}

    def ready(self) -> list[str]:
        """The GPUs of each engine."""
        return sorted(e.layout for e in self.engines().values())

    def close(self) -> None:
        self.pool.close()
        self.trainer.close()
        self.shared.close()


@pytest.fixture
def plane(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path
          ) -> Iterator[ColocatedPlane]:
    with contextlib.closing(ColocatedPlane(etcd_servers, etcd, keys, tmp_path)) as made:
        yield made


def test_engines_share_the_gpus_of_the_trainer_and_are_replaced_on_them(plane: ColocatedPlane) -> None:
    """One of them each, and Ray gives them to nobody else."""
    plane.until(lambda: len(plane.ready()) == 2 and (plane.folder / "gpus").exists(), "engines and trainer")
    gpus = (plane.folder / "gpus").read_text().split(",")
    assert len(gpus) == RANKS and plane.ready() == sorted(gpus)
    assert ray.available_resources().get("GPU") == GPUS - RANKS

    # A third one has no GPU to share, and the pool says so.
    plane.etcd.put(plane.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=3).encode())
    plane.until(lambda: "no GPU of the trainer" in plane.pool.waiting, "the reason")
    assert plane.ready() == sorted(gpus)
    plane.etcd.put(plane.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=2).encode())
    plane.until(lambda: plane.pool.waiting == "", "a whole pool")

    # The process that holds the GPUs in Ray dies, and another one holds them.
    [held] = plane.shared._on.values()
    first = held.holder
    assert first is not None
    first.placed.kill()
    plane.until(lambda: held.holder not in (None, first) and
                ray.available_resources().get("GPU") == GPUS - RANKS, "another holder")
    assert plane.ready() == sorted(gpus)

    # An engine keeps its memory in the trainer's phase.
    late = next(iter(plane.engines().values()))
    plane.etcd.put(plane.keys.engine(late.id), late.replace(holds_device=True).encode())
    plane.until(lambda: late.id not in plane.engines() and len(plane.ready()) == 2, "another engine")
    assert plane.ready() == sorted(gpus)
    [event] = [e for e in events.recent(plane.etcd, plane.keys) if e.kind == "engine.replaced"]
    assert "did not release its memory in the trainer's phase" in event.message
    assert PoolStatus.decode(plane.etcd.get(plane.keys.pool_status(POOL)).value).released == 0
