"""When a run counts as recovered from a kill: another process is there, and steps were made that needed it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.etcd.records import Member
from elastic_rl.faults.kinds import RoleKilled


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
