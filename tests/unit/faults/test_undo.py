"""What a fault has stopped, limited or started is undone, also by another process, and only once."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_rl.faults.undo import Undo, UndoRegistry, undo_all
from elastic_rl.runtime.waiting import wait_until

_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(_WAITS, start_new_session=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def _is(process: subprocess.Popen[bytes], status: str) -> None:
    wait_until(lambda: psutil.Process(process.pid).status() == status, timeout_s=60.0, what=status)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    _is(process, psutil.STATUS_STOPPED)


def test_stopped_process_goes_on_once_all_is_undone(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    UndoRegistry(tmp_path).note(Undo.CONTINUE, process.pid)
    _stop(process)
    assert undo_all(tmp_path) == [f"continue {process.pid}"]
    _is(process, psutil.STATUS_SLEEPING)
    _stop(process)
    assert undo_all(tmp_path) == [] and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it was done"


def test_what_a_killed_injector_has_left_is_undone_by_another_process(process: subprocess.Popen[bytes], tmp_path: Path
                                                                      ) -> None:
    script = f"""
import os, signal
from pathlib import Path
import psutil
from elastic_rl.faults.undo import Undo, UndoRegistry
with UndoRegistry(Path({str(tmp_path)!r})).noted(Undo.CONTINUE, {process.pid}):
    os.kill({process.pid}, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == -signal.SIGKILL
    _is(process, psutil.STATUS_STOPPED)
    assert undo_all(tmp_path) == [f"continue {process.pid}"]
    _is(process, psutil.STATUS_SLEEPING)


def test_process_that_has_the_number_of_another_one_is_left_alone(process: subprocess.Popen[bytes], tmp_path: Path
                                                                  ) -> None:
    registry = UndoRegistry(tmp_path)
    entry = registry.note(Undo.END, process.pid)
    assert not registry.undo({**entry, "started": entry["started"] - 1})
    assert process.poll() is None
    assert registry.undo(entry) and process.wait(timeout=60) == -signal.SIGKILL
    assert not registry.undo(entry)


def test_limit_of_files_is_given_back(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    limit = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    with UndoRegistry(tmp_path).noted(Undo.UNLIMIT, process.pid, limit=[*limit]):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, limit[1]))
    assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == limit


def test_line_that_a_killed_writer_has_torn_hides_no_other(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    registry = UndoRegistry(tmp_path)
    first = registry.note(Undo.CONTINUE, process.pid)
    with (tmp_path / "undo.jsonl").open("a") as file:
        file.write('{"id": "torn", "und')
    second = registry.note(Undo.END, process.pid)
    assert registry.pending() == [first, second]


def test_what_cannot_be_undone_keeps_nothing_else_from_it(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    registry = UndoRegistry(tmp_path)
    registry.note(Undo.CONTINUE, process.pid)
    _stop(process)
    with (tmp_path / "undo.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "x", "undo": "unheard-of", "pid": 1, "started": 0}\n')
    done, failed = undo_all(tmp_path)
    assert done == f"continue {process.pid}" and "unheard-of" in failed and "not undone" in failed
    _is(process, psutil.STATUS_SLEEPING)
