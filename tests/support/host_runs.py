"""Whole runs on the machines of a lab: what is read of them, and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_rl.bench.recovery.host_runs import RunRecords
from support.lab import Lab
from support.waiting import wait_until

T = TypeVar("T")
PATIENCE_S = 900.0


def read(lab: Lab, of: Callable[[RunRecords], T], job: str = "") -> T:
    """Something of the lab's job, or of another one."""
    with lab.etcd() as etcd:
        return of(RunRecords(etcd, job or lab.job))


def wait_for(check: Callable[..., object], what: str) -> None:
    wait_until(check, what=what, timeout_s=PATIENCE_S, poll_s=0.5)


def wait_for_hosts(lab: Lab) -> None:
    wait_for(lambda: all(lab.phase(name) == "ready" for name in lab.machines), "the hosts")


def wait_for_steps(lab: Lab, steps: int, step: Callable[[RunRecords], int] = RunRecords.step) -> None:
    """Returns when the run has done so many further steps."""
    before = read(lab, step)
    wait_for(lambda: read(lab, step) >= before + steps, "further steps")


def engines(lab: Lab) -> dict[str, str]:
    """Id of each engine that serves the newest version that any serves, with the name of its host."""
    names = {machine.address: name for name, machine in lab.machines.items()}
    return {engine: names[address] for engine, address in read(lab, RunRecords.engines).items()}


def wait_for_engines(lab: Lab, count: int, *, on_b: bool) -> None:
    wait_for(lambda: len(engines(lab)) == count and ("b" in engines(lab).values()) == on_b,
             f"{count} engines, {'some' if on_b else 'none'} of them on b")
