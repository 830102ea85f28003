"""Whole runs on real parts: etcd, coordinators, a DCS node, Ray Serve, Megatron ranks, SGLang engines, the router.

Two runs, since one takes minutes. The first learns, with tensor-parallel ranks, while faults of every kind happen to
it. The second has data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiers import full
from support.whole_run import Job, assert_sound, fault_of, whole_job

from chaos_tests.faults.catalogue import FAULTS
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import (
    CoordinatorKilled,
    EngineKilled,
    PoolScaled,
    Restarted,
    TrainerRankKilled,
    TrainerRankStopped,
)
from elastic_rl.faults.outages import EtcdStopped
from elastic_rl.host.paths import ClusterPaths, JobPaths

STEPS = 60

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), full(
    proved_in="tests/e2e/test_faults_at_once.py tests/integration/driver/test_compute_plane.py",
    why="learning, trackers and each further kind of fault and outage, in whole runs of their own")]


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with whole_job(tmp_path, request.param) as made:
        yield made


def assert_published(job: Job, report: dict[str, Any], steps: int) -> None:
    """The metrics of each step are in etcd, TensorBoard and W&B alike, and one trace has the life of a version from its
    publish to the first sample that it made."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # every run collects this file

    points = job.step_metrics()
    with EtcdClient(ClusterInfo.load(ClusterPaths.of(job.cluster.cfg).info).etcd_endpoints, call_timeout_s=2.0) as etcd:
        status = JobStatus.decode(etcd.get(Keys(job.cfg.job).job_status()).value)
    assert points[-1].eval_accuracy == status.eval_accuracy == report["eval_accuracy_last"]
    assert points[-1].tokens > points[-1].samples
    assert sum(p.seconds["total"] for p in points) <= status.productive_s < status.updated_at - status.started_at

    shown = EventAccumulator(str(JobPaths.of(job.cluster.cfg).folder / "tensorboard" / "rl")).Reload()
    assert [e.value for e in shown.Scalars("reward_mean")][-10:] == pytest.approx([p.reward for p in points[-10:]])
    assert list((JobPaths.of(job.cluster.cfg).folder / "wandb").glob("offline-run-*/*.wandb"))

    # Of some steps before the end: a process that is ended loses its last second of spans.
    trace = job.spans.trace_with("rollout.first_token", version=points[-10].policy_version - 1)
    pids = {s.name: s.pid for s in trace}
    assert {"trainer.publish", "trainer.commit", "dcs.commit", "engine.pull", "engine.apply"} <= set(pids)
    assert len({pids[name] for name in ("trainer.publish", "engine.apply", "rollout.first_token")}) == 3
    assert len({s.attrs["engine"] for s in trace if s.name == "engine.apply"}) == job.cfg.rollout.engines


def every_fault(context: FaultContext, steps: int) -> list[tuple[int, Sequence[Fault]]]:
    """Faults that happen at once hit parts that recover independently of each other. Each entry waits for the recovery
    from the one before it."""
    return [(3, [PoolScaled(context, "pool_scaled_out", +1), TrainerRankKilled(context)]),
            (5, [PoolScaled(context, "pool_scaled_in", -1), Restarted(context, "roles/advantages")]),
            (7, [EngineKilled(context), TrainerRankStopped(context)]),
            (9, [CoordinatorKilled(context)]),
            (10, [Restarted(context, "job")])]


@pytest.mark.parametrize("job", [{
    "train.steps": STEPS, "train.state_every_steps": 5, "coordinator.hang_min_s": 8, "rollout.engines": 2,
    "trainer.tensor_parallel": 2, "telemetry.trackers": "[tensorboard, wandb]"}], indirect=True)
def test_run_learns_through_every_kind_of_fault_and_leaves_nothing_behind(job: Job) -> None:
    report = job.run(every_fault)
    assert_sound(job, report, STEPS)

    # It learned.
    assert 0.2 <= report["eval_accuracy_first"] <= 0.6
    assert report["eval_accuracy_last"] >= report["eval_accuracy_first"] + 0.1
    assert report["reward_last"] > report["reward_first"]

    # Each fault happened, was detected, and the run recovered from it.
    assert "SIGKILL" in fault_of(report, "engine_killed")["witness"]
    assert "SIGSTOP" in fault_of(report, "trainer_rank_stopped")["witness"]
    killed = fault_of(report, "trainer_rank_killed")
    assert "SIGKILL" in killed["witness"]
    for name in ("pool_scaled_out", "pool_scaled_in", "restarted_advantages", "restarted_job"):
        fault_of(report, name)
    assert "SIGKILL" in fault_of(report, "coordinator_killed")["witness"]
    assert len(report["engines"]) >= 2 + 1 + 1, "the first two, the one of the larger pool, and a replacement"
    # Three times the trainer resumed from its last state: after a kill, a hang and the restart of the job.
    assert 0 < report["steps_redone"] <= 3 * 5
    kinds = [e.kind for e in job.events()]
    assert kinds.count("operation.succeeded") >= 2, "the restarts that the operator asked for"
    assert "run.crash_loop" not in kinds
    assert job.epoch() == 1 + 2, "one restart of the job, the operator's, which ends an epoch and begins one"

    # It is visible to others, and nothing stays behind.
    assert JobPaths.of(job.cluster.cfg).report_page.read_text().startswith("<!doctype html>")
    assert_published(job, report, STEPS)
    job.cluster.down()
    assert job.leftovers() == []


OUTAGES = ("all_engines_killed", "router_killed", "dcs_killed", "etcd_killed", "actor_killed", "second_actor",
           "trainer_stopped")


def every_outage(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    """One outage after the other, each a few steps after the recovery from the one before."""
    faults = [EtcdStopped(context, 60.0), *(FAULTS[name].make(context) for name in OUTAGES)]
    return [(2 + 4 * i, [fault]) for i, fault in enumerate(faults)]


@pytest.mark.parametrize("job", [{
    "sft.max_steps": 10, "train.steps": 40, "train.state_every_steps": 5, "trainer.tensor_parallel": 1,
    "trainer.data_parallel": 2}], indirect=True)
def test_every_step_is_done_exactly_once_through_every_outage(job: Job) -> None:
    """Data-parallel ranks, whose batches arrive in shares. Nothing that is away ends the run (I5, I11)."""
    report = job.run(every_outage)
    assert_sound(job, report, 40)
    said = {}
    for name in ("etcd_stopped", *OUTAGES):
        said[name] = fault_of(report, name)["said"]
    assert "engines" in said["all_engines_killed"] and "trainer" in said["trainer_stopped"], said
    assert job.epoch() == 1, "an outage was answered by a global restart"
    kinds = [e.kind for e in job.events()]
    assert {"etcd.restarted", "dcs.restarted"} <= set(kinds)
