"""Jobs that train nothing, on real parts: no trainer starts, and each prompt is in the output once, also when the actor
is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from support.tiers import full
from support.whole_run import Job, whole_job

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import JobStatus
from elastic_rl.runtime.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), full(
    proved_in="tests/integration/pipeline/test_sampled_jobs.py tests/integration/pipeline/test_output.py",
    why="jobs that train nothing, as whole runs")]

SMALL = {"data.options.operand_below": 20, "rollout.engines": 1, "rollout.groups_per_request": 8}
WAIT_S = 600.0


def _kill_actor(job: Job, step: int, killed: list[int]) -> None:
    """As soon as this step is committed, and the next is under way."""
    wait_until(lambda: ClusterInfo.load(job.cluster.cfg.cluster_dir), timeout_s=WAIT_S, what="the cluster")
    info, keys = ClusterInfo.load(job.cluster.cfg.cluster_dir), Keys(job.cfg.job)
    with EtcdClient(info.etcd_endpoints, call_timeout_s=2.0) as etcd:
        def reached() -> bool:
            status = readable_one(etcd.get(keys.job_status()), JobStatus)
            return status is not None and status.step >= step

        wait_until(reached, timeout_s=WAIT_S, what=f"step {step}")
        [actor] = members(etcd, keys, "actor")
        os.kill(actor.pid, signal.SIGKILL)
        killed.append(actor.pid)


def test_rejection_sampling_has_each_prompt_once_although_its_actor_is_killed(tmp_path: Path) -> None:
    settings = SMALL | {"mode": "rejection_sampling", "train.group_size": 2, "train.prompts_per_step": 16,
                        "rejection.prompts": 320}
    with whole_job(tmp_path / "run", settings) as job:
        killed: list[int] = []
        killer = threading.Thread(target=_kill_actor, args=(job, 2, killed))
        killer.start()
        report = job.run()
        killer.join()
        assert killed and report["status"] == "finished"
        folder = job.cluster.cfg.job_dir
        rows = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
        ordinals = [row["ordinal"] for row in rows]
        assert ordinals == sorted(set(ordinals)) and set(ordinals) <= set(range(320))
        # A model without training seldom ends a response, so that most prompts have no sample to keep.
        assert report["output"]["prompts"] == 320 and report["output"]["samples"] == 640
        assert report["output"]["kept"] == len(rows) and report["output"]["dropped"] == {}
        assert all(row["versions"] == [1] for row in rows)
        assert not (folder / "kept").exists()
        assert not [e.kind for e in job.events() if e.kind.startswith("trainer.")]


def test_evaluation_has_each_prompt_once_and_starts_no_trainer(tmp_path: Path) -> None:
    settings = SMALL | {"mode": "eval", "eval.samples": 2, "eval.temperature": 1.0, "eval.prompts_per_step": 16}
    with whole_job(tmp_path / "run", settings) as job:
        report = job.run()
        [(name, found)] = report["output"]["sets"].items()
        assert (report["status"], name, found["prompts"], found["samples"]) == ("finished", "eval", 40, 80)
        folder = job.cluster.cfg.job_dir
        rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        assert [(row["index"], row["sample"]) for row in rows] == [(i, n) for i in range(40) for n in (0, 1)]
        assert found["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 80)
        assert json.loads((folder / "eval.json").read_text()) == report["output"]
        assert not [e.kind for e in job.events() if e.kind.startswith("trainer.")]
