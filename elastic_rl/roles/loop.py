"""The training loop: depends only on committed state and the experience ledger, so any replica can continue it.

One step in sync mode: wait until the pool serves the head → sample the step's prompt groups → reward → advantages →
train (which publishes the next version). The number of a step determines its prompt groups. When the trainer group is
lost, the loop waits until it has re-formed, resumes from the trainer's committed step, and rewinds the ledger to it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from elastic_rl.coordinator.targets import TRAINER
from elastic_rl.data.ledger import Ledger
from elastic_rl.data.order import PromptOrder
from elastic_rl.data.tasks import Addition, Problem
from elastic_rl.engine.client import Sample
from elastic_rl.errors import ElasticRLError, TrainerFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import Engine, LedgerEntry, RestartRequest, Severity, StepMetrics
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
    """Whether a run may end early: the last two evaluations reached the goal, so that chance in one does not end it."""
    return goal is not None and len(eval_accuracy) >= 2 and min(eval_accuracy[-2:]) >= goal


class TrainingLoop:
    """Runs one job to its last step."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, member: Membership, trainer: TrainerClient,
                 clients: RoleClients) -> None:
        self.ctx, self.cfg = ctx, ctx.config
        self.etcd, self.keys, self.member = etcd, ctx.keys, member
        self.trainer, self.clients = trainer, clients
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
        self._restart_requests = 0

    # -- main loop ----------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Returns when the job has finished. Raises Fenced when a newer epoch has begun, and errors that it cannot
        recover from."""
        try:
            self._resume(self.trainer.wait_ready())
            while not self.finished:
                try:
                    self._advance()
                except TrainerFailed as e:
                    self._recover(e)
        finally:
            self.run_log.close()

    def _emit(self, kind: str, subject: str, message: str, *, severity: Severity = Severity.INFO,
              **data: object) -> None:
        fencing.emit(self.etcd, self.keys, self.ctx.epoch, kind, subject, message, severity=severity, **data)

    def _tracker_failed(self, name: str, reason: str) -> None:
        with contextlib.suppress(ElasticRLError):  # the log has it too
            self._emit("tracker.failed", name, f"{name} gets no more metrics of the training: {reason}",
                       severity=Severity.WARNING)

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
        self._emit("run.finished", self.ctx.job, f"finished after {self.step} steps")

    def _resume(self, status: TrainerStatus) -> None:
        """Continues from the trainer's committed step."""
        self._restart_requests = self._read_restart_request().generation
        self._phase, self._incarnation = status.phase, status.incarnation
        self.step, self.policy_version = (status.step if status.phase == "rl" else 0), status.policy_version
        self.ledger.rewind(self.step, epoch=self.ctx.epoch)
        self.status.resume(self._phase, self.step, policy_version=self.policy_version)

    def _recover(self, failure: TrainerFailed) -> None:
        """Waits until the group has re-formed, and resumes from its step."""
        failed_at = self.step
        log.warning("trainer failed at step %d: %s", failed_at, failure)
        request = self._read_restart_request()
        if request.generation > self._restart_requests:  # it was ended on purpose, so this is no fault
            self._emit("trainer.restarting", "trainer", f"the trainer group restarts: {request.reason or request.by}",
                       step=failed_at, incarnation=self._incarnation)
        else:
            beats = [m.beat_at for m in members(self.etcd, self.keys, "trainer")]  # a dead rank's until its lease ends
            self._emit("trainer.failed", "trainer", str(failure), severity=Severity.ERROR, step=failed_at,
                       incarnation=self._incarnation,
                       **({"detect_s": round(max(0.0, time.time() - min(beats)), 3)} if beats else {}))
        self.member.progress(self.step, "waiting for the trainer")
        self._resume(self.trainer.wait_ready(not_incarnation=self._incarnation))
        self.run_log.write("rewind", from_step=failed_at, to_step=self.step, reason=str(failure))
        self._emit("trainer.recovered", "trainer", f"resumed at step {self.step}, version {self.policy_version}",
                   step=self.step, incarnation=self._incarnation)

    def _read_restart_request(self) -> RestartRequest:
        """The newest request to restart the trainer group, carried out or not."""
        found = self.etcd.get(self.keys.restart(TRAINER))
        return readable_one(found, RestartRequest) or RestartRequest(target=TRAINER, generation=0)

    # -- phases -------------------------------------------------------------------------------------------------
    def _sft(self) -> None:
        self.member.progress(0, "sft")

        def on_progress(record: dict[str, Any]) -> None:
            self.run_log.write("sft", **record)
            self.member.progress(int(record["step"]), "sft")
            self.status.write("sft", step=int(record["step"]), eval_accuracy=float(record["eval_accuracy"]))

        began = time.monotonic()
        self.trainer.sft(on_progress)
        self._resume(self.trainer.wait_ready())
        self.status.write(self._phase, productive_s=self.status.latest.productive_s + time.monotonic() - began)
        self._evaluate()

    def _train_step(self, step: int) -> None:
        timer = StepTimer()
        ordinals = list(range((step - 1) * self.cfg.train.prompts_per_step, step * self.cfg.train.prompts_per_step))
        problems = [self.task.train[i] for i in self.order.groups(ordinals[0], len(ordinals))]
        with traces.span("train_step", step=step), timer.phase("total"):
            with timer.phase("sync"):
                pool = self._wait_in_sync()
            self.member.progress(step, "generate")
            with timer.phase("generate"):
                groups = self._sample(problems, self.cfg.train.group_size, self.cfg.rollout.temperature)
            with timer.phase("reward"):
                rewards = [[self.reward(p, s.token_ids) for s in group]
                           for p, group in zip(problems, groups, strict=True)]
            with timer.phase("advantage"):
                advantages = self.clients.advantages(rewards)
            self.member.progress(step, "train")
            with timer.phase("train"):
                batch = make_batch([p.prompt_ids for p in problems], groups, advantages, ordinals,
                                   max_prompt=self.max_prompt, max_response=self.max_response)
                versions = sorted({s.version for group in groups for s in group})
                # Recorded before the training: when this process or the trainer dies in between, the trainer's
                # committed step decides, and _resume deletes every entry after it.
                self.ledger.record(LedgerEntry(step=step, epoch=self.ctx.epoch, groups=ordinals,
                                               policy_versions=versions, samples=sum(map(len, groups))))
                metrics = self.trainer.train(step, batch)
        # A repeated publish has a newer number than the trainer reported: its samples are not stale.
        staleness = max(0, self.policy_version - versions[0])
        self.step, self.policy_version = step, int(metrics["policy_version"])
        tokens = sum(len(p.prompt_ids) + len(s.token_ids) for p, g in zip(problems, groups, strict=True) for s in g)
        self._report_step(timer, metrics, pool, rewards, ordinals, versions, staleness, tokens)

    def _evaluate(self) -> None:
        """Evaluates greedy exact match on every eval problem, answered by the engines at the head."""
        self._wait_in_sync()
        self.member.progress(self.step, "evaluate")
        groups = self._sample(self.task.eval, 1, temperature=0.0)
        right = sum(self.reward(p, g[0].token_ids) for p, g in zip(self.task.eval, groups, strict=True))
        eval_accuracy = right / len(groups)
        self._eval_accuracy.append(eval_accuracy)
        self.run_log.write("eval", step=self.step, eval_accuracy=eval_accuracy, policy_version=self.policy_version)
        self.status.evaluated(self._phase, self.step, eval_accuracy)

    # -- parts of a step ----------------------------------------------------------------------------------------
    def _wait_in_sync(self) -> list[Engine]:
        return wait_in_sync(self.etcd, self.keys, self.policy_version - self.cfg.train.max_staleness,
                            timeout_s=self.cfg.rollout.ready_timeout_s,
                            report_progress=lambda: self.member.progress(self.step, "sync"))

    def _sample(self, problems: list[Problem], n: int, temperature: float) -> list[list[Sample]]:
        return self.clients.generate(GenerationRequest(
            prompts=[list(p.prompt_ids) for p in problems], samples_per_prompt=n, temperature=temperature,
            max_new_tokens=self.max_response, stop_token_ids=[self.task.eos_id],
            min_version=self.policy_version - self.cfg.train.max_staleness))

    def _report_step(self, timer: StepTimer, metrics: dict[str, Any], pool: list[Engine], rewards: list[list[float]],
                     ordinals: list[int], versions: list[int], staleness: int, tokens: int) -> None:
        flat = [r for row in rewards for r in row]
        seconds = timer.seconds(inside={"publish_stall": ("train", float(metrics["publish_stall_s"]))})
        self.run_log.write(
            "step", step=self.step, reward_mean=sum(flat) / len(flat), samples=len(flat), groups=ordinals,
            policy_version=self.policy_version, sample_versions=versions, staleness=staleness, seconds=seconds,
            **{k: metrics.get(k) for k in ("loss", "grad_norm", "logprob_diff_max", "clip_fraction", "tokens")},
            engines=[e.model_dump(mode="json", include={"id", "state", "version", "pull_apply_s", "pause_s"})
                     for e in pool])
        step_metrics = StepMetrics(step=self.step, at=time.time(), reward=sum(flat) / len(flat), staleness=staleness,
                                   policy_version=self.policy_version, samples=len(flat), tokens=tokens,
                                   seconds=seconds)
        self.status.write("rl", metrics=step_metrics, step=self.step, reward=step_metrics.reward,
                          policy_version=self.policy_version, staleness=staleness)
        difference = float(metrics["logprob_diff_max"])
        if difference > self.cfg.train.logprob_tolerance:
            self._emit("logprob.mismatch", "actor", severity=Severity.WARNING, step=self.step, message=
                       f"engine and trainer log-probs differ by {difference:.2e} at step {self.step}")
