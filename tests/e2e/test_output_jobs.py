"""Jobs that train nothing, on real parts: no trainer starts, and each prompt is in the output once, also when the actor
is killed on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.tiers import full
from support.waiting import wait_until
from support.whole_run import Job, whole_job

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import JobStatus
from elastic_rl.host import processes
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.runtime.files import UMASK_ENV

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), full(
    proved_in="tests/integration/pipeline/test_sampled_jobs.py tests/integration/pipeline/test_output.py",
    why="jobs that train nothing, as whole runs")]

SMALL = {"data.options.operand_below": 20, "rollout.engines": 1, "rollout.groups_per_request": 8}
WAIT_S = 600.0


@contextlib.contextmanager
def _at_step(job: Job, step: int) -> Iterator[tuple[EtcdClient, Keys]]:
    """As soon as this step is committed, and the next is under way."""
    wait_until(lambda: ClusterInfo.load(ClusterPaths.of(job.cluster.cfg).info), timeout_s=WAIT_S, what="the cluster")
    info, keys = ClusterInfo.load(ClusterPaths.of(job.cluster.cfg).info), Keys(job.cfg.job)
    with EtcdClient(info.etcd_endpoints, call_timeout_s=2.0) as etcd:
        def reached() -> bool:
            status = readable_one(etcd.get(keys.job_status()), JobStatus)
            return status is not None and status.step >= step

        wait_until(reached, timeout_s=WAIT_S, what=f"step {step}")
        yield etcd, keys


def _kill_actor(job: Job, step: int, killed: list[int]) -> None:
    with _at_step(job, step) as (etcd, keys):
        [actor] = members(etcd, keys, "actor")
        os.kill(actor.pid, signal.SIGKILL)
        killed.append(actor.pid)


def _look_at_processes(job: Job, umasks: dict[str, str], sockets: dict[Path, int]) -> None:
    """Umasks of the job's processes, by pid and command, and modes of the sockets that they have in files, and of the
    folder for these."""
    folder = str(JobPaths.of(job.cluster.cfg).private)
    with _at_step(job, 1):
        temporary = JobPaths.of(job.cluster.cfg).temp
        sockets[temporary] = temporary.stat().st_mode & 0o777
        for process in [*processes.marked(folder), *processes.marked(folder, OWNER_ENV)]:
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                umasks[f"{process.pid} {process.cmdline()}"] = status.partition("\nUmask:")[2].split()[0]
                paths = [c.laddr for c in process.net_connections("unix") if str(c.laddr).startswith("/")]
                sockets |= {path: path.stat().st_mode & 0o777 for path in map(Path, paths) if path.exists()}



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
        folder = JobPaths.of(job.cluster.cfg).folder
        rows = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
        ordinals = [row["ordinal"] for row in rows]
        assert ordinals == sorted(set(ordinals)) and set(ordinals) <= set(range(320))
        # A model without training seldom ends a response, so that most prompts have no sample to keep.
        assert report["output"]["prompts"] == 320 and report["output"]["samples"] == 640
        assert report["output"]["kept"] == len(rows) and report["output"]["dropped"] == {}
        assert all(row["versions"] == [1] for row in rows)
        assert not (folder / "kept").exists()
        assert not [e.kind for e in job.events() if e.kind.startswith("trainer.")]


@pytest.fixture
def group_may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(UMASK_ENV, raising=False)
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_evaluation_has_each_prompt_once_and_leaves_nothing_for_others(tmp_path: Path, group_may_write: None) -> None:
    settings = SMALL | {"mode": "eval", "eval.samples": 2, "eval.temperature": 1.0, "eval.prompts_per_step": 16}
    with whole_job(tmp_path / "run", settings) as job:
        umasks: dict[str, str] = {}
        sockets: dict[Path, int] = {}
        looking = threading.Thread(target=_look_at_processes, args=(job, umasks, sockets))
        looking.start()
        report = job.run()
        looking.join()
        assert set(umasks.values()) == {"0077"} and any("sglang" in name for name in umasks), umasks
        temporary = JobPaths.of(job.cluster.cfg).temp
        assert len(sockets) > 1 and all(path.is_relative_to(temporary) for path in sockets), sockets
        assert set(sockets.values()) == {0o700}
        assert not temporary.exists() and JobPaths.of(job.cluster.cfg).evaluated.stat().st_mode & 0o777 == 0o664
        [(name, found)] = report["output"]["sets"].items()
        assert (report["status"], name, found["prompts"], found["samples"]) == ("finished", "eval", 40, 80)
        folder = JobPaths.of(job.cluster.cfg).folder
        rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        assert [(row["index"], row["sample"]) for row in rows] == [(i, n) for i in range(40) for n in (0, 1)]
        assert found["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 80)
        assert json.loads((folder / "eval.json").read_text()) == report["output"]
        assert not [e.kind for e in job.events() if e.kind.startswith("trainer.")]
