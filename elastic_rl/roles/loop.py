"""The training loop: a function of committed state and the experience ledger, so it can start again anywhere.

One step in sync mode: wait until the pool serves the head → sample the step's prompt groups → reward → advantages →
train (which publishes the next version). Which groups a step takes follows from its number alone. When the trainer
group is lost the loop waits until it re-formed, takes the step it resumed at as the truth, and rewinds the ledger.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from elastic_rl.data.ledger import Ledger
from elastic_rl.data.order import PromptOrder
from elastic_rl.data.tasks import Addition, Problem
from elastic_rl.errors import ElasticRLError, TrainerFailed
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import Engine, LedgerEntry, Severity, StepMetrics
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.rewards.registry import REWARDS
from elastic_rl.roles.batching import make_batch
from elastic_rl.roles.role_clients import RoleClients
from elastic_rl.roles.rollout import GenerationRequest
from elastic_rl.roles.rollout_pool import wait_in_sync
from elastic_rl.roles.run_log import JobStatusWriter, RunLog
from elastic_rl.roles.step_timer import StepTimer
from elastic_rl.telemetry import traces
from elastic_rl.telemetry.trackers import Trackers
from elastic_rl.trainer.client import TrainerClient, TrainerStatus

log = logging.getLogger(__name__)


def reached(eval_accuracy: Sequence[float], goal: float | None) -> bool:
    """Whether a run may end early: two evaluations in a row at the goal, so that one lucky one does not do it."""
    return goal is not None and len(eval_accuracy) >= 2 and min(eval_accuracy[-2:]) >= goal


class TrainingLoop:
    """Drives one run to its last step. ``run`` returns when the run is finished and raises when it cannot go on."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, member: Membership, trainer: TrainerClient,
                 peers: RoleClients) -> None:
        self.ctx, self.cfg = ctx, ctx.config
        self.etcd, self.keys, self.member = etcd, ctx.keys, member
        self.trainer, self.peers = trainer, peers
        self.task = Addition(self.cfg.data, self.cfg.seed)
        self.order = PromptOrder(len(self.task.train), self.cfg.seed)
        self.reward = REWARDS["exact_match"]
        self.ledger = Ledger(etcd, self.keys)
        self.run_log = RunLog(self.cfg.job_dir / "steps.jsonl", Trackers.from_names(
            self.cfg.telemetry.trackers, self.cfg.job_dir, self.cfg.job, self._tracker_failed))
        self.status = JobStatusWriter(etcd, self.keys, epoch=ctx.epoch, steps=self.cfg.train.steps,
                                      seed=self.cfg.seed)
        self.max_response = max(len(p.answer_ids) for p in self.task.train + self.task.eval)
        self.max_prompt = max(len(p.prompt_ids) for p in self.task.train + self.task.eval)
        self.step = 0
        self.policy_version = 0
        self.finished = False
        self._eval_accuracy: list[float] = []
        self._incarnation = ""

    # -- the run ------------------------------------------------------------------------------------------------
    def run(self) -> None:
        try:
            self._take_up(self.trainer.wait_ready())
            while not self.finished:
                try:
                    self._advance()
                except TrainerFailed as e:
                    self._recover(e)
        finally:
            self.run_log.close()

    def _tracker_failed(self, name: str, why: str) -> None:
        with contextlib.suppress(ElasticRLError):  # the log has it
            events.emit(self.etcd, self.keys, "tracker.failed", name, severity=Severity.WARNING,
                        message=f"the metrics of training go no longer to {name}: {why}")

    def _advance(self) -> None:
        if self._phase == "sft":
            self._sft()
        cfg = self.cfg.train
        while self.step < cfg.steps and not reached(self._eval_accuracy, cfg.stop_eval_accuracy):
            self._train_step(self.step + 1)
            if self.step % cfg.eval_every_steps == 0 or self.step == cfg.steps:
                self._evaluate()
        self.finished = True
        self.member.progress(self.step, "finished")
        self.status.write("finished", step=self.step)
        events.emit(self.etcd, self.keys, "run.finished", self.ctx.job, f"done after {self.step} steps")

    def _take_up(self, status: TrainerStatus) -> None:
        """Takes the trainer's committed step as the truth."""
        self._phase, self._incarnation = status.phase, status.incarnation
        self.step, self.policy_version = (status.step if status.phase == "rl" else 0), status.policy_version
        self.ledger.rewind(self.step, epoch=self.ctx.epoch)
        self.status.resume(self._phase, self.step, policy_version=self.policy_version)

    def _recover(self, failure: TrainerFailed) -> None:
        was = self.step
        log.warning("trainer failed at step %d: %s", was, failure)
        beats = [m.beat_at for m in members(self.etcd, self.keys, "trainer")]  # a dead rank's until its lease ends
        events.emit(self.etcd, self.keys, "trainer.failed", "trainer", str(failure), severity=Severity.ERROR,
                    step=was, incarnation=self._incarnation,
                    **({"detect_s": round(max(0.0, time.time() - min(beats)), 3)} if beats else {}))
        self.member.progress(self.step, "waiting for the trainer")
        self._take_up(self.trainer.wait_ready(not_incarnation=self._incarnation))
        self.run_log.write("rewind", from_step=was, to_step=self.step, reason=str(failure))
        events.emit(self.etcd, self.keys, "trainer.recovered", "trainer",
                    f"resumed at step {self.step}, version {self.policy_version}",
                    step=self.step, incarnation=self._incarnation)

    # -- phases -------------------------------------------------------------------------------------------------
    def _sft(self) -> None:
        self.member.progress(0, "sft")

        def on_progress(seen: dict[str, Any]) -> None:
            self.run_log.write("sft", **seen)
            self.member.progress(int(seen["step"]), "sft")
            self.status.write("sft", step=int(seen["step"]), eval_accuracy=float(seen["eval_accuracy"]))

        began = time.monotonic()
        self.trainer.sft(on_progress)
        status = self.trainer.wait_ready()
        self._take_up(status)
        self.status.write(self._phase, productive_s=self.status.latest.productive_s + time.monotonic() - began)
        self._evaluate()

    def _train_step(self, step: int) -> None:
        watch = StepTimer()
        ordinals = list(range((step - 1) * self.cfg.train.prompts_per_step, step * self.cfg.train.prompts_per_step))
        problems = [self.task.train[i] for i in self.order.groups(ordinals[0], len(ordinals))]
        with traces.span("train_step", step=step), watch.phase("total"):
            with watch.phase("sync"):
                pool = self._in_sync()
            self.member.progress(step, "generate")
            with watch.phase("generate"):
                groups = self._sample(problems, self.cfg.train.group_size, self.cfg.rollout.temperature)
            with watch.phase("reward"):
                rewards = [[self.reward(p, s.token_ids) for s in group]
                           for p, group in zip(problems, groups, strict=True)]
            with watch.phase("advantage"):
                advantages = self.peers.advantages(rewards)
            self.member.progress(step, "train")
            with watch.phase("train"):
                batch = make_batch([p.prompt_ids for p in problems], groups, advantages, ordinals,
                                   max_prompt=self.max_prompt, max_response=self.max_response)
                versions = sorted({s.version for group in groups for s in group})
                # Recorded before it is trained on: should this process or the trainer die in between, the trainer's
                # committed step decides, and _take_up deletes every entry after it.
                self.ledger.record(LedgerEntry(step=step, epoch=self.ctx.epoch, groups=ordinals,
                                               policy_versions=versions, samples=sum(map(len, groups))))
                metrics = self.trainer.train(step, batch)
        # A publish that was repeated has a newer number than the trainer told of.
        staleness = max(0, self.policy_version - versions[0])
        self.step, self.policy_version = step, int(metrics["policy_version"])
        tokens = sum(len(p.prompt_ids) + len(s.token_ids) for p, g in zip(problems, groups, strict=True) for s in g)
        self._report_step(watch, metrics, pool, rewards, ordinals, versions, staleness, tokens)

    def _evaluate(self) -> None:
        """Greedy exact match on every held-out problem, answered by the engines at the head."""
        self._in_sync()
        self.member.progress(self.step, "evaluate")
        groups = self._sample(self.task.eval, 1, temperature=0.0)
        right = sum(self.reward(p, g[0].token_ids) for p, g in zip(self.task.eval, groups, strict=True))
        eval_accuracy = right / len(groups)
        self._eval_accuracy.append(eval_accuracy)
        self.run_log.write("eval", step=self.step, eval_accuracy=eval_accuracy, policy_version=self.policy_version)
        self.status.evaluated(self._phase, self.step, eval_accuracy)

    # -- parts of a step ----------------------------------------------------------------------------------------
    def _in_sync(self) -> list[Engine]:
        return wait_in_sync(self.etcd, self.keys, self.policy_version - self.cfg.train.max_staleness,
                            timeout_s=self.cfg.rollout.ready_timeout_s,
                            sign=lambda: self.member.progress(self.step, "sync"))

    def _sample(self, problems: list[Problem], n: int, temperature: float) -> list[Any]:
        return self.peers.generate(GenerationRequest(
            prompts=[list(p.prompt_ids) for p in problems], samples_per_prompt=n, temperature=temperature,
            max_new_tokens=self.max_response, stop_token_ids=[self.task.eos_id],
            min_version=self.policy_version - self.cfg.train.max_staleness))

    def _report_step(self, watch: StepTimer, metrics: dict[str, Any], pool: list[Engine], rewards: list[list[float]],
                     ordinals: list[int], versions: list[int], staleness: int, tokens: int) -> None:
        flat = [r for row in rewards for r in row]
        seconds = watch.seconds(inside={"publish_stall": ("train", float(metrics["publish_stall_s"]))})
        self.run_log.write(
            "step", step=self.step, reward_mean=sum(flat) / len(flat), samples=len(flat), groups=ordinals,
            policy_version=self.policy_version, sample_versions=versions, staleness=staleness, seconds=seconds,
            **{k: metrics.get(k) for k in ("loss", "grad_norm", "logprob_diff_max", "clip_fraction", "tokens")},
            engines=[e.model_dump(mode="json", include={"id", "state", "version", "pull_apply_s", "pause_s"})
                     for e in pool])
        point = StepMetrics(step=self.step, at=time.time(), reward=sum(flat) / len(flat), staleness=staleness,
                          policy_version=self.policy_version, samples=len(flat), tokens=tokens, seconds=seconds)
        self.status.write("rl", point=point, step=self.step, reward=point.reward, policy_version=self.policy_version,
                          staleness=staleness)
        worst = float(metrics["logprob_diff_max"])
        if worst > self.cfg.train.logprob_tolerance:
            events.emit(self.etcd, self.keys, "logprob.mismatch", "actor", severity=Severity.WARNING, message=
                        f"engine and trainer log-probs differ by {worst:.2e} at step {self.step}", step=self.step)
