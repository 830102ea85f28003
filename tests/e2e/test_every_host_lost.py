"""Whole runs on three hosts, each with a member of etcd and a coordinator. One loses the host that has driver, Ray's
head, leader and rank 0. The other one loses the power of every host in turn; then the driver's is cut off and healed,
the next one drained, and one preempted. Each step is in the records once, no group is lost or there twice, and no host
keeps a process of the run."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.host_runs import engines, read, wait_for, wait_for_hosts, wait_for_steps
from support.lab import Lab, Machine, lab_of
from support.tiers import full

from elastic_rl.bench.recovery.host_runs import RL_RUN, RunRecords
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import read_records

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]

APART_STEPS = 2
NOTICE = "/tmp/notice"
"""Where a host looks for a notice of preemption; each has a /tmp of its own."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("abc", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1", "--etcd.follow_members_s=5",
                   joining=["--coordinator", "--etcd", f"--preemption-notice={NOTICE}"])
        wait_for_hosts(made)
        wait_for(lambda: sorted(made.votes().values()) == [True] * 3, "the votes of all members of etcd")
        yield made


def begin(lab: Lab, engine_count: int) -> None:
    """Submits the run. Returns when it does steps on the first host, with an engine on another one at least."""
    lab.first.run("train", "--detach", f"--job={lab.job}", *lab.first.location, *RL_RUN,
                  f"--rollout.engines={engine_count}")
    wait_for(lambda: lab.runs_on(lab.first.name), "the run on the first host")
    wait_for(lambda: len(engines(lab)) == engine_count and {*engines(lab).values()} != {lab.first.name},
             "all engines, not all of them on the first host")
    wait_for_steps(lab, APART_STEPS)


def lose(lab: Lab, machine: Machine) -> None:
    """Powers the host off. Returns when the run does further steps without it."""
    lab.watched_from = next(other for other in lab.machines.values() if other is not machine)
    machine.power_off()
    wait_for(lambda: lab.phase(machine.name) == "lost", f"the loss of {machine.name}")
    wait_for(lambda: lab.holder() not in ("", machine.name), "the host of the driver")
    wait_for_steps(lab, APART_STEPS)


def come_back(lab: Lab, machine: Machine) -> None:
    """Powers the host on, and starts the cluster's services there as its operator does."""
    machine.power_on()
    if machine is lab.first:
        machine.run("up", *machine.location)
    else:
        machine.join(machine.cluster.paths.join_file)
    wait_for(lambda: lab.phase(machine.name) == "ready", f"the return of {machine.name}")


def end(lab: Lab) -> None:
    """Stops the run, and looks at its records and at what is left of it."""
    last, watcher = lab.machines[lab.holder()], lab.watched_from
    watcher.run("stop", lab.job, *watcher.location)
    steps = read(lab, RunRecords.step)
    paths = JobPaths.of(last.cluster.cfg)
    done = {record["step"] for record in read_records(paths.steps) if record["kind"] == "step"}
    report = json.loads(paths.report.read_text())
    assert done == set(range(1, steps + 1))
    assert report["steps"] == steps and report["audit_problems"] == []
    assert report["groups_lost"] == report["groups_duplicated"] == 0
    assert report["logprob_diff_max"] <= 1e-4
    for machine in lab.machines.values():
        wait_for(lambda machine=machine: not machine.computes(), f"the end of all of the run on {machine.name}")


def test_run_survives_the_loss_of_the_first_host(lab: Lab) -> None:
    """The third host has a member of etcd and a coordinator alone; the run is on the two others, and then on one."""
    lab.first.run("cordon", "c", *lab.first.location)
    wait_for(lambda: lab.phase("c") == "cordoned", "the cordon of c")
    begin(lab, 2)
    lose(lab, lab.first)
    end(lab)


@full(proved_in="tests/e2e/test_every_host_lost.py tests/integration/host/test_hosts_lost.py",
      why="the same with each of three hosts in turn, a cut, a drain and a preemption")
def test_run_survives_the_loss_of_each_host_in_turn(lab: Lab) -> None:
    a, b, c = lab.machines.values()
    begin(lab, 3)
    for machine in (a, b, c):
        lose(lab, machine)
        come_back(lab, machine)

    cut = lab.machines[lab.holder()]
    lab.watched_from = next(machine for machine in (a, b, c) if machine is not cut)
    cut.cut()
    wait_for(lambda: lab.phase(cut.name) == "lost", f"the loss of {cut.name}")
    wait_for(lambda: lab.holder() not in ("", cut.name), "another host of the driver")
    wait_for_steps(lab, APART_STEPS)
    cut.heal()
    wait_for(lambda: lab.phase(cut.name) == "ready", f"the return of {cut.name}")

    drained = lab.machines[lab.holder()]
    lab.watched_from.run("drain", drained.name, "--within=30", "--wait", *lab.watched_from.location)
    wait_for(lambda: lab.holder() not in ("", drained.name), "another host of the driver")
    wait_for_steps(lab, APART_STEPS)
    assert not drained.computes()
    lab.watched_from.run("uncordon", drained.name, *lab.watched_from.location)
    wait_for_hosts(lab)

    preempted = b if lab.holder() == "b" else c
    lab.watched_from = a
    preempted.path(NOTICE).touch()
    wait_for(lambda: lab.phase(preempted.name) == "left", f"the drain of {preempted.name}")
    wait_for_steps(lab, APART_STEPS)
    assert not preempted.computes()
    end(lab)
