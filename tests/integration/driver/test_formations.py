"""How a trainer group goes from host to host in the passes of the driver, on a real etcd: stand-ins take the place of
its Ray actors."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest
from support.etcd_server import EtcdServers
from support.placed_actors import StandInActor, StandInPlacer, stand_in_for_ray

from elastic_rl import config
from elastic_rl.config.groups import ACTOR, REFERENCE
from elastic_rl.dcs.catalog import reads
from elastic_rl.driver import formation, hosts_of_ray, trainer_group
from elastic_rl.driver.hosts_of_ray import HostNode, RayHosts
from elastic_rl.driver.trainer_group import GroupState, TrainerGroup
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import Formation, RestartRequest
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.local_host import LocalHost
from elastic_rl.net.addresses import LOOPBACK


class Driver:
    """A driver with one trainer group of up to three replicas, one on each host. ``a`` is the driver's own."""

    def __init__(self, etcd: EtcdClient, ctx: RunContext, group: TrainerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.etcd, self.ctx, self.group, self.keys = etcd, ctx, group, ctx.keys
        self.hosts, self.saved = RayHosts(), 0
        monkeypatch.setattr(reads, "head", lambda *_: self if self.saved else None)

    @property
    def number(self) -> int:
        """Number of the newest version of the state."""
        return self.saved

    def have(self, open_: str, *, lost: str = "", drains: str = "", **gpus: int) -> None:
        """``gpus``: free ones, by host, by a reading of now."""
        nodes = {host: HostNode(f"id-{host}", f"10.0.0.{ord(host)}", gpus.get(host, 0)) for host in open_}
        self.hosts = RayHosts(nodes=nodes, open=frozenset(open_), lost=frozenset(lost),
                              drains=dict.fromkeys(drains, 7.0), looked_at=time.monotonic())

    def pass_(self, request: RestartRequest | None = None, *, holds: bool = False) -> None:
        self.group.reconcile(request, self.hosts, holds=holds, changed_at=self.group.changed_at)

    def running(self) -> dict[str, StandInActor]:
        """The newest actor of each host."""
        return dict(self.group._placed)  # type: ignore[arg-type]

    def formation(self) -> tuple[int, dict[str, int]]:
        found = self.etcd.get(self.keys.formation(self.group.name))
        record = readable_one(found, Formation)
        assert found and record
        return found.version, record.ranks()

    def end_all(self) -> None:
        for actor in self.running().values():
            actor.is_over = True


@pytest.fixture
def make_driver(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Any,
                monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(group: Any = ACTOR, **trainer: Any) -> Driver:
        stand_in_for_ray(monkeypatch, trainer_group)
        monkeypatch.setattr(LocalHost, "of", lambda _: type("Own", (), {"name": "a"}))
        monkeypatch.setattr(trainer_group, "fingerprint", lambda _: "digest")
        settings = {"data_parallel": 3, "min_data_parallel": 1, "ranks_per_host": 1, **trainer}
        cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "cluster": "lab", "device": {"type": "cpu"},
                            "trainer": settings, "reference": {"enabled": True}, "algorithm": {"kl_coef": 0.1}})
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                         epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK).of_group(group)
        return Driver(etcd, ctx, TrainerGroup(ctx, etcd), monkeypatch)

    return make


def reformed(driver: Driver) -> list[str]:
    return [e.message for e in events.recent(driver.etcd, driver.keys) if e.kind == f"{driver.group.name}.reformed"]


def failures(driver: Driver) -> list[str]:
    return [e.message for e in events.recent(driver.etcd, driver.keys) if e.kind.endswith("agent_ended")]


def test_loss_of_a_host_ends_the_others_and_the_group_forms_smaller_without_waiting_for_the_lost_actor(
        make_driver: Any) -> None:
    driver = make_driver()
    driver.have("abc")
    driver.pass_()
    first = driver.running()
    assert driver.formation() == (1, {"a": 1, "b": 1, "c": 1}) and driver.group.waiting == ""
    assert {actor.host for actor in first.values()} == {"", "b", "c"}
    assert all(actor.args[1:] == (1, 3, "digest") for actor in first.values())
    assert {actor.args[0].formation for actor in first.values()} == {1}

    driver.have("ab", lost="c")
    driver.pass_()
    assert driver.group.state is GroupState.STOPPING and driver.formation()[0] == 1
    first["a"].is_over = first["b"].is_over = True
    driver.pass_()
    assert driver.formation() == (2, {"a": 1, "b": 1}) and first["c"].is_removed
    context = driver.running()["b"].args[0]
    assert context.config.trainer.ranks == 2 and context.formation == 2
    assert "c is lost" in reformed(driver)[0] and failures(driver) == []
    assert "trains with 2 meanwhile" in driver.group.waiting


def test_ranks_of_an_earlier_formation_publish_nothing(make_driver: Any) -> None:
    driver = make_driver()
    driver.have("ab")
    driver.pass_()
    of = {number: FencedWriter.of_formation(driver.etcd, driver.keys, driver.ctx.epoch, ACTOR.name, number)
          for number in (0, 1, 2)}
    of[1].require()
    driver.have("a", lost="b")
    driver.pass_()
    driver.end_all()
    driver.pass_()
    with pytest.raises(Fenced, match="formation 1"):
        of[1].require()
    of[2].require()
    of[0].require()
    fencing.raise_epoch(driver.etcd, driver.keys, holder="next")
    for writer in of.values():
        with pytest.raises(Fenced):
            writer.require()


def test_group_grows_once_its_state_was_saved_after_there_was_room(make_driver: Any) -> None:
    driver = make_driver()
    driver.saved = 4
    driver.have("ab")
    driver.pass_()
    driver.have("abc")
    for _ in range(3):
        driver.pass_()
        assert driver.group.state is GroupState.RUNNING and driver.formation()[0] == 1
    driver.saved = 5
    driver.pass_()
    assert driver.group.state is GroupState.STOPPING
    driver.end_all()
    driver.pass_()
    assert driver.formation() == (2, {"a": 1, "b": 1, "c": 1})
    assert "there is room for 3 replicas" in reformed(driver)[0] and failures(driver) == []


def test_room_that_goes_again_before_a_save_changes_nothing(make_driver: Any) -> None:
    driver = make_driver()
    driver.saved = 4
    for hosts, saved in (("ab", 4), ("abc", 4), ("ab", 5), ("abc", 5)):
        driver.have(hosts)
        driver.saved = saved
        driver.pass_()
    assert driver.group.state is GroupState.RUNNING, "the save was before the room"


def test_drained_host_loses_its_ranks_at_the_next_save_and_only_where_others_have_room(make_driver: Any) -> None:
    driver = make_driver(min_data_parallel=2, data_parallel=2)
    driver.have("ab")
    driver.pass_()
    driver.have("a", drains="b")
    driver.saved = 1
    for _ in range(3):
        driver.pass_()
    assert driver.group.state is GroupState.RUNNING, "no other host has room for a replica"
    driver.have("ac", drains="b")
    driver.pass_()
    driver.saved = 2
    driver.pass_()
    driver.end_all()
    driver.pass_()
    assert driver.formation() == (2, {"a": 1, "c": 1}) and "b is drained" in reformed(driver)[0]


def test_group_without_a_state_moves_at_once(make_driver: Any) -> None:
    driver = make_driver(REFERENCE)
    driver.have("ab")
    driver.pass_()
    driver.have("a", drains="b")
    driver.pass_()
    assert driver.group.state is GroupState.STOPPING


def test_group_begins_smaller_only_when_no_host_is_missing_and_never_below_its_least_size(make_driver: Any) -> None:
    driver = make_driver(min_data_parallel=2)
    driver.have("ab")
    driver.pass_(holds=True)
    assert driver.running() == {}
    driver.have("a")
    driver.pass_()
    assert driver.running() == {} and "room for 2 ranks" in driver.group.waiting
    driver.have("ab")
    driver.pass_()
    assert driver.formation()[1] == {"a": 1, "b": 1}


def test_agent_that_ends_ends_the_others_and_is_named_with_its_host(make_driver: Any) -> None:
    driver = make_driver()
    driver.have("abc")
    driver.pass_()
    first = driver.running()
    first["b"].is_over, first["b"].result = True, (1, "")
    driver.pass_()
    assert first["a"].stopping and first["c"].stopping and driver.formation()[0] == 1
    first["a"].is_over = first["c"].is_over = True
    driver.pass_()
    [failure] = failures(driver)
    assert "exit code 1 on b" in failure and reformed(driver) == []


def test_host_without_what_the_ranks_need_is_left_out_and_said(make_driver: Any) -> None:
    driver = make_driver(data_parallel=2)
    driver.have("abc")
    driver.pass_()
    driver.running()["b"].result = ("this host lacks the model /m", "")
    driver.end_all()
    driver.pass_()
    driver.group._budget = trainer_group.StartBudget()
    driver.pass_()
    assert driver.formation()[1] == {"a": 1, "c": 1}
    driver.have("ab", lost="c")
    driver.pass_()
    driver.end_all()
    driver.pass_()
    assert driver.formation()[1] == {"a": 1} and "b: this host lacks the model" in driver.group.waiting


def test_host_whose_agent_ends_again_and_again_is_left_out_where_the_others_are_enough(make_driver: Any) -> None:
    driver = make_driver(data_parallel=2)
    driver.have("ab")
    for times in range(1, 4):
        driver.group._budget = trainer_group.StartBudget()
        driver.pass_()
        assert driver.formation() == (times, {"a": 1, "b": 1})
        driver.running()["b"].is_over, driver.running()["b"].result = True, (1, "")
        driver.pass_()
        driver.running()["a"].is_over = True
        driver.pass_()
    driver.group._budget = trainer_group.StartBudget()
    driver.pass_()
    assert driver.formation() == (4, {"a": 1}) and "b: its agent has ended 3 times" in driver.group.waiting
    assert len(failures(driver)) == 3


def test_host_is_left_out_by_the_room_that_its_formation_still_has(
        make_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs: what the formation has is not free in what Ray says."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(trainer_group, "uses_cuda", lambda _: True)
    driver = make_driver(data_parallel=4, min_data_parallel=4, ranks_per_host=None)
    driver.have("ab", a=2, b=2)
    driver.pass_()
    assert driver.formation() == (1, {"a": 2, "b": 2})
    now += hosts_of_ray.SETTLE_S
    driver.have("abc", c=2)
    driver.running()["b"].result = ("this host lacks the model /m", "")
    driver.end_all()
    driver.pass_()
    now += hosts_of_ray.SETTLE_S
    driver.have("abc", a=2, b=2, c=2)
    driver.group._budget = trainer_group.StartBudget()
    driver.pass_()
    assert driver.formation() == (2, {"a": 2, "c": 2})


def test_end_of_an_agent_counts_once_where_ray_refuses_its_removal(make_driver: Any, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    driver = make_driver(data_parallel=2)
    driver.have("ab")
    driver.pass_()
    driver.running()["b"].result = (1, "")
    driver.end_all()
    with monkeypatch.context() as patch:
        def refuse(actor: StandInActor) -> None:
            raise RuntimeError("Ray is away")

        patch.setattr(StandInActor, "remove", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                driver.pass_()
    driver.pass_()
    assert len(failures(driver)) == 1 and driver.group._blamed[1] == 1


def test_formation_of_which_etcd_let_only_a_part_begin_is_removed(make_driver: Any, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    driver = make_driver()
    driver.have("abc")
    place = StandInPlacer.place

    def fails_for_c(self: StandInPlacer, kind: str, name: str, *args: Any, **options: Any) -> StandInActor:
        if name.endswith("/c"):
            raise EtcdUnavailable("away")
        return place(self, kind, name, *args, **options)

    monkeypatch.setattr(StandInPlacer, "place", fails_for_c)
    with pytest.raises(EtcdUnavailable):
        driver.pass_()
    assert driver.group.state is GroupState.ENDED and all(actor.is_removed for actor in StandInActor.made)
    monkeypatch.setattr(StandInPlacer, "place", place)
    driver.pass_()
    assert driver.formation() == (2, {"a": 1, "b": 1, "c": 1})


def test_room_on_gpus_is_what_is_free_and_what_the_group_has_by_a_reading_that_is_newer_than_it(
        make_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(trainer_group, "uses_cuda", lambda _: True)
    driver = make_driver(data_parallel=4, ranks_per_host=None)
    driver.have("ab", a=2, b=1)
    driver.pass_()
    assert driver.formation() == (1, {"a": 2, "b": 1})
    driver.saved = 1
    for _ in range(3):  # the reading is of before
        driver.pass_()
        driver.saved += 1
    assert driver.group.state is GroupState.RUNNING
    now += hosts_of_ray.SETTLE_S
    driver.have("ab", b=1)
    driver.pass_()
    driver.saved += 1
    driver.pass_()
    driver.end_all()
    driver.pass_()
    assert driver.running() == {} and "Ray to say" in driver.group.waiting, "what has ended is not free at once"
    now += hosts_of_ray.SETTLE_S
    driver.have("ab", a=2, b=2)
    driver.pass_()
    assert driver.formation() == (2, {"a": 2, "b": 2})


def test_group_that_fits_nowhere_else_waits_for_the_room_that_others_took(make_driver: Any) -> None:
    driver = make_driver(data_parallel=2, min_data_parallel=2)
    driver.have("ab")
    driver.pass_()
    late = driver.running()["b"]
    late.is_placed = lambda: False  # type: ignore[method-assign]
    late.created_at -= formation.NO_ROOM_S + 1
    for _ in range(3):
        driver.pass_()
    assert driver.group.state is GroupState.PLACING and driver.formation()[0] == 1


def test_next_driver_adopts_a_whole_formation_and_removes_what_is_left_of_one(make_driver: Any,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    driver.have("abc")
    driver.pass_()
    actors: Collection[StandInActor] = driver.running().values()
    old = StandInActor("0/b", 1.0, "b", ())

    def next_group(found: Collection[StandInActor]) -> TrainerGroup:
        monkeypatch.setattr(StandInPlacer, "adopt", lambda *_: [*found])
        made = TrainerGroup(driver.ctx, driver.etcd)
        made.take_over()
        return made

    adopted = next_group([*actors, old])
    assert adopted.state is GroupState.RUNNING and set(adopted._placed) == set("abc") and old.is_removed
    assert not any(actor.is_removed for actor in actors)
    driver.group = next_group([actor for actor in actors if actor.name != "1/b"])
    assert driver.group.state is GroupState.ENDED and sum(actor.is_removed for actor in actors) == 2
    driver.pass_()
    assert driver.formation()[0] == 2

    # The driver was killed while it ended the formation: one of its agents may not react.
    actors = driver.running().values()
    next(iter(actors)).told_before = True
    driver.group = next_group(actors)
    driver.pass_()
    assert driver.group.state is GroupState.STOPPING and all(actor.stopping for actor in actors)
    driver.end_all()
    driver.pass_()
    assert driver.formation()[0] == 3 and failures(driver) == [], "on purpose"


def test_formation_of_another_release_is_left_alone_until_the_epoch_is_over(
        make_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    driver.have("abc")
    driver.pass_()
    actors, key = driver.running().values(), driver.keys.formation(ACTOR.name)
    driver.etcd.put(key, b'{"hosts": {"a": 1}}')
    monkeypatch.setattr(StandInPlacer, "adopt", lambda *_: [*actors])
    driver.group = TrainerGroup(driver.ctx, driver.etcd)
    driver.group.take_over()
    for _ in range(2):
        driver.pass_()
        assert "cannot be read" in driver.group.waiting and "restart the job" in driver.group.waiting
    assert driver.etcd.get(key).version == 2 and not any(actor.is_removed for actor in actors)
    epoch = fencing.raise_epoch(driver.etcd, driver.keys, holder="restart of the job").number
    driver.group = TrainerGroup(driver.ctx.model_copy(update={"epoch": epoch}), driver.etcd)
    monkeypatch.setattr(StandInPlacer, "adopt", lambda *_: [])
    driver.group.take_over()
    driver.pass_()
    assert driver.formation()[0] == 3 and driver.group.state is GroupState.RUNNING


def test_restart_that_was_requested_ends_the_ranks_of_all_hosts(make_driver: Any) -> None:
    driver = make_driver()
    driver.have("abc")
    driver.pass_()
    request = RestartRequest(target=ACTOR.name, generation=1, reason="a rank hangs")
    driver.etcd.put(driver.keys.restart(ACTOR.name), request.encode())
    rank = Membership(driver.etcd, driver.keys, "trainer", "rank-2", ttl_s=30, epoch=driver.ctx.epoch).start()
    rank._stopping.set()
    driver.pass_(request)
    assert driver.group.state is GroupState.STOPPING
    driver.end_all()
    driver.pass_(request)
    assert driver.formation()[0] == 2 and members(driver.etcd, driver.keys, "trainer") == []
    assert failures(driver) == reformed(driver) == []


def test_host_that_gave_its_room_to_others_is_left_out_for_a_while(make_driver: Any) -> None:
    driver = make_driver()
    driver.have("ab")
    driver.pass_()
    late = driver.running()["b"]
    late.is_placed = lambda: False  # type: ignore[method-assign]
    driver.pass_()
    assert driver.group.state is GroupState.PLACING and driver.formation()[0] == 1
    late.created_at -= formation.NO_ROOM_S + 1
    driver.pass_()
    driver.end_all()
    driver.pass_()
    assert driver.formation() == (2, {"a": 1}) and "b has no room" in reformed(driver)[0]
    for driver.saved in (1, 2):
        driver.pass_()
    assert driver.group.state is GroupState.RUNNING, "it does not go back and forth"
