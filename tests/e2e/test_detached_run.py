"""A whole run that its terminal does not outlive: submitted, killed with -9, attached to and finished."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.tiers import full
from support.waiting import wait_until
from support.whole_run import Job, assert_sound, whole_job

from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), full(
    proved_in="tests/integration/host/test_run_service.py tests/unit/host/test_job_run.py",
    why="a real driver and its compute plane under a run that is killed and started again")]

STEPS = 6
SETTINGS = {"rollout.engines": 1, "train.steps": STEPS, "train.state_every_steps": 2, "train.prompts_per_step": 8,
            "train.group_size": 4, "sft.max_steps": 4, "data.options.operand_below": 30,
            "trainer.tensor_parallel": 1, "trainer.data_parallel": 1}


def command(job: Job, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "elastic_rl.cli.main", *args, f"--job={job.cfg.job}",
                           f"--run_dir={job.cfg.run_dir}"], capture_output=True, text=True, check=False)


def test_run_is_finished_by_the_process_after_the_one_that_was_killed(tmp_path: Path) -> None:
    with whole_job(tmp_path, SETTINGS) as job:
        job.cluster.up()
        started = command(job, "train", "--detach")
        assert started.returncode == 0, started.stderr
        wait_until(lambda: len(job.step_records()) >= 2, what="the second step", timeout_s=900)
        first = job.cluster.run.pid
        psutil.Process(first).kill()
        attached = command(job, "attach")
        assert attached.returncode == 0, attached.stderr
        assert f"{job.cfg.job}: finished" in attached.stdout
        assert "run.restarted" in [e.kind for e in job.events()] and job.epoch() == 1
        assert_sound(job, json.loads(JobPaths.of(job.cluster.cfg).report.read_text()), STEPS)
        job.cluster.down()
        assert job.leftovers() == []
