"""A job whose trainer groups are real ranks under torch elastic, on a real etcd and DCS node. Engines: a function."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic_rl import config
from elastic_rl.config.groups import TrainerGroupSpec
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.leftovers import remove_files
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import stop
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from support.actor_runs import ThreadedJob
from support.cluster_files import make_secret
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from support.rank_processes import spawn_agent
from support.waiting import wait_until

Advantages = Callable[[list[list[float]]], list[list[float]]]


def centered(rewards: list[list[float]]) -> list[list[float]]:
    return [[r - sum(group) / len(group) for r in group] for group in rewards]


class Engines:
    """A sample of each prompt is right and the other wrong."""

    def __init__(self, advantages: Advantages = centered) -> None:
        self.advantages = advantages

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False
                 ) -> list[Answers]:
        return [[(place, [self._sample(p.prompt.answer_ids or () if i == 0 else (9, 4), min_version)
                          for i in range(p.samples)]) for place, p in enumerate(prompts)]]

    @staticmethod
    def _sample(tokens: Sequence[int], version: int) -> Sample:
        return Sample((Segment(tuple(tokens), (-2.0,) * len(tokens), version=version),), "stop")

    def judge(self, request: JudgeRequest) -> list[Judgement]:
        raise AssertionError("no reward asks a judge")

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        raise AssertionError("there is no teacher")

    def token_advantages(self, batch: bytes) -> np.ndarray:
        raise AssertionError("the algorithm is no user's own")


@dataclass
class Groups:
    """The job and its groups."""

    job: ThreadedJob

    def wait_for(self, step: int) -> None:
        wait_until(lambda: self.job.status().phase == "rl" and self.job.status().step >= step,
                   what=f"step {step}", alive=lambda: not self.job.runs[-1].errors)

    def kill_rank(self, group: TrainerGroupSpec) -> None:
        os.kill(members(self.job.etcd, self.job.keys, group.name)[0].pid, signal.SIGKILL)

    def finish(self) -> None:
        wait_until(lambda: self.job.status().phase == "finished" or bool(self.job.runs[-1].errors),
                   what="the end of the job")
        assert not self.job.runs[-1].errors, self.job.runs[-1].errors

    def state(self, group: TrainerGroupSpec) -> dict[str, torch.Tensor]:
        """The tensors of the group's newest state."""
        security = dcs_security(self.job.ctx.config)
        with Puller(self.job.etcd, self.job.keys, "test", io_timeout_s=30, security=security) as puller, \
                puller.pull(group.state) as pulled:
            return {name: tensor.clone() for name, tensor in pulled.tensors()}

    def kinds(self) -> list[str]:
        return [e.kind for e in events.recent(self.job.etcd, self.job.keys)]


@contextmanager
def running_groups(etcd_servers: EtcdServers, etcd: EtcdClient, folder: Path, settings: Mapping[str, Any], *,
                   steps: int, engines: Engines | None = None) -> Iterator[Groups]:
    """A deterministic job of small sums, on one rank a group. ``settings``: further ones, by section; ``folder`` is
    made."""
    folder.mkdir()
    keys = Keys(f"t-{secrets.token_hex(4)}")
    sections: dict[str, dict[str, Any]] = {
        "device": {"type": "cpu"}, "dcs": {"arena_bytes": 128 << 20}, "data": {"options": {"operand_below": 10}},
        "sft": {"max_steps": 0},
        "train": {"steps": steps, "state_every_steps": 2, "prompts_per_step": 8, "group_size": 2, "lr": 1e-3,
                  "eval_every_steps": steps, "stop_eval_accuracy": None},
        # A rank that is lost must be noticed long before a collective times out.
        "trainer": {"data_parallel": 1, "collective_timeout_s": 250.0, "start_timeout_s": 260.0}}
    for section, values in settings.items():
        sections[section] = {**sections.get(section, {}), **values}
    cfg = config.parse({"job": keys.job, "seed": 1, "deterministic": True, "run_dir": str(folder / "runs"), **sections})
    epoch = fencing.raise_epoch(etcd, keys, holder="test").number
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, epoch=epoch,
                     model_dir=str(make_model_dir(folder / "model", cfg)), host=LOOPBACK)
    make_secret(cfg)
    with ExitStack() as closing:
        node = spawn_node(etcd_servers.endpoints, keys, "node-0", folder, arena_bytes=cfg.dcs.arena_bytes)
        closing.callback(stop, node.pid)
        closing.callback(remove_files, JobPaths.of(cfg).file_tag())
        await_node(etcd, keys, node)
        for group in cfg.trainer_groups:
            context = ctx.of_group(group).save(folder / f"context-{group.name}.json")
            agent = spawn_agent(context, log=folder / f"{group.name}.log")
            closing.callback(stop, agent.pid)
        job = ThreadedJob(etcd, ctx, engines or Engines())
        closing.callback(job.close)
        job.start_actor()
        yield Groups(job)
