"""A process is made to exit, and its GIL is held, from outside: real processes, since only the kernel can do it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.python_child import running
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.errors import ConfigError, DeadlineExceeded
from elastic_rl.faults import ptrace
from elastic_rl.faults.context import InjectionEnded

pytestmark = pytest.mark.skipif(
    not ptrace.supported() or os.geteuid() != 0, reason="needs Linux on x86-64, and the permission to debug")

SLEEPS = "print(flush=True)\nimport time; time.sleep(1000)"
COMPUTES = "print(flush=True)\nwhile True: pass"
COUNTS = """
import threading, sys
def work():
    while True:
        sum(range(10000))
threading.Thread(target=work, daemon=True).start()
for line in sys.stdin:
    print(line, end='', flush=True)
"""

BLOCKED = """
import ctypes, signal, sys
print(flush=True)
CLONE_VFORK = 0x4000  # the kernel lets nothing stop it until the child ends
ctypes.CDLL(None).syscall(56, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) or signal.pause()
print("on", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("code", [SLEEPS, COMPUTES])
def test_process_exits_with_the_code_in_a_system_call_and_out_of_it(code: str) -> None:
    with running(code) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        ptrace.exit_process(process.pid, 7)
        assert process.wait(timeout=60) == 7


def test_python_code_waits_while_its_gil_is_held_and_goes_on_after_it() -> None:
    with running(COUNTS) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("before\n")
        process.stdin.flush()
        assert process.stdout.readline() == "before\n"
        unread: list[bool] = []

        def held(_seconds: float) -> None:
            stops = [Path(f"/proc/{process.pid}/task/{t}/stat").read_text().rpartition(")")[2].split()[0]
                     for t in os.listdir(f"/proc/{process.pid}/task")]
            unread.append(stops.count("t") == 1)

        witness = ptrace.hold_gil(process.pid, 5.0, find_s=120.0, wait=held)
        assert unread == [True] and "had its GIL" in witness, "all threads but one go on until they need it"
        process.stdin.write("after\n")
        process.stdin.flush()
        assert process.stdout.readline() == "after\n"


def test_process_that_does_nothing_has_no_gil_to_hold() -> None:
    with running(SLEEPS) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        with pytest.raises(DeadlineExceeded, match="no thread|was not seen to stop"):
            ptrace.hold_gil(process.pid, 5.0, find_s=0.5)
        assert process.poll() is None


def test_signals_that_come_meanwhile_are_delivered_and_leave_nothing_stopped() -> None:
    ticks = ("import signal; signal.signal(signal.SIGALRM, lambda *_: None); "
             "signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)")
    with subprocess.Popen([sys.executable, "-c", f"{ticks}\nprint('ready', flush=True)\nwhile True: sum(range(200))"],
                          stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            for _ in range(1000):
                ptrace._attach(child.pid, time.monotonic() + PATIENCE_S)
                ptrace._release(child.pid)
            used = psutil.Process(child.pid).cpu_times().user
            wait_until(lambda: psutil.Process(child.pid).cpu_times().user > used, what="the process to go on")
        finally:
            child.kill()


def test_process_that_could_not_be_made_to_exit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ptrace._ptrace

    def refuses(request: int, thread: int, **words: Any) -> int:
        if request == ptrace._SETREGS:
            raise ConfigError("it is refused")
        return real(request, thread, **words)

    with running(COUNTS) as process:
        assert process.stdin is not None and process.stdout is not None
        for word in ("before", "after"):
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{word}\n"
            monkeypatch.setattr(ptrace, "_ptrace", refuses)
            with pytest.raises(ConfigError, match="it is refused"):
                ptrace.exit_process(process.pid)
        assert process.poll() is None


@pytest.mark.parametrize("act", [lambda pid: ptrace.exit_process(pid, stop_s=0.2),
                                 lambda pid: ptrace.hold_gil(pid, 5.0, find_s=0.2)])
def test_thread_that_the_kernel_does_not_let_stop_is_given_up_in_time_and_goes_on(act: Callable[[int], object]) -> None:
    with running(BLOCKED) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        blocked = psutil.Process(process.pid)
        wait_until(lambda: blocked.status() == psutil.STATUS_DISK_SLEEP, what="the wait in the kernel")
        with ThreadPoolExecutor(1) as ends_with_its_thread, pytest.raises(DeadlineExceeded, match="seen to stop"):
            ends_with_its_thread.submit(act, process.pid).result(PATIENCE_S)
        [child] = blocked.children()
        child.kill()
        assert process.stdout.readline() == "on\n"


def test_process_that_is_not_to_be_struck_any_more_goes_on() -> None:
    stopped = list[str]()

    @contextmanager
    def refused() -> Any:
        stopped.append(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0])
        raise InjectionEnded("the injection of faults was ended")
        yield

    with running(COUNTS) as process:
        assert process.stdin is not None and process.stdout is not None
        with pytest.raises(InjectionEnded):
            ptrace.exit_process(process.pid, striking=refused())
        process.stdin.write("after\n")
        process.stdin.flush()
        assert process.stdout.readline() == "after\n" and stopped == ["t"], "it is stopped before others have to wait"
