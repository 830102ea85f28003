"""A job of which nothing runs costs its leader fewer passes; the first thing that runs or is asked for ends that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.coordinator.reconciler import interval_s
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    Evidence,
    Member,
    Operation,
    OperationKind,
    ProcessFinding,
    RestartRequest,
)

SEEN = LastSeen(role="rollout", id="r", incarnation="i", first_seen=1.0)
NODE = LastSeen(role="dcs", id="n", incarnation="j", first_seen=1.0)
OPERATION = Operation(id="o", kind=next(iter(OperationKind)), target="pools/rollout")
IDLE = ClusterSnapshot(
    job="j", members=[Member(role="coordinator", id="c-0", incarnation="i", pid=3, host="h")],
    nodes={"n": DcsNode(id="n", host="h", port=1, pid=2, arena_path="", arena_bytes=1)},
    registry={NODE.name: NODE, SEEN.name: SEEN.model_copy(update={"suspected_at": 2.0, "dead_at": 3.0})},
    operations={"o": OPERATION.model_copy(update={"ended_at": 5.0})},
    restarts={"job": RestartRequest(target="job", generation=2, observed_generation=2)})


def test_job_of_which_only_coordinators_and_nodes_run_is_idle() -> None:
    assert IDLE.is_idle and ClusterSnapshot(job="j").is_idle


@pytest.mark.parametrize("change", [
    {"members": [Member(role="actor", id="a", incarnation="i", pid=1, host="h")]},
    {"engines": {"e": Engine(id="e", pool="rollout", state=EngineState.DEAD, epoch=1)}},
    {"evidence": {SEEN.name: Evidence(role="rollout", id="r", incarnation="i", finding=ProcessFinding.GONE, at=1.0,
                                      by="w")}},
    {"registry": {SEEN.name: SEEN.model_copy(update={"suspected_at": 2.0})}},
    {"operations": {"o": OPERATION}},
    {"restarts": {"job": RestartRequest(target="job", generation=3, observed_generation=2)}},
], ids=lambda change: next(iter(change)))
def test_job_with_anything_that_runs_or_is_to_be_done_is_not_idle(change: dict[str, Any]) -> None:
    assert not replace(IDLE, **change).is_idle


@pytest.mark.parametrize(("interval", "deadline", "idle"), [(0.5, 30.0, 1.5), (5.0, 30.0, 5.0), (0.1, 1.0, 0.25)])
def test_passes_over_an_idle_job_are_fewer_and_never_too_few_for_a_healthy_leader(
        interval: float, deadline: float, idle: float) -> None:
    cfg = config.parse({"job": "j", "etcd": {"retry_budget_s": deadline / 2}, "coordinator": {
        "reconcile_interval_s": interval, "reconcile_deadline_s": deadline}}).coordinator
    assert interval_s(cfg, idle=False) == interval and interval_s(cfg, idle=True) == idle
