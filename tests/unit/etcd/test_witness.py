"""What a witness concludes from what it sees of a process, and what it sees of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from elastic_rl.etcd.process_state import ProcessState, Sighting, load_per_core, look_at, machine_id, start_ticks
from elastic_rl.etcd.records import MemberProcess, ProcessFinding
from elastic_rl.etcd.witness import Watched, merge

GONE_S, STOPPED_S = 2.0, 3.0
PROCESS = MemberProcess(role="actor", id="a", incarnation="1", pid=1, started=1)
RUNNING, STOPPED, GONE = (Sighting(s, 5) for s in (ProcessState.RUNNING, ProcessState.STOPPED, ProcessState.GONE))


def after(*looks: tuple[float, Sighting]) -> Watched:
    watched = Watched(PROCESS)
    for at, sighting in looks:
        watched = watched.look(sighting, at)
    return watched


def finding(watched: Watched, now: float) -> ProcessFinding | None:
    return watched.finding(now, gone_s=GONE_S, stopped_s=STOPPED_S)


def test_gone_process_is_reported_after_the_time_to_deregister() -> None:
    watched = after((0.0, RUNNING), (10.0, GONE), (11.0, GONE))
    assert finding(watched, 11.9) is None
    assert finding(watched, 12.0) is ProcessFinding.GONE


def test_process_that_was_never_seen_alive_is_not_reported() -> None:
    assert finding(after((0.0, GONE), (50.0, GONE)), 100.0) is None


def test_process_that_was_stopped_all_the_time_is_reported() -> None:
    watched = after((0.0, RUNNING), (1.0, STOPPED), (2.0, STOPPED), (3.5, STOPPED))
    assert finding(watched, 3.5) is None
    assert finding(watched, 4.0) is ProcessFinding.STOPPED
    assert finding(watched.look(RUNNING, 5.0), 50.0) is None


def test_process_that_ran_between_two_stops_is_slow_and_not_stopped() -> None:
    looks = [(float(at), Sighting(ProcessState.STOPPED, ran=at)) for at in range(100)]
    assert finding(after((0.0, RUNNING), *looks), 100.0) is None


def test_process_that_may_not_be_examined_is_not_reported() -> None:
    for state in (STOPPED, GONE):
        watched = after((0.0, RUNNING), (1.0, state), (2.0, Sighting(ProcessState.UNKNOWN)))
        assert finding(watched, 50.0) is None
        assert finding(watched.look(GONE, 60.0), 70.0) is ProcessFinding.GONE


@given(st.lists(st.tuples(st.sampled_from([ProcessState.RUNNING, ProcessState.STOPPED, ProcessState.UNKNOWN]),
                          st.floats(0.0, 2.9)), max_size=40))
def test_process_that_runs_now_and_then_is_never_reported(story: list[tuple[ProcessState, float]]) -> None:
    watched, now = Watched(PROCESS), 0.0
    for ran, (state, pause_s) in enumerate(story):  # it has run between any two looks
        now += pause_s
        watched = watched.look(Sighting(state, ran), now)
        assert finding(watched, now + STOPPED_S - 0.01) is None


def test_successor_under_the_same_name_is_watched_from_the_beginning() -> None:
    name, old = ("actor", "a"), after((0.0, RUNNING), (1.0, GONE))
    successor = PROCESS.replace(pid=2, incarnation="2")
    assert merge({name: old}, {name: PROCESS}) == {name: old}
    assert merge({name: old}, {}) == {name: old}, "its lease may have ended because it is gone"
    assert merge({name: old}, {name: successor}) == {name: Watched(successor)}


# -- real processes ---------------------------------------------------------------------------------------------------
@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"],
                               stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait(60)


def test_process_is_seen_running_stopped_and_gone_before_it_is_reaped(child: subprocess.Popen[bytes]) -> None:
    started = start_ticks(child.pid)
    assert started > 0 and look_at(child.pid, started).state is ProcessState.RUNNING
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: look_at(child.pid, started).state is ProcessState.STOPPED, what="SIGSTOP")
    stopped = look_at(child.pid, started)
    assert look_at(child.pid, started) == stopped, "it has not run in between"
    child.send_signal(signal.SIGCONT)
    wait_until(lambda: look_at(child.pid, started).state is ProcessState.RUNNING, what="SIGCONT")
    wait_until(lambda: look_at(child.pid, started).ran > stopped.ran, what="its run")
    child.kill()
    wait_until(lambda: look_at(child.pid, started).state is ProcessState.GONE, what="its end")


def test_process_with_a_reused_pid_is_another_one() -> None:
    assert look_at(os.getpid(), start_ticks(os.getpid())).state is ProcessState.RUNNING
    assert look_at(os.getpid(), start_ticks(os.getpid()) - 1).state is ProcessState.GONE


def test_machine_is_named_the_same_by_all_its_processes() -> None:
    code = "from elastic_rl.etcd.process_state import machine_id; print(machine_id())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert told.strip() == machine_id() != ""
    assert load_per_core() >= 0.0
