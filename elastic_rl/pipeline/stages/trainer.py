"""The trainer groups of one term of the actor, and the stages of every job that trains: ``mode: sft``, and ``mode: rl``
with its supervised phase."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from elastic_rl.data.sources import CheckedSource
from elastic_rl.etcd import event_kinds
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.records.reporting import log_step
from elastic_rl.pipeline.sampling.prompt_reader import PROMPTS, PromptReader
from elastic_rl.pipeline.schedule import State, UpdateMade
from elastic_rl.pipeline.stages.base import Stages
from elastic_rl.pipeline.stages.term import ActorTerm
from elastic_rl.pipeline.training.commits import until_committed
from elastic_rl.pipeline.training.device_phases import make_device_phases
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.supervised_evaluation import SupervisedEvaluation
from elastic_rl.pipeline.training.supervised_steps import SupervisedSteps
from elastic_rl.pipeline.training.trainers import Trainers
from elastic_rl.telemetry import training_metrics


class TrainerAccess:
    """The trainer groups and their devices, used by the loop's thread."""

    def __init__(self, term: ActorTerm) -> None:
        self._term = term
        self.groups = Trainers(
            term.etcd, term.keys, term.security, term.cfg, epoch=term.ctx.epoch, term=term.number,
            on_wait=self._on_wait, waits=term.waits, on_recovered=lambda group: term.emit(
                event_kinds.TRAINER_GROUP_EVENTS[group].recovered, group, f"the group {group} computes again",
                step=term.step),
            publish_again=self._publish_lost_policy)
        self.devices = make_device_phases(term.cfg, term.etcd, term.keys, term.writer, term.waits, self.groups,
                                          epoch=term.ctx.epoch, term=term.number)

    def close(self) -> None:
        self.groups.close()

    def _on_wait(self, group: str, what: str) -> None:
        if what:
            self._term.waits.waits(group, what)
        else:  # it answers; its ranks report their own progress
            self._term.alive("waiting for the trainer's step")

    def publish_again(self, version: int) -> None:
        """Publishes the weights again for engines that cannot get this version: its chunks may be lost with the node
        that had them, and the trainer has the weights. Raises TrainerFailed, Conflict and Fenced."""
        self._term.events.republished(version, f"nobody has the chunks of version {version}, which engines lack")
        self.devices.publish_again(self.groups.publish_policy)
        self._term.waits.stage("sync")

    def _publish_lost_policy(self, step: int, version: int) -> None:
        """Publishes the policy again for a group that computes with that of a step, beside which no engine shares the
        trainer's devices; nobody has the policy of an earlier step any more."""
        if step == self.groups.step:
            self._term.events.republished(version, f"version {version} of the policy is lost")
            self.groups.publish_policy()


class TrainerStages(Stages):
    """The stages of every job that trains: where its trainer is, supervised steps, and commits."""

    def __init__(self, term: ActorTerm, trainer: TrainerAccess, source: CheckedSource, prompts: PromptReader) -> None:
        super().__init__(term, trainer.devices)
        self._trainer, self._source, self._prompts = trainer, source, prompts
        self._supervised = SupervisedSteps(trainer.groups, self._waits, GroupTrials(term.cfg, self._waits, "sft"),
                                           partial(term.events.groups_failed, "sft"))
        self._evaluation = SupervisedEvaluation(trainer.groups.forward_logprobs)

    def _perform(self, effect: schedule.Effect) -> Any:
        match effect:
            case schedule.Resume():
                return self._resume(effect)
            case schedule.SftUpdate():
                return self._sft_update(effect)
            case schedule.SftEvaluate():
                return self._sft_evaluate(effect)
            case schedule.BeginRl():
                return self._begin_rl(effect)
            case schedule.Save():
                return self._save(effect)
            case schedule.Stop(updates=updates) if effect.step is not None and updates:
                # A run that is resumed knows nothing of them, so that nobody else records them.
                self._log_sft(effect.step, updates)
                return self._term.stop(effect.step, **self._sft_totals(effect.step, updates))
        return super()._perform(effect)

    def _resume(self, effect: schedule.Resume) -> State:
        term = self._term
        self._waits.stage("resume")
        status = self._waits.retry("trainer", self._trainer.groups.wait_ready)
        rl_step = 0 if status.phase == "sft" else status.step
        if effect.reason and status.phase == "rl":  # first: the same transaction then undoes the steps, and says so
            term.run_log.write("rewind", from_step=effect.at_step, to_step=rl_step, reason=effect.reason)
        term.resume(status.phase, status.step, rl_step, status.policy_version)
        prompts = self._prompts.require_same(status.cursor, self._source.train)
        if (found := term.step_of_predecessor(status.cursor, rl_step, status.policy_version)) is not None:
            metrics, groups = found
            log_step(term.run_log, metrics, groups, [], [], {})
            term.write(metrics=metrics, step=rl_step, reward=metrics.reward)
        term.events.resumed(status.step, status.consumed.groups, term.number)
        term.events.trainers_recovered(self._trainer.groups.take_reformed(), effect.at_step, status.step,
                                       status.policy_version)
        return State(phase=status.phase, step=status.step, policy_version=status.policy_version,
                     consumed=status.consumed.groups, branch=status.branch,
                     cursor={**status.cursor, PROMPTS: prompts})

    def _sft_update(self, effect: schedule.SftUpdate) -> UpdateMade:
        self._waits.stage("sft")
        demonstrations = self._prompts.demonstrations(effect.step)
        began = time.monotonic()
        metrics = self._supervised.make(effect.step, demonstrations, effect.cursor)
        self._term.step = effect.step
        self._term.status.progress(**self._sft_progress(effect.step))
        return UpdateMade(metrics, time.monotonic() - began)

    def _sft_evaluate(self, effect: schedule.SftEvaluate) -> float:
        cfg, term = self._term.cfg, self._term
        self._waits.stage("evaluate")
        n = len(self._source.eval)
        picks = random.Random(f"sft-eval-{cfg.seed}").sample(range(n), min(cfg.sft.eval_problems, n))
        found = self._evaluation.of(self._prompts.read(self._source.eval, picks, answers=True))
        left_out = {"eval_left_out": found.left_out} if found.left_out else {}
        self._log_sft(effect.step, effect.updates, eval_accuracy=found.exact_match, eval_loss=found.loss, **left_out)
        term.write(**self._sft_totals(effect.step, effect.updates), eval_accuracy=found.exact_match,
                   eval_measure="exact_match")
        return found.exact_match

    def _log_sft(self, step: int, updates: Sequence[UpdateMade], **evaluation: float) -> None:
        """The record of the updates up to a step, with the evaluation after it, if there was one."""
        last = updates[-1].metrics if updates else {}
        self._term.run_log.write("sft", step=step, **evaluation,
                                 passes=step * self._term.cfg.sft.batch_size / len(self._source.train),
                                 **{name: last.get(name) for name in ("loss", "grad_norm", "lr")},
                                 throughput=training_metrics.of_throughput(last))

    def _sft_totals(self, step: int, updates: Sequence[UpdateMade]) -> dict[str, Any]:
        """What the status says once these updates up to a step are on record."""
        return {**self._sft_progress(step), "productive_s": self._term.status.latest.productive_s + sum(
            update.seconds for update in updates)}

    def _sft_progress(self, step: int) -> dict[str, int]:
        """What the status says after a supervised step."""
        cfg = self._term.cfg
        found = {"sft_step": step, "sft_steps": cfg.sft.max_steps}
        return {**found, "step": step} if cfg.mode == "sft" else found

    def _begin_rl(self, effect: schedule.BeginRl) -> None:
        self._waits.stage("publish")
        self._trainer.groups.save("sft", effect.step, begin_rl=True, cursor=effect.cursor)

    def _save(self, effect: schedule.Save) -> None:
        self._waits.stage("save")
        until_committed(self._waits, lambda: self._trainer.groups.save(
            effect.phase, effect.step, publish=effect.publish, cursor=effect.cursor))
