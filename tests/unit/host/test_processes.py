"""How processes are ended. They are real."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.host import processes
from elastic_rl.host.test_hosts.isolated_hosts import MARK, IsolatedHosts
from elastic_rl.host.test_hosts.naming import Subnet
from elastic_rl.runtime.process import runs

_PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
sys.stdin.read()
"""
_LEADER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print(flush=True); signal.pause()"], stdout=subprocess.PIPE)
child.stdout.readline()
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
    willing = subprocess.Popen(["sleep", "600"], start_new_session=True)
    assert processes.stop_all([child.pid, willing.pid], grace_s=0.2) == {willing.pid}, "side by side"
    assert not psutil.pid_exists(child.pid) and not psutil.pid_exists(willing.pid)


def test_group_ends_with_its_leader_and_a_number_that_was_reaped_is_sent_nothing() -> None:
    leader = subprocess.Popen([sys.executable, "-c", _LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              start_new_session=True)
    assert leader.stdout
    left = psutil.Process(int(leader.stdout.readline()))
    held = processes._Leader(psutil.Process(leader.pid))
    with contextlib.closing(held):
        assert held.group() == [left]
        os.kill(leader.pid, signal.SIGKILL)
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
        assert held.group() == [left], "a zombie has its number still"
        leader.wait()
        held.signal_group(signal.SIGKILL)
        assert held.group() == [] and left.status() != psutil.STATUS_ZOMBIE, "the group may be another one's"
    left.kill()

    leader = subprocess.Popen([sys.executable, "-c", _LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              start_new_session=True)
    assert leader.stdout
    left = psutil.Process(int(leader.stdout.readline()))
    assert processes.stop(leader.pid, grace_s=PATIENCE_S, descendants=False)
    wait_until(lambda: not runs(left), what="the end of its group")


def test_process_of_another_user_is_none_of_this_one_whatever_its_mark(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can start processes of others, and read their environment")
    env = {**os.environ, processes.RUN_MARK: str(tmp_path)}
    others = subprocess.Popen(["/bin/sleep", "600"], env=env, user=65534, cwd="/")
    mine = subprocess.Popen(["/bin/sleep", "600"], env=env)
    try:
        assert [process.pid for process in processes.marked(str(tmp_path))] == [mine.pid]
    finally:
        for child in (others, mine):
            child.kill()
            child.wait()


def test_process_in_another_user_namespace_is_of_no_test_host() -> None:
    if subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode:
        pytest.skip("no user namespace can be made here")
    hosts = IsolatedHosts(secrets.token_hex(3), Subnet.parse("198.18.3.0/24"), ["a"], Path("/nowhere"))
    env = {**os.environ, MARK: f"{hosts.tag}/a"}
    mine, others = (subprocess.Popen([*inside, "sh", "-c", "echo; exec sleep 600"], env=env, stdout=subprocess.PIPE)
                    for inside in ((), ("unshare", "--user")))
    try:
        for child in (mine, others):
            assert child.stdout
            child.stdout.readline()
        assert hosts._on_or_left() == ["a"]
        assert hosts.power_off("a") and others.poll() is None and not psutil.pid_exists(mine.pid)
        assert hosts._on_or_left() == [] and not hosts.power_off("a")
    finally:
        for child in (mine, others):
            child.kill()
            child.wait()
