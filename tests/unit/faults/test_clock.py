"""The wall clock of a running process is set from outside: real processes, since only the kernel can do it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from support.python_child import running
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.keys import Keys
from elastic_rl.faults import clock, ptrace
from elastic_rl.faults.context import FaultContext, InjectionEnded
from elastic_rl.faults.processes import PROCESS_KINDS, ProcessKind, Struck, Way
from elastic_rl.faults.undo import Undo, UndoRegistry, undo_all
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import RUN_MARK

pytestmark = pytest.mark.skipif(
    not ptrace.supported() or os.geteuid() != 0, reason="needs Linux on x86-64, and the permission to debug")

TELLS = """
import sys, time
for _ in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""
SPINS = """
import threading, time
def spin():
    while True:
        time.time()
for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()
""" + TELLS
NEAR_S = 300.0


def offset(process: subprocess.Popen[str]) -> float:
    """Seconds by which the process's wall clock is ahead; its monotonic clock is the machine's."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wall, monotonic = map(float, process.stdout.readline().split())
    assert abs(monotonic - time.monotonic()) < NEAR_S
    return wall - time.time()


@pytest.mark.parametrize("seconds", [-3600, 3600, 86400 * 365])
@pytest.mark.parametrize("code", [TELLS, SPINS])
def test_clock_of_one_process_is_set_and_reset(code: str, seconds: int) -> None:
    with running(code) as process, running(TELLS) as other:
        assert abs(offset(process)) < NEAR_S
        assert f"{abs(seconds)} s" in clock.set_by(process.pid, seconds)
        assert abs(offset(process) - seconds) < NEAR_S and abs(offset(other)) < NEAR_S
        clock.set_by(process.pid, 2 * seconds)  # instead, not on top
        assert abs(offset(process) - 2 * seconds) < NEAR_S
        assert clock.reset(process.pid) and abs(offset(process)) < NEAR_S
        assert not clock.reset(process.pid)
        assert abs(time.time() - psutil.Process(other.pid).create_time()) < NEAR_S, "this process's clock is untouched"


def test_process_that_reads_its_clock_all_the_time_survives_each_change() -> None:
    with running(SPINS) as process:
        assert abs(offset(process)) < NEAR_S
        for n in range(30):
            clock.set_by(process.pid, (-1) ** n * 3600)
            assert clock.reset(process.pid)
        assert abs(offset(process)) < NEAR_S and process.poll() is None


@pytest.fixture
def context(tmp_path: Path) -> FaultContext:
    return FaultContext(config.parse({"job": "j", "run_dir": str(tmp_path)}), cast(Any, None), Keys("j"),
                        cast(Any, None), undo=UndoRegistry(tmp_path))


def marks_of(context: FaultContext) -> dict[str, str]:
    """The environment of the processes of its job."""
    return {RUN_MARK: str(JobPaths.of(context.cfg).private)}


@pytest.mark.parametrize(("way", "seconds"), [(Way.CLOCK_SET_BACK, -3600), (Way.CLOCK_SET_AHEAD, 3600)])
def test_struck_process_has_the_wrong_clock_until_the_fault_is_over(
        way: Way, seconds: int, context: FaultContext, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(TELLS, marks_of(context)) as process, ThreadPoolExecutor(1) as pool:
        assert abs(offset(process)) < NEAR_S
        monkeypatch.setitem(cast(Any, PROCESS_KINDS), "dcs", ProcessKind("dcs", lambda of: [process.pid], "dcs"))
        struck = pool.submit(Struck(context, "dcs", way, seconds=600.0).inject)
        wait_until(lambda: abs(offset(process) - seconds) < NEAR_S, what="the wrong clock")
        assert clock.offset_of(process.pid) == seconds and len(context.undo.pending()) == 1 and not struck.done()
        context.ended.set()  # what the fault waits for, in the place of its seconds
        target, witness = struck.result(60)
        assert target == f"dcs (pid {process.pid})" and f"{'back' if seconds < 0 else 'ahead'} by 3600 s" in witness
        assert abs(offset(process)) < NEAR_S and context.undo.pending() == []


def test_fault_whose_process_ends_meanwhile_has_no_witness(context: FaultContext,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    with running(TELLS, marks_of(context)) as process, ThreadPoolExecutor(1) as pool:
        assert abs(offset(process)) < NEAR_S
        monkeypatch.setitem(cast(Any, PROCESS_KINDS), "dcs", ProcessKind("dcs", lambda of: [process.pid], "dcs"))
        struck = pool.submit(Struck(context, "dcs", Way.CLOCK_SET_BACK, seconds=600.0).inject)
        wait_until(lambda: clock.offset_of(process.pid) != 0, what="the wrong clock")
        process.kill()
        process.wait()
        context.ended.set()
        assert struck.result(60)[1] == "" and context.undo.pending() == []


def test_clock_that_is_not_to_be_set_any_more_stays(context: FaultContext) -> None:
    with running(TELLS) as process:
        assert abs(offset(process)) < NEAR_S
        context.end()
        with pytest.raises(InjectionEnded):
            clock.set_by(process.pid, 3600, context.striking("its clock was set"))
        assert abs(offset(process)) < NEAR_S, "it goes on, as it was"


def test_clock_that_somebody_has_set_is_reset_by_whoever_comes_next(tmp_path: Path) -> None:
    with running(TELLS) as process:
        UndoRegistry(tmp_path).note(Undo.RESET_CLOCK, process.pid)
        clock.set_by(process.pid, 3600)
        os.kill(process.pid, signal.SIGSTOP)  # it was killed while it set the clock
        assert undo_all(tmp_path).done == [f"reset clock {process.pid}"]
        assert abs(offset(process)) < NEAR_S, "it goes on, with the clock of the machine"
        assert undo_all(tmp_path).done == [] and undo_all(tmp_path).failed == []


def test_process_that_has_ended_is_said_to_have_ended(tmp_path: Path) -> None:
    with running(TELLS) as process:
        UndoRegistry(tmp_path).note(Undo.RESET_CLOCK, process.pid)
        process.kill()
        process.wait()
        for act in (lambda: clock.set_by(process.pid, 3600), lambda: clock.reset(process.pid)):
            with pytest.raises(ProcessLookupError):
                act()
        assert undo_all(tmp_path).failed == []


def test_vdso_of_another_form_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    offset_of, code = clock._function()
    with running(TELLS) as process:
        monkeypatch.setattr(clock, "_function", lambda: (offset_of, bytes([code[0] ^ 1, *code[1:]])))
        with pytest.raises(ConfigError, match="not the one of this process"):
            clock.set_by(process.pid, 3600)
        monkeypatch.undo()
        assert abs(offset(process)) < NEAR_S


@pytest.mark.parametrize("image", [b"", b"\x7fELF", bytes(4096), b"\xff" * 4096])
def test_what_is_no_vdso_has_no_function(image: bytes) -> None:
    with pytest.raises(ConfigError, match="vDSO"):
        clock._symbol(image)
