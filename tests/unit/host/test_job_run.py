"""The files of a run: whoever is killed in the middle of changing them, a run that was stopped or has ended never comes
back, and one that is wanted always does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.errors import ConfigError, ElasticRLError, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.host import job_run
from elastic_rl.host.job_run import JobRun, RunReading, RunStatus, Submission, in_turn
from elastic_rl.host.service_files import ServiceRecord
from elastic_rl.runtime.files import replace_file


class _Service:
    """The lock of the run's process."""

    def __init__(self) -> None:
        self.alive = False

    def get(self, name: str) -> ServiceRecord:
        return ServiceRecord(name, pid=7 if self.alive else 0, running=self.alive)


def _killed_at(content: bytes) -> Callable[..., None]:
    """``replace_file`` in a process that is killed before it writes ``content``."""
    def replace(path: Path, written: bytes, **options: Any) -> None:
        if written == content:
            raise KeyboardInterrupt
        replace_file(path, written, **options)
    return replace


class World:
    """One job: commands, its run's process and the host agent, each killed at any point, one step after the other."""

    def __init__(self, folder: Path) -> None:
        self.cfg = config.parse({"job": "j", "run_dir": str(folder)})
        (folder / "j" / "cluster").mkdir(parents=True)
        self.service = _Service()
        self.run = JobRun(self.cfg, self.service)  # type: ignore[arg-type]
        self.process: Iterator[None] | None = None
        self.stopped = self.ended = self.submitted = False
        """What happened to the newest submission, for certain."""

    def submit(self, killed: bool) -> None:
        if self.run.read().wanted or self.service.alive:
            return
        submission = Submission.of_this_process(self.cfg, faults=False, from_job="")
        self.submitted, self.stopped, self.ended = not killed, False, False
        if not killed:
            self.run.submit(submission)
            return
        with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(job_run, "replace_file", _killed_at(submission.encode()))
            self.run.submit(submission)

    def stop(self) -> None:
        self.stopped |= self.run.withdraw()

    def agent(self) -> None:
        """A pass: starts the run, if it is to run."""
        if not self.service.alive and self.run.read().wanted:
            assert self.submitted and not self.stopped and not self.ended, "it came back"
            self.service.alive, self.process = True, self._process()

    def _process(self) -> Iterator[None]:
        """As ``run_service``; a step between two files may be its last one."""
        before = self.run.read()
        if self.run.submission() is None:
            return
        status = before.status
        assert status is not None
        if before.wanted:
            yield
            for phase in (JobPhase.STARTING, JobPhase.RUNNING):
                if status.phase is not JobPhase.RUNNING:
                    self.run.save(status := status.now(phase))
                yield
            yield
            if self.run.submitted:
                self.run.save(status.now(JobPhase.FINISHED))
                self.ended = True
            else:
                self.run.save(status.now(JobPhase.STOPPED))
            yield
        self.run.withdraw()

    def step(self) -> None:
        if self.process is not None and next(self.process, "exit") == "exit":
            self.kill()

    def kill(self) -> None:
        self.service.alive, self.process = False, None


@settings(max_examples=seeds(40))
@example(["submit", "agent", "step", "step", "step", "kill", "killed submit", "agent"])
@given(st.lists(st.sampled_from(["submit", "killed submit", "stop", "kill", *["agent"] * 3, *["step"] * 6]),
                min_size=10, max_size=60))
def test_run_comes_back_exactly_while_it_is_wanted_whoever_is_killed(happens: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for what in happens:
            match what:
                case "submit" | "killed submit":
                    world.submit(killed=what != "submit")
                case _:
                    getattr(world, what)()
            reading = world.run.read()
            if world.submitted and not world.stopped and not world.ended:
                assert reading.wanted and reading.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING)
            if world.ended:
                assert reading.phase is JobPhase.FINISHED and not reading.wanted
            if world.stopped and not world.ended:
                assert not reading.wanted and (reading.stopping or reading.phase is JobPhase.STOPPED)
        world.kill()
        world.agent()
        while world.process is not None:
            world.step()
        assert world.run.read().over, "it has come to an end"
        if world.submitted and not world.stopped:
            assert world.run.read().phase is JobPhase.FINISHED


@st.composite
def _runs(draw: st.DrawFn) -> dict[str, RunReading]:
    """The runs of some jobs, in any state that their files can be in."""
    runs = {}
    for i in range(draw(st.integers(0, 6))):
        phase = draw(st.sampled_from(JobPhase))
        status = RunStatus(phase=phase, submitted_at=draw(st.sampled_from([1.0, 2.0, 3.0])), at=9.0)
        runs[f"j{i}"] = RunReading(draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([status, None])))
    return runs


@settings(max_examples=seeds(200))
@given(_runs(), st.integers(1, 3))
def test_queued_runs_start_in_the_order_of_their_submission_as_others_end(runs: dict[str, RunReading],
                                                                          limit: int) -> None:
    starts = in_turn(runs, limit)
    active = sum(r.active for r in runs.values())
    waiting = [job for job, r in runs.items() if r.queued and job not in starts]
    assert all(runs[job].queued and runs[job].wanted and not runs[job].alive for job in starts)
    assert len(starts) + active <= max(limit, active), "no more than the limit run"
    assert not waiting or len(starts) + active >= limit, "no place is left free"
    assert all(runs[a].status.submitted_at <= runs[b].status.submitted_at for a in starts for b in waiting)
    for reading in runs.values():
        assert not (reading.active and reading.queued) and reading.wanted <= (reading.active or reading.queued)


def test_run_gets_the_environment_that_it_was_submitted_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.setitem(os.environb, b"NO_TEXT", b"\xff\xe4")
    submission = Submission.of_this_process(config.parse({"run_dir": str(tmp_path)}), faults=False, from_job="")
    submission = Submission.decode(submission.encode())
    monkeypatch.delenv("OF_THE_USER")
    monkeypatch.delenv("NO_TEXT")
    monkeypatch.setenv("OF_THE_AGENT", "1")
    changes = submission.process_environment()
    assert (changes["OF_THE_USER"], changes["NO_TEXT"]) == ("1", os.fsdecode(b"\xff\xe4"))
    assert changes["OF_THE_AGENT"] is None


def test_submission_is_for_its_user_only(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(killed=False)
    assert (tmp_path / "j" / "cluster" / "submission.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("error", [ConfigError("no such model", hint="name one"), PreflightFailed("no room")],
                         ids=lambda e: type(e).__name__)
def test_error_of_a_run_is_the_error_of_the_command_that_follows_it(error: ElasticRLError, tmp_path: Path) -> None:
    status = RunStatus(phase=JobPhase.STARTING, submitted_at=1.0, at=1.0).failed(error, see=tmp_path)
    shown = RunStatus.decode(status.encode()).as_error()
    assert (type(shown), str(shown), status.phase) == (type(error), str(error), JobPhase.FAILED)


def test_unexpected_error_of_a_run_names_its_log(tmp_path: Path) -> None:
    status = RunStatus(phase=JobPhase.STARTING, submitted_at=1.0, at=1.0)
    assert str(tmp_path) in str(status.failed(KeyError("x"), see=tmp_path).as_error())
    assert str(status.failed(OSError(28, "No space left on device", "f"), see=tmp_path).as_error()) == (
        "f: No space left on device")
    assert status.now(JobPhase.FAILED).as_error() is None, "a crash loop"


def test_damaged_submission_is_reported_with_what_to_do(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(killed=False)
    (tmp_path / "j" / "cluster" / "submission.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        world.run.submission()
    assert world.run.read().wanted, "nobody has stopped it"
