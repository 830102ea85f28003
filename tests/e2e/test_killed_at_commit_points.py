"""Whole runs in which whoever makes the steps dies at the same point of them again and again, as by kill -9: before,
between and after what it commits."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import full
from support.whole_run import assert_sound, whole_job

from elastic_rl.runtime import failpoints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), full(
    proved_in="tests/e2e/test_faults_at_once.py chaos_tests/sim/pipeline.py",
    why="each point between the commits of a step, on real parts")]

STEPS = 9
NTH = 3
"""Each process dies at the third step that it is at, so that it does some first: else it were a crash loop."""
SETTINGS = {"rollout.engines": 1, "train.steps": STEPS, "train.state_every_steps": 1, "train.prompts_per_step": 4,
            "train.group_size": 4, "sft.max_steps": 0, "data.options.operand_below": 5,
            "trainer.tensor_parallel": 1, "trainer.data_parallel": 1}


@pytest.mark.parametrize(("point", "event"), [*((point, "actor.dead") for point in failpoints.ACTOR),
                                              *((point, "trainer.restarted") for point in failpoints.RANK)])
def test_each_step_is_done_once_although_its_maker_dies_in_it(point: str, event: str, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.ENV, f"{point}:{NTH}")
    with whole_job(tmp_path / "run", SETTINGS) as job:
        report = job.run()
        assert_sound(job, report, STEPS)
        assert sum(e.kind == event for e in job.events()) >= STEPS // NTH - 1, "it did not die there"
        assert job.epoch() == 1, "a part was answered by a global restart"
        assert "run.crash_loop" not in [e.kind for e in job.events()]
