"""Chaos runs against a job that runs already, which goes on afterwards: one to its end, one that is aborted, one whose
process is killed while it has stopped etcd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.tiers import full
from support.waiting import wait_until
from support.whole_run import whole_job

from chaos_tests import abort, blast_radius, runner
from chaos_tests.blast_radius import BlastRadius, Part
from chaos_tests.event_log import Kind, read
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.scenarios import SCENARIOS
from chaos_tests.target import Target, running_cluster
from elastic_rl.faults.undo import UndoRegistry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), full(
    proved_in="chaos_tests/tests/test_runner_with_light_job.py tests/unit/chaos/test_runner.py "
              "tests/unit/chaos/test_abort.py tests/unit/chaos/test_blast_radius.py",
    why="a cluster that is not the run's own")]
MINUTES = 0.2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    settings = {**SCENARIOS["quick"].settings, "train.steps": 100_000, "train.stop_eval_accuracy": None}
    with whole_job(tmp_path_factory.mktemp("job"), settings) as job:
        job.cluster.up()
        job.cluster.submit()
        with running_cluster(job.cluster) as made:
            wait_until(lambda: made.context().step() > 2, what="steps")
            yield made


def limits(*parts: Part) -> runner.Limits:
    radius = BlastRadius(parts=frozenset(parts), allow_last=True)
    return runner.Limits(late=50.0, aborts_itself=True, guard=lambda context: blast_radius.guarded(radius, context))


def schedule(fault: str, minutes: float = MINUTES) -> Schedule:
    return Schedule(1, 0, (Strike(0, (fault,), 1.0),), minutes, "quick")


def goes_on(target: Target) -> None:
    step = target.context().step()
    wait_until(lambda: target.context().step() > step, what="a further step of the job")


def test_job_is_struck_within_the_radius_and_goes_on(target: Target, tmp_path: Path) -> None:
    outcome = runner.run_attached(schedule("coordinator_killed"), tmp_path, target, limits(Part.COORDINATORS))
    assert not outcome.failed, outcome
    events = [*read(tmp_path / "events.jsonl")]
    assert [e["name"] for e in events if e["kind"] == Kind.FAULT and e["healed_at"]] == ["coordinator_killed"]
    assert events[0]["target"] == target.name and events[-1]["phase"] == "running"
    goes_on(target)


def test_what_is_out_of_the_radius_is_not_struck_and_fails_the_run(target: Target, tmp_path: Path) -> None:
    outcome = runner.run_attached(schedule("coordinator_killed"), tmp_path, target, limits(Part.ENGINES))
    assert any("coordinator_killed was planned" in line for line in outcome.wrong)
    [fault] = [e for e in read(tmp_path / "events.jsonl") if e["kind"] == Kind.FAULT]
    assert fault["witness"] == "" and "coordinators are not to be struck" in fault["problem"]


def test_run_that_is_aborted_has_what_it_stopped_go_on(target: Target, tmp_path: Path) -> None:
    etcd = psutil.Process(next(r.pid for r in target.cluster.services.running() if r.name == "etcd-0"))

    def abort_it() -> None:
        wait_until(lambda: etcd.status() == psutil.STATUS_STOPPED, what="the stop")
        abort.abort(tmp_path)

    threading.Thread(target=abort_it, daemon=True).start()
    outcome = runner.run_attached(schedule("etcd_stopped", 5.0), tmp_path, target, limits(Part.ETCD, Part.DRIVER))
    assert "abort is in the folder" in outcome.aborted and etcd.status() != psutil.STATUS_STOPPED
    goes_on(target)


def test_etcd_that_a_killed_run_has_stopped_goes_on_by_the_abort_command(target: Target, tmp_path: Path) -> None:
    file, folder = tmp_path / "schedule.json", tmp_path / "results"
    file.write_text(schedule("etcd_stopped", 5.0).to_json(), encoding="utf-8")
    etcd = psutil.Process(next(r.pid for r in target.cluster.services.running() if r.name == "etcd-0"))
    run = subprocess.Popen([
        sys.executable, "-m", "elastic_rl.cli.main", "chaos", "replay", str(file),
        "--only", "etcd,driver", "--allow-last", "--yes",
        f"--out={folder}", f"--job={target.cfg.job}", f"--run_dir={target.cfg.run_dir}"])
    try:
        wait_until(lambda: etcd.status() == psutil.STATUS_STOPPED, what="the stop")
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    assert [entry["pid"] for entry in UndoRegistry(folder).pending()] == [etcd.pid]
    done = abort.abort(folder)
    assert done is not None and str(etcd.pid) in done.done[0] and etcd.status() != psutil.STATUS_STOPPED
    goes_on(target)
