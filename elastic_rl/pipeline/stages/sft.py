"""The stages of supervised steps: ``mode: sft``, and the phase of ``mode: rl`` before its RL steps."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

from elastic_rl.data.batch import collate_answers
from elastic_rl.data.sources import CheckedSource
from elastic_rl.errors import Conflict, TrainerFailed
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.records.reporting import log_step
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.sampling.prompt_reader import PROMPTS, PromptReader
from elastic_rl.pipeline.schedule import RunPlan, State, UpdateMade
from elastic_rl.pipeline.stages.term import ActorTerm
from elastic_rl.pipeline.stages.trainer_access import TrainerAccess
from elastic_rl.pipeline.training.commits import until_committed
from elastic_rl.telemetry import training_metrics


class TrainerStages:
    """The stages of every job that trains: where its trainer is, supervised steps, and commits. Each raises
    TrainerFailed and Conflict when the trainer is not where the schedule believes it to be, and Fenced."""

    def __init__(self, term: ActorTerm, trainer: TrainerAccess, source: CheckedSource, prompts: PromptReader) -> None:
        self._term, self._waits, self._trainer = term, term.waits, trainer
        self._source, self._prompts = source, prompts

    def carry_out(self, effect: schedule.Effect) -> Any:
        match effect:
            case schedule.Resume():
                return self._resume(effect)
            case schedule.SftUpdate():
                return self._update(effect)
            case schedule.SftEvaluate():
                return self._evaluate(effect)
            case schedule.BeginRl():
                return self._begin_rl(effect)
            case schedule.Save():
                return self._save(effect)
            case schedule.Finish():
                return self._term.finish(effect.step)
        raise TypeError(f"no effect of this mode: {effect!r}")

    def _resume(self, effect: schedule.Resume) -> State:
        term = self._term
        self._trainer.turns.begin_resume()
        self._waits.stage("resume")
        status = self._waits.retry("trainer", self._trainer.groups.wait_ready)
        rl_step = 0 if status.phase == "sft" else status.step
        term.resume(status.phase, status.step, rl_step, status.policy_version)
        prompts = self._prompts.require_same(status.cursor, self._source.train)
        if (found := term.step_of_predecessor(status.cursor, rl_step, status.policy_version)) is not None:
            metrics, groups = found
            log_step(term.run_log, metrics, groups, [], [], {})
            term.write(metrics=metrics, step=rl_step, reward=metrics.reward)
        term.events.resumed(status.step, status.consumed.groups, term.number)
        if effect.reason and status.phase == "rl":
            term.run_log.write("rewind", from_step=effect.at_step, to_step=rl_step, reason=effect.reason)
        term.events.trainers_recovered(self._trainer.groups.take_reformed(), effect.at_step, status.step,
                                       status.policy_version)
        return State(phase=status.phase, step=status.step, policy_version=status.policy_version,
                     consumed=status.consumed.groups, branch=status.branch,
                     cursor={**status.cursor, PROMPTS: prompts})

    def _update(self, effect: schedule.SftUpdate) -> UpdateMade:
        self._trainer.turns.to_trainer(StepTimer())
        self._waits.stage("sft")
        demonstrations = self._prompts.demonstrations(effect.step)
        began = time.monotonic()
        metrics = self._trainer.groups.update("sft", effect.step, collate_answers(demonstrations),
                                              cursor=effect.cursor)
        self._term.step = effect.step
        return UpdateMade(metrics, time.monotonic() - began)

    def _evaluate(self, effect: schedule.SftEvaluate) -> float:
        cfg, term = self._term.cfg, self._term
        self._trainer.turns.to_trainer(StepTimer())
        self._waits.stage("evaluate")
        n = len(self._source.eval)
        picks = random.Random(f"sft-eval-{cfg.seed}").sample(range(n), min(cfg.sft.eval_problems, n))
        batch = collate_answers(self._prompts.read(self._source.eval, picks, answers=True))
        outputs = self._trainer.groups.forward_logprobs(batch)
        # Greedy decoding gives the answer exactly when each token of it is the most probable one after those before.
        accuracy = float((outputs["greedy"] | ~batch["loss_mask"]).all(dim=1).float().mean())
        eval_loss = -float(outputs["logprobs"][batch["loss_mask"]].double().mean())
        last = effect.updates[-1].metrics if effect.updates else {}
        term.run_log.write("sft", step=effect.step, eval_accuracy=accuracy, eval_loss=eval_loss,
                           passes=effect.step * cfg.sft.batch_size / len(self._source.train),
                           **{name: last.get(name) for name in ("loss", "grad_norm", "lr")},
                           throughput=training_metrics.of_throughput(last))
        term.write(step=effect.step, eval_accuracy=accuracy, productive_s=term.status.latest.productive_s + sum(
            update.seconds for update in effect.updates))
        return accuracy

    def _begin_rl(self, effect: schedule.BeginRl) -> None:
        self._trainer.turns.to_trainer(StepTimer())
        self._waits.stage("publish")
        self._trainer.groups.save("sft", effect.step, begin_rl=True, cursor=effect.cursor)

    def _save(self, effect: schedule.Save) -> None:
        self._trainer.turns.to_trainer(StepTimer())
        self._waits.stage("save")
        until_committed(self._waits, lambda: self._trainer.groups.save(
            effect.phase, effect.step, publish=effect.publish, cursor=effect.cursor))


class SftStages:
    """``mode: sft``: no engine, and none of the user's functions but the source."""

    def __init__(self, term: ActorTerm, closing: contextlib.ExitStack) -> None:
        trainer = TrainerAccess(term)
        closing.callback(trainer.close)
        source, reads = term.open_source()
        prompts = term.waits.retry("source", lambda: PromptReader(term.cfg, source, term.waits, reads))
        self.carry_out = TrainerStages(term, trainer, source, prompts).carry_out
        self.steps = schedule.run_sft(RunPlan.of(term.cfg))

    def lost(self, error: TrainerFailed | Conflict) -> None:
        pass  # nothing is under way but what the trainer had
