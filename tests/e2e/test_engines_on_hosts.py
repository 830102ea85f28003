"""A whole run whose engines are on two hosts: one host is lost, comes back, and is drained. The run goes on where it
is, in its first epoch, and what was on the other host is replaced."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.lab import Lab, lab_of
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.etcd import fencing
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Engine, EngineState, JobStatus
from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/host/test_ray_workers.py tests/integration/driver/test_parts_on_ray.py",
    why="a whole run with engines on two hosts")]

STEPS = 100_000
"""The run is stopped before."""
APART_STEPS = 2
SETTINGS = ("--rollout.engines=2", f"--train.steps={STEPS}", "--train.state_every_steps=1",
            "--train.prompts_per_step=8", "--train.group_size=4", "--train.updates_per_step=1", "--sft.max_steps=0",
            "--data.options.operand_below=30", "--trainer.tensor_parallel=1", "--trainer.data_parallel=1",
            "--train.eval_every_steps=1000")
PATIENCE_S = 900.0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("ab", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1")
        yield made


def engines(lab: Lab) -> dict[str, str]:
    """Id of each engine that serves the newest version that any serves, with the name of its host."""
    names = {machine.address: name for name, machine in lab.machines.items()}
    with lab.etcd() as etcd:
        found = [e for e, _ in readable(etcd.range(Keys(lab.job).engines_prefix())[0], Engine)
                 if e.state is EngineState.READY]
    newest = max((e.version for e in found), default=0)
    return {e.id: names[e.host] for e in found if e.version == newest}


def wait_for_engines(lab: Lab, count: int, *, on_b: bool) -> None:
    wait_until(lambda: len(engines(lab)) == count and ("b" in engines(lab).values()) == on_b, timeout_s=PATIENCE_S,
               poll_s=0.5, what=f"{count} engines, {'some' if on_b else 'none'} of them on b")


def wait_for_steps(lab: Lab) -> None:
    def step() -> int:
        with lab.etcd() as etcd:
            return (readable_one(etcd.get(Keys(lab.job).job_status()), JobStatus) or JobStatus(phase="", step=0)).step

    before = step()
    wait_until(lambda: step() >= before + APART_STEPS, what="further steps", timeout_s=PATIENCE_S, poll_s=0.5)


def ranks(lab: Lab) -> list[str]:
    with lab.etcd() as etcd:
        return sorted(m.incarnation for m in members(etcd, Keys(lab.job), "actor"))


def test_loss_and_drain_of_a_host_replace_its_engines_and_nothing_else(lab: Lab) -> None:
    a, b = lab.machines.values()
    wait_until(lambda: lab.phase("a") == lab.phase("b") == "ready", what="both hosts")
    b.lose_sight_of(a)
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *SETTINGS)
    wait_for_engines(lab, 2, on_b=True)
    wait_for_steps(lab)
    before = ranks(lab)

    b.power_off()
    wait_for_engines(lab, 2, on_b=False)
    wait_for_steps(lab)

    b.power_on()
    b.join(lab.join_file)
    wait_until(lambda: lab.phase("b") == "ready", what="host b", timeout_s=PATIENCE_S)
    b.lose_sight_of(a)
    wait_until(b.computes, what="b's worker of Ray", timeout_s=PATIENCE_S)
    a.run("scale", "3", f"--job={lab.job}", *a.location)
    wait_for_engines(lab, 3, on_b=True)
    a.run("drain", "b", "--within=300", "--wait", *a.location)
    wait_until(lambda: not b.computes(), what="the end of the compute plane on b", timeout_s=PATIENCE_S)
    wait_for_engines(lab, 3, on_b=False)
    wait_for_steps(lab)

    with lab.etcd() as etcd:
        assert fencing.current_epoch(etcd, Keys(lab.job)) == 1
    assert ranks(lab) == before != []
    a.run("stop", lab.job, *a.location)
    report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
    assert report["groups_lost"] == report["groups_duplicated"] == 0 and report["audit_problems"] == []
    assert report["logprob_diff_max"] <= 1e-4
