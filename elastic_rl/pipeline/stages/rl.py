"""The stages of ``mode: rl``: source → generate → reward → advantage → train → publish, and evaluations."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.step_file import StepKeeper, identity
from elastic_rl.errors import Conflict, GroupsFailed, GroupsLost, StaleSamples, TrainerFailed
from elastic_rl.host.address import host_address, own_address
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.flow.background import BackgroundGeneration
from elastic_rl.pipeline.flow.group_flow import FlowLimits
from elastic_rl.pipeline.flow.inline import Generation, InlineGeneration
from elastic_rl.pipeline.records.recent_updates import RecentUpdates
from elastic_rl.pipeline.records.reporting import log_step, step_metrics, with_measured
from elastic_rl.pipeline.rollouts import Rollouts
from elastic_rl.pipeline.sampling.evaluation import bounded, evaluate_sets, further_sets
from elastic_rl.pipeline.sampling.sampler import OnCap
from elastic_rl.pipeline.schedule import NotTrained, RunPlan, TakenStep
from elastic_rl.pipeline.stages.base import RoleCalls
from elastic_rl.pipeline.stages.term import ActorTerm, known_before
from elastic_rl.pipeline.stages.trainer import TrainerAccess, TrainerStages
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.step_maker import StepMaker
from elastic_rl.pipeline.training.training_batch import TrainingBatches
from elastic_rl.runtime.failpoints import reach
from elastic_rl.telemetry import traces


class RlStages(TrainerStages):
    """The parts that a job with RL steps has, and its stages: those of ``TrainerStages``, and three more."""

    def __init__(self, term: ActorTerm, roles: RoleCalls, closing: contextlib.ExitStack) -> None:
        """Waits for the source, and for what the settings name of the user's functions. Raises Fenced."""
        cfg, waits = term.cfg, term.waits
        trainer = TrainerAccess(term)
        closing.callback(trainer.close)
        source, reads = term.open_source()
        limits = FlowLimits.of(cfg)
        # Where another thread generates, this one only evaluates.
        on_cap: OnCap = (lambda cap: None) if limits.beside_steps else term.status.generation_cap
        self._rollouts = Rollouts(cfg, term.etcd, term.keys, term.writer, roles, source, term.status.needs,
                                  reads, waits, trainer.publish_again, on_cap)
        closing.callback(self._rollouts.close)
        super().__init__(term, trainer, source, self._rollouts.prompts)
        batches = waits.retry("plugin", lambda: TrainingBatches(
            cfg, roles, waits, source.max_response_tokens, trainer.groups))
        closing.callback(batches.close)
        paths = JobPaths.of(cfg)
        kept = StepKeeper(cfg.train.keep_steps, paths.kept_steps, identity(cfg.job, paths.job_id))
        self._maker = StepMaker(batches, trainer.groups, waits, GroupTrials(cfg, waits), in_parts=cfg.computes_parts,
                                on_failed=partial(term.events.groups_failed, "train"), on_batch=kept.keep)
        self._generation = self._make_generation(limits)
        closing.callback(self._generation.close)
        self._updates = RecentUpdates()
        self._parts = 0
        """Most parts of the next step that were computed in one attempt."""
        term.pieces = lambda: self._generation.flow.finished_groups + self._parts
        self.effects = schedule.run_rl(RunPlan.of(cfg), self._generation.flow)

    def _make_generation(self, limits: FlowLimits) -> Generation:
        term = self._term
        if not limits.beside_steps:
            return InlineGeneration(limits, self._rollouts, term.write_lease)
        return self._waits.retry("plugin", lambda: BackgroundGeneration(
            term.cfg, limits, self._rollouts, term.write_lease, term.status.generation_cap,
            self._trainer.publish_again, lambda loss: term.events.queue_replaced(len(loss.groups), loss.why),
            host_address(term.cfg) if term.cfg.ranks_may_spread else own_address()))

    def _perform(self, effect: schedule.Effect) -> Any:
        match effect:
            case schedule.Take():
                return self._take(effect)
            case schedule.Train():
                return self._train(effect)
            case schedule.Evaluate():
                return self._evaluate(effect)
        return super()._perform(effect)

    def lost(self, error: TrainerFailed | Conflict) -> None:
        if isinstance(error, GroupsLost):
            self._generation.lost(error)
        if isinstance(error, StaleSamples):
            self._generation.flow.refused(error.versions)

    def _take(self, effect: schedule.Take) -> TakenStep:
        taken = self._generation.take(effect.step, effect.timer, lambda groups, before: self._add_part(
            groups, effect, before))
        return TakenStep(taken.groups, taken.chosen.consumption, taken.metrics, taken.accumulated)

    def _add_part(self, groups: StepGroups, effect: schedule.Take, before: Accumulated) -> Accumulated:
        added = self._maker.add(groups, effect.step, effect.timer, before)
        self._parts = max(self._parts, added.parts)
        return added

    def _train(self, effect: schedule.Train) -> int | NotTrained:
        term, taken = self._term, effect.taken
        groups, timer = taken.groups, effect.timer
        with traces.span("train_step", step=effect.step):
            metrics = step_metrics(
                effect.step, groups, policy_version=effect.policy_version,
                dropped={reason: len(dropped) for reason, dropped in taken.consumption.dropped.items()})
            cursor = {**effect.cursor, **known_before(metrics, taken.consumption.trained)}
            reach("step.taken")
            try:
                made, advantages = self._maker.make(taken, effect.step, timer, cursor)
            except GroupsFailed as e:
                return NotTrained(e.ordinals)
        reach("step.trained")
        trained = {**taken.metrics, **made, **self._generation.take_metrics()}
        timer.move("train", "publish_stall", float(trained["publish_stall_s"]))
        term.step, version = effect.step, int(trained["policy_version"])
        self._parts = 0
        self._waits.works()
        metrics = with_measured(metrics, trained, timer.seconds()).replace(
            policy_version=version, idle_s=self._generation.take_idle_s(timer))
        log_step(term.run_log, metrics, [g.ordinal for g in groups.groups],
                 sorted({v for s in groups.samples for v in s.versions}), self._generation.engines, trained)
        term.write(metrics=metrics, step=effect.step, reward=metrics.reward, policy_version=version,
                   staleness=metrics.staleness, samples=term.samples.ops(effect.step, groups, advantages),
                   **self._updates.add(effect.step, trained, term.status.latest))
        reach("step.recorded")
        term.events.responses(metrics, self._source)
        term.events.logprob_difference(metrics, trained["logprob_diff_max"], term.cfg.logprob_tolerance)
        return version

    def _evaluate(self, effect: schedule.Evaluate) -> float:
        term, rollouts = self._term, self._rollouts
        rollouts.await_version(effect.min_version, effect.timer)
        self._waits.stage("evaluate")
        scores = evaluate_sets(self._source, lambda name, indices: rollouts.sampler.evaluation_groups(
            list(zip(indices, rollouts.prompts.read(self._source.evals[name], indices), strict=True)),
            effect.min_version))
        main = scores[self._source.eval_name]
        accuracy, sets = main.accuracy, further_sets(scores, self._source.eval_name)
        term.run_log.write("eval", step=effect.step, eval_accuracy=accuracy, **({"eval_sets": sets} if sets else {}),
                           **({"eval_reward_parts": main.reward_parts} if main.parts else {}),
                           policy_version=max(score.newest_version for score in scores.values()))
        term.write_evaluation(effect.step, accuracy, bounded(sets), error=main.error)
        return accuracy
