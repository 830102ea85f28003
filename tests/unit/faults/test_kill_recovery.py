"""When a run counts as recovered from a kill: another process is there, and steps were made that needed it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.etcd.records import Member
from elastic_rl.faults.kinds import CoordinatorKilled, PoolScaled, RoleKilled


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
        self.count, self.replica = 2, "a"
        self.cfg: Any = SimpleNamespace(cluster_name="c")
        self.etcd = SimpleNamespace(count=lambda prefix: self.count)

    def leader(self) -> Any:
        return SimpleNamespace(replica=self.replica, pid=1)

    def kill(self, pid: int) -> str:
        return "seen"

    def has_event(self, kind: Any, since: float) -> bool:
        return True


def test_coordinator_that_nobody_starts_again_is_missing() -> None:
    context: Any = Coordinators()
    fault = CoordinatorKilled(context)
    fault.inject()
    context.count, context.replica = 1, "b"
    assert fault.detected() and not fault.healed()
    context.count = 2
    assert fault.healed()


@pytest.mark.parametrize(("change", "desired"), [(1, 8), (-1, 6)])
def test_pool_is_scaled_from_the_size_that_it_has(change: int, desired: int) -> None:
    asked = list[Any]()
    context: Any = SimpleNamespace(desired=lambda: 7, striking=lambda what: nullcontext(),
                                   api=SimpleNamespace(patch=lambda path, body: asked.append(body)))
    PoolScaled(context, "pool_scaled", change).inject()
    assert asked == [{"desired": desired}]
