"""A run that keeps and profiles a step, which is then made again outside of it, with the run's own numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.tiers import full
from support.whole_run import whole_job

from elastic_rl import config
from elastic_rl.data import step_file
from elastic_rl.host import inherited_model
from elastic_rl.host.paths import JobPaths
from elastic_rl.trainer import replay

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), full(
    proved_in="tests/integration/trainer/test_replay.py tests/unit/trainer/test_profiling.py "
              "tests/unit/data/test_step_file.py",
    why="the actor that keeps a step, and the ranks that profile it")]

SETTINGS = {"rollout.engines": 1, "train.steps": 2, "train.prompts_per_step": 8, "train.group_size": 4,
            "train.updates_per_step": 1, "sft.max_steps": 0, "data.options.operand_below": 30,
            "trainer.tensor_parallel": 1, "trainer.data_parallel": 2,
            "rollout.reward": "sum_reward:reward", "train.keep_steps": [1], "trainer.profile_steps": [1],
            "trainer.profile_ranks": [1]}


REWARD = """from elastic_rl.rewards.base import Reward
async def reward(prompt, samples):
    return [Reward(float(sum(sample.response_ids) % 5)) for sample in samples]
"""
"""It differs among the responses of a model that has learned nothing."""


def test_kept_step_is_made_again_with_the_numbers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a job without a supervised phase: it was made from the model that the job began with."""
    (tmp_path / "sum_reward.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    with whole_job(tmp_path / "run", SETTINGS) as job:
        job.run()
        cfg, paths = job.cluster.cfg, JobPaths.of(job.cluster.cfg)
        [profile] = paths.profiles.iterdir()
        assert profile.name == "rl-step-000001-trainer-rank-1.trace.json.gz"
        assert [e.data["file"] for e in job.events() if e.kind == "trainer.profiled"] == [str(profile)]

        kept = step_file.read(paths.kept_steps, 1, step_file.identity(cfg.job, paths.job_id))
        recorded = next(record for record in job.step_records() if record["step"] == 1)
        assert kept.batch.samples == recorded["samples"] and [p.name for p in paths.kept_steps.iterdir()] == [
            "step-000001.safetensors"]
        values = json.loads(cfg.model_dump_json())
        values["trainer"] |= {"data_parallel": 1, "profile_ranks": [0]}
        (tmp_path / "again").mkdir()
        [found] = replay.run(config.parse(values), {1: step_file.path_of(paths.kept_steps, 1)},
                             inherited_model.began_with(cfg), tmp_path / "again", timeout_s=300)
        for name in ("loss", "grad_norm", "lr"):
            assert found[name] == pytest.approx(recorded[name], rel=2e-4, abs=2e-6), name
        assert found["grad_norm"] > 0 and found["logprob_diff_max"] < 1e-4
