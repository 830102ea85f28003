"""A whole run that moves: to another host when its own is drained, and back when that one loses its power. Each step is
in the records once in its final form, and the training goes on from the committed state."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.host_runs import read, wait_for, wait_for_hosts, wait_for_steps
from support.lab import Lab, Machine, lab_of
from support.tiers import full

from elastic_rl.bench.recovery.host_runs import RL_RUN, RunRecords
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import read_records

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/host/test_hosts_lost.py tests/integration/host/test_joined_host.py",
    why="a whole run on two hosts in turn")]

APART_STEPS = 2
"""Steps between two moves."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("ab", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1")
        yield made


def wait_for_steps_on(lab: Lab, host: str, in_epoch: int) -> None:
    """Returns when the run is on the host and has done further steps there. What it has left on the host before does
    steps until its epoch is over, or that host has ended it."""
    wait_for(lambda: lab.runs_on(host), f"the run on {host}")
    wait_for(lambda: read(lab, RunRecords.epoch) == in_epoch, f"epoch {in_epoch}")
    wait_for_steps(lab, APART_STEPS)


def steps_of(lab: Lab, machine: Machine) -> list[int]:
    """The steps in the copy of the records on a machine, each as often as it is there."""
    records = read_records(JobPaths.of(machine.cluster.cfg).steps)
    return [record["step"] for record in records if record["kind"] == "step"]


def test_run_goes_on_from_its_committed_state_on_another_host(lab: Lab) -> None:
    a, b = lab.machines.values()
    wait_for_hosts(lab)
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *RL_RUN, "--rollout.engines=1")
    wait_for_steps_on(lab, "a", 1)

    a.run("drain", "a", "--within=0", "--wait", *a.location)
    wait_for_steps_on(lab, "b", 2)
    wait_for(lambda: not a.computes(), "the end of the compute plane on a")
    a.run("uncordon", "a", *a.location)
    wait_for_hosts(lab)

    b.power_off()
    wait_for_steps_on(lab, "a", 3)
    a.run("stop", lab.job, *a.location)
    steps = read(lab, RunRecords.step)
    assert sorted(set(steps_of(lab, a))) == list(range(1, steps + 1)), "those of the other host, too"
    report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
    assert report["steps"] == steps and report["audit_problems"] == []
    assert report["groups_lost"] == report["groups_duplicated"] == 0
    assert report["logprob_diff_max"] <= 1e-4
