"""A whole run whose engines are on two hosts: one host is lost, comes back, and is drained. The run goes on where it
is, in its first epoch, and what was on the other host is replaced."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.host_runs import read, wait_for, wait_for_engines, wait_for_hosts, wait_for_steps
from support.lab import Lab, lab_of
from support.tiers import full

from elastic_rl.bench.recovery.host_runs import RL_RUN, RunRecords
from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/host/test_ray_workers.py tests/integration/driver/test_parts_on_ray.py",
    why="a whole run with engines on two hosts")]

APART_STEPS = 2


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("ab", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1")
        yield made


def actors(lab: Lab) -> list[str]:
    return [member.incarnation for member in read(lab, lambda run: run.members("actor"))]


def test_loss_and_drain_of_a_host_replace_its_engines_and_nothing_else(lab: Lab) -> None:
    a, b = lab.machines.values()
    wait_for_hosts(lab)
    b.lose_sight_of(a)
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *RL_RUN, "--rollout.engines=2")
    wait_for_engines(lab, 2, on_b=True)
    wait_for_steps(lab, APART_STEPS)
    before = actors(lab)

    b.power_off()
    wait_for_engines(lab, 2, on_b=False)
    wait_for_steps(lab, APART_STEPS)

    b.power_on()
    b.join(lab.join_file)
    wait_for_hosts(lab)
    b.lose_sight_of(a)
    wait_for(b.computes, "b's worker of Ray")
    a.run("scale", "3", f"--job={lab.job}", *a.location)
    wait_for_engines(lab, 3, on_b=True)
    a.run("drain", "b", "--within=300", "--wait", *a.location)
    wait_for(lambda: not b.computes(), "the end of the compute plane on b")
    wait_for_engines(lab, 3, on_b=False)
    wait_for_steps(lab, APART_STEPS)

    assert read(lab, RunRecords.epoch) == 1
    assert actors(lab) == before != []
    a.run("stop", lab.job, *a.location)
    report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
    assert report["groups_lost"] == report["groups_duplicated"] == 0 and report["audit_problems"] == []
    assert report["logprob_diff_max"] <= 1e-4
