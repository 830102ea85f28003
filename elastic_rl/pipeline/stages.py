"""Carries out what the schedule asks for, on the real parts: source → generate → reward → advantage → train → publish;
or, where nothing is trained, source → generate → reward → write.

Each stage waits for what it depends on, says so, and tries again without end; only Fenced ends it. What the trainer
answers decides where the run is: a lost group, or a step that another actor has taken, sends the schedule back to the
trainer's committed state.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial, singledispatchmethod
from typing import Any, Protocol

from elastic_rl.data.batch import collate_answers
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group
from elastic_rl.data.sources import make_source
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.engine.generation import Generated, PromptRequest
from elastic_rl.errors import Conflict, EtcdUnavailable, GroupsLost, TrainerFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import GroupLease, Severity, StepMetrics
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.flow.background import BackgroundGeneration
from elastic_rl.pipeline.flow.generation import Generation, InlineGeneration
from elastic_rl.pipeline.flow.group_flow import ChosenStep
from elastic_rl.pipeline.records.reporting import SampleWriter, log_sampled, log_step, step_metrics, with_measured
from elastic_rl.pipeline.records.run_events import PRODUCER, RunEvents
from elastic_rl.pipeline.records.run_log import JobStatusWriter, RunLog
from elastic_rl.pipeline.records.sample_ring import SampleRing
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollouts import Rollouts
from elastic_rl.pipeline.sampling.evaluation import bounded, evaluate_sets, further_sets
from elastic_rl.pipeline.sampling.prompt_reader import PROMPTS
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.schedule import Lost, RunPlan, State
from elastic_rl.pipeline.training.commits import until_committed
from elastic_rl.pipeline.training.step_maker import StepMaker
from elastic_rl.pipeline.training.trainers import Trainers
from elastic_rl.pipeline.training.training_batch import ScoringRoles, TrainingBatches
from elastic_rl.pipeline.training.turns import OwnDevices, SharedDevices, Turns
from elastic_rl.pipeline.untrained.base_policy import output_of
from elastic_rl.pipeline.untrained.output import OutputStatus
from elastic_rl.pipeline.untrained.sampled_modes import sampled_mode
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.telemetry import traces, training_metrics
from elastic_rl.telemetry.trackers import Trackers
from elastic_rl.trainer.service.client import TrainerStatus

log = logging.getLogger(__name__)

_LOST_RETRY_S = (0.5, 10.0)
"""Pauses after losses of the trainer with no step between them."""
_FENCE_CHECK_S = 5.0
_LAST_STEP = "last_step"
"""In the cursor: what is known of a step before it is trained."""
_PHASES = {"generate": "waiting for samples", "evaluate": "waiting for samples", "advantage": "waiting for advantages",
           "teacher": "waiting for the teacher",
           "reference": "waiting for the trainer's step", "actor_fwd": "waiting for the trainer's step",
           "value": "waiting for the critic",
           "train": "waiting for the trainer's step", "sft": "waiting for the trainer's step",
           "publish": "waiting for the trainer's step", "save": "waiting for the trainer's step",
           "turn": "waiting for the devices"}
"""Phases as a member: in these stages others work, and report their own progress."""


class RoleCalls(ScoringRoles, Protocol):
    """The stateless roles, one attempt a call. Each raises ElasticRLError when the attempt failed."""

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, suspects: bool = False
                 ) -> Sequence[Generated]:
        """The samples of each prompt, none of them older than ``min_version``, or why there are none. ``suspects``: in
        another process of the user's function than those of all other groups."""

    def judge(self, request: JudgeRequest) -> Sequence[Judgement]:
        """What the judge model makes of each response."""


class Pipeline:
    """Runs one job to its last step, as one term of the actor."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, member: Membership, roles: RoleCalls,
                 stopping: threading.Event) -> None:
        """``stopping`` ends the run with Fenced, wherever it waits."""
        self.ctx, self.cfg, self.etcd, self.keys, self.member = ctx, ctx.config, etcd, ctx.keys, member
        self.roles = roles
        self.waits = Waits(self._show_wait, stopping)
        self.events = RunEvents(etcd, ctx.keys, self._emit)
        self.run_log = RunLog(self.cfg.job_dir / "steps.jsonl", Trackers.from_names(
            self.cfg.telemetry.trackers, self.cfg.job_dir, self.cfg.job, self._tracker_failed,
            wandb_mode=self.cfg.telemetry.wandb_mode))
        self.finished = False
        self.status: JobStatusWriter | None = None
        self.term = 0
        self._phase, self._step = "starting", 0
        self._fence_read = 0.0
        """When a wait last checked that this is still the actor; monotonic."""
        self._lost = ""
        """Name of the trainer group that was lost last; "" while none is."""
        self._cursor: Mapping[str, Any] = {}
        """As the trainer has it."""
        self._reported: schedule.Resume | None = None
        self._timer = StepTimer()
        self._sft: dict[str, Any] = {}
        self._taken: dict[str, float] = {}
        """Metrics of how the groups of the step came."""

    def run(self) -> None:
        """Returns when the job has finished. Raises Fenced when another term or epoch has begun."""
        self.waits.stage("starting")
        self.term = self.waits.retry("etcd", lambda: fencing.begin_term(
            self.etcd, self.keys, self.ctx.epoch, self.member.incarnation))
        self.writer = FencedWriter.of_term(self.etcd, self.keys, self.ctx.epoch, self.term)
        self.status = self.waits.retry("etcd", lambda: JobStatusWriter(
            self.etcd, self.keys, self.writer, steps=self.cfg.total_steps, seed=self.cfg.seed))
        self.samples = SampleWriter(SampleRing(self.etcd, self.keys, self.writer), self.ctx.model_dir)
        security = Security.from_config(self.cfg.dcs, self.cfg.cluster_dir / TOKEN_FILE)
        self.trainer = Trainers(self.etcd, self.keys, security, self.cfg, epoch=self.ctx.epoch, term=self.term,
                                on_wait=self._on_trainer_wait, waits=self.waits, on_recovered=lambda group: self._emit(
                                    f"{group}.recovered", group, f"the group {group} computes again", step=self._step),
                                publish_again=self._publish_policy_again)
        self.turns: Turns = OwnDevices() if not self.cfg.colocated else SharedDevices(
            self.etcd, self.keys, self.writer, self.waits, self.trainer, epoch=self.ctx.epoch, term=self.term,
            timer=lambda: self._timer)
        with contextlib.ExitStack() as closing:
            closing.callback(self.run_log.close)
            closing.callback(self.trainer.close)
            self._make_parts(closing)
            self.output = None if self.mode is None else output_of(
                self.ctx, self.etcd, self.writer, security, self.waits, term=self.term, file=self.mode.file,
                alive=self._alive)
            self._drive()

    def _make_parts(self, closing: contextlib.ExitStack) -> None:
        """What the settings name: the source, and the user's functions. What these read may be away now, as it may be
        later, so they are waited for; a job that is wrong is refused before it begins (``job.check``)."""
        reads = self.reads = SourceReads(self.cfg.data.source, self.waits)
        self.source = self.waits.retry("source", lambda: reads.read("be made", lambda: make_source(self.cfg)))
        self.rollouts = Rollouts(self.cfg, self.etcd, self.keys, self.writer, self.roles, self.source, reads,
                                 self.waits, self._publish_again)
        closing.callback(self.rollouts.close)
        self.prompts, self.sampler = self.rollouts.prompts, self.rollouts.sampler
        if self.cfg.mode == "rl":
            self.batches = self.waits.retry("plugin", lambda: TrainingBatches(
                self.cfg, self.roles, self.waits, self.source.max_response_tokens, self.trainer))
            closing.callback(self.batches.close)
            self.maker = StepMaker(self.batches, self.trainer, self.waits, in_parts=self.cfg.computes_parts)
        self.mode = self.waits.retry("source", lambda: sampled_mode(
            self.cfg, self.source, self.prompts, self.sampler, self.ctx.model_dir))
        self.plan = RunPlan.of(self.cfg, self.mode.groups if self.mode is not None else 0)
        limits = self.plan.flow_limits(self.cfg.train.max_groups_in_flight if self.plan.beside_steps else None)
        if self.cfg.mode == "rl":
            self.generation: Generation = self.waits.retry("plugin", lambda: BackgroundGeneration(
                self.cfg, limits, self.rollouts, self._write_lease, self._publish_again,
                lambda loss: self.events.queue_replaced(len(loss.groups), loss.why), self.ctx.host,
            )) if self.plan.beside_steps else InlineGeneration(
                limits, self.rollouts, self._write_lease, self.turns.to_engines)
            closing.callback(self.generation.close)

    def _drive(self) -> None:
        if self.cfg.mode == "rl":
            steps = schedule.run_rl(self.plan, self.generation.flow)
        else:
            steps = schedule.run_sft(self.plan) if self.mode is None else schedule.run_sampled(self.plan)
        effect = next(steps)
        lost = RetryBackoff(*_LOST_RETRY_S)
        while True:
            try:
                outcome = self.waits.retry("trainer", lambda e=effect: self._carry_out(e),  # type: ignore[misc]
                                           end_on=(TrainerFailed, Conflict))
            except (TrainerFailed, Conflict) as e:
                if isinstance(e, GroupsLost):
                    self.generation.lost(e)
                self._lost = e.group if isinstance(e, TrainerFailed) else ""
                effect = steps.throw(Lost(str(e)))
                self.waits.pause(lost.left_s(time.monotonic()))
                lost.failed(time.monotonic())  # the first loss is answered at once
                continue
            if isinstance(effect, schedule.Train | schedule.SftUpdate | schedule.Write):
                lost.reset()
            try:
                effect = steps.send(outcome)
            except StopIteration:
                return

    def _carry_out(self, effect: schedule.Effect) -> Any:
        self.turns.before(effect)
        return self.execute(effect)

    # -- waiting --------------------------------------------------------------------------------------------------
    def _show_wait(self, stage: str, kind: str, what: str) -> None:
        self.member.progress(self._step, f"waiting for {kind}" if kind else _PHASES.get(stage, stage))
        if self.status is None:
            return
        self.status.activity(stage, kind, what)
        if kind and kind != "etcd" and time.monotonic() - self._fence_read >= _FENCE_CHECK_S:
            self._fence_read = time.monotonic()
            with contextlib.suppress(EtcdUnavailable):  # a wait whose text stays the same writes nothing
                self.writer.require()

    def _on_trainer_wait(self, group: str, what: str) -> None:
        if what:
            self.waits.waits(group, what)
        else:  # it answers; its ranks report their own progress
            self.waits.pause(0.0)
            self.waits.works()
            self.member.progress(self._step, "waiting for the trainer's step")

    def _alive(self) -> None:
        self.waits.pause(0.0)
        self.waits.works()
        self.member.progress(self._step, "writing")

    def _write(self, **changes: Any) -> None:
        assert self.status is not None
        self.waits.retry("etcd", lambda: self.status.write(self._phase, **changes))  # type: ignore[union-attr]

    def _emit(self, kind: str, subject: str, message: str, *, severity: Severity = Severity.INFO,
              **data: Any) -> None:
        self.waits.retry("etcd", lambda: self.writer.emit(kind, subject, message, severity=severity, **data))

    def _tracker_failed(self, name: str, reason: str) -> None:
        try:
            self.writer.emit("tracker.failed", name, f"{name} gets no more metrics of the training: {reason}",
                             severity=Severity.WARNING)
        except EtcdUnavailable:
            log.warning("tracker %s failed: %s", name, reason)

    # -- effects --------------------------------------------------------------------------------------------------
    @singledispatchmethod
    def execute(self, effect: Any) -> Any:
        """Carries one effect out. Raises TrainerFailed and Conflict when the trainer is not where the schedule believes
        it to be, and Fenced."""
        raise TypeError(f"no such effect: {effect!r}")

    @execute.register
    def _resume(self, effect: schedule.Resume) -> State:
        self.waits.stage("resume")
        if effect.reason and effect is not self._reported:
            if self._lost:
                self.events.trainer_lost(effect.at_step, effect.reason, self._lost)
            else:
                self.events.resynced(effect.at_step, effect.reason)
            self._reported = effect  # this effect may be carried out again: one fault, one alert
        status = self._committed()
        self._phase, self._step = status.phase, status.step
        rl_step = 0 if status.phase == "sft" else status.step
        assert self.status is not None
        self.status.resume(status.phase, rl_step, policy_version=status.policy_version)
        self._cursor = status.cursor
        if self.plan.groups:
            self._write(steps=self.plan.steps)
        prompts = self.prompts.require_same(
            status.cursor, self.source.train if self.mode is None else self.mode.prompts)
        self._report_step_of_predecessor(status, rl_step)
        self.events.resumed(status.step, status.consumed.groups, self.term)
        if effect.reason and status.phase == "rl":
            self.run_log.write("rewind", from_step=effect.at_step, to_step=rl_step, reason=effect.reason)
        self.events.trainers_recovered(self.trainer.take_reformed(), effect.at_step, status.step, status.policy_version)
        return State(phase=status.phase, step=status.step, policy_version=status.policy_version,
                     consumed=status.consumed.groups,
                     branch=status.branch if isinstance(status, TrainerStatus) else Branch(),
                     cursor={**status.cursor, PROMPTS: prompts})

    def _committed(self) -> TrainerStatus | OutputStatus:
        """The state of the trainer, or of the output, as soon as it is there."""
        if self.output is None:
            return self.waits.retry("trainer", self.trainer.wait_ready)
        return self.waits.retry("dcs", self.output.resume)

    def _report_step_of_predecessor(self, status: TrainerStatus | OutputStatus, step: int) -> None:
        """A step whose actor was gone when it was done: what is known of it came with its command."""
        known = status.cursor.get(_LAST_STEP) or {}
        metrics = StepMetrics.model_validate(known["metrics"]) if known else None
        if metrics is None or metrics.step != step or self.etcd.get(self.keys.step_metrics(step)) is not None:
            return
        metrics = metrics.replace(policy_version=status.policy_version)
        groups = list(IntervalSet.from_json(known["groups"]))
        if self.mode is None:
            log_step(self.run_log, metrics, groups, [], [], {})
        else:
            log_sampled(self.run_log, metrics, groups, [])
        self._write(metrics=metrics, step=step, reward=metrics.reward)

    @execute.register
    def _sft_update(self, effect: schedule.SftUpdate) -> None:
        self.waits.stage("sft")
        demonstrations = self.prompts.demonstrations(effect.step)
        began = time.monotonic()
        metrics = self.trainer.update("sft", effect.step, collate_answers(demonstrations), cursor=effect.cursor)
        self._step = effect.step
        self._sft = {**{name: metrics.get(name) for name in ("loss", "grad_norm", "lr")},
                     "throughput": training_metrics.of_throughput(metrics),
                     "seconds": self._sft.get("seconds", 0.0) + time.monotonic() - began}

    @execute.register
    def _sft_evaluate(self, effect: schedule.SftEvaluate) -> float:
        self.waits.stage("evaluate")
        n = len(self.source.eval)
        picks = random.Random(f"sft-eval-{self.cfg.seed}").sample(range(n), min(self.cfg.sft.eval_problems, n))
        batch = collate_answers(self.prompts.read(self.source.eval, picks, answers=True))
        outputs = self.trainer.forward_logprobs(batch)
        # Greedy decoding gives the answer exactly when each token of it is the most probable one after those before.
        accuracy = float((outputs["greedy"] | ~batch["loss_mask"]).all(dim=1).float().mean())
        eval_loss = -float(outputs["logprobs"][batch["loss_mask"]].double().mean())
        assert self.status is not None
        spent_s = self._sft.pop("seconds", 0.0)
        self.run_log.write("sft", step=effect.step, eval_accuracy=accuracy, eval_loss=eval_loss,
                           passes=effect.step * self.cfg.sft.batch_size / len(self.source.train),
                           **{"loss": None, **self._sft})
        self._write(step=effect.step, eval_accuracy=accuracy,
                    productive_s=self.status.latest.productive_s + spent_s)
        return accuracy

    @execute.register
    def _begin_rl(self, effect: schedule.BeginRl) -> None:
        self.waits.stage("publish")
        self.trainer.save("sft", effect.step, begin_rl=True, cursor=effect.cursor)

    def _write_lease(self, groups: IntervalSet) -> None:
        lease = GroupLease(producer=PRODUCER, epoch=self.ctx.epoch, term=self.term, groups=groups.to_json(),
                           at=time.time())
        self.writer.write(Op.put(self.keys.group_lease(PRODUCER), lease.encode()))

    @execute.register
    def _sample(self, effect: schedule.SampleGroups) -> list[tuple[Group, str]]:
        assert self.mode is not None
        mode, self._timer = self.mode, StepTimer()
        self.waits.stage("source")
        self._write_lease(effect.leased)
        return self.rollouts.generate(effect.step, effect.min_version, self._timer, lambda: mode.generate(
            effect.ordinals, effect.min_version))

    @execute.register
    def _take(self, effect: schedule.Take) -> tuple[StepGroups, ChosenStep]:
        self._timer = StepTimer()
        taken = self.generation.take(effect.step, self._timer, lambda groups, first: self.maker.add(
            groups, effect.step, self._timer, first=first))
        self._taken = taken.metrics
        return taken.groups, taken.chosen

    @execute.register
    def _train(self, effect: schedule.Train) -> int:
        groups = effect.groups
        with traces.span("train_step", step=effect.step):
            metrics = step_metrics(
                effect.step, groups, policy_version=effect.policy_version,
                dropped={reason: len(groups) for reason, groups in effect.consumption.dropped.items()})
            known = {"metrics": metrics.model_dump(mode="json"), "groups": effect.consumption.trained.to_json()}
            cursor = {**effect.cursor, _LAST_STEP: known}
            made, advantages = self.maker.make(groups, effect.step, self._timer, effect.consumption, cursor)
        trained = self._taken | made | self.generation.take_metrics()
        self._cursor = cursor
        self._timer.move("train", "publish_stall", float(trained["publish_stall_s"]))
        self._step, version = effect.step, int(trained["policy_version"])
        self.waits.works()
        metrics = with_measured(metrics, trained, self._timer.seconds()).replace(
            policy_version=version, idle_s=self.generation.take_idle_s(self._timer))
        log_step(self.run_log, metrics, [g.ordinal for g in groups.groups],
                 sorted({v for s in groups.samples for v in s.versions}),
                 self.generation.engines, trained)
        self._write(metrics=metrics, step=effect.step, reward=metrics.reward, policy_version=version,
                    staleness=metrics.staleness)
        self.samples.write(effect.step, groups, advantages)
        self.events.responses(metrics, self.source)
        self.events.logprob_difference(metrics, trained["logprob_diff_max"], self.cfg.logprob_tolerance)
        return version

    @execute.register
    def _evaluate(self, effect: schedule.Evaluate) -> float:
        self.rollouts.await_version(effect.min_version, self._timer)
        self.waits.stage("evaluate")
        scores = evaluate_sets(self.source, lambda name, indices: self.sampler.evaluation_groups(
            list(zip(indices, self.prompts.read(self.source.evals[name], indices), strict=True)), effect.min_version))
        main = scores[self.source.eval_name]
        accuracy, sets = main.accuracy, further_sets(scores, self.source.eval_name)
        assert self.status is not None
        self.run_log.write("eval", step=effect.step, eval_accuracy=accuracy, **({"eval_sets": sets} if sets else {}),
                           **({"eval_reward_parts": main.reward_parts} if main.parts else {}),
                           policy_version=max(score.newest_version for score in scores.values()))
        self.waits.retry("etcd", lambda: self.status.evaluated(  # type: ignore[union-attr]
            self._phase, effect.step, accuracy, bounded(sets)))
        return accuracy

    @execute.register
    def _save(self, effect: schedule.Save) -> None:
        self.waits.stage("save")
        until_committed(self.waits, lambda: self.trainer.save(
            effect.phase, effect.step, publish=effect.publish, cursor=effect.cursor))

    @execute.register
    def _write_samples(self, effect: schedule.Write) -> None:
        assert self.mode is not None and self.output is not None
        mode, output = self.mode, self.output
        self.waits.stage("write")
        with traces.span("write", step=effect.step), self._timer.phase("write"):
            groups = StepGroups.from_groups(effect.groups)
            metrics = step_metrics(
                effect.step, groups, policy_version=output.policy_version,
                dropped={reason: len(groups) for reason, groups in effect.consumption.dropped.items()})
            metrics = metrics.replace(policy_version=output.policy_version)
            known = {"metrics": metrics.model_dump(mode="json"), "groups": effect.consumption.groups.to_json()}
            lines, cursor = self.waits.retry("source", lambda: self.reads.read("decode texts", lambda: mode.output(
                effect.groups, {**effect.cursor, **self._cursor, _LAST_STEP: known})))
            self.waits.retry("disk", lambda: output.commit(effect.step, lines, effect.consumption, cursor),
                             end_on=(Conflict,))
        self._cursor, self._step = cursor, effect.step
        self.waits.works()
        metrics = metrics.replace(seconds=self._timer.seconds(), idle_s=self.waits.take_idle_s())
        log_sampled(self.run_log, metrics, list(effect.consumption.groups), self.rollouts.pool.engines,
                    lines=len(lines))
        self._write(metrics=metrics, step=effect.step, reward=metrics.reward, policy_version=metrics.policy_version)
        self.samples.write(effect.step, groups, None)

    @execute.register
    def _complete(self, effect: schedule.Complete) -> None:
        assert self.mode is not None and self.output is not None
        mode, output = self.mode, self.output
        self.waits.stage("write")
        result = self.waits.retry("disk", lambda: output.complete(
            lambda file: mode.summary(file, self._cursor, output.consumed, self._alive)), end_on=(Conflict,))
        self.run_log.write("output", step=effect.step, result=result)
        if "sets" in result:
            sets = {name: float(s["reward_mean"]) for name, s in result["sets"].items()}
            accuracy = sets.pop(str(result["main"]))
            self.waits.retry("etcd", lambda: self.status.evaluated(  # type: ignore[union-attr]
                self._phase, effect.step, accuracy, bounded(sets)))

    @execute.register
    def _finish(self, effect: schedule.Finish) -> None:
        self.member.progress(effect.step, "finished")
        self._emit("run.finished", self.ctx.job, f"finished after {effect.step} steps")
        self._phase = "finished"
        self._write(step=effect.step)
        self.finished = True

    def _publish_again(self, version: int) -> None:
        """The chunks of a version may be lost with the node that had them; the trainer has the weights."""
        self.events.republished(version, f"engines lack version {version}")
        if self.output is None:
            self._publish_weights_again()
        else:
            self.waits.retry("dcs", self.output.publish_again, end_on=(Conflict,))

    def _publish_policy_again(self, step: int, version: int) -> None:
        """For a group that computes with the policy of a step; nobody has an earlier one any more."""
        if step != self._step:
            return
        self.events.republished(version, f"version {version} of the policy is lost")
        self.turns.to_trainer()
        self.trainer.save("rl", step, publish=True, cursor=self._cursor)

    def _publish_weights_again(self) -> None:
        save = partial(self.trainer.save, "rl", self._step, publish=True, cursor=self._cursor)
        self.turns.to_trainer()
        if self.cfg.colocated:  # a trainer whose memory is offloaded does not repeat a commit that failed
            self.turns.to_engines(int(until_committed(self.waits, save)["policy_version"]))
        else:
            save()
        self.waits.stage("sync")
