"""A whole run whose ranks are on three hosts, one on each: a host loses its power and comes back, another is drained.
The group shrinks and grows, the steps go on, and their losses are those of a run that nothing has disturbed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.host_runs import read, wait_for, wait_for_hosts, wait_for_steps
from support.lab import Lab, lab_of
from support.tiers import full

from elastic_rl import config
from elastic_rl.bench.recovery.host_runs import SFT_RUN, RunRecords, over_hosts
from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/driver/test_formations.py tests/integration/trainer/test_ranks_on_hosts.py",
    why="a whole run with its trainer on three hosts")]

APART_STEPS = 10


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("abc", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1")
        yield made


def wait_for_trainer(lab: Lab, names: str) -> None:
    """Returns when the ranks are on these hosts, and have made further steps there."""
    wait_for(lambda: "".join(read(lab, RunRecords.trainer_hosts)) == names, f"ranks on {names}")
    wait_for_steps(lab, APART_STEPS, RunRecords.trainer_step)
    assert "".join(read(lab, RunRecords.trainer_hosts)) == names


def losses(lab: Lab, job: str) -> dict[int, float]:
    """The loss on held-out problems after each step in which it was evaluated, as it was found last."""
    cfg = config.parse({"run_dir": str(lab.first.folder), "cluster": "lab", "job": job})
    records = [json.loads(line) for line in JobPaths.of(cfg).steps.read_text().splitlines()]
    return {record["step"]: record["eval_loss"] for record in records if record["kind"] == "sft"}


def test_group_shrinks_and_grows_with_the_hosts_and_learns_what_it_would_have_learnt(lab: Lab) -> None:
    a, b, c = lab.machines.values()
    wait_for_hosts(lab)
    b.lose_sight_of(a)
    c.lose_sight_of(a)
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *SFT_RUN, *over_hosts(3))
    wait_for_trainer(lab, "abc")

    b.power_off()
    wait_for_trainer(lab, "ac")
    b.power_on()
    b.join(lab.join_file)
    wait_for_trainer(lab, "abc")
    a.run("drain", "c", "--within=600", "--wait", *a.location)
    assert lab.phase("c") == "left" and not c.computes()
    wait_for_trainer(lab, "ab")

    assert read(lab, RunRecords.epoch) == 1
    a.run("stop", lab.job, *a.location)
    report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
    assert report["audit_problems"] == []
    disturbed = losses(lab, lab.job)
    until = max(disturbed)
    assert until > 3 * APART_STEPS

    other = f"{lab.job}-undisturbed"
    a.run("train", "--detach", f"--job={other}", *a.location, *SFT_RUN, "--trainer.data_parallel=1")
    wait_for(lambda: read(lab, RunRecords.trainer_step, other) > until, "the undisturbed run")
    a.run("stop", other, *a.location)
    undisturbed = losses(lab, other)
    assert undisturbed[until] < undisturbed[min(undisturbed)] * 0.9, "it has learnt something"
    assert disturbed == {number: pytest.approx(undisturbed[number], rel=1e-3) for number in disturbed}
