"""Starts of a host agent that has ended, by a process that uses its cluster. Nothing is started here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.errors import PreflightFailed
from elastic_rl.host.agent.restart_policy import RestartLimits
from elastic_rl.host.agent.status import AgentStatus, AgentWatch

LIMITS = RestartLimits()


class World:
    """A cluster whose agent runs or not, and a clock. Each look is two seconds after the one before."""

    def __init__(self, folder: Path) -> None:
        self.now, self.runs, self.starts = 0.0, True, list[float]()
        self.error: Exception | None = None
        cluster: Any = SimpleNamespace(
            cfg=SimpleNamespace(job="j"),
            agents=SimpleNamespace(running=lambda: ["agent-0"] if self.runs else []), revive=self._revive,
            paths=SimpleNamespace(agent_status=folder / "agent.json", info=folder / "cluster.json"))
        self.paths = cluster.paths
        self.watch = AgentWatch(cluster, clock=lambda: self.now)

    def _revive(self, name: str) -> bool:
        if self.error is not None:
            raise self.error
        self.starts.append(self.now)
        self.runs = True
        return True

    def look(self) -> str:
        self.now += 2.0
        return self.watch.waiting().get("host agent", "")

    def crash(self) -> float:
        """The agent ends; returns how long it takes until it is started again."""
        self.runs, ended_at = False, self.now
        while not self.runs:
            self.look()
            assert self.now - ended_at <= LIMITS.longest_wait_s + 4.0
        self.look()
        return self.starts[-1] - ended_at


@pytest.fixture
def world(tmp_path: Path) -> World:
    out = World(tmp_path)
    assert out.look() == ""
    return out


def test_agent_that_keeps_ending_is_started_at_longer_intervals(world: World) -> None:
    pauses = [world.crash() for _ in range(12)]
    assert pauses[0] <= 2.0 and min(pauses[-3:]) > LIMITS.backoff_max_s / 2 - 2.0


def test_pauses_are_short_again_after_the_agent_has_run_for_a_while(world: World) -> None:
    """A run takes weeks, and what ended its agent on the first day says nothing about the last one."""
    for _ in range(12):
        world.crash()
    world.now += LIMITS.stable_s + LIMITS.budget * LIMITS.refill_s
    world.look()
    assert [world.crash() <= pause for pause in (2.0, 4.0)] == [True, True]


def test_agent_that_cannot_be_started_says_why_and_is_tried_again(world: World) -> None:
    world.runs, world.error = False, PreflightFailed("no room for its log")
    assert world.look() == "has ended and cannot be started: no room for its log"
    world.error = None
    while not world.runs:
        world.look()
        assert world.now <= LIMITS.longest_wait_s + 10.0
    assert world.look() == ""


def test_what_the_agent_said_before_the_cluster_was_up_is_not_shown(world: World) -> None:
    world.paths.info.touch()
    up_since = world.paths.info.stat().st_mtime
    status = AgentStatus(name="agent-0", pid=1, at=up_since - 1.0, error="the cluster's start is not complete")
    status.save(world.paths.agent_status)
    assert world.look() == ""
    status.replace(at=up_since).save(world.paths.agent_status)
    assert world.look() == "the cluster's start is not complete"
