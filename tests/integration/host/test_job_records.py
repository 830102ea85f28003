"""The records of a job's run on real etcd: who writes them late, or with another secret, changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.driver import __main__ as driver
from elastic_rl.errors import ConfigError, Conflict, ElasticRLError, Fenced
from elastic_rl.etcd import events, fencing, job_settings
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import Assignment, ClusterSpec, JobPhase, JobRecord, JobState, RunStatus, driver_of
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import cluster_secrets, job_run, processes
from elastic_rl.host.agent import assigned_work
from elastic_rl.host.job_run import JobRun, Submission
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.host.service_files import SERVICE_FILE_ENV, ServiceFiles
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.run_service import RunService

SECRET = ClusterSecret.generate()


@pytest.fixture
def run(own_etcd: EtcdClient, tmp_path: Path) -> JobRun:
    """The run of a job that is on the cluster."""
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path), "cluster": "lab"})
    (tmp_path / "j" / "cluster").mkdir(parents=True)
    own_etcd.put(KEYS.job("j"), JobRecord(settings="s", priority=3).encode())
    return JobRun(cfg, ServiceFiles(tmp_path / "singletons"), lambda: EtcdClient(own_etcd.endpoints), lambda: False)


KEYS = ClusterKeys("lab")


@pytest.fixture
def cluster(own_etcd: EtcdClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that is up by its files, with a job that was submitted in a folder, with a program for its Python."""
    out = Cluster(config.parse({"job": "j", "run_dir": str(tmp_path / "runs"), "cluster": "lab"}))
    out.dir.mkdir(parents=True)
    ClusterInfo("", own_etcd.endpoints, [], "").save(out.paths.info)
    cluster_secrets.write_secrets(out.paths, lambda line: None)
    own_etcd.put(KEYS.job("j"), JobRecord().encode())
    (program := tmp_path / "python").write_text(
        f"#!/bin/sh\necho \"$PWD $MINE$NOT_MINE $* in $ELASTIC_RL_SERVICE_FILE\" > {tmp_path}/started\n")
    program.chmod(0o755)
    (folder := tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as submitter:
        submitter.setattr(sys, "executable", str(program))
        submitter.setenv("MINE", "mine")
        submitter.chdir(folder)
        out.run.submit(own_etcd, Submission.of_this_process(out.cfg), ClusterSecret.read(out.paths.secret))
    return out


def submission(run_dir: Path = Path("runs")) -> Submission:
    return Submission.of_this_process(config.parse({"job": "j", "run_dir": str(run_dir)}), faults=True)


def test_submission_is_read_back_and_leaves_the_rest_of_the_record(run: JobRun, own_etcd: EtcdClient) -> None:
    assert run.read().phase is None
    run.submit(own_etcd, submission(), SECRET)
    reading = run.read()
    assert reading.record is not None and (reading.record.settings, reading.record.priority) == ("s", 3)
    assert reading.queued and reading.wanted and run.submission(own_etcd, SECRET, 1) == submission().replace(number=1)
    assert submission().python.encode() not in own_etcd.range(KEYS.submission("j"))[0][0].value, "it is sealed"
    with pytest.raises(job_settings.OtherSecret):
        run.submission(own_etcd, ClusterSecret.generate(), 1)


def test_older_submission_that_somebody_puts_back_is_refused(run: JobRun, own_etcd: EtcdClient) -> None:
    run.submit(own_etcd, submission(), SECRET)
    old = own_etcd.get(KEYS.submission("j"))
    run.submit(own_etcd, submission(), SECRET)
    assert old is not None
    own_etcd.put(KEYS.submission("j"), old.value)
    with pytest.raises(Conflict, match="submission 1 of job j, and not 2"):
        run.submission(own_etcd, SECRET, 2)


def test_stopped_run_is_wanted_again_by_its_next_submission_alone(run: JobRun, own_etcd: EtcdClient) -> None:
    assert not run.withdraw(own_etcd), "there is none"
    run.submit(own_etcd, submission(), SECRET)
    assert run.withdraw(own_etcd) and not run.withdraw(own_etcd)
    assert run.read().phase is JobPhase.STOPPED
    run.submit(own_etcd, submission(), SECRET)
    reading = run.read()
    assert reading.wanted and reading.record is not None and reading.record.submission == 2


def test_status_is_written_by_the_holder_of_the_assignment_alone(run: JobRun, own_etcd: EtcdClient) -> None:
    run.submit(own_etcd, submission(), SECRET)
    own_etcd.put(KEYS.assignment(run.name), Assignment(host="a").encode())
    running = RunStatus(submission=1, phase=JobPhase.RUNNING)
    run.save(own_etcd, running, 1)
    assert run.read().phase is JobPhase.RUNNING
    own_etcd.put(KEYS.assignment(run.name), Assignment(host="b").encode())
    with pytest.raises(Fenced):
        run.save(own_etcd, running.replace(phase=JobPhase.FINISHED), 1)
    assert run.read().phase is JobPhase.RUNNING
    run.save(own_etcd, running.replace(phase=JobPhase.FINISHED), 2)
    run.save(own_etcd, running, 2)
    assert run.read().phase is JobPhase.FINISHED, "a late write of the same process undoes no end"
    run.submit(own_etcd, submission(), SECRET)
    assert run.read().queued, "that was the submission before"
    run.save(own_etcd, running.replace(submission=2), 2)
    assert run.read().phase is JobPhase.RUNNING


def test_end_of_a_run_is_known_on_its_host_while_etcd_is_not_up(run: JobRun, own_etcd: EtcdClient) -> None:
    run.submit(own_etcd, submission(), SECRET)
    own_etcd.put(KEYS.assignment(run.name), Assignment(host="a").encode())
    run.save(own_etcd, RunStatus(submission=1, phase=JobPhase.FINISHED, submitted_at=7.0), 1)
    run._connect = lambda: None
    assert run.read().phase is JobPhase.FINISHED and run.read().submitted_at == 7.0


def test_submission_that_etcd_would_not_take_is_refused(
        run: JobRun, own_etcd: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "_MAX_SUBMISSION_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"take \d+ KiB") as refused:
        run.submit(own_etcd, submission(), SECRET)
    assert "environment" in refused.value.hint and run.read().phase is None


def test_job_that_was_taken_off_the_cluster_is_not_submitted(run: JobRun, own_etcd: EtcdClient) -> None:
    own_etcd.delete(KEYS.job("j"))
    with pytest.raises(ConfigError, match="job j is not on cluster lab"):
        run.submit(own_etcd, submission(), SECRET)
    assert own_etcd.get(KEYS.submission("j")) is None and run.read().phase is None


def test_cluster_that_was_taken_down_starts_no_run_again(run: JobRun, own_etcd: EtcdClient) -> None:
    own_etcd.put(KEYS.job("never"), JobRecord(settings="s").encode())
    own_etcd.put(KEYS.job("broken"), b"{")
    run.submit(own_etcd, submission(), SECRET)
    own_etcd.put(KEYS.job_state("j"), JobState(phase=JobPhase.RUNNING, submission=1, order=1).encode())
    job_run.all_stopped(own_etcd, KEYS)
    assert not run.read().wanted
    found = own_etcd.get(KEYS.job("never"))
    assert found is not None and JobRecord.decode(found.value) == JobRecord(settings="s")


def test_run_whose_record_cannot_be_read_is_not_taken_for_none(run: JobRun, own_etcd: EtcdClient) -> None:
    run.submit(own_etcd, submission(), SECRET)
    own_etcd.put(KEYS.job("j"), b"{")
    with pytest.raises(ConfigError, match="the record of job j in etcd cannot be read"):
        run.read()


def test_stop_is_of_the_submission_that_was_seen(run: JobRun, own_etcd: EtcdClient, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    run.submit(own_etcd, submission(), SECRET)
    seen = run.read()
    run.withdraw(own_etcd)
    run.submit(own_etcd, submission(), SECRET)
    with monkeypatch.context() as patched:
        patched.setattr(run, "read_from", lambda etcd: seen)
        run.withdraw(own_etcd)
    assert run.read().wanted, "that was the submission before"


def test_driver_of_an_older_assignment_begins_nothing(own_etcd: EtcdClient, tmp_path: Path) -> None:
    """Its host may have slept while the job was assigned elsewhere: it must not fence off who carries it out now."""
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path), "cluster": "lab"})
    ctx = RunContext(config=cfg, etcd_endpoints=own_etcd.endpoints, job="j", epoch=0, assignment=1, model_dir="",
                     host="h")
    keys = ctx.keys
    own_etcd.put(KEYS.assignment(driver_of("j")), Assignment(host="a").encode())
    assert driver._begin(own_etcd, ctx, "d1") == (1, 1, False)
    own_etcd.put(KEYS.assignment(driver_of("j")), Assignment(host="b").encode())
    with pytest.raises(Fenced):
        driver._begin(own_etcd, ctx, "d2")
    with pytest.raises(Fenced):
        fencing.begin_driver(own_etcd, keys, 1, "d2", fencing.assigned(KEYS, "j", 1))
    own_etcd.put(KEYS.job("j"), JobRecord(settings="of the newer one").encode())
    with pytest.raises(Fenced):
        job_settings.submit(own_etcd, KEYS, cfg, SECRET, token=fencing.assigned(KEYS, "j", 1))
    assert (fencing.current_epoch(own_etcd, keys), fencing.current_driver(own_etcd, keys)) == (1, 1)
    assert driver._begin(own_etcd, ctx.model_copy(update={"assignment": 2}), "d3") == (2, 2, False)
    assert driver._begin(own_etcd, ctx.model_copy(update={"assignment": 0}), "without one") == (3, 3, False)


# -- the end with the cluster ------------------------------------------------------------------------------------------
class BegunRun:
    """A run that trains on host a, of generation 1, with the status that its actor writes."""

    def __init__(self, run: JobRun, etcd: EtcdClient) -> None:
        self.run, self.etcd, self.keys = run, etcd, Keys("j")
        run.submit(etcd, submission(), SECRET)
        self.assign("a")
        epoch = fencing.raise_epoch(etcd, self.keys, holder="driver").number
        self.actor = FencedWriter.of_term(etcd, self.keys, epoch, fencing.begin_term(etcd, self.keys, epoch, "actor"))
        etcd.put(self.keys.job_status(), JobStatus(phase="rl", step=7, stage="train").encode())
        self.save()

    def assign(self, host: str) -> None:
        self.etcd.put(KEYS.assignment(self.run.name), Assignment(host=host).encode())

    def save(self, phase: JobPhase = JobPhase.RUNNING) -> None:
        self.run.save(self.etcd, RunStatus(submission=1, phase=phase, at=5.0), 1)

    def service(self, generation: int, *, taken_down: bool = False) -> RunService:
        where: Any = SimpleNamespace(run=self.run, cfg=config.parse({"job": "j"}), host=SimpleNamespace(name="a"),
                                     taken_down=taken_down, stops_runs=taken_down)
        return RunService(where, 1, generation)

    @property
    def status(self) -> JobStatus:
        found = self.etcd.get(self.keys.job_status())
        assert found is not None
        return JobStatus.decode(found.value)

    def stops(self) -> list[str]:
        return [e.message for e in events.recent(self.etcd, self.keys) if e.kind == "run.stopped"]

    def goes_on(self) -> bool:
        """Whether nothing says that it has ended."""
        self.actor.require()
        return self.run.read().phase is JobPhase.RUNNING and self.status.phase == "rl" and not self.stops()


@pytest.fixture
def begun(run: JobRun, own_etcd: EtcdClient) -> BegunRun:
    return BegunRun(run, own_etcd)


def test_run_that_ended_with_its_cluster_is_on_record_as_stopped(begun: BegunRun) -> None:
    for _ in range(2):
        begun.run.end_with_cluster(begun.etcd)
    assert begun.run.read().phase is JobPhase.STOPPED and begun.run.read().outcome == "stopped with its cluster"
    assert begun.run.last_seen().phase is JobPhase.STOPPED, "while the cluster is down again"
    assert (begun.status.phase, begun.status.stage) == ("stopped", "")
    assert "step 7" in begun.status.message and "could not be committed" in begun.status.message
    assert begun.stops() == [begun.status.message]
    with pytest.raises(Fenced):
        begun.actor.require()


def test_end_with_the_cluster_that_was_interrupted_is_completed(begun: BegunRun) -> None:
    begun.etcd.put(begun.keys.job_status(), JobStatus(phase="stopped", message="of the actor").encode())
    begun.run.end_with_cluster(begun.etcd)
    assert begun.run.read().phase is JobPhase.STOPPED and begun.status.message == "of the actor" and not begun.stops()


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STOPPED])
def test_run_that_another_host_has_taken_over_is_not_ended_with_this_one(
        begun: BegunRun, tmp_path: Path, has_begun: bool, phase: JobPhase) -> None:
    """It may be in the middle of its commit there. ``phase``: what is known of it here."""
    begun.run.save_copy(RunStatus(submission=1, phase=phase, at=5.0, generation=1))
    begun.assign("b")
    if has_begun:
        there = JobRun(config.parse({"job": "j", "run_dir": str(tmp_path / "b"), "cluster": "lab"}),
                       ServiceFiles(tmp_path / "b"), lambda: None, lambda: False)
        there.save(begun.etcd, RunStatus(submission=1, phase=JobPhase.RUNNING, at=5.0), 2)
    begun.run.end_with_cluster(begun.etcd)
    assert begun.goes_on() and begun.run.last_seen().phase is phase


def test_run_whose_process_still_ends_writes_its_end_itself(begun: BegunRun, tmp_path: Path) -> None:
    files = ServiceFiles(tmp_path / "singletons")
    pid = files.start(quote(begun.run.name, safe=""), ["sleep", "600"], log=tmp_path / "log", generation=1)
    try:
        begun.run.end_with_cluster(begun.etcd)
        assert begun.run.pid == pid and begun.goes_on()
    finally:
        processes.stop(pid, grace_s=0.0)


@pytest.mark.parametrize("newest", [RunStatus(submission=1, phase=JobPhase.FINISHED, generation=1),
                                    RunStatus(submission=2, phase=JobPhase.RUNNING, generation=1), None])
def test_end_with_the_cluster_replaces_no_other_status(begun: BegunRun, newest: RunStatus | None) -> None:
    """That of another submission is of a time before etcd was restored from a backup."""
    key = KEYS.run_status("j")
    begun.etcd.put(key, newest.encode()) if newest is not None else begun.etcd.delete(key)
    begun.run.end_with_cluster(begun.etcd)
    found = begun.etcd.get(key)
    assert (found.value if found is not None else None) == (newest.encode() if newest is not None else None)
    assert begun.status.phase == "rl" and begun.run.last_seen().phase is JobPhase.RUNNING


def test_run_of_which_nobody_knows_whose_status_it_is_goes_on(begun: BegunRun) -> None:
    """The copy is of an earlier release: its process is started, and stops it."""
    begun.run.save_copy(RunStatus(submission=1, phase=JobPhase.RUNNING, at=5.0))
    begun.run.end_with_cluster(begun.etcd)
    assert begun.goes_on()


def test_run_that_had_not_begun_leaves_the_status_of_the_job_as_it_is(begun: BegunRun) -> None:
    begun.save(JobPhase.STARTING)
    begun.run.end_with_cluster(begun.etcd)
    assert begun.run.read().phase is JobPhase.STOPPED and begun.status.phase == "rl" and not begun.stops()


def test_end_that_etcd_has_not_answered_is_written_by_the_next_start_of_the_cluster(begun: BegunRun) -> None:
    gone = RunStatus(submission=1, phase=JobPhase.STOPPED, at=9.0, message="while etcd did not answer")
    with EtcdClient([f"{LOOPBACK}:1"], call_timeout_s=0.5, retry_budget_s=0.1) as away:
        begun.service(1, taken_down=True)._end(away, gone)
    assert begun.goes_on() and begun.run.last_seen().phase is JobPhase.STOPPED
    begun.run.end_with_cluster(begun.etcd)
    reading = begun.run.read()
    assert reading.status == gone.replace(generation=1) and begun.status.phase == "stopped"
    assert begun.stops() == [begun.status.message]


def test_process_that_takes_a_run_over_writes_its_status_under_its_own_generation(
        begun: BegunRun, monkeypatch: pytest.MonkeyPatch) -> None:
    begun.assign("b")
    service, before = begun.service(2), begun.run.read().status
    assert before is not None

    def train(submitted: Submission, info: Any, begun_at: float, begin: Callable[[], None], goes_on: Any) -> int:
        begin()
        return 0

    monkeypatch.setattr(service, "_train", train)
    submitted = submission().replace(settings={"job": "j", "trainer": {"stop_timeout_s": 600.0}})
    done = service._carry_out(begun.etcd, None, submitted, before)  # type: ignore[arg-type]
    reading = begun.run.read()
    assert reading.status == begun.run.last_seen().status == before.replace(generation=2, stop_s=600.0)
    assert done.phase is JobPhase.FINISHED and reading.stop_s == 600.0


def test_run_that_is_submitted_once_more_has_the_time_for_its_commit_that_it_was_started_with(begun: BegunRun) -> None:
    begun.etcd.update(KEYS.job("j"), lambda raw: JobRecord.decode(raw or b"").replace(stop_s=10.0).encode())
    assert begun.run.read().stop_s == 10.0, "its process is of an earlier release, which does not say"
    begun.run.save(begun.etcd, RunStatus(submission=1, phase=JobPhase.RUNNING, stop_s=600.0), 1)
    begun.run.submit(begun.etcd, submission(), SECRET)
    assert begun.run.read().stop_s == 600.0
    begun.run.save(begun.etcd, RunStatus(submission=1, phase=JobPhase.STOPPED, stop_s=600.0), 1)
    assert begun.run.read().stop_s == 10.0


# -- the cluster -------------------------------------------------------------------------------------------------------
def test_runs_of_a_cluster_that_was_taken_down_or_is_owned_are_stopped_by_its_start(
        cluster: Cluster, own_etcd: EtcdClient) -> None:
    def wanted_after_start() -> bool:
        cluster._put_spec(own_etcd.endpoints)
        record = own_etcd.get(KEYS.job("j"))
        return record is not None and not JobRecord.decode(record.value).stopped

    cluster.paths.stopped.touch()  # left by a start that was killed at its end
    assert wanted_after_start()
    cluster.paths.info.unlink()
    assert not wanted_after_start()
    cluster.paths.stopped.unlink()
    cluster.run.submit(own_etcd, Submission.of_this_process(cluster.cfg), ClusterSecret.read(cluster.paths.secret))
    assert wanted_after_start()
    cluster._owns = True
    assert not wanted_after_start()
    found = own_etcd.get(KEYS.spec())
    assert found is not None and ClusterSpec.decode(found.value).parallel_jobs == 1


@pytest.mark.parametrize("taken_down", [False, True])
def test_run_has_ended_with_a_cluster_that_was_taken_down_and_not_with_its_owner(
        cluster: Cluster, own_etcd: EtcdClient, taken_down: bool) -> None:
    """Where the owner was killed, the process of the run may be between two incarnations, and its actor commits."""
    own_etcd.put(KEYS.assignment(cluster.run.name), Assignment(host="a").encode())
    JobPaths.of(cluster.cfg).private.mkdir(parents=True)
    cluster.run.save(own_etcd, RunStatus(submission=1, phase=JobPhase.RUNNING), 1)
    cluster._owns = not taken_down
    if taken_down:
        cluster.paths.info.rename(cluster.paths.stopped)
    cluster._put_spec(own_etcd.endpoints)
    reading = cluster.run.read_from(own_etcd)
    assert reading.phase is (JobPhase.STOPPED if taken_down else JobPhase.RUNNING) and not reading.wanted


def test_no_run_is_started_while_the_cluster_is_taken_down(cluster: Cluster) -> None:
    arguments = {"job": "j", "submission": 2}
    command = assigned_work._run_command(cluster, "driver/j", arguments, 7)
    assert command[1:4] == ["-m", "elastic_rl.run_launcher", "--job=j"] and command[-2:] == [
        "--submission=2", "--generation=7"]
    for odd in ("x", "driver/../../x", "driver/A", "driver/"):
        with pytest.raises(ElasticRLError, match="does not know the singleton"):
            assigned_work._run_command(cluster, odd, arguments, 7)
    cluster.paths.info.rename(cluster.paths.stopped)
    with pytest.raises(ElasticRLError, match="being taken down"):
        assigned_work._run_command(cluster, "driver/j", arguments, 7)


# -- the launcher ------------------------------------------------------------------------------------------------------
def launch(cluster: Cluster, service_file: str = "/file") -> subprocess.CompletedProcess[str]:
    options = ["--job=j", *cluster.location, "--submission=1", "--generation=3"]
    environment = {**os.environ, "NOT_MINE": "of the agent", SERVICE_FILE_ENV: service_file, OWNER_ENV: "/c"}
    return subprocess.run([*processes.python("elastic_rl.run_launcher"), *options], capture_output=True, text=True,
                          env=environment)


def test_run_uses_interpreter_environment_and_folder_of_its_submitter(cluster: Cluster, tmp_path: Path) -> None:
    done = launch(cluster)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "started").read_text() == (
        f"{tmp_path}/elsewhere mine -m elastic_rl.run_service --job=j --run_dir={tmp_path}/runs --cluster=lab "
        "--submission=1 --generation=3 in /file\n")


def test_run_whose_python_or_folder_is_gone_says_so_and_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "python").rename(tmp_path / "moved")
    done = launch(cluster)
    assert done.returncode == 1 and "the Python that job j was submitted with is gone" in done.stderr
    (tmp_path / "elsewhere").rmdir()
    done = launch(cluster)
    assert done.returncode == 1 and f"was submitted in, {tmp_path}/elsewhere, is gone" in done.stderr
    (tmp_path / "moved").rename(tmp_path / "python")
    (tmp_path / "elsewhere").mkdir()
    assert launch(cluster).returncode == 0


def test_submission_that_cannot_be_read_is_refused(cluster: Cluster, own_etcd: EtcdClient, tmp_path: Path) -> None:
    for _ in range(3):
        own_etcd.put(KEYS.assignment(cluster.run.name), Assignment(host="a").encode())
    (file := tmp_path / "file").write_text('{"pid": 1, "url": "", "generation": 3}\n')
    secret = cluster.paths.secret.read_bytes()
    cluster.paths.secret.unlink()
    cluster_secrets.write_secrets(cluster.paths, lambda line: None)
    done = launch(cluster, str(file))
    assert done.returncode == 1 and "were not sealed" in done.stderr, "the secret may be put back"
    cluster.paths.secret.write_bytes(secret)
    own_etcd.put(KEYS.submission("j"), job_settings.seal(b"{", "j", ClusterSecret.read(cluster.paths.secret)))
    cluster.run.save(own_etcd, RunStatus(submission=1, phase=JobPhase.RUNNING), 3)
    done = launch(cluster, str(file))
    assert done.returncode == 1 and cluster.run.read().phase is JobPhase.RUNNING, "nothing refuses what has begun"
    cluster.run.save(own_etcd, RunStatus(submission=1, phase=JobPhase.STARTING), 3)
    done = launch(cluster, str(file))
    assert done.returncode == 0, done.stderr
    reading = cluster.run.read()
    assert reading.phase is JobPhase.FAILED and "cannot be read" in str(reading.error) and reading.submitted_at
    assert '{"completed": 3}' in file.read_text(), "it is not started again"


def test_queued_run_is_known_on_its_host_while_etcd_is_not_up(run: JobRun, own_etcd: EtcdClient) -> None:
    run.submit(own_etcd, submission(), SECRET)
    assert run.last_seen().queued
    assert run.withdraw(own_etcd)
    assert run.last_seen().phase is JobPhase.STOPPED
