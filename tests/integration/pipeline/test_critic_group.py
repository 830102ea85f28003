"""PPO with two real trainer groups under torch elastic, on a real etcd and DCS node; engines are a function.

A run whose critic is killed, and whose actor is replaced, ends with both groups at the last step, with the weights and
optimizer states of a run that nothing disturbed, bit for bit.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
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
from elastic_rl.algorithms.ppo import sample_rewards
from elastic_rl.config import AlgorithmConfig
from elastic_rl.config.groups import ACTOR, CRITIC, GroupSpec
from elastic_rl.data.ledger import ConsumedGroups, audit
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import StepMetrics, Version
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.processes import python, spawn, stop
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.runtime import wait_until

pytestmark = pytest.mark.timeout(900)

STEPS, WAIT_S = 6, 400.0
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
        found: list[list[float]] = sample_rewards(torch.tensor(rewards), AlgorithmConfig()).tolist()
        return found

    def judge(self, request: JudgeRequest) -> list[Judgement]:
        raise AssertionError("no reward asks a judge")

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        raise AssertionError("there is no teacher")

    def token_advantages(self, batch: bytes) -> np.ndarray:
        raise AssertionError("the algorithm is no user's own")


@dataclass
class Groups:
    """A job with its two groups."""

    job: ThreadedJob
    agents: dict[str, subprocess.Popen[bytes]]

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.job.status().phase == "rl" and self.job.status().step >= step, timeout_s=WAIT_S,
                   what=f"step {step}", alive=lambda: not self.job.runs[-1].errors)

    def kill_rank(self, group: GroupSpec) -> None:
        os.kill(members(self.job.etcd, self.job.keys, group.name)[0].pid, signal.SIGKILL)

    def finish(self) -> None:
        wait_until(lambda: self.job.status().phase == "finished" or bool(self.job.runs[-1].errors), timeout_s=WAIT_S,
                   what="the end of the job")
        assert not self.job.runs[-1].errors, self.job.runs[-1].errors

    def states(self, group: GroupSpec) -> list[Version]:
        return [v for v in reads.list_versions(self.job.etcd, self.job.keys, group.state) if v.committed_at > 0]

    def tensors(self, group: GroupSpec) -> dict[str, torch.Tensor]:
        """Of the newest state."""
        with Puller(self.job.etcd, self.job.keys, "test", io_timeout_s=30, security=Security(TOKEN)) as puller, \
                puller.pull(group.state) as pulled:
            return {name: tensor.clone() for name, tensor in pulled.tensors()}

    def kinds(self) -> list[str]:
        return [e.kind for e in events.recent(self.job.etcd, self.job.keys)]


@contextmanager
def running(etcd_servers: EtcdServers, etcd: EtcdClient, folder: Path) -> Iterator[Groups]:
    keys = Keys(f"t-{secrets.token_hex(4)}")
    cfg = config.parse({
        "job": keys.job, "seed": 1, "deterministic": True, "device": {"type": "cpu"}, "run_dir": str(folder / "runs"),
        "dcs": {"arena_bytes": 128 << 20}, "data": {"options": {"operand_below": 10}}, "sft": {"max_steps": 0},
        "train": {"steps": STEPS, "state_every_steps": 2, "prompts_per_step": 8, "group_size": 2, "lr": 1e-3,
                  "eval_every_steps": STEPS, "stop_eval_accuracy": None},
        "algorithm": {"name": "ppo", "gae_lambda": 0.9, "kl_coef": 0.1, "kl_in": "reward"},
        "critic": {"warmup_steps": 1, "train": {"lr": 1e-2}},
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
        agents = {}
        for group in cfg.trainer_groups:
            context = ctx.of_group(group).save(folder / f"context-{group.name}.json")
            agents[group.name] = spawn(python("elastic_rl.trainer.group.agent", "--context", str(context)),
                                       log=folder / f"{group.name}.log", env={"OMP_NUM_THREADS": "1"})
            closing.callback(stop, agents[group.name].pid)
        job = ThreadedJob(etcd, ctx, Engines())
        closing.callback(job.close)
        job.start_actor()
        yield Groups(job, agents)


def test_run_whose_critic_is_killed_and_whose_actor_is_replaced_equals_the_undisturbed_one(
        etcd_servers: EtcdServers, etcd: EtcdClient, tmp_path: Path) -> None:
    found = {}
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
        with running(etcd_servers, etcd, tmp_path / name) as groups:
            if name == "disturbed":
                groups.wait_for(3)
                groups.kill_rank(CRITIC)
                wait_until(lambda: "critic.recovered" in groups.kinds(), timeout_s=WAIT_S, what="the recovery")
                groups.job.start_actor()  # the first one is fenced off wherever it is
            groups.finish()
            assert_at_the_last_step(groups)
            kinds = groups.kinds()
            assert ("critic.failed" in kinds) is (name == "disturbed") and "trainer.failed" not in kinds
            found[name] = {group.name: groups.tensors(group) for group in (ACTOR, CRITIC)}
    for group, expected in found["undisturbed"].items():
        tensors = found["disturbed"][group]
        assert set(tensors) == set(expected)
        assert [n for n in expected if not torch.equal(tensors[n], expected[n])] == [], group


def assert_at_the_last_step(groups: Groups) -> None:
    """Both groups have committed it, as one update, and every sample was trained on once."""
    policy, critic = (groups.states(group)[-1].meta for group in (ACTOR, CRITIC))
    assert policy["pair"] == critic["pair"] and policy["step"] == critic["step"] == STEPS
    assert policy["consumed"] == critic["consumed"]
    for group in (ACTOR, CRITIC):
        states = [(int(v.meta["step"]), ConsumedGroups.from_json(v.meta["consumed"])) for v in groups.states(group)
                  if v.meta["phase"] == "rl"]
        assert audit(states, groups_per_step=8).clean
    job = groups.job
    metrics = [StepMetrics.decode(kv.value) for kv in job.etcd.range(job.keys.steps_prefix())[0]]
    assert [m.step for m in metrics] == list(range(1, STEPS + 1))
    assert {"critic_loss", "explained_variance", "value_mean", "kl_reference"} <= set(metrics[-1].update)
    assert metrics[0].update["lr"] == 0 and metrics[1].update["lr"] > 0, "the policy waits for the critic"
    with Puller(job.etcd, job.keys, "test", io_timeout_s=30, security=Security(TOKEN)) as puller:
        head = puller.head(CRITIC.weights)
        assert head is not None and head.meta["step"] == STEPS
