"""A whole run whose engines and trainer alternate on the same devices, with faults in the phases of either side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.tiers import full
from support.whole_run import assert_recovered, assert_sound, whole_job

from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.records import EngineState
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import EngineKilled, TrainerRankKilled

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), full(
    proved_in="tests/integration/pipeline/test_device_phases.py tests/integration/engine/test_colocated_engine.py",
    why="kills in the phase of either side, in a whole run")]

STEPS = 24
SETTINGS = {"placement": "colocated", "train.steps": STEPS, "train.state_every_steps": 3, "train.prompts_per_step": 8,
            "train.group_size": 4, "sft.max_steps": 10, "data.options.operand_below": 30}


def kills_in_each_phase(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    return [(2, [EngineKilled(context)]),
            (3, [EngineKilled(context, state=EngineState.RELEASED)]),
            (4, [TrainerRankKilled(context, phase=Side.ENGINES)]),
            (5, [TrainerRankKilled(context, phase=Side.TRAINER)])]


def test_each_step_is_done_once_though_either_side_is_killed(tmp_path: Path) -> None:
    with whole_job(tmp_path / "run", SETTINGS) as job:
        report = job.run(kills_in_each_phase)
        assert [fault["name"] for fault in report["faults"]] == [
            "engine_killed", "released_engine_killed", "trainer_rank_killed_in_phase_of_engines",
            "trainer_rank_killed_in_phase_of_trainer"]
        assert_recovered(report["faults"], "SIGKILL")
        assert_sound(job, report, STEPS)
        assert job.epoch() == 1, "a part was answered by a global restart"
        assert "run.crash_loop" not in [e.kind for e in job.events()]
        job.cluster.down()
        assert job.leftovers() == []
