"""A job on a real etcd without Ray, tensors and engines: the trainer is the real service, board, gate and client over
HTTP; only the tensors behind them are left out. Engines are a function."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from elastic_rl import config
from elastic_rl.data.batch import Batch
from elastic_rl.data.branch import Branch
from elastic_rl.data.ledger import audit
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.data.tokenizer import EOS_ID, VOCABULARY
from elastic_rl.dcs.security import Security
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.errors import Conflict, EngineFailed, Fenced, PluginFailed, StepsHeld
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import (
    Accumulate,
    Apply,
    BatchCommand,
    Check,
    Command,
    ForwardLogprobs,
    ForwardReference,
    Save,
    TrainCommand,
    Update,
    WriterGate,
    after_begin_rl,
    after_update,
)
from elastic_rl.trainer.service.server import TrainerService
from elastic_rl.trainer.service.shares import Shares
from support.actor_runs import WAIT_S, ThreadedJob

STEPS = 6


def share_on(board: Board, command: BatchCommand) -> Batch:
    """The share of a command, which the board must have whole."""
    return Batch.of_pieces([Batch.from_bytes(piece) for piece in board.share(command.batch) or [b""]])


class TrainerWithoutTensors:
    """The trainer group of one rank. ``lose`` ends it; ``form`` forms the next one from the last saved state."""

    def __init__(self, etcd: EtcdClient, keys: Keys, epoch: int, shares: Shares, max_staleness: int) -> None:
        self._etcd, self._keys, self._epoch, self._shares = etcd, keys, epoch, shares
        self._max_staleness = max_staleness
        self.saved, self.saved_branch = [Progress()], Branch()
        self.version = self.saved_version = 0
        self.weights_version = 0
        """The version as which the weights that there are now were first published."""
        self.trained: list[tuple[int, Batch]] = []
        """Each step with the batch that it was made of, in one piece or in parts."""
        self.parts: list[Batch] = []
        """Accumulated so far."""
        self.loses_parts = threading.Event()
        """Once, before a part that is not the first."""
        self.at_part = threading.Event()
        """A part was accumulated."""
        self.reference_passes: list[int] = []
        """Steps for which the reference policy was asked."""
        self.frozen = threading.Event()
        self.loss_fails = threading.Event()
        self.loss_fails_late = threading.Event()
        """After an update of a step that is no saved one."""
        self.rejects_saves = threading.Event()
        """Each attempt takes a second and is not committed."""
        self.rejected_saves: list[float] = []
        """When."""
        self.republished = 0
        self.form()

    def form(self) -> None:
        self.board, self.progress, self.branch = Board(1 << 20), self.saved[-1], (
            self.saved_branch.restored(self.saved_version))
        self.parts = []
        self.service = TrainerService(self.board, "127.0.0.1", Security(), self._shares.take).start()
        self.member = Membership(self._etcd, self._keys, "trainer", "rank-0", ttl_s=10, url=self.service.url,
                                 epoch=self._epoch).start()
        self.gate = WriterGate(self._epoch, self.member.incarnation)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._report()
        self._thread.start()

    def lose(self) -> None:
        """As kill -9 of a rank: nothing of the unsaved progress remains."""
        self._stop.set()
        self._thread.join()
        self.service.close()
        self.member.close()

    def _report(self) -> None:
        p = self.progress
        if p.phase == "rl" and not self.board.status()["ready"]:
            self._publish_weights()
        self.branch = self.branch.published(self.version) if p.phase == "rl" else self.branch
        self.board.set_status(ready=True, group=self.member.incarnation, epoch=self._epoch, step=p.step, phase=p.phase,
                              cursor=p.cursor, consumed=p.consumed.to_json(), policy_version=self.version,
                              state_version=len(self.saved), share_urls=[self.service.url], minibatches=1,
                              cost={"linear": 1.0, "square": 0.0}, restarts=0,
                              pair=p.pair, branch=self.branch.to_json(), reference_version=0)

    def _publish_weights(self) -> None:
        self.version += 1
        self.weights_version = self.version

    def _run(self) -> None:
        while not self._stop.is_set():
            command = None if self.frozen.is_set() else self.board.next()
            if command is None:
                self._stop.wait(0.005)
                continue
            try:
                self.gate.term = max(self.gate.term, fencing.current_term(self._etcd, self._keys))
                earlier = self.gate.admit(command, self.progress, StalenessRule(
                    self.weights_version, self._max_staleness, self.branch, self.version))
            except (Fenced, Conflict, PluginFailed) as e:
                self.board.refused(command, e)
                continue
            late = isinstance(command, Update) and command.phase == "rl" and command.step % 2 == 0
            if late and self.loss_fails_late.is_set():
                self.progress, failure = self.saved[-1], StepsHeld("algorithm.name=mine failed late")
                self.gate.hold(failure)
                self._report()
                self.board.refused(command, failure)
                continue
            if self.loss_fails.is_set() and isinstance(command, Update | Check):
                self.board.refused(command, PluginFailed("the token_loss of algorithm.name=mine failed"))
                continue
            parts = 0
            if isinstance(command, Accumulate | Apply):
                parts = command.part if isinstance(command, Accumulate) else command.parts
            if isinstance(command, Accumulate) and parts and self.loses_parts.is_set():
                self.loses_parts.clear()
                self.parts.clear()
            if parts and parts != len(self.parts):
                self.board.refused(command, Conflict(f"{len(self.parts)} parts are accumulated"))
                continue
            result = earlier if earlier is not None else self._execute(command)
            self._report()
            self.gate.executed(command, result)
            self.board.done(command, result)

    def _save(self) -> None:
        self.saved.append(self.progress)
        self.saved_version, self.saved_branch = self.version, self.branch.published(self.version)

    def _execute(self, command: Command) -> dict[str, Any]:
        batch = share_on(self.board, command) if isinstance(command, BatchCommand) else None
        if isinstance(command, ForwardLogprobs | ForwardReference) and batch is not None:
            zeros = torch.zeros(batch.loss_tokens)
            if isinstance(command, ForwardReference):
                self.reference_passes.append(command.step)
                self.board.put_output(command.id, save({"logprobs": zeros - 1.0}))
                return {}
            self.board.put_output(command.id, save({"logprobs": zeros, "greedy": zeros == 0.0}))
            return {}
        if isinstance(command, Save) and self.rejects_saves.is_set():
            self.board.waits_for = "the trainer to commit its state"
            self._stop.wait(1.0)
            self.board.waits_for = ""
            self.rejected_saves.append(time.monotonic())
            return {"committed": False}
        if isinstance(command, Save):
            if command.begin_rl:
                self.progress = after_begin_rl(self.progress, command)
                self._publish_weights()
            else:
                self.progress = self.progress.replace(cursor=dict(command.cursor))
            if command.publish:
                self.version += 1
                self.republished += 1
            self._save()
            return {"committed": True, "policy_version": self.version}
        if isinstance(command, Check):
            return {}
        if isinstance(command, Accumulate):
            assert batch is not None
            self.parts = [*(self.parts if command.part else []), batch]
            self.at_part.set()
            return {"parts": len(self.parts)}
        assert isinstance(command, TrainCommand)
        self.progress = after_update(self.progress, command)
        if command.phase == "rl":
            self.trained += [(command.step, made) for made in (self.parts if batch is None else [batch])]
            self.parts = []
            self._publish_weights()
            if command.step % 2 == 0:
                self._save()
        return {"loss": 0.1, "publish_stall_s": 0.0, "policy_version": self.version, "logprob_diff_max": 0.0,
                "grad_norm": None, "my_stat": 2.5, "train_tokens_per_s": 1234.5678}


@dataclass
class Roles:
    """Engines that answer every prompt right with its first sample and wrong with the others, unless they are away.
    All else that they sample follows from what they are asked with, and from the version that answers."""

    trainer: TrainerWithoutTensors
    etcd: EtcdClient
    keys: Keys
    away: threading.Event = field(default_factory=threading.Event)
    hanging: threading.Event = field(default_factory=threading.Event)
    """Requests hang while it is not set."""
    broken: threading.Event = field(default_factory=threading.Event)
    """Advantages are no numbers."""
    unscored: threading.Event = field(default_factory=threading.Event)
    """No teacher answers."""
    unpublished: set[int] = field(default_factory=set)
    """Groups whose samples say a version that there is not."""
    finish_reason: str = "stop"
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hanging.set()

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False
                 ) -> list[Answers]:
        if self.away.is_set():
            raise EngineFailed("no engine answered in 4 attempts")
        self.hanging.wait(WAIT_S)
        version = self.trainer.version
        self.asked += [p.ordinal for p in prompts]
        return [[(place, [self._sample(p, i, version + 9 * (p.ordinal in self.unpublished)) for i in range(p.samples)])]
                for place, p in enumerate(prompts)]

    def _sample(self, request: PromptRequest, index: int, version: int) -> Sample:
        right, asked = request.prompt.answer_ids or (), request.sampling
        drawn_by = (request.prompt.token_ids, index, asked.seed, asked.temperature, asked.max_new_tokens, version)
        draw = random.Random(hashlib.sha256(repr(drawn_by).encode()).digest())
        ids = right if index == 0 else (draw.choice([t for t in VOCABULARY.values() if t > EOS_ID and t not in right]),)
        return Sample((Segment(ids, tuple(-draw.random() for _ in ids), version=version),), self.finish_reason)

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        if self.broken.is_set():
            return [[float("nan")] * len(row) for row in rewards]
        return [[r - sum(row) / len(row) for r in row] for row in rewards]

    def judge(self, request: JudgeRequest) -> list[Judgement]:
        raise AssertionError("no reward asks a judge")

    def token_advantages(self, batch: bytes) -> np.ndarray:
        given = Batch.from_bytes(batch)
        return (given["teacher_logprobs"] - given["old_logprobs"]).numpy()

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        if self.unscored.is_set():
            raise EngineFailed("no teacher answered")
        return [TokenScores(np.full(len(s.token_ids) - s.first, -2.0, np.float32), *(
            np.zeros((len(s.token_ids) - s.first, top), dtype) for dtype in (np.int32, np.float32))) for s in sequences]


_MODEL = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 1024,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
          "rope_theta": 10000.0}
"""config.json of a policy of which only the size is asked for."""


class SimulatedJob(ThreadedJob):
    """One job and its parts."""

    roles: Roles

    def __init__(self, etcd: EtcdClient, endpoints: list[str], keys: Keys, folder: Path, **settings: str) -> None:
        epoch = fencing.raise_epoch(etcd, keys, holder="test").number
        given = {"job": keys.job, "run_dir": str(folder), "data.options.operand_below": "10", "sft.max_steps": "4",
                 "sft.batch_size": "8", "sft.target_eval_accuracy": "0.9", "train.steps": str(STEPS),
                 "train.prompts_per_step": "8", "train.group_size": "2", "train.eval_every_steps": "3",
                 "rollout.groups_per_request": "3", "train.stop_eval_accuracy": "null"} | settings
        self.cfg = config.load(overrides=[f"--{key}={value}" for key, value in given.items()])
        (model := folder / "model").mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(_MODEL))
        ctx = RunContext(config=self.cfg, etcd_endpoints=endpoints, job=keys.job, epoch=epoch,
                         model_dir=str(model), host=LOOPBACK)
        self.trainer = TrainerWithoutTensors(etcd, keys, epoch, Shares(self.cfg, needs=[], vocab=1 << 31),
                                            self.cfg.train.max_staleness)
        super().__init__(etcd, ctx, Roles(self.trainer, etcd, keys))

    def wait_for(self, step: int, *, phase: str = "rl") -> None:
        super().wait_for(step, phase=phase)

    def assert_exactly_once(self, *, best: int = 0) -> None:
        """``best``: which of the two samples of each group has the higher reward."""
        last = self.trainer.saved[-1]
        assert (last.phase, last.step) == ("rl", STEPS)
        assert audit([(s.step, s.consumed) for s in self.trainer.saved if s.phase == "rl"], groups_per_step=8).clean
        metrics = [StepMetrics.decode(kv.value) for kv in self.etcd.range(self.keys.steps_prefix())[0]]
        assert [m.step for m in metrics] == list(range(1, STEPS + 1)) and all(m.samples == 16 for m in metrics)
        for _, batch in self.trainer.trained:
            advantages = batch["advantages"].view(-1, 2)
            assert bool((advantages[:, best] == 0.5).all()) and bool((advantages[:, 1 - best] == -0.5).all())

    def kinds(self, prefix: str) -> list[str]:
        return [e.kind for e in events.recent(self.etcd, self.keys) if e.kind.startswith(prefix)]

    def close(self) -> None:
        super().close()
        self.trainer.lose()
