"""A whole run whose ranks are on three hosts, one on each: a host loses its power and comes back, another is drained.
The group shrinks and grows, the steps go on, and their losses are those of a run that nothing has disturbed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from support.lab import Lab, lab_of
from support.tiers import full
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.etcd import fencing
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Formation
from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/driver/test_formations.py tests/integration/trainer/test_ranks_on_hosts.py",
    why="a whole run with its trainer on three hosts")]

SETTINGS = ("--mode=sft", "--seed=3", "--sft.max_steps=100000", "--sft.eval_every_steps=10", "--sft.batch_size=192",
            "--sft.lr=2e-4", "--sft.state_every_steps=5", "--sft.eval_problems=64", "--trainer.tensor_parallel=1",
            "--data.options.operand_below=30")
OVER_HOSTS = ("--trainer.data_parallel=3", "--trainer.min_data_parallel=1", "--trainer.ranks_per_host=1")
APART_STEPS = 10
PATIENCE_S = 900.0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("abc", f"e2e-{secrets.token_hex(4)}") as made:
        made.start("--coordinator.replicas=1")
        yield made


def step(lab: Lab, job: str) -> int:
    with lab.etcd() as etcd:
        return max((m.step for m in members(etcd, Keys(job), "trainer")), default=0)


def wait_for_steps(lab: Lab, until: int) -> None:
    wait_until(lambda: step(lab, lab.job) >= until, what=f"step {until}", timeout_s=PATIENCE_S, poll_s=0.5)


def hosts(lab: Lab) -> str:
    with lab.etcd() as etcd:
        found = readable_one(etcd.get(Keys(lab.job).formation("trainer")), Formation)
    return "".join(sorted(found.ranks())) if found else ""


def wait_for_hosts(lab: Lab, names: str) -> None:
    """Returns when the ranks are on these hosts, and have made further steps there."""
    wait_until(lambda: hosts(lab) == names, what=f"ranks on {names}", timeout_s=PATIENCE_S, poll_s=0.5)
    wait_for_steps(lab, step(lab, lab.job) + APART_STEPS)
    assert hosts(lab) == names


def losses(lab: Lab, job: str) -> dict[int, float]:
    """The loss on held-out problems after each step in which it was evaluated, as it was found last."""
    cfg = config.parse({"run_dir": str(lab.first.folder), "cluster": "lab", "job": job})
    records = [json.loads(line) for line in JobPaths.of(cfg).steps.read_text().splitlines()]
    return {record["step"]: record["eval_loss"] for record in records if record["kind"] == "sft"}


def test_group_shrinks_and_grows_with_the_hosts_and_learns_what_it_would_have_learnt(lab: Lab) -> None:
    a, b, c = lab.machines.values()
    wait_until(lambda: all(lab.phase(name) == "ready" for name in "abc"), what="the hosts")
    b.lose_sight_of(a)
    c.lose_sight_of(a)
    a.run("train", "--detach", f"--job={lab.job}", *a.location, *SETTINGS, *OVER_HOSTS)
    wait_for_hosts(lab, "abc")

    b.power_off()
    wait_for_hosts(lab, "ac")
    b.power_on()
    b.join(lab.join_file)
    wait_for_hosts(lab, "abc")
    a.run("drain", "c", "--within=600", "--wait", *a.location)
    assert lab.phase("c") == "left" and not c.computes()
    wait_for_hosts(lab, "ab")

    with lab.etcd() as etcd:
        assert fencing.current_epoch(etcd, Keys(lab.job)) == 1
    a.run("stop", lab.job, *a.location)
    report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
    assert report["audit_problems"] == []
    disturbed = losses(lab, lab.job)
    until = max(disturbed)
    assert until > 3 * APART_STEPS

    other = f"{lab.job}-undisturbed"
    a.run("train", "--detach", f"--job={other}", *a.location, *SETTINGS, "--trainer.data_parallel=1")
    wait_until(lambda: step(lab, other) > until, what="the undisturbed run", timeout_s=PATIENCE_S, poll_s=0.5)
    a.run("stop", other, *a.location)
    undisturbed = losses(lab, other)
    assert undisturbed[until] < undisturbed[min(undisturbed)] * 0.9, "it has learnt something"
    assert disturbed == {number: pytest.approx(undisturbed[number], rel=1e-3) for number in disturbed}
