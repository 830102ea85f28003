"""A whole run that moves: to another host when its own is drained, and back when that one loses its power. Each step is
in the records once in its final form, and the training goes on from the committed state."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.lab import Lab, Machine, lab_of
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.etcd import fencing
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import read_records

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/host/test_hosts_lost.py tests/integration/host/test_joined_host.py",
    why="a whole run on two hosts in turn")]

STEPS = 100_000
"""The run is stopped before."""
APART_STEPS = 2
"""Steps between two moves."""
SETTINGS = ("--rollout.engines=1", f"--train.steps={STEPS}", "--train.state_every_steps=1",
            "--train.prompts_per_step=8", "--train.group_size=4", "--train.updates_per_step=1", "--sft.max_steps=0",
            "--data.options.operand_below=30", "--trainer.tensor_parallel=1", "--trainer.data_parallel=1",
            "--train.eval_every_steps=1000")
PATIENCE_S = 900.0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("ab", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1")
        yield made


def status(lab: Lab) -> JobStatus:
    with lab.etcd() as etcd:
        return readable_one(etcd.get(Keys(lab.job).job_status()), JobStatus) or JobStatus(phase="", step=0)


def epoch(lab: Lab) -> int:
    with lab.etcd() as etcd:
        return fencing.current_epoch(etcd, Keys(lab.job))


def wait_for_steps(lab: Lab, host: str, in_epoch: int) -> None:
    """Returns when the run is on the host and has done further steps there. What it has left on the host before does
    steps until its epoch is over, or that host has ended it."""
    wait_until(lambda: lab.runs_on(host), what=f"the run on {host}", timeout_s=PATIENCE_S, poll_s=0.5)
    wait_until(lambda: epoch(lab) == in_epoch, what=f"epoch {in_epoch}", timeout_s=PATIENCE_S, poll_s=0.5)
    before = status(lab).step
    wait_until(lambda: status(lab).step >= before + APART_STEPS, what=f"steps on {host}", timeout_s=PATIENCE_S,
               poll_s=0.5)


def steps_of(lab: Lab, machine: Machine) -> list[int]:
    """The steps in the copy of the records on a machine, each as often as it is there."""
    records = read_records(JobPaths.of(machine.cluster.cfg).steps)
    return [record["step"] for record in records if record["kind"] == "step"]


def test_run_goes_on_from_its_committed_state_on_another_host(lab: Lab) -> None:
    a, b = lab.machines.values()
    wait_until(lambda: lab.phase("a") == lab.phase("b") == "ready", what="both hosts")
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *SETTINGS)
    wait_for_steps(lab, "a", 1)

    a.run("drain", "a", "--within=0", "--wait", *a.location)
    wait_for_steps(lab, "b", 2)
    wait_until(lambda: not a.computes(), what="the end of the compute plane on a")
    a.run("uncordon", "a", *a.location)
    wait_until(lambda: lab.phase("a") == "ready", what="host a")

    b.power_off()
    wait_for_steps(lab, "a", 3)
    a.run("stop", lab.job, *a.location)
    steps = status(lab).step
    assert sorted(set(steps_of(lab, a))) == list(range(1, steps + 1)), "those of the other host, too"
    report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
    assert report["steps"] == steps and report["audit_problems"] == []
    assert report["groups_lost"] == report["groups_duplicated"] == 0
    assert report["logprob_diff_max"] <= 1e-4
