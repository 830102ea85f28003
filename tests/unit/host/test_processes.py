"""How processes are ended. They are real."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.waiting import PATIENCE_S

from elastic_rl.host import processes

_PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""
_DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """One that does not ask for the exit code of its child."""
    process = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    yield process
    process.kill()
    process.wait()


def test_process_has_ended_also_where_its_parent_does_not_ask(parent: subprocess.Popen[str]) -> None:
    """The host agent is such a parent; `down` would wait for each service that it had started again."""
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    assert processes.stop(child.pid, grace_s=PATIENCE_S), "it ended in time"
    assert child.status() == psutil.STATUS_ZOMBIE
    assert processes.stop(child.pid, grace_s=PATIENCE_S), "it has ended"


def test_own_child_is_gone_afterwards() -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    assert processes.stop(child.pid, grace_s=PATIENCE_S)
    assert not psutil.pid_exists(child.pid)
    assert processes.stop(child.pid), "there is none"


def test_process_that_does_not_react_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", _DEAF], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             start_new_session=True)
    assert child.stdout
    child.stdout.readline()
    assert not processes.stop(child.pid, grace_s=0.2)
    assert not psutil.pid_exists(child.pid)
