"""The stages of the modes that train nothing: source → generate → reward → write; with an advantage before the write
where batches are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group
from elastic_rl.data.step_file import StepKeeper, identity
from elastic_rl.errors import Conflict
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.records.reporting import log_sampled, step_metrics
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollouts import Rollouts
from elastic_rl.pipeline.sampling.evaluation import bounded
from elastic_rl.pipeline.sampling.prompt_reader import PROMPTS
from elastic_rl.pipeline.schedule import RunPlan, State
from elastic_rl.pipeline.stages.base import RoleCalls, Stages
from elastic_rl.pipeline.stages.term import ActorTerm, known_before
from elastic_rl.pipeline.training.device_phases import OwnDevices
from elastic_rl.pipeline.training.training_batch import NoPasses, TrainingBatches
from elastic_rl.pipeline.untrained.base_policy import output_of
from elastic_rl.pipeline.untrained.sampled_modes import sampled_mode
from elastic_rl.telemetry import traces


class SampledStages(Stages):
    """The parts that such a job has, and its stages. Its committed state is its output, in the place of a trainer's."""

    def __init__(self, term: ActorTerm, roles: RoleCalls, closing: contextlib.ExitStack) -> None:
        """Waits for the source, and for what the settings name of the user's functions. Raises Fenced."""
        super().__init__(term, OwnDevices())
        source, self._reads = term.open_source()
        self._rollouts = Rollouts(term.cfg, term.etcd, term.keys, term.writer, roles, source, term.status.needs,
                                  self._reads, term.waits, self._publish_again, term.status.generation_cap)
        closing.callback(self._rollouts.close)
        self._mode = self._waits.retry("source", lambda: sampled_mode(
            term.cfg, source, self._rollouts.prompts, self._rollouts.sampler, term.ctx.model_dir))
        self._output = output_of(term.ctx, term.etcd, term.writer, term.security, term.waits, term=term.number,
                                 file=self._mode.file, alive=term.alive)
        cfg, paths = term.cfg, JobPaths.of(term.cfg)
        self._batches: TrainingBatches | None = None
        if cfg.makes_batches:
            self._batches = self._waits.retry("plugin", lambda: TrainingBatches(
                cfg, roles, self._waits, source.max_response_tokens, NoPasses()))
            closing.callback(self._batches.close)
        self._keeper = StepKeeper(cfg.train.keep_steps, paths.kept_steps, identity(cfg.job, paths.job_id))
        self._plan = RunPlan.of(term.cfg, self._mode.groups)
        self.effects = schedule.run_sampled(self._plan)

    def _perform(self, effect: schedule.Effect) -> Any:
        match effect:
            case schedule.Resume():
                return self._resume()
            case schedule.SampleGroups():
                return self._sample(effect)
            case schedule.Write():
                return self._write(effect)
            case schedule.Complete():
                return self._complete(effect)
        return super()._perform(effect)

    def _publish_again(self, version: int) -> None:
        """Publishes the policy again for engines that cannot get this version: its chunks may be lost with the node
        that had them."""
        self._term.events.republished(version, f"nobody has the chunks of version {version}, which engines lack")
        self._waits.retry("dcs", self._output.publish_again, end_on=(Conflict,))

    def _resume(self) -> State:
        term = self._term
        self._waits.stage("resume")
        status = self._waits.retry("dcs", self._output.resume)
        term.resume(status.phase, status.step, status.step, status.policy_version)
        term.write(steps=self._plan.steps)
        prompts = self._rollouts.prompts.require_same(status.cursor, self._mode.prompts)
        if (found := term.step_of_predecessor(status.cursor, status.step, status.policy_version)) is not None:
            metrics, groups = found
            log_sampled(term.run_log, metrics, groups, [])
            term.write(metrics=metrics, step=status.step, reward=metrics.reward)
        term.events.resumed(status.step, status.consumed.groups, term.number)
        return State(phase=status.phase, step=status.step, policy_version=status.policy_version,
                     consumed=status.consumed.groups, cursor={**status.cursor, PROMPTS: prompts})

    def _sample(self, effect: schedule.SampleGroups) -> Sequence[tuple[Group, str]]:
        self._waits.stage("source")
        self._term.write_lease(effect.leased)
        return self._rollouts.generate(effect.step, effect.version, effect.timer, lambda: self._mode.generate(
            effect.ordinals, effect.version))

    def _write(self, effect: schedule.Write) -> Mapping[str, Any]:
        term, mode, output, timer = self._term, self._mode, self._output, effect.timer
        groups = StepGroups.from_groups(effect.groups)
        advantages = self._keep(effect.step, groups, timer)
        self._waits.stage("write")
        with traces.span("write", step=effect.step), timer.stage("write"):
            metrics = step_metrics(
                effect.step, groups, policy_version=output.policy_version,
                dropped={reason: len(dropped) for reason, dropped in effect.consumption.dropped.items()})
            metrics = metrics.replace(policy_version=output.policy_version)
            known = known_before(metrics, effect.consumption.groups)
            lines, cursor = self._waits.retry("source", lambda: self._reads.read("decode texts", lambda: mode.output(
                effect.groups, {**effect.cursor, **known})))
            self._waits.retry("disk", lambda: output.commit(effect.step, lines, effect.consumption, cursor),
                              end_on=(Conflict,))
        term.step = effect.step
        self._waits.works()
        metrics = metrics.replace(seconds=timer.seconds(), idle_s=self._waits.take_idle_s())
        log_sampled(term.run_log, metrics, list(effect.consumption.groups), self._rollouts.pool.engines,
                    lines=len(lines))
        term.write(metrics=metrics, step=effect.step, reward=metrics.reward, policy_version=metrics.policy_version,
                   samples=term.samples.ops(effect.step, groups, advantages))
        return cursor

    def _keep(self, step: int, groups: StepGroups, timer: StepTimer) -> list[float] | None:
        """Writes the batch of a step that is to be kept to its file. Returns the advantages of its samples; None where
        it is not to be kept, or has no samples."""
        if self._batches is None or step not in self._keeper.steps or not groups.groups:
            return None
        made = self._batches.make(groups, step, timer)
        self._keeper.keep(step, made.batch, groups.versions)
        self._batches.forget()
        return made.advantages

    def _complete(self, effect: schedule.Complete) -> None:
        term, mode, output = self._term, self._mode, self._output
        self._waits.stage("write")
        result = self._waits.retry("disk", lambda: output.complete(
            lambda file: mode.summary(file, effect.cursor, output.consumed, term.alive)), end_on=(Conflict,))
        term.run_log.write("output", step=effect.step, result=result)
        if "sets" in result:
            sets = {name: float(s["reward_mean"]) for name, s in result["sets"].items()}
            accuracy = sets.pop(str(result["main"]))
            term.write_evaluation(effect.step, accuracy, bounded(sets))
