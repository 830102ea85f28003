"""Whole runs on real parts: etcd, coordinators, a DCS node, Ray Serve, Megatron ranks, SGLang engines, the router.

Each run is short; what it must show is that learning happens and that a fault is seen, survived and accounted for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.otlp_collector import Collector, collecting
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_rl import config, train
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, JobStatus, StepMetrics
from elastic_rl.faults.drill import FaultPlan
from elastic_rl.faults.kinds import (
    CoordinatorKilled,
    EngineKilled,
    PoolScaled,
    Restarted,
    TrainerRankKilled,
    TrainerRankStopped,
)
from elastic_rl.host import leftovers, processes
from elastic_rl.host.local_cluster import Cluster

UNTAUGHT = {"sft.max_steps": 25}
"""For runs that need not learn: a model that was hardly warmed up costs the loop as much as a good one."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Job:
    """One job on a cluster of its own, in a folder of its own."""

    def __init__(self, run_dir: Path, settings: dict[str, Any], spans: Collector) -> None:
        self.spans = spans
        self.cfg = config.load(overrides=[
            f"--job=e2e-{secrets.token_hex(4)}", f"--run_dir={run_dir}", "--train.eval_every_steps=1000",
            f"--telemetry.otlp_endpoint={spans.endpoint}",
            *(f"--{key}={value}" for key, value in settings.items())])
        self.cluster = Cluster(self.cfg)

    def run(self, plan: FaultPlan | None = None) -> dict[str, Any]:
        """Trains to the end and returns report.json."""
        info = self.cluster.up()
        code = train.run(self.cluster.cfg, info, **({"faults": True, "fault_plan": plan} if plan else {}))
        logs = self.cluster.cfg.cluster_dir / "logs"
        assert code == 0, f"the run failed; its logs are in {logs}"
        return json.loads((self.cluster.cfg.job_dir / "report.json").read_text())

    def events(self) -> list[Event]:
        """All of the cluster that is up."""
        with EtcdClient(ClusterInfo.load(self.cluster.cfg.cluster_dir).etcd_endpoints, call_timeout_s=2.0) as etcd:
            return events.recent(etcd, Keys(self.cfg.job), 2000)

    def leftovers(self) -> list[str]:
        """What should be gone once the cluster is down."""
        run = str(self.cluster.cfg.cluster_dir)
        mine = [p for p in psutil.process_iter(["cmdline"]) if self.cfg.job in " ".join(p.info["cmdline"] or [])]
        return [*(f"process {p.pid}" for p in [*mine, *processes.marked(run)]),
                *map(str, Path("/dev/shm").glob(f"*{self.cfg.job}*")),
                *map(str, leftovers.tagged_files(leftovers.file_tag(self.cluster.cfg.cluster_dir))),
                *([str(self.cluster.cfg.ray_dir)] if self.cluster.cfg.ray_dir.exists() else [])]


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with collecting() as spans:
        job = Job(tmp_path, request.param, spans)
        try:
            yield job
        finally:
            job.cluster.down()
            leftovers.sweep(job.cluster.cfg.cluster_dir)


def assert_sound(report: dict[str, Any], steps: int) -> None:
    """What holds after every run, disturbed or not (I3, I4, I5)."""
    assert report["steps"] == steps
    assert report["groups_lost"] == 0 and report["groups_duplicated"] == 0
    assert report["staleness_max"] == 0
    assert report["logprob_diff_max"] <= 1e-4
    assert report["versions_committed"] > steps


def assert_told(job: Job, report: dict[str, Any], steps: int) -> None:
    """What others are told of a run: a point of the curve for each step, the same to TensorBoard and W&B, and of each
    version one trace from its publish to the first sample that it made."""
    with EtcdClient(ClusterInfo.load(job.cluster.cfg.cluster_dir).etcd_endpoints, call_timeout_s=2.0) as etcd:
        points = [StepMetrics.decode(kv.value) for kv in etcd.range(Keys(job.cfg.job).steps_prefix())[0]]
        status = JobStatus.decode(etcd.get(Keys(job.cfg.job).job_status()).value)
    assert [p.step for p in points] == list(range(1, steps + 1))
    assert points[-1].eval_accuracy == status.eval_accuracy == report["eval_accuracy_last"]
    assert points[-1].tokens > points[-1].samples
    assert sum(p.seconds["total"] for p in points) < status.productive_s < status.updated_at - status.started_at

    shown = EventAccumulator(str(job.cluster.cfg.job_dir / "tensorboard" / "rl")).Reload()
    assert [e.value for e in shown.Scalars("reward_mean")] == pytest.approx([p.reward for p in points])
    assert list((job.cluster.cfg.job_dir / "wandb").glob("offline-run-*/*.wandb"))

    # Of some steps before the end: a process takes its last second of spans along when it is ended.
    trace = job.spans.trace_with("rollout.first_token", version=points[-10].policy_version - 1)
    pids = {s.name: s.pid for s in trace}
    assert {"trainer.publish", "trainer.commit", "dcs.commit", "engine.pull", "engine.apply"} <= set(pids)
    assert len({pids[name] for name in ("trainer.publish", "engine.apply", "rollout.first_token")}) == 3
    assert len({s.attrs["engine"] for s in trace if s.name == "engine.apply"}) == job.cfg.rollout.engines


@pytest.mark.parametrize("job", [{"train.steps": 60, "telemetry.trackers": "[tensorboard, wandb]"}], indirect=True)
def test_a_short_run_learns_tells_of_it_and_leaves_nothing_behind(job: Job) -> None:
    report = job.run()
    assert_sound(report, 60)
    assert 0.2 <= report["eval_accuracy_first"] <= 0.6
    assert report["eval_accuracy_last"] >= report["eval_accuracy_first"] + 0.1
    assert report["reward_last"] > report["reward_first"]
    assert (job.cluster.cfg.job_dir / "report.html").read_text().startswith("<!doctype html>")
    assert_told(job, report, 60)
    job.cluster.down()
    assert job.leftovers() == []


def fault_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    fault = next(f for f in report["faults"] if f["name"] == name)
    assert fault["witness"], "the fault must have been seen to happen"
    assert fault["injected_at"] <= fault["detected_at"] <= fault["healed_at"]
    return fault


@pytest.mark.parametrize("job", [{**UNTAUGHT, "train.steps": 60}], indirect=True)
def test_a_killed_engine_is_replaced_while_the_run_goes_on(job: Job) -> None:
    report = job.run(lambda context, steps: [(3, EngineKilled(context))])
    assert_sound(report, 60)
    assert "SIGKILL" in fault_of(report, "engine_killed")["witness"]


@pytest.mark.parametrize("job", [{**UNTAUGHT, "train.steps": 12, "train.state_every_steps": 5}], indirect=True)
def test_a_killed_trainer_rank_costs_only_the_steps_after_the_last_state(job: Job) -> None:
    report = job.run(lambda context, steps: [(7, TrainerRankKilled(context))])
    assert_sound(report, 12)
    fault_of(report, "trainer_rank_killed")
    assert 0 < report["steps_redone"] <= 5


@pytest.mark.parametrize("job", [
    {**UNTAUGHT, "train.steps": 30, "train.state_every_steps": 5, "coordinator.hang_min_s": 8}], indirect=True)
def test_a_hung_group_is_restarted_and_so_is_what_an_operator_wants_anew(job: Job) -> None:
    report = job.run(lambda context, steps: [(6, TrainerRankStopped(context)),
                                             (14, Restarted(context, "roles/advantages")),
                                             (17, Restarted(context, "job"))])
    assert_sound(report, 30)
    assert "SIGSTOP" in fault_of(report, "trainer_rank_stopped")["witness"]
    fault_of(report, "restarted_advantages")
    fault_of(report, "restarted_job")
    kinds = [e.kind for e in job.events()]
    assert "trainer.hung" in kinds and kinds.count("operation.succeeded") >= 3, "one by the policy, two by the operator"
    assert "run.crash_loop" not in kinds and "driver.dead" not in kinds


@pytest.mark.parametrize("job", [
    {**UNTAUGHT, "train.steps": 20, "trainer.tensor_parallel": 1, "trainer.data_parallel": 2}], indirect=True)
def test_a_killed_leading_coordinator_stops_nothing_and_data_parallel_ranks_train_too(job: Job) -> None:
    report = job.run(lambda context, steps: [(3, CoordinatorKilled(context))])
    assert_sound(report, 20)
    fault_of(report, "coordinator_killed")


@pytest.mark.parametrize("job", [{**UNTAUGHT, "train.steps": 100}], indirect=True)
def test_the_pool_grows_and_shrinks_under_a_running_job(job: Job) -> None:
    report = job.run(lambda context, steps: [(3, PoolScaled(context, "pool_scaled_out", +1)),
                                             (4, PoolScaled(context, "pool_scaled_in", -1))])
    assert_sound(report, 100)
    fault_of(report, "pool_scaled_out")
    fault_of(report, "pool_scaled_in")
    assert len(report["engines"]) == 3
