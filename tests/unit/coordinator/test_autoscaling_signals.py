"""What a snapshot says of the load of a pool, and what makes it unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_rl.config import Config, parse
from elastic_rl.coordinator.autoscaling.policy import PoolLoad
from elastic_rl.coordinator.autoscaling.signals import observe
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    JobStatus,
    Member,
    Operation,
    OperationKind,
    OperationState,
    PoolSpec,
    PoolStatus,
    StepMetrics,
)

POOL = "rollout"
SYNC = parse({"job": "j"})
ASYNC = parse({"job": "j", "train": {"schedule": "fully_async", "max_staleness": 1}})
ACTOR = Member(role="actor", id="a", pid=1, host="h")
STEP = StepMetrics(step=7, at=900.0, reward=0.5, seconds={"total": 40.0, "generate": 30.0, "train": 10.0})


def engine(number: int, pool: str = POOL, **more: Any) -> Engine:
    return Engine(**{"id": f"{pool}-{number}", "pool": pool, "state": EngineState.READY, "epoch": 1, "waiting": 2,
                     "token_usage": 0.5, "load_known": True, **more})


def member(of: Engine, stalled_s: float = 0.0) -> Member:
    return Member(role="engine", id=of.id, pid=1, host="h", progress_at=100.0, beat_at=100.0 + stalled_s)


def snapshot(*engines: Engine, **more: Any) -> ClusterSnapshot:
    return replace(ClusterSnapshot(
        "j", now=1000.0, status=JobStatus(phase="rl", step=7, stage="generate"),
        members=[ACTOR, *(member(e) for e in engines)], engines={e.id: e for e in engines},
        specs={POOL: PoolSpec(name=POOL, desired=2)},
        statuses={POOL: PoolStatus(name=POOL, ready=2, starting=0, draining=0)}), **more)


TWO = (engine(0), engine(1, waiting=4, token_usage=0.9))


def load(found: ClusterSnapshot, step: StepMetrics | None = STEP, cfg: Config = SYNC, pool: str = POOL,
         step_age_s: float = 100.0) -> PoolLoad | str:
    return observe(found, pool, step, cfg, step_age_s=step_age_s).load


def test_load_is_the_mean_over_the_engines_of_the_pool() -> None:
    assert load(snapshot(*TWO, engine(9, "genrm", waiting=50))) == PoolLoad(
        engines=2, queued=3.0, token_usage=0.7, trainer_idle=0.75, step_s=40.0)
    assert observe(snapshot(*TWO), POOL, STEP, SYNC).missing == ""


def test_trainer_that_works_beside_generation_is_idle_while_it_waits_for_groups() -> None:
    found = load(snapshot(*TWO), STEP.replace(idle_s={"groups": 4.0}), ASYNC)
    assert isinstance(found, PoolLoad) and found.trainer_idle == 0.1 and found.asks


def test_other_pools_do_not_go_by_the_trainer() -> None:
    of_judge = snapshot(engine(0, "genrm"), specs={"genrm": PoolSpec(name="genrm", desired=1, stream="")})
    found = load(of_judge, pool="genrm")
    assert isinstance(found, PoolLoad) and found.trainer_idle is None


@pytest.mark.parametrize(("stage", "cfg", "asks"), [
    ("generate", SYNC, True), ("train", SYNC, False), ("publish", SYNC, False), ("train", ASYNC, True)])
def test_run_asks_for_samples_in_some_stages_where_it_does_one_after_the_other(
        stage: str, cfg: Config, asks: bool) -> None:
    found = load(snapshot(*TWO, status=JobStatus(phase="rl", step=7, stage=stage)), cfg=cfg)
    assert isinstance(found, PoolLoad) and found.asks is asks


def test_run_that_waits_says_so() -> None:
    found = load(snapshot(*TWO, status=JobStatus(phase="rl", step=7, stage="reward", waiting_kind="reward")))
    assert isinstance(found, PoolLoad) and found.waits


@pytest.mark.parametrize(("changes", "step", "why"), [
    ({"status": None}, STEP, "no run"),
    ({"status": JobStatus(phase="sft", step=7)}, STEP, "phase sft"),
    ({"status": JobStatus(phase="finished", step=7)}, STEP, "phase finished"),
    ({"status": JobStatus(phase="rl", step=7, stage="evaluate")}, STEP, "evaluates"),
    ({"engines": {}}, STEP, "no engine is ready"),
    ({"members": [member(e) for e in TWO]}, STEP, "no actor process runs"),
    ({"members": [ACTOR]}, STEP, "2 of 2 engines have not answered"),
    ({"members": [ACTOR, *(member(e, stalled_s=60.0) for e in TWO)]}, STEP, "2 of 2"),
    ({"engines": {e.id: e.replace(load_known=False) for e in TWO}}, STEP, "2 of 2"),
    ({}, None, "has not made a step"),
    ({}, STEP.replace(step=6), "has not made a step"),
    ({}, STEP.replace(seconds={}), "no duration"),
])
def test_what_is_not_certain_makes_the_load_unknown(changes: dict[str, Any], step: StepMetrics | None, why: str
                                                    ) -> None:
    found = load(snapshot(*TWO, **changes), step)
    assert isinstance(found, str) and why in found


def test_step_is_too_old_by_the_leaders_clock_alone() -> None:
    """The clock of the host that wrote when the step ended may be any number of hours off."""
    ahead, late = STEP.replace(at=1e11), STEP.replace(at=1.0)
    assert isinstance(load(snapshot(*TWO), late, step_age_s=300.0), PoolLoad)
    assert "301 s ago" in str(load(snapshot(*TWO), ahead, step_age_s=301.0))


def test_share_of_a_cache_that_one_engine_does_not_say_is_unknown() -> None:
    found = load(snapshot(TWO[0], engine(1, token_usage=None)))
    assert isinstance(found, PoolLoad) and found.token_usage is None


def test_job_that_does_not_train_needs_no_step() -> None:
    found = load(snapshot(*TWO, status=JobStatus(phase="eval")), None, parse({"job": "j", "mode": "eval"}))
    assert isinstance(found, PoolLoad) and found.trainer_idle is None and found.asks


@pytest.mark.parametrize(("changes", "missing"), [
    ({"specs": {POOL: PoolSpec(name=POOL, desired=3)}}, "2 of 3 engines"),
    ({"statuses": {POOL: PoolStatus(name=POOL, ready=2, starting=0, draining=0, pending=1)}}, "2 of 2 engines"),
])
def test_number_is_reached_when_all_engines_are_ready_and_none_is_to_come(changes: dict[str, Any], missing: str
                                                                         ) -> None:
    found = observe(snapshot(*TWO, **changes), POOL, STEP, SYNC)
    assert missing in found.missing and found.no_room == ("statuses" in changes)


@pytest.mark.parametrize(("kind", "target", "params", "busy"), [
    (OperationKind.SCALE, "pools/rollout", {}, True), (OperationKind.SCALE, "pools/genrm", {}, False),
    (OperationKind.DRAIN, "engines/rollout-0", {"pool": POOL}, True),
    (OperationKind.REGISTER, "engines/x", {"pool": "genrm"}, False),
    (OperationKind.RESTART, "engines/rollout-1", {}, True), (OperationKind.RESTART, "job", {}, True),
    (OperationKind.RESTART, "driver", {}, True), (OperationKind.RESTART, "trainer", {}, False)])
def test_operation_on_the_pool_or_its_engines_makes_it_busy(kind: OperationKind, target: str, params: dict[str, Any],
                                                            busy: bool) -> None:
    op = Operation(id="op-1", kind=kind, target=target, params=params)
    assert bool(observe(snapshot(*TWO, operations={op.id: op}), POOL, STEP, SYNC).busy) is busy
    ended = op.replace(state=OperationState.FAILED)
    assert not observe(snapshot(*TWO, operations={op.id: ended}), POOL, STEP, SYNC).busy


def test_draining_engine_makes_the_pool_busy() -> None:
    assert "1 engine draining" in observe(snapshot(*TWO, engine(2, state=EngineState.DRAINING)), POOL, STEP, SYNC).busy


@pytest.mark.parametrize(("ready", "starting", "pending", "blocks"), [
    (1000, 0, 0, False), (950, 50, 0, False), (949, 51, 0, True), (960, 0, 1, True), (1001, 0, 0, True)])
def test_pool_of_thousands_is_whole_although_some_engines_start(ready: int, starting: int, pending: int, blocks: bool
                                                               ) -> None:
    specs = {POOL: PoolSpec(name=POOL, desired=1000)}
    found = snapshot(*map(engine, range(ready)), specs=specs, statuses={POOL: PoolStatus(
        name=POOL, ready=ready, starting=starting, pending=pending, draining=0)})
    assert bool(observe(found, POOL, STEP, SYNC).missing) == blocks
