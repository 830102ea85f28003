"""The abort switch: who uses it, what makes a run use it itself, and what is undone, also after kill -9."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from chaos_tests import abort
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.errors import ConfigError, DeadlineExceeded, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.records import Severity
from elastic_rl.faults.undo import Undo, Undone, UndoRegistry, undo_all

FAULT: dict[str, Any] = {"name": "engine_killed", "witness": "seen", "problem": "", "injected_at": 100.0,
                         "detected_at": 101.0, "healed_at": 110.0}


def alert(since: float, **changes: Any) -> Alert:
    return Alert(id="1", kind="engine.dead", subject="e", message="m", severity=Severity.ERROR, phase=Phase.FIRING,
                 since=since).replace(**changes)


def reason(*alerts: Alert, phase: JobPhase | None = JobPhase.RUNNING, under_way: tuple[float, ...] = (),
           **changes: Any) -> str:
    return abort.reason(phase, [(each, each.since) for each in alerts], [FAULT | changes], under_way)


def test_run_goes_on_while_the_job_runs_and_each_alert_is_of_a_fault() -> None:
    assert reason() == "" and reason(phase=None) == "", "etcd is away"
    assert reason(alert(101.0), alert(160.0)) == "", "while the fault was under way, and soon after"
    assert reason(alert(500.0), under_way=(499.0,)) == ""
    assert reason(alert(500.0, severity=Severity.WARNING)) == "" and reason(alert(500.0, phase=Phase.RESOLVED)) == ""
    assert reason(witness="", healed_at=None, problem="it was not injected") == "", "nothing has happened"


def test_run_aborts_itself_for_what_its_faults_do_not_explain() -> None:
    assert "engine.dead of e is of none of the faults" in reason(alert(500.0))
    assert "engine.dead of e is of none of the faults" in reason(alert(99.0))
    assert "engine.dead" in reason(alert(300.0), under_way=(499.0,))
    assert reason(healed_at=None, problem="not within 9 s") == "the job has not recovered from engine_killed: " \
                                                              "not within 9 s"
    assert reason(phase=JobPhase.STOPPED) == "the job is stopped"


def test_file_in_the_folder_ends_the_run_there_and_no_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chaos run was in"):
        abort.abort(tmp_path)
    with abort.running(tmp_path) as switch:
        assert switch.why == "" and abort.is_running(tmp_path)
        with pytest.raises(ConfigError, match="another process runs in"), abort.running(tmp_path):
            pass
        with ThreadPoolExecutor(1) as terminal:
            aborted = terminal.submit(abort.abort, tmp_path)
            wait_until(lambda: (tmp_path / abort.ABORT_FILE).exists(), what="the file")
            assert not aborted.done(), "it waits until the run has seen it"
            assert "abort is in the folder" in switch.why
            assert aborted.result(60.0) is None
        switch.request("SIGINT")
        assert "abort is in the folder" in switch.why, "the first reason counts"
    assert not abort.is_running(tmp_path)
    with abort.running(tmp_path) as again:
        assert again.why == "", "the file was for the run before"


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    process = psutil.Process(child.pid)
    yield process
    process.resume()
    child.kill()
    child.wait()


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def stop(folder: Path, process: psutil.Process) -> None:
    UndoRegistry(folder).note(Undo.CONTINUE, process.pid)
    process.suspend()
    wait_until(lambda: is_stopped(process), what="the stop")


def test_what_was_stopped_goes_on_at_the_end_of_the_run(tmp_path: Path, sleeper: psutil.Process) -> None:
    with pytest.raises(RuntimeError), abort.running(tmp_path):
        stop(tmp_path, sleeper)
        raise RuntimeError
    wait_until(lambda: not is_stopped(sleeper), what="the process to go on")


def test_what_a_killed_run_has_stopped_goes_on_by_the_next_command(tmp_path: Path, sleeper: psutil.Process) -> None:
    folder = tmp_path / "r"
    folder.mkdir(0o700)
    killed = subprocess.run([sys.executable, "-c", (
        "import os, pathlib, psutil, sys\n"
        "from chaos_tests import abort\n"
        "from elastic_rl.faults.undo import Undo, UndoRegistry\n"
        "folder, process = pathlib.Path(sys.argv[1]), psutil.Process(int(sys.argv[2]))\n"
        "with abort.running(folder):\n"
        "    UndoRegistry(folder).note(Undo.CONTINUE, process.pid)\n"
        "    process.suspend()\n"
        "    os.kill(os.getpid(), 9)\n"), str(folder), str(sleeper.pid)], check=False, timeout=300)
    assert killed.returncode == -9
    wait_until(lambda: is_stopped(sleeper), what="the stop")
    done = abort.undo_of_killed_runs(tmp_path)
    assert list(done) == [str(folder)] and str(sleeper.pid) in done[str(folder)].done[0]
    wait_until(lambda: not is_stopped(sleeper), what="the process to go on")
    assert abort.abort(folder) == Undone(), "there is nothing left to undo"


def test_abort_of_a_run_that_does_not_react_says_so(
        tmp_path: Path, sleeper: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped: what its fault has stopped stays so."""
    monkeypatch.setattr(abort, "_REACTS_S", 0.3)
    with abort.running(tmp_path) as switch:
        registry = UndoRegistry(tmp_path)
        registry.note(Undo.CONTINUE, sleeper.pid)
        with pytest.raises(DeadlineExceeded, match="is stopped, or hangs"):
            abort.abort(tmp_path)
        assert switch.why and registry.pending(), "it undoes it when it goes on"
        undo_all(tmp_path)
        assert abort.abort(tmp_path) is None, "as while its cluster starts: there is no fault, and none begins"


def test_folder_of_a_run_is_private_and_a_link_or_fifo_in_it_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    with abort.running(tmp_path / "new" / "run"):
        assert stat.S_IMODE((tmp_path / "new" / "run").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "new" / "run" / "runner.lock").stat().st_mode) == 0o600
    precious = tmp_path / "precious"
    precious.write_text("kept")
    for name, put in (("linked", lambda path: path.symlink_to(precious)), ("fifo", os.mkfifo)):
        folder = tmp_path / name
        folder.mkdir(0o700)
        put(folder / "runner.lock")
        (folder / "undo.jsonl").touch(0o600)
        for use in (lambda folder=folder: abort.running(folder).__enter__(), lambda folder=folder: abort.abort(folder)):
            with pytest.raises(ConfigError, match="runner.lock"):
                use()
    assert abort.undo_of_killed_runs(tmp_path) == {} and precious.read_text() == "kept"
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(PreflightFailed, match="not a folder of this user"), abort.running(tmp_path / "link"):
        pass
    with pytest.raises(ConfigError, match="cannot be made"), abort.running(precious / "run"):
        pass
