"""A job with groups that compute with the policy and do not train it.

Its log-probs are those of the trainer's own ranks: the job ends with the weights and optimizer state of one without
these groups, bit for bit, also when both are killed on the way; nothing goes back then.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.actor_runs import ThreadedJob
from support.etcd_server import EtcdServers
from support.tiers import full
from support.trainer_groups import running_groups

from elastic_rl.config.groups import ACTOR, ACTOR_FWD, REFERENCE
from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError, Conflict
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.trainer.service.client import TrainerClient

pytestmark = pytest.mark.timeout(900)

STEPS = 5


def require_fenced(job: ThreadedJob) -> None:
    """What the groups say to who asks for another version than there is, or for what they do not do."""
    term = fencing.begin_term(job.etcd, job.keys, job.ctx.epoch, "test")
    lengths = torch.tensor([3])
    batch = Batch({"tokens": torch.tensor([1, 2, 3], dtype=torch.int32), "lengths": lengths,
                   "loss_mask": torch.tensor([False, True, True])})
    client = TrainerClient(job.etcd, job.keys, dcs_security(job.ctx.config), epoch=job.ctx.epoch, term=term,
                           group=ACTOR_FWD)
    try:
        used, found = client.forward_version(batch, STEPS)
        assert used["step"] == STEPS and used["version"] >= STEPS
        assert bool((found["logprobs"] < 0).all())
        with pytest.raises(Conflict, match=f"after RL step {STEPS + 1} is committed"):
            client.forward_version(batch, STEPS + 1)
        with pytest.raises(Conflict, match="of number 1000 or higher"):
            client.forward_version(batch, STEPS, at_least=1000)
        with pytest.raises(ConfigError, match="the group actor_fwd has no save"):
            client.save("rl", 0)
        assert client.forward_version(batch, STEPS)[0] == used, "it has kept its version"
    finally:
        client.close()


@full(proved_in="tests/unit/pipeline/test_trainer_groups.py tests/integration/trainer/test_critic_group.py",
      why="real groups that only compute, killed in a job")
def test_run_with_killed_forward_groups_equals_one_without_such_groups(
        etcd_servers: EtcdServers, etcd: EtcdClient, tmp_path: Path) -> None:
    found = {}
    for with_groups in (True, False):
        settings = {"algorithm": {"tis_cap": 2.0, "kl_coef": 0.1, "reference_every_steps": 2},
                    "dcs": {"keep_versions": 2}, "train": {"updates_per_step": 2},
                    "actor_fwd": {"enabled": with_groups}, "reference": {"enabled": with_groups}}
        with running_groups(etcd_servers, etcd, tmp_path / str(with_groups), settings, steps=STEPS) as groups:
            assert len(groups.job.ctx.config.trainer_groups) == (3 if with_groups else 1)
            if with_groups:
                for step, group in ((1, REFERENCE), (2, ACTOR_FWD)):
                    groups.wait_for(step)
                    groups.kill_rank(group)
            groups.finish()
            # Without what only the trainer's own reference policy has.
            found[with_groups] = {name: tensor for name, tensor in groups.state(ACTOR).items()
                                  if not name.startswith("reference.")}
            if with_groups:
                lost = {"trainer.failed", "trainer.rewound", "trainer.restarted", "actor.resynced"}
                assert not lost.intersection(groups.kinds())
                assert {f"{group.name}.{what}" for group in (REFERENCE, ACTOR_FWD)
                        for what in ("restarted", "recovered")} <= set(groups.kinds())
                require_fenced(groups.job)
    assert found[True].keys() == found[False].keys()
    different = [name for name, tensor in found[True].items() if not torch.equal(tensor, found[False][name])]
    assert not different
