"""A job with groups that compute with the policy and do not train it, on real ranks, a real etcd and a real DCS node;
engines are a function.

Its log-probs are those of the trainer's own ranks: the job ends with the weights and optimizer state of one without
these groups, bit for bit, also when both are killed on the way; nothing goes back then.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.actor_runs import ThreadedJob
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers

from elastic_rl import config
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, REFERENCE, GroupSpec
from elastic_rl.data.batch import Batch
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.errors import ConfigError, Conflict
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.processes import python, spawn, stop
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.runtime import wait_until
from elastic_rl.trainer.service.client import TrainerClient

pytestmark = pytest.mark.timeout(900)

STEPS, WAIT_S = 5, 400.0
TOKEN = "token of the test"


class Engines:
    """A sample of each prompt is right and the other wrong."""

    def generate(self, prompts: Sequence[PromptRequest], min_version: int) -> list[list[Sample]]:
        return [[self._sample(p.prompt.answer_ids or () if i == 0 else (9, 4)) for i in range(p.samples)]
                for p in prompts]

    @staticmethod
    def _sample(tokens: Sequence[int]) -> Sample:
        return Sample((Segment(tuple(tokens), (-2.0,) * len(tokens), version=1),), "stop")

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return [[r - sum(group) / len(group) for r in group] for group in rewards]

    def judge(self, request: JudgeRequest) -> list[Judgement]:
        raise AssertionError("no reward asks a judge")

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        raise AssertionError("there is no teacher")

    def token_advantages(self, batch: bytes) -> np.ndarray:
        raise AssertionError("the algorithm has none")


@dataclass
class Groups:
    job: ThreadedJob

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.job.status().phase == "rl" and self.job.status().step >= step, timeout_s=WAIT_S,
                   what=f"step {step}", alive=lambda: not self.job.runs[-1].errors)

    def kill_rank(self, group: GroupSpec) -> None:
        os.kill(members(self.job.etcd, self.job.keys, group.name)[0].pid, signal.SIGKILL)

    def finish(self) -> None:
        wait_until(lambda: self.job.status().phase == "finished" or bool(self.job.runs[-1].errors), timeout_s=WAIT_S,
                   what="the end of the job")
        assert not self.job.runs[-1].errors, self.job.runs[-1].errors

    def state(self) -> dict[str, torch.Tensor]:
        """The newest state of the trainer, without what only its own reference policy has."""
        with Puller(self.job.etcd, self.job.keys, "test", io_timeout_s=30, security=Security(TOKEN)) as puller, \
                puller.pull(ACTOR.state) as pulled:
            return {name: tensor.clone() for name, tensor in pulled.tensors() if not name.startswith("reference.")}

    def kinds(self) -> list[str]:
        return [e.kind for e in events.recent(self.job.etcd, self.job.keys)]


@contextmanager
def running(etcd_servers: EtcdServers, etcd: EtcdClient, folder: Path, *, with_groups: bool) -> Iterator[Groups]:
    keys = Keys(f"t-{secrets.token_hex(4)}")
    cfg = config.parse({
        "job": keys.job, "seed": 1, "deterministic": True, "device": {"type": "cpu"}, "run_dir": str(folder / "runs"),
        "dcs": {"arena_bytes": 128 << 20, "keep_versions": 2}, "data": {"options": {"operand_below": 10}},
        "sft": {"max_steps": 0}, "algorithm": {"tis_cap": 2.0, "kl_coef": 0.1, "reference_every_steps": 2},
        "train": {"steps": STEPS, "state_every_steps": 2, "prompts_per_step": 8, "group_size": 2, "lr": 1e-3,
                  "updates_per_step": 2, "eval_every_steps": STEPS, "stop_eval_accuracy": None},
        "actor_fwd": {"enabled": with_groups}, "reference": {"enabled": with_groups},
        # A rank that is lost must be noticed long before a collective times out.
        "trainer": {"data_parallel": 1, "collective_timeout_s": 250.0, "start_timeout_s": 260.0}})
    epoch = fencing.raise_epoch(etcd, keys, holder="test").number
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, epoch=epoch,
                     model_dir=str(make_model_dir(folder / "model", cfg)))
    cfg.cluster_dir.mkdir(parents=True)
    (cfg.cluster_dir / TOKEN_FILE).write_text(TOKEN)
    with ExitStack() as closing:
        node = spawn_node(etcd_servers.endpoints, keys, "node-0", folder, arena_bytes=cfg.dcs.arena_bytes)
        closing.callback(stop, node.pid)
        await_node(etcd, keys, node)
        assert len(cfg.trainer_groups) == (3 if with_groups else 1)
        for group in cfg.trainer_groups:
            context = ctx.of_group(group).save(folder / f"context-{group.name}.json")
            agent = spawn(python("elastic_rl.trainer.group.agent", "--context", str(context)),
                          log=folder / f"{group.name}.log", env={"OMP_NUM_THREADS": "1"})
            closing.callback(stop, agent.pid)
        job = ThreadedJob(etcd, ctx, Engines())
        closing.callback(job.close)
        job.start_actor()
        yield Groups(job)


def require_fenced(job: ThreadedJob) -> None:
    """What the groups say to who asks for another version than there is, or for what they do not do."""
    term = fencing.begin_term(job.etcd, job.keys, job.ctx.epoch, "test")
    lengths = torch.tensor([3])
    batch = Batch({"tokens": torch.tensor([[1, 2, 3]]), "lengths": lengths,
                   "loss_mask": torch.tensor([[False, True, True]])})
    client = TrainerClient(job.etcd, job.keys, Security(TOKEN), epoch=job.ctx.epoch, term=term, group=ACTOR_FWD)
    try:
        used, found = client.forward_version(batch, STEPS)
        assert used["step"] == STEPS and used["version"] >= STEPS
        assert bool((found["logprobs"][batch["loss_mask"]] < 0).all())
        with pytest.raises(Conflict, match=f"after RL step {STEPS + 1} is committed"):
            client.forward_version(batch, STEPS + 1)
        with pytest.raises(Conflict, match="of number 1000 or higher"):
            client.forward_version(batch, STEPS, at_least=1000)
        with pytest.raises(ConfigError, match="the group actor_fwd has no save"):
            client.save("rl", 0)
        assert client.forward_version(batch, STEPS)[0] == used, "it has kept its version"
    finally:
        client.close()


def test_run_whose_forward_groups_are_killed_equals_one_whose_trainer_does_their_work(
        etcd_servers: EtcdServers, etcd: EtcdClient, tmp_path: Path) -> None:
    found = {}
    for with_groups in (True, False):
        folder = tmp_path / str(with_groups)
        folder.mkdir()
        with running(etcd_servers, etcd, folder, with_groups=with_groups) as groups:
            if with_groups:
                for step, group in ((1, REFERENCE), (2, ACTOR_FWD)):
                    groups.wait_for(step)
                    groups.kill_rank(group)
            groups.finish()
            found[with_groups] = groups.state()
            if with_groups:
                lost = {"trainer.failed", "trainer.rewound", "trainer.restarted", "actor.resynced"}
                assert not lost.intersection(groups.kinds())
                assert {f"{group.name}.{what}" for group in (REFERENCE, ACTOR_FWD)
                        for what in ("restarted", "recovered")} <= set(groups.kinds())
                require_fenced(groups.job)
    assert found[True].keys() == found[False].keys()
    different = [name for name, tensor in found[True].items() if not torch.equal(tensor, found[False][name])]
    assert not different
