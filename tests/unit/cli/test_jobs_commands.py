"""jobs, attach and stop: how a job is named, and what they say of jobs whose cluster is not up."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.cli import follow, main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.cluster_records import JobPhase, RunStatus
from elastic_rl.host import job_run
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(args)
    return int(e.value.code or 0)


def _job(run_dir: Path, name: str, status: RunStatus) -> JobPaths:
    """A job whose last run has a status."""
    cluster = Cluster(config.parse({"job": name, "run_dir": str(run_dir)}))
    cluster.dir.mkdir(parents=True)
    cluster.run.save_copy(status)
    return JobPaths.of(cluster.cfg)


def _status(phase: JobPhase) -> RunStatus:
    return RunStatus(submission=1, phase=phase, submitted_at=1.7e9, at=1.7e9 + 60)


def _refused(error: ConfigError, folder: Path) -> RunStatus:
    return job_run.failed(_status(JobPhase.STARTING), error, see=folder).replace(at=1.7e9 + 60)


@pytest.mark.parametrize("words", ["a --run_dir=DIR", "--run_dir=DIR a", "--run_dir DIR a", "a --run_dir DIR",
                                   "--job=a --run_dir=DIR", "--run_dir DIR --job a"])
def test_job_is_named_as_an_argument_or_by_its_option(words: str, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stop", *words.replace("DIR", str(tmp_path)).split()) == 0
    assert "job a does not run: it was never started" in capsys.readouterr().out.replace("\n", " ")


def test_second_job_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("attach", "a", "b", f"--run_dir={tmp_path}") == Exit.USAGE
    assert "unexpected argument 'b'" in capsys.readouterr().err


def test_jobs_are_listed_by_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _job(tmp_path, "refused", _refused(ConfigError("no such model"), tmp_path))
    done = _job(tmp_path, "done", _status(JobPhase.FINISHED))
    done.steps.write_text("".join(json.dumps({"kind": kind, "step": n}) + "\n" for n, kind in enumerate(
        ["step", "step", "eval", "rewind"], 1)) + '{"kind": "st')
    killed = _job(tmp_path, "killed-while-it-stopped", _status(JobPhase.RUNNING))
    ClusterPaths(killed.private).stopped.touch()  # by a command that took its cluster down
    _job(tmp_path, "down", _status(JobPhase.RUNNING))
    shutil.copytree(killed.folder, tmp_path / "a copy")
    (tmp_path / "no-job").mkdir()
    assert run("jobs", f"--run_dir={tmp_path}", "-o", "json") == 0
    rows = {row["job"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: (row["state"], row["step"]) for name, row in rows.items()} == {
        "refused": ("failed", None), "done": ("finished", 2), "killed-while-it-stopped": ("stopped", None),
        "down": ("running", None)}
    assert rows["refused"]["message"] == "no such model"
    assert f"`elastic-rl up --job=down --run_dir={tmp_path}` starts them" in rows["down"]["message"]
    assert rows["done"]["since_at"] == 1.7e9 + 60
    assert run("jobs", f"--run_dir={tmp_path}") == 0
    assert time.strftime("%Y-%m-%d %H:%M", time.localtime(1.7e9 + 60)) in capsys.readouterr().out


def test_attach_to_a_run_that_has_ended_gives_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError("no such model", hint="name one")
    _job(tmp_path, "refused", _refused(error, tmp_path))
    _job(tmp_path, "done", _status(JobPhase.FINISHED)).report.write_text("{")
    os.utime(tmp_path / "done" / "report.json", (1.0, 1.0))  # that of a run before
    _job(tmp_path, "stopped", _status(JobPhase.STOPPED))
    _job(tmp_path, "crashed", _status(JobPhase.FAILED))
    where = f"--run_dir={tmp_path}"
    assert [run("attach", job, where) for job in ("refused", "done", "stopped", "crashed", "nobody")] == [
        Exit.USAGE, Exit.OK, Exit.INTERRUPTED, Exit.FAILED, Exit.FAILED]
    said = capsys.readouterr().err
    for text in ("error: no such model", "hint: name one", "the run was stopped", "exit code 1",
                 "`elastic-rl jobs --run_dir="):
        assert text in said


def test_run_on_a_cluster_that_ends_with_it_cannot_be_detached(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--with-cluster", "--detach", f"--run_dir={tmp_path}", "--job=j") == Exit.USAGE
    assert "--keep-up" in capsys.readouterr().err and not (tmp_path / "j").exists()


def test_job_that_is_done_is_refused_before_anything_starts_and_stays_finished(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "up", lambda *_, **__: pytest.fail("it starts something"))
    _job(tmp_path, "j", status := _status(JobPhase.FINISHED).replace(step=10))
    for how in (["--with-cluster"], ["--detach"], []):
        assert run("train", *how, f"--run_dir={tmp_path}", "--job=j", "--train.steps=10") == Exit.USAGE
        said = capsys.readouterr().err.replace("\n", " ")
        assert "has already done its 10 steps" in said and "--train.steps=N" in said
    assert Cluster(config.parse({"job": "j", "run_dir": str(tmp_path)})).run.look().status == status
    with pytest.raises(pytest.fail.Exception, match="it starts something"):
        run("train", "--with-cluster", f"--run_dir={tmp_path}", "--job=j", "--train.steps=11")


def test_completion_knows_the_jobs(tmp_path: Path) -> None:
    for name in ("my-job", "other"):
        _job(tmp_path / "runs", name, _status(JobPhase.FINISHED))
    done = subprocess.run([sys.executable, "-m", "elastic_rl.cli.main"], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "_ELASTIC_RL_COMPLETE": "complete_bash", "COMP_CWORD": "2",
                               "COMP_WORDS": "elastic-rl attach my"})
    assert done.stdout.split() == ["my-job"]


@pytest.mark.parametrize(("typed", "answer"), [(b"s", "s"), (b"xyD", "d"), (b"x", "")])
def test_key_on_a_terminal_counts_without_a_return(typed: bytes, answer: str) -> None:
    keyboard, terminal = pty.openpty()
    try:
        os.write(keyboard, b"s\n")  # typed before the question
        assert select.select([terminal], [], [], 60.0)[0], "the kernel passes it on later"
        with follow._keys_count_at_once(terminal):
            os.write(keyboard, typed)
            assert follow._read_key(terminal, "ds", timeout_s=60.0 if answer else 0.2) == answer
    finally:
        os.close(keyboard)
        os.close(terminal)
