"""A whole run whose engines and ranks alternate on two hosts: one host loses its power and comes back. On CPUs, so that
the group shrinks and grows within the epoch."""

from __future__ import annotations

import json
import secrets

import pytest
from support.host_runs import engines, read, wait_for, wait_for_hosts, wait_for_steps
from support.lab import Lab, lab_of
from support.tiers import full

from elastic_rl.bench.recovery.host_runs import RL_RUN, RunRecords, over_hosts
from elastic_rl.host.paths import JobPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/integration/driver/test_shared_gpus_on_hosts.py tests/integration/pipeline/test_device_phases.py",
    why="the phases of a whole run over two hosts")]

APART_STEPS = 2


def wait_for_ranks(lab: Lab, names: str) -> None:
    """Returns when the ranks are on these hosts, and the run has made further steps."""
    wait_for(lambda: "".join(read(lab, RunRecords.trainer_hosts)) == names, f"ranks on {names}")
    wait_for_steps(lab, APART_STEPS)


def test_engines_and_ranks_of_two_hosts_alternate_and_go_on_without_one() -> None:
    with lab_of("ab", f"e2e-{secrets.token_hex(4)}") as lab:
        lab.start("--coordinator.replicas=1")
        a, b = lab.machines.values()
        wait_for_hosts(lab)
        b.lose_sight_of(a)
        a.run("train", "--detach", f"--job={lab.job}", *a.location, *RL_RUN, *over_hosts(2), "--placement=colocated",
              "--rollout.engines=2")
        wait_for(lambda: sorted(engines(lab).values()) == ["a", "b"], "an engine on each host")
        wait_for_ranks(lab, "ab")

        b.power_off()
        wait_for_ranks(lab, "a")
        b.power_on()
        b.join(lab.join_file)
        wait_for_hosts(lab)
        b.lose_sight_of(a)
        wait_for_ranks(lab, "ab")

        assert read(lab, RunRecords.epoch) == 1
        a.run("stop", lab.job, *a.location)
        report = json.loads(JobPaths.of(a.cluster.cfg).report.read_text())
        assert report["groups_lost"] == report["groups_duplicated"] == 0 and report["audit_problems"] == []
        assert report["logprob_diff_max"] <= 1e-4
