"""What the kernel says about processes: work, starvation, reads. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl.host.process_activity import ActivityMeter, Since, listening, of_process, of_tree
from elastic_rl.net.addresses import free_port

BUSY = "while True: pass"
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.wait()


def test_busy_process_works_and_a_stopped_one_does_nothing(start: Start) -> None:
    child = start(BUSY)
    meter = ActivityMeter([child.pid])
    seen = 0.0

    def worked() -> bool:
        nonlocal seen
        seen += meter.since().cpu_s
        return seen > 0.1

    wait_until(worked, what="CPU time")
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, what="the stop")
    meter.since()
    assert {meter.since() for _ in range(1000)} == {Since()}


def test_processes_that_share_a_core_are_starved(start: Start) -> None:
    pin = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    children = [start(pin + BUSY) for _ in range(4)]
    wait_until(lambda: all((of_process(c.pid) or of_tree(0)).starved_s > 0.2 for c in children),
               what="processes to wait for the CPU")
    meter = ActivityMeter(c.pid for c in children)
    assert meter.since().ready, "three of the four wait, and the kernel has not counted that yet"


def test_tree_counts_descendants_and_their_reads(start: Start) -> None:
    grandchild = ("import time; sum(range(5_000_000)); open('/dev/zero', 'rb').read(1 << 22); print(1, flush=True); "
                  "time.sleep(600)")
    child = start(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])")
    assert child.stdout and child.stdout.readline()
    alone, tree = of_process(child.pid), of_tree(child.pid)
    assert alone and tree.cpu_s > alone.cpu_s and tree.read_bytes >= alone.read_bytes + (1 << 22)
    for process in psutil.Process(child.pid).children():
        process.kill()


def test_process_that_is_gone_counts_for_nothing(start: Start) -> None:
    child = start("pass")
    child.wait()
    assert of_process(child.pid) is None and of_tree(child.pid).cpu_s == 0
    assert ActivityMeter([child.pid]).since() == Since()


def test_process_is_found_by_the_port_it_listens_on(start: Start) -> None:
    port = free_port()
    child = start(f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); "
                  "time.sleep(600)")
    assert child.stdout and child.stdout.readline()
    assert listening(port) == [child.pid] and listening(free_port()) == []
