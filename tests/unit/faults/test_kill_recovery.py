"""When a run counts as recovered from a kill: another process is there, and steps were made that needed it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.etcd.records import Member
from elastic_rl.faults import outages
from elastic_rl.faults.kinds import CoordinatorKilled, PoolScaled, RoleKilled, TrainerRankStopped


class Context:
    """A job with one replica of each role."""

    def __init__(self, max_staleness: int) -> None:
        self.cfg = config.parse({"train": {"schedule": "fully_async", "max_staleness": max_staleness}})
        self.now, self.replicas = 7, ["a"]

    def step(self) -> int:
        return self.now

    def members(self, role: str) -> list[Member]:
        return [Member(role=role, id=name, pid=1, host="here") for name in self.replicas]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_role_has_recovered_once_groups_begun_afterwards_are_trained(max_staleness: int) -> None:
    context: Any = Context(max_staleness)
    fault = RoleKilled(context, "rollout")
    [fault.victim] = context.members("rollout")
    context.now = 8
    assert not fault.healed(), "its record outlives it"
    context.replicas = []
    assert not fault.healed()
    context.replicas, context.now = ["b"], 9
    assert not fault.healed(), "it is back"
    context.now += max_staleness + 1
    assert not fault.healed(), "what is trained may have been generated before"
    context.now += 1
    assert fault.healed()


def test_replica_that_dies_again_has_not_recovered() -> None:
    context: Any = Context(0)
    fault = RoleKilled(context, "rollout")
    [fault.victim] = context.members("rollout")
    context.replicas = ["b"]
    assert not fault.healed()
    context.now, context.replicas = context.now + 9, []
    assert not fault.healed(), "it is gone by now"
    context.replicas = ["c"]
    assert not fault.healed(), "its steps count from here"
    context.now += 2
    assert fault.healed()


class Coordinators:
    """Of which a test says how many there are, and which one leads."""

    def __init__(self) -> None:
        self.count, self.replica, self.pid = 2, "a", 1
        self.cfg: Any = SimpleNamespace(cluster_name="c")
        self.etcd = SimpleNamespace(count=lambda prefix: self.count)

    def leader(self) -> Any:
        return SimpleNamespace(replica=self.replica, pid=self.pid)

    def kill(self, pid: int) -> str:
        return "seen"

    def has_event(self, kind: Any, since: float) -> bool:
        return True


@pytest.mark.parametrize("replica", ["b", "a"])
def test_coordinator_that_nobody_starts_again_is_missing(replica: str) -> None:
    """``replica``: which one leads next: another one, or, after a further fault, the killed one that was restarted."""
    context: Any = Coordinators()
    fault = CoordinatorKilled(context)
    fault.inject()
    assert not fault.detected()
    context.count, context.replica, context.pid = 1, replica, 2
    assert fault.detected() and not fault.healed()
    context.count = 2
    assert fault.healed()


class Away:
    """A job of whose parts none is there."""

    def __init__(self) -> None:
        self.cfg: Any = config.parse({"job": "j", "train": {"schedule": "fully_async", "max_staleness": 1}})
        self.etcd = self.keys = None
        self.now, self.there = 7, "before"

    def step(self) -> int:
        return self.now

    @property
    def _pid(self) -> int:
        return {"before": 5, "none": 0, "after": 6}[self.there]

    def service(self, name: str) -> int:
        return self._pid

    def router_pid(self, pool: str = "") -> int:
        return self._pid

    def ready(self, pool: str = "") -> set[str]:
        return {f"e{self._pid}"} if self._pid else set()

    def members(self, role: str) -> list[Member]:
        return [Member(role=role, id="m", pid=self._pid, host="here", incarnation=str(self._pid))] if self._pid else []

    def trainer_ranks(self) -> list[Member]:
        return self.members("trainer") * (2 if self.there == "before" else self.ranks)

    ranks = 2


def outage(name: str, context: Any) -> Any:
    made: dict[str, Any] = {
        "router": outages.RouterKilled, "engines": outages.AllEnginesKilled, "actor": outages.ActorKilled,
        "etcd": lambda c: outages.ServiceKilled(c, "etcd-0"), "dcs": outages.DcsNodeKilled,
        "trainer": outages.TrainerStopped, "rank": TrainerRankStopped}
    fault = made[name](context)
    for field, value in {"victim": 5 if name != "actor" else "5", "victims": frozenset({"e5", "5"}), "desired": 1,
                         "incarnation": "5", "ranks": 2}.items():
        if hasattr(fault, field):
            setattr(fault, field, value)
    if name == "trainer":
        fault.victims = frozenset({"5"})
    return fault


@pytest.mark.parametrize("name", ["router", "engines", "actor", "etcd", "dcs", "trainer", "rank"])
def test_outage_is_over_when_the_part_is_back_and_steps_were_made_with_it(name: str) -> None:
    context: Any = Away()
    fault = outage(name, context)
    for there in ("before", "none"):
        context.there = there
        for _ in range(10):
            context.now += 1
            assert not fault.healed(), "steps of groups that were generated before"
    context.there = "after"
    healed = list[bool]()
    for _ in range(4):
        healed.append(fault.healed())
        context.now += 1
    assert healed == [False, False, False, True]


def test_trainer_with_fewer_ranks_than_before_has_not_recovered() -> None:
    context: Any = Away()
    context.ranks, context.there = 1, "after"
    fault = outage("rank", context)
    for _ in range(9):
        context.now += 1
        assert not fault.healed()


@pytest.mark.parametrize(("change", "desired"), [(1, 8), (-1, 6)])
def test_pool_is_scaled_from_the_size_that_it_has(change: int, desired: int) -> None:
    asked = list[Any]()
    context: Any = SimpleNamespace(desired=lambda: 7, striking=lambda what: nullcontext(),
                                   api=SimpleNamespace(patch=lambda path, body: asked.append(body)))
    PoolScaled(context, "pool_scaled", change).inject()
    assert asked == [{"desired": desired}]
