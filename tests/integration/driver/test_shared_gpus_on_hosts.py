"""Trainer and engines on the GPUs of several hosts that they share, in the passes of drivers, on a real etcd: stand-ins
take the place of Ray's actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.etcd_server import EtcdServers
from support.placed_actors import StandInActor, StandInPlacer, stand_in_for_ray

from elastic_rl import config
from elastic_rl.dcs.catalog import reads
from elastic_rl.driver import external_engines, pool, shared_gpus, trainer_group
from elastic_rl.driver.hosts_of_ray import HostNode, RayHosts
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.shared_gpus import Holder, SharedGpus
from elastic_rl.driver.trainer_group import GroupState, TrainerGroup
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import PoolSpec
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.local_host import LocalHost
from elastic_rl.net.addresses import LOOPBACK

PER_HOST = 2
POOL = "rollout"


class Plane:
    """The compute plane of a job of up to four ranks and three engines. ``a`` is the driver's own host, and each host
    has two GPUs, 4 and 5."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ctx, self.etcd, self.saved = ctx, etcd, 0
        self.have("abc")
        monkeypatch.setattr(reads, "head", lambda *_: self)
        self.next_driver()

    @property
    def number(self) -> int:
        """Number of the newest version of the state."""
        return self.saved

    def next_driver(self) -> None:
        self.ctx = self.ctx.model_copy(update={
            "generation": fencing.begin_driver(self.etcd, self.ctx.keys, self.ctx.epoch, "test")})
        self.shared = SharedGpus.of(self.ctx, self.etcd)
        self.group = TrainerGroup(self.ctx, self.etcd, shared=self.shared)
        self.pool = EnginePool(self.ctx, self.etcd, shared=self.shared)
        self.group.take_over()
        self.pool.take_over()

    def next_epoch(self) -> None:
        """The global restart, for which Ray has ended everything."""
        for actor in StandInActor.made:
            actor.is_removed = True
        epoch = fencing.raise_epoch(self.etcd, self.ctx.keys, holder="test").number
        self.ctx = self.ctx.model_copy(update={"epoch": epoch})
        self.next_driver()

    def have(self, open_: str, *, lost: str = "", drains: str = "", free: int = PER_HOST) -> None:
        """``free``: GPUs on each host that nobody has."""
        nodes = {host: HostNode(f"id-{host}", f"10.0.0.{ord(host)}", free) for host in open_ + drains}
        self.hosts = RayHosts(nodes=nodes, open=frozenset(open_), closed=frozenset(lost + drains),
                              lost=frozenset(lost), drains=dict.fromkeys(drains, 7.0),
                              looked_at=time.monotonic() + 60.0)

    def passes(self, times: int = 3) -> None:
        for _ in range(times):
            self.shared.reconcile(self.hosts)
            self.group.reconcile(None, self.hosts)
            self.pool.reconcile({}, self.hosts)

    def actors(self, kind: str) -> list[StandInActor]:
        return [actor for actor in StandInActor.made
                if actor.kind.startswith(kind) and not actor.is_over and not actor.is_removed]

    def ranks(self) -> dict[str, tuple[int, str]]:
        """The number of ranks of each host, and their GPUs."""
        return {actor.host or "a": (actor.args[1], actor.args[4]) for actor in self.actors("trainer-hosts")}

    def engines(self) -> list[tuple[str, str]]:
        """The host and the GPUs of each engine."""
        return sorted((actor.host or "a", actor.args[4]) for actor in self.actors("engines"))

    def scale(self, desired: int) -> None:
        self.etcd.put(self.ctx.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=desired).encode())


@pytest.fixture
def make_plane(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
               ) -> Callable[[int], Plane]:
    def adopt(_: StandInPlacer, kind: str) -> list[StandInActor]:
        return [actor for actor in StandInActor.made
                if actor.kind == kind and not actor.is_over and not actor.is_removed]

    stand_in_for_ray(monkeypatch, pool, external_engines, trainer_group, shared_gpus)
    monkeypatch.setattr(StandInPlacer, "adopt", adopt)
    monkeypatch.setattr(Holder, "gpus", lambda self: tuple(f"{i}" for i in range(4, 4 + self.count)))
    monkeypatch.setattr(LocalHost, "of", lambda _: type("Own", (), {"name": "a"}))
    monkeypatch.setattr(trainer_group, "fingerprint", lambda _: "digest")

    def make(fewest: int) -> Plane:
        cfg = config.parse({
            "job": keys.job, "run_dir": str(tmp_path), "cluster": "lab", "placement": "colocated",
            "device": {"type": "cuda"}, "rollout": {"engines": 3},
            "trainer": {"data_parallel": 4, "min_data_parallel": fewest}})
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                         epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK)
        return Plane(ctx, etcd, monkeypatch)

    return make


@pytest.fixture
def plane(make_plane: Callable[[int], Plane]) -> Plane:
    return make_plane(2)


def test_ranks_and_engines_are_on_the_gpus_of_two_hosts_also_of_the_next_driver(plane: Plane) -> None:
    plane.passes()
    assert plane.ranks() == {"a": (2, "4,5"), "b": (2, "4,5")}
    assert plane.engines() == [("a", "4"), ("a", "5"), ("b", "4")] and plane.group.waiting == ""
    assert {actor.host for actor in plane.actors("shared-gpus")} == {"", "b"}
    assert all(actor.bundle["GPU"] == (2 if actor.kind == "shared-gpus" else 0) for actor in StandInActor.made)

    # The next driver adopts all of it, and gives the row of an engine that ends to no other.
    before = list(StandInActor.made)
    plane.next_driver()
    plane.passes()
    assert StandInActor.made == before and not any(actor.is_removed for actor in before)
    plane.scale(5)
    plane.passes()
    assert plane.engines() == [("a", "4"), ("a", "5"), ("b", "4"), ("b", "5")]
    assert "no GPU of the trainer is without an engine" in plane.pool.waiting
    next(actor for actor in plane.actors("engines") if actor.host == "b" and actor.args[4] == "4").is_over = True
    plane.pool._budget = pool.StartBudget()
    plane.passes(1)
    plane.pool._budget = pool.StartBudget()
    plane.passes(1)
    assert plane.engines() == [("a", "4"), ("a", "5"), ("b", "4"), ("b", "5")]


def test_formation_that_ends_is_made_again_on_the_same_hosts_and_gpus(plane: Plane) -> None:
    plane.passes()
    for actor in plane.actors("trainer-hosts"):
        actor.is_over = True
    plane.passes(1)
    plane.group._budget = trainer_group.StartBudget()
    plane.passes(1)
    assert plane.group.state is GroupState.RUNNING and plane.ranks() == {"a": (2, "4,5"), "b": (2, "4,5")}
    assert not plane.shared.lost


def test_lost_host_ends_the_epoch_and_the_next_one_is_smaller(plane: Plane) -> None:
    plane.have("ab")
    plane.passes()
    plane.have("a", lost="b")
    plane.passes(1)
    assert "b is lost" in plane.shared.lost
    plane.next_epoch()
    plane.passes()
    assert plane.ranks() == {"a": (2, "4,5")} and plane.engines() == [("a", "4"), ("a", "5")]
    assert not plane.shared.lost and "it trains with 2" in plane.group.waiting


def test_drain_of_a_host_ends_the_epoch_once_the_state_was_saved(plane: Plane) -> None:
    plane.passes()
    plane.have("ac", drains="b")
    plane.passes()
    assert not plane.shared.lost and len(plane.engines()) == 3, "what was computed since the last save is kept"
    plane.saved = 1
    plane.passes(1)
    assert plane.shared.lost == "b is drained"
    plane.next_epoch()
    plane.passes()
    assert plane.ranks().keys() == {"a", "c"} and {host for host, _ in plane.engines()} == {"a", "c"}


def test_run_stays_on_a_drained_host_while_no_others_have_room(make_plane: Callable[[int], Plane]) -> None:
    plane = make_plane(4)
    plane.passes()
    for plane.saved in range(3):
        plane.have("ac", drains="b", free=0)
        plane.passes()
    assert not plane.shared.lost and plane.group.state is GroupState.RUNNING
    plane.have("ac", lost="b")
    plane.passes(1)
    assert "b is lost" in plane.shared.lost
