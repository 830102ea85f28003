"""The whole run of the default tier: one job on real parts, in which each part that the run needs is lost, several at
once where they recover independently of each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.whole_run import assert_recovered, assert_sound, whole_job

from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import CoordinatorKilled, EngineKilled, TrainerRankKilled
from elastic_rl.faults.outages import ActorKilled, DcsNodeKilled, EtcdStopped, RouterKilled
from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

STEPS = 40
# With one engine the run waits for each of these parts. It makes some steps before a recovery is seen: more, the busier
# the machine is.
SETTINGS = {"rollout.engines": 1, "train.steps": STEPS, "train.state_every_steps": 3, "train.prompts_per_step": 8,
            "train.group_size": 4, "sft.max_steps": 4, "data.options.operand_below": 30,
            "trainer.tensor_parallel": 1, "trainer.data_parallel": 2}


def parts_lost_at_once(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    return [(2, [EngineKilled(context), CoordinatorKilled(context)]),
            (4, [TrainerRankKilled(context), RouterKilled(context)]),
            (6, [ActorKilled(context)]),
            (8, [DcsNodeKilled(context)]),
            (10, [EtcdStopped(context, 15.0)])]


def test_every_step_is_done_exactly_once_although_each_part_is_lost(tmp_path: Path) -> None:
    with whole_job(tmp_path / "run", SETTINGS) as job:
        report = job.run(parts_lost_at_once)
        assert sorted(fault["name"] for fault in report["faults"]) == [
            "actor_killed", "coordinator_killed", "dcs_killed", "engine_killed", "etcd_stopped", "router_killed",
            "trainer_rank_killed"]
        assert_recovered(report["faults"], "")
        assert all(fault["witness"] for fault in report["faults"]), "a fault that nobody saw happen"
        assert_sound(job, report, STEPS)
        assert job.epoch() == 1, "a part was answered by a global restart"
        assert "run.crash_loop" not in [e.kind for e in job.events()]
        assert JobPaths.of(job.cluster.cfg).report_page.read_text().startswith("<!doctype html>")
        job.cluster.down()
        assert job.leftovers() == []
