"""PPO with two trainer groups. A run whose critic is killed, and whose actor is replaced, ends with both groups at the
last step, with the weights and optimizer states of a run that nothing disturbed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.etcd_server import EtcdServers
from support.tiers import full
from support.trainer_groups import Engines, Groups, running_groups
from support.waiting import wait_until

from elastic_rl.algorithms.ppo import PpoOptions, sample_rewards
from elastic_rl.config.groups import ACTOR, CRITIC, TrainerGroupSpec
from elastic_rl.data.ledger import ConsumedGroups, audit
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.records import StepMetrics, Version
from elastic_rl.host.job_secrets import dcs_security

pytestmark = pytest.mark.timeout(900)

STEPS = 6
SETTINGS = {"algorithm": {"name": "ppo", "options": {"gae_lambda": 0.9}, "kl_coef": 0.1, "kl_in": "reward"},
            "critic": {"warmup_steps": 1, "train": {"lr": 1e-2}}}


def sample_advantages(rewards: list[list[float]]) -> list[list[float]]:
    found: list[list[float]] = sample_rewards(torch.tensor(rewards), PpoOptions()).tolist()
    return found


def states_of(groups: Groups, group: TrainerGroupSpec) -> list[Version]:
    return [v for v in reads.list_versions(groups.job.etcd, groups.job.keys, group.state) if v.committed_at > 0]


RunToItsEnd = Callable[..., dict[str, dict[str, torch.Tensor]]]


@pytest.fixture
def run_to_its_end(etcd_servers: EtcdServers, etcd: EtcdClient, tmp_path: Path) -> RunToItsEnd:
    """Runs a job, and returns the tensors of its last states by group."""
    def run(*, disturbed: bool) -> dict[str, dict[str, torch.Tensor]]:
        with running_groups(etcd_servers, etcd, tmp_path / f"disturbed-{disturbed}", SETTINGS, steps=STEPS,
                            engines=Engines(sample_advantages)) as groups:
            if disturbed:
                groups.wait_for(3)
                groups.kill_rank(CRITIC)
                wait_until(lambda: "critic.recovered" in groups.kinds(), what="the recovery")
                groups.job.start_actor()  # the first one is fenced off wherever it is
            groups.finish()
            assert_at_the_last_step(groups)
            kinds = groups.kinds()
            assert ("critic.failed" in kinds) is disturbed and "trainer.failed" not in kinds
            return {group.name: groups.state(group) for group in (ACTOR, CRITIC)}

    return run


def test_critic_that_is_killed_and_actor_that_is_replaced_cost_no_step(run_to_its_end: RunToItsEnd) -> None:
    assert all(run_to_its_end(disturbed=True).values())


@full(proved_in="tests/integration/trainer/test_critic_group.py tests/integration/trainer/test_precision.py "
                "tests/unit/pipeline/test_trainer_groups.py",
      why="the bits of two groups, of which one resumed in the middle of a job")
def test_run_with_a_killed_critic_and_a_replaced_actor_is_unchanged(run_to_its_end: RunToItsEnd) -> None:
    undisturbed, disturbed = run_to_its_end(disturbed=False), run_to_its_end(disturbed=True)
    for group, expected in undisturbed.items():
        tensors = disturbed[group]
        assert set(tensors) == set(expected)
        assert [n for n in expected if not torch.equal(tensors[n], expected[n])] == [], group


def assert_at_the_last_step(groups: Groups) -> None:
    """Both groups have committed it, as one update, and every sample was trained on once."""
    policy, critic = (states_of(groups, group)[-1].meta for group in (ACTOR, CRITIC))
    assert policy["pair"] == critic["pair"] and policy["step"] == critic["step"] == STEPS
    assert policy["consumed"] == critic["consumed"]
    for group in (ACTOR, CRITIC):
        states = [(int(v.meta["step"]), ConsumedGroups.from_json(v.meta["consumed"])) for v in states_of(groups, group)
                  if v.meta["phase"] == "rl"]
        assert audit(states, groups_per_step=8).clean
    job = groups.job
    metrics = [StepMetrics.decode(kv.value) for kv in job.etcd.range(job.keys.steps_prefix())[0]]
    assert [m.step for m in metrics] == list(range(1, STEPS + 1))
    assert {"critic_loss", "explained_variance", "value_mean", "kl_reference"} <= set(metrics[-1].update)
    assert metrics[0].update["lr"] == 0 and metrics[1].update["lr"] > 0, "the policy waits for the critic"
    with Puller(job.etcd, job.keys, "test", io_timeout_s=30, security=dcs_security(job.ctx.config)) as puller:
        head = puller.head(CRITIC.weights)
        assert head is not None and head.meta["step"] == STEPS
