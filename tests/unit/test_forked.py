"""Processes that are forked in place of a start: for the rest of the suite they are children like any other."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support import forked
from support.forked import ForkedProcess

MODULE = "json.tool"
"""It has a ``main``, and is imported at once."""


def test_forked_process_is_a_child_with_own_session_and_files() -> None:
    process = ForkedProcess([MODULE, "--compact"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    found = psutil.Process(process.pid)
    assert found.ppid() == os.getpid() and os.getsid(process.pid) == process.pid
    assert process.communicate(b'{"a": 1}') == (b'{"a":1}\n', None) and process.returncode == 0


def test_forked_process_has_the_descriptors_that_it_is_passed_under_their_numbers() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"a": 2}')
    os.close(writing)
    process = ForkedProcess([MODULE, "--compact", f"/dev/fd/{reading}"], stdout=subprocess.PIPE, pass_fds=[reading])
    os.close(reading)
    assert process.communicate() == (b'{"a":2}\n', None)


def test_failed_and_killed_forked_processes_have_their_exit_codes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked.spawn(MODULE, "--no-such-option", log=log).wait(60) == 2
    assert "unrecognized arguments" in log.read_text()
    waiting = ForkedProcess([MODULE], stdin=subprocess.PIPE)
    waiting.kill()
    assert waiting.wait(60) == -signal.SIGKILL


def test_next_process_has_its_own_pid_after_a_server_that_did_not_answer_in_time(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late answer must not be taken for that of the next request: tests would signal another process."""
    (tmp_path / "imported_slowly.py").write_text(
        f"import pathlib, signal\nif not pathlib.Path('{tmp_path}/once').exists():\n    "
        f"pathlib.Path('{tmp_path}/once').touch()\n    signal.pause()\ndef main(): print(__import__('os').getpid())\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forked, "PATIENCE_S", 3.0)
    with pytest.raises(TimeoutError):
        ForkedProcess(["imported_slowly"], stdout=subprocess.PIPE)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    process = ForkedProcess(["imported_slowly"], stdout=subprocess.PIPE, text=True)
    assert int(process.communicate()[0]) == process.pid


def test_another_server_takes_the_place_of_one_that_was_killed() -> None:
    ForkedProcess([MODULE, "--help"], stdout=subprocess.DEVNULL).wait(60)
    server = forked._servers[MODULE]._process
    server.kill()
    server.wait(60)
    assert ForkedProcess([MODULE, "--help"], stdout=subprocess.DEVNULL).wait(60) == 0


def test_process_that_cannot_be_set_up_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "gone"))
    with pytest.raises(ChildProcessError, match="FileNotFoundError.*gone"):
        ForkedProcess([MODULE, "--help"])


def test_forked_process_has_the_environment_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What imports set is there, unless the caller sets it, and what the caller has not set is not."""
    (tmp_path / "sets_variables.py").write_text(
        "import os\nos.environ.update(MADE='by import', CHOSEN='by import')\n"
        "def main(): print(*(os.environ.get(name) for name in ('MADE', 'CHOSEN', 'HOME')))\n")
    monkeypatch.syspath_prepend(tmp_path)
    process = ForkedProcess(["sets_variables"], stdout=subprocess.PIPE, env={"CHOSEN": "by caller"}, text=True)
    assert process.communicate()[0] == "by import by caller None\n"
