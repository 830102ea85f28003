"""What a job's run is by its records, and what it is submitted with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.errors import ConfigError, ElasticRLError, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, JobState, RunStatus
from elastic_rl.host import job_run
from elastic_rl.host.job_run import RunReading, Submission

_STARTING = RunStatus(submission=1, phase=JobPhase.STARTING)
_phases = st.sampled_from(list(JobPhase))
_statuses = st.none() | st.builds(RunStatus, submission=st.integers(1, 3), phase=st.sampled_from(
    [p for p in JobPhase if p is not JobPhase.QUEUED]))


@settings(max_examples=seeds(300))
@given(st.builds(
    RunReading, _statuses, st.none() | st.builds(JobRecord, submission=st.integers(0, 3), stopped=st.booleans()),
    st.none() | st.builds(JobState, phase=_phases, submission=st.integers(1, 3), order=st.just(1)), st.booleans(),
    st.integers(0, 1)))
def test_run_is_in_one_state_whatever_its_records_say(reading: RunReading) -> None:
    states = [reading.ended, reading.wanted, reading.stopping]
    assert sum(states) == 1
    assert reading.queued <= reading.wanted or reading.stopping
    assert reading.over == (reading.ended and not reading.alive)
    if reading.record is None or reading.status is None or reading.status.submission != reading.record.submission:
        return
    if reading.status.phase.ended:
        assert reading.phase is reading.status.phase, "the run itself knows best"
    elif not (reading.state is not None and reading.state.submission == reading.record.submission
              and reading.state.phase.ended):
        assert reading.wanted != reading.record.stopped


@pytest.mark.parametrize(("record", "state", "status", "phase"), [
    (JobRecord(), None, None, None),
    (JobRecord(submission=1), None, None, JobPhase.QUEUED),
    (JobRecord(submission=1), JobState(phase=JobPhase.STARTING, submission=1, order=1), None, JobPhase.STARTING),
    (JobRecord(submission=1), JobState(phase=JobPhase.RUNNING, submission=1, order=1), _STARTING, JobPhase.STARTING),
    (JobRecord(submission=2), JobState(phase=JobPhase.FINISHED, submission=1, order=1),
     _STARTING.replace(phase=JobPhase.FINISHED), JobPhase.QUEUED),
    (JobRecord(submission=1, stopped=True), JobState(phase=JobPhase.QUEUED, submission=1, order=1), None,
     JobPhase.STOPPED),
    (JobRecord(submission=1, stopped=True), JobState(phase=JobPhase.STARTING, submission=1, order=1), None,
     JobPhase.STARTING),  # a process may be about to start: it is stopping
    (JobRecord(submission=1, stopped=True), JobState(phase=JobPhase.STOPPED, submission=1, order=1), _STARTING,
     JobPhase.STOPPED),
])
def test_phase_of_a_run(record: JobRecord, state: JobState | None, status: RunStatus | None,
                        phase: JobPhase | None) -> None:
    assert RunReading(status, record, state).phase is phase


def test_run_of_a_cluster_that_is_down_is_what_it_was_last(tmp_path: Path) -> None:
    running = _STARTING.replace(phase=JobPhase.RUNNING)
    assert RunReading(running).wanted and not RunReading(running, down=True).wanted
    assert RunReading(running, down=True).phase is JobPhase.STOPPED
    assert RunReading(_STARTING.replace(phase=JobPhase.FAILED), down=True).phase is JobPhase.FAILED
    assert RunReading(None).phase is None and RunReading(None).over


def test_what_a_queued_run_waits_for_is_the_leaders_word() -> None:
    queued = JobState(phase=JobPhase.QUEUED, submission=1, order=1, reason="waits for a: one job runs at a time")
    assert RunReading(None, JobRecord(submission=1), queued).waits_for == queued.reason
    assert "coordinator" in RunReading(None, JobRecord(submission=2), queued).waits_for


def test_run_gets_the_environment_that_it_was_submitted_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.setitem(os.environb, b"NO_TEXT", b"\xff\xe4")
    submission = Submission.of_this_process(config.parse({"run_dir": str(tmp_path)}))
    found = Submission.decode(submission.encode()).process_environment()
    assert (found[b"OF_THE_USER"], found[b"NO_TEXT"]) == (b"1", b"\xff\xe4")
    assert b"ELASTIC_RL_UMASK" in found


def test_folder_and_interpreter_need_not_be_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xe4"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", f"{folder}/python")
    submission = Submission.decode(Submission.of_this_process(config.parse({"run_dir": str(tmp_path)})).encode())
    assert submission.working_folder == folder and submission.interpreter == f"{folder}/python"


@pytest.mark.parametrize("error", [ConfigError("no such model", hint="name one"), PreflightFailed("no room")],
                         ids=lambda e: type(e).__name__)
def test_error_of_a_run_is_the_error_of_the_command_that_follows_it(error: ElasticRLError, tmp_path: Path) -> None:
    status = job_run.failed(_STARTING, error, see=tmp_path)
    shown = job_run.as_error(RunStatus.decode(status.encode()))
    assert (type(shown), str(shown), status.phase) == (type(error), str(error), JobPhase.FAILED)


def test_unexpected_error_of_a_run_names_its_log(tmp_path: Path) -> None:
    assert str(tmp_path) in str(job_run.as_error(job_run.failed(_STARTING, KeyError("x"), see=tmp_path)))
    full = job_run.failed(_STARTING, OSError(28, "No space left on device", "f"), see=tmp_path)
    assert str(job_run.as_error(full)) == "f: No space left on device"
    assert job_run.as_error(job_run.now(_STARTING, JobPhase.FAILED)) is None, "a crash loop"


def test_any_error_of_a_run_can_be_written_and_read(tmp_path: Path) -> None:
    long = job_run.failed(_STARTING, ValueError("\udcff" * 100_000), see=tmp_path)
    assert len(RunStatus.decode(long.encode()).message) < 40_000 and "\\udcff" in long.message
    for name in ("Sequence", "annotations", "OfALaterRelease"):
        assert type(job_run.as_error(_STARTING.replace(error=name, message="x"))) is ElasticRLError
