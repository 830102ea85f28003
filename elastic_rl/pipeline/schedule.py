"""What a run does next, as a function of committed state. Pure.

The schedule is a generator of effects: it yields what is to be done and is sent the outcome. It does no I/O, and no
decision depends on a clock (effects only carry the timer that measures them), so the same code runs the job and is run
thousands of times in a simulated world that crashes.

Nothing that a run decides lives in the actor alone. Its position is the trainer's committed state: phase, step, the
consumed groups, and the cursor, in which the schedule keeps its evaluations. A replaced actor therefore asks the
trainer where it is and goes on; so does one whose trainer was lost. ``Lost`` is thrown into the generator for both.
Where nothing is trained the committed state is that of the output (``pipeline.untrained.output``), and the same holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from elastic_rl.config import Config
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption, GroupLedger
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.trainer.progress import Phase

_KEPT_EVALS = 4
_SFT_TARGET = 0.4
"""Target of the SFT phase before RL, where the settings have none."""


class Lost(Exception):
    """The trainer is not where the schedule believes: its group was lost and has gone back, or another actor's command
    was executed. Go on from its state."""


class StopAsked(Exception):
    """The operator stops the run: what is trained and not committed yet is saved, and ``Stop`` follows. It may come in
    the place of the outcome of any effect but those two and ``Finish``."""


@dataclass(frozen=True)
class RunPlan:
    """The settings that the schedule goes by; ``FlowLimits`` has those of the flow."""

    mode: str
    steps: int
    groups_per_step: int
    eval_every_steps: int
    stop_eval_accuracy: float | None
    sft_max_steps: int
    sft_target: float
    sft_eval_far: int
    sft_eval_near: int
    groups: int = 0
    """Prompt groups of a job that trains nothing: each is sampled once."""

    @classmethod
    def of(cls, cfg: Config, groups: int = 0) -> RunPlan:
        """``groups``: of a job that trains nothing, whose steps follow from them."""
        per_step = cfg.eval.prompts_per_step if cfg.mode == "eval" else cfg.train.prompts_per_step
        return cls(mode=cfg.mode, groups=groups, groups_per_step=per_step,
                   steps=cfg.train.steps if cfg.uses_trainer else math.ceil(groups / per_step),
                   eval_every_steps=cfg.train.eval_every_steps, stop_eval_accuracy=cfg.train.stop_eval_accuracy,
                   sft_max_steps=cfg.sft.max_steps, sft_target=_sft_target(cfg),
                   sft_eval_far=cfg.sft.eval_every_steps, sft_eval_near=cfg.sft.eval_every_steps_near_target)


class Flow(Protocol):
    """The groups between those who generate and those who train them, as the schedule sees them (``GroupFlow``)."""

    def resume(self, step: int, version: int, consumed: IntervalSet, branch: Branch) -> object:
        """The trainer is at this committed state."""

    def trained(self, consumption: Consumption, version: int) -> object:
        """The step that was taken last was made, and its policy has this number."""

    def failed(self, ordinals: Collection[int]) -> object:
        """The step that was taken last was not made: these groups of it are dropped."""


@dataclass(frozen=True)
class State:
    """The committed state of the trainer or, where nothing is trained, of the output."""

    phase: str
    step: int
    policy_version: int
    consumed: IntervalSet = IntervalSet()
    cursor: Mapping[str, Any] = field(default_factory=dict)
    branch: Branch = Branch()
    """Which versions are of the weights that the trainer has."""

    @property
    def min_version(self) -> int:
        """The oldest version that engines may serve as this state's: none shall sample from weights that the trainer
        went back from, whose numbers are all below that of the branch's first version."""
        return max(self.policy_version, self.branch.first)


# -- outcomes: what an effect found that a later one needs.

@dataclass(frozen=True)
class UpdateMade:
    """A supervised update."""

    metrics: Mapping[str, Any]
    """The trainer's answer."""
    seconds: float


@dataclass(frozen=True)
class TakenStep:
    """The groups of an RL step, and how they came."""

    groups: StepGroups
    consumption: Consumption
    metrics: Mapping[str, float] = field(default_factory=dict)
    """How the groups came, by the names of ``training_metrics``."""
    accumulated: Accumulated = Accumulated()
    """What the trainer has computed of the step already."""


@dataclass(frozen=True)
class NotTrained:
    """The trainer refused the groups of a step, and its state is as it was."""

    failed: Collection[int]
    """Groups that it cannot compute with. Without any, the same step is to be tried again."""


# -- effects: what the schedule asks for. The docstring says what it is sent.

@dataclass(frozen=True, kw_only=True)
class Timed:
    """An effect whose stages may be timed."""

    timer: StepTimer = field(default_factory=StepTimer)
    """The timer begins with the effect, however often that is tried; an effect that goes on with a step has the timer
    of the step."""


@dataclass(frozen=True, kw_only=True)
class OnTrainer(Timed):
    """An effect in which the trainer computes: it has the devices, where engines share them with it."""


@dataclass(frozen=True, kw_only=True)
class OnEngines(Timed):
    """An effect in which engines generate: they have the devices, where the trainer shares them with them."""

    min_version: int
    """The oldest version that engines are to serve."""


@dataclass(frozen=True)
class Resume:
    """→ State. ``reason``: why the trainer was lost; "" at the start."""

    reason: str
    at_step: int


@dataclass(frozen=True)
class SftUpdate(OnTrainer):
    """→ UpdateMade."""

    step: int
    cursor: Mapping[str, Any]


@dataclass(frozen=True)
class SftEvaluate(OnTrainer):
    """→ accuracy on held-out demonstrations."""

    step: int
    updates: Sequence[UpdateMade]
    """Updates since the last evaluation."""


@dataclass(frozen=True)
class BeginRl(OnTrainer):
    """→ None, once the supervised phase has ended; ``Resume`` follows."""

    step: int
    cursor: Mapping[str, Any]


@dataclass(frozen=True)
class SampleGroups(Timed):
    """→ the group of each ordinal, with its rewards and the reason to drop it, or "". For a job that trains nothing,
    so that no trainer shares the devices of its engines."""

    step: int
    ordinals: Sequence[int]
    leased: IntervalSet
    """The groups that this writer works on, which is written down before."""
    version: int
    """The policy's, which engines are to serve."""


@dataclass(frozen=True)
class Take(OnEngines):
    """→ TakenStep, once enough groups of the flow have finished that may be trained in this step: they are
    generated now, or have been beside the steps before. Gradients of parts of them are computed meanwhile, if the
    settings say so."""

    step: int


@dataclass(frozen=True)
class Train(OnTrainer):
    """→ the number of the policy version that the step makes, once it is being published; or NotTrained."""

    step: int
    taken: TakenStep
    cursor: Mapping[str, Any]
    policy_version: int
    """The newest one before the step."""


@dataclass(frozen=True)
class Evaluate(OnEngines):
    """→ accuracy of the policy on the held-out prompts."""

    step: int


@dataclass(frozen=True)
class Save(OnTrainer):
    """→ None, once the trainer's state of this step is committed. ``publish``: and its policy too."""

    phase: Phase
    step: int
    cursor: Mapping[str, Any]
    publish: bool = False


@dataclass(frozen=True)
class Write:
    """→ the cursor of the next step, once the samples to be kept are on disk and the state of this one is
    committed."""

    step: int
    groups: Sequence[Group]
    """Groups that are not dropped."""
    consumption: Consumption
    cursor: Mapping[str, Any]
    timer: StepTimer
    """The timer of the ``SampleGroups`` before."""


@dataclass(frozen=True)
class Complete:
    """→ None, once the output of all steps is one file, with a summary beside it."""

    step: int
    cursor: Mapping[str, Any]


@dataclass(frozen=True)
class Finish:
    """→ None. The last effect."""

    step: int


@dataclass(frozen=True)
class Stop:
    """→ None. The last effect of a run that its operator stops."""

    step: int | None
    """The step of the committed state; None where the run was stopped before it was known."""
    updates: Sequence[UpdateMade] = ()
    """Supervised updates since the last evaluation, which are committed and on no record yet."""


Effect = (Resume | SftUpdate | SftEvaluate | BeginRl | Take | Train | Evaluate | Save | SampleGroups | Write
          | Complete | Finish | Stop)
INTERRUPTIBLE = (Resume, Take, Evaluate, SampleGroups)
"""Effects that a stop does not wait for: nothing is lost with them that is trained."""
NOT_STOPPED = (Resume, Finish, Stop)
"""Effects that are carried out although the run is to stop: they end it, or say what there is to be saved."""
Effects = Generator[Effect, Any, None]
"""The effects of a whole job, one after the other; each is sent its outcome."""
Continuation = Generator[Effect, Any, bool]
"""The effects from a committed state on; returns whether all of the job is done with them."""


def run_rl(plan: RunPlan, flow: Flow) -> Effects:
    """A job with RL steps, whose groups ``flow`` decides on, after a supervised phase."""
    def go_on(state: State, position: _Position) -> Continuation:
        if state.phase == "sft":
            cursor = yield from _sft(plan, state, position)
            yield BeginRl(position.step, cursor)
            return False
        yield from _rl(plan, state, position, flow)
        return True

    return _from_committed_state(go_on)


def run_sft(plan: RunPlan) -> Effects:
    """A job with supervised steps only."""
    def go_on(state: State, position: _Position) -> Continuation:
        cursor = yield from _sft(plan, state, position)
        yield Save("sft", position.step, cursor, publish=True)
        return True

    return _from_committed_state(go_on)


def run_sampled(plan: RunPlan) -> Effects:
    """A job that trains nothing."""
    return _from_committed_state(partial(_sampled, plan))


def _from_committed_state(go_on: Callable[[State, _Position], Continuation]) -> Effects:
    """Goes on from the committed state, and again whenever the job turns out to be at another one, or the continuation
    ends without the job. Ends after ``Finish``, or ``Stop``."""
    reason, position = "", _Position(0)
    while True:
        try:
            state: State = yield Resume(reason, position.step)
            position = _Position(state.step, state.phase, state.cursor)
            try:
                if (yield from go_on(state, position)):
                    yield Finish(position.step)
                    return
            except StopAsked:
                if (save := position.save()) is not None:
                    yield save
                yield Stop(position.step, tuple(position.updates))
                return
            reason = ""
        except Lost as e:
            reason = str(e) or "the trainer was lost"
        except StopAsked:  # where the trainer is, or the output, is not known: the committed state has what there is
            yield Stop(None)
            return


@dataclass
class _Position:
    """Where the job is, and what a commit of it would have to say."""

    step: int
    phase: str = ""
    cursor: Mapping[str, Any] = field(default_factory=dict)
    updates: list[UpdateMade] = field(default_factory=list)
    """Supervised updates since the last evaluation."""

    def save(self) -> Save | None:
        """What commits the steps that were trained; None where there are none, or each one is committed as it is made.
        The trainer may have committed this step already: it does so at some of them."""
        phases: dict[str, Phase] = {"sft": "sft", "rl": "rl"}
        return Save(phases[self.phase], self.step, self.cursor) if self.step and self.phase in phases else None


def _sft(plan: RunPlan, state: State, position: _Position) -> Generator[Effect, Any, dict[str, Any]]:
    """Supervised steps with evaluations in between, until the target accuracy or the last step; returns the cursor."""
    cursor = dict(state.cursor)
    found = dict(cursor.get("sft") or {})
    accuracy, evaluated_at = found.get("accuracy"), int(found.get("step", 0))
    while position.step < plan.sft_max_steps and not (accuracy is not None and accuracy >= plan.sft_target):
        until = min(evaluated_at + _sft_interval(plan, accuracy), plan.sft_max_steps)
        for step in range(position.step + 1, until + 1):
            position.updates.append((yield SftUpdate(step, cursor)))
            position.step = step
        accuracy = yield SftEvaluate(position.step, position.updates)
        evaluated_at, position.updates = position.step, []
        cursor["sft"] = {"step": evaluated_at, "accuracy": accuracy}
        position.cursor = cursor
    return cursor


def _sft_target(cfg: Config) -> float:
    """The accuracy that ends the supervised phase; infinite where none does."""
    if cfg.sft.target_eval_accuracy is not None:
        return cfg.sft.target_eval_accuracy
    return _SFT_TARGET if cfg.mode == "rl" else math.inf


def _sft_interval(plan: RunPlan, accuracy: float | None) -> int:
    """Supervised steps until the next evaluation: few from a quarter of the target accuracy on, where it rises fast."""
    far = math.isinf(plan.sft_target) or (accuracy is not None and accuracy < 0.25 * plan.sft_target)
    return plan.sft_eval_far if far else min(plan.sft_eval_near, plan.sft_eval_far)


def _rl(plan: RunPlan, state: State, position: _Position, flow: Flow) -> Effects:
    flow.resume(state.step, state.policy_version, state.consumed, state.branch)
    while True:
        evals = _evals(state)
        if _evaluation_due(plan, state.step) and (not evals or evals[-1][0] != state.step):
            # The policy of this step, however stale samples may be.
            accuracy = yield Evaluate(state.step, min_version=state.min_version)
            evals = [*evals, (state.step, float(accuracy))][-_KEPT_EVALS:]
            # Committed with the next step; until then a successor finds it missing, and evaluates again.
            state = replace(state, cursor={**state.cursor, "evals": [list(e) for e in evals]})
            position.cursor = state.cursor
        if state.step >= plan.steps or reached([a for _, a in evals], plan.stop_eval_accuracy):
            break
        version = yield from _step(state, flow)
        position.step = state.step + 1
        state = replace(state, step=position.step, policy_version=version)
    yield Save("rl", state.step, state.cursor)


def _step(state: State, flow: Flow) -> Generator[Effect, Any, int]:
    """One RL step; returns the version that it makes. Groups that the trainer cannot compute with are dropped on the
    record of the step, and others are taken in their place."""
    take = Take(state.step + 1, min_version=state.min_version)
    while True:
        taken: TakenStep = yield take
        made: int | NotTrained = yield Train(take.step, taken, state.cursor, state.policy_version, timer=take.timer)
        if not isinstance(made, NotTrained):
            flow.trained(taken.consumption, made)
            return made
        flow.failed(made.failed)


def _sampled(plan: RunPlan, state: State, position: _Position) -> Continuation:
    """Each group is sampled once, and is in the output or dropped. An evaluation drops none: what is left out would
    change its result. There is no flow: no group competes for a step, since a step has the ordinals that follow, no
    other is generated in the place of one that is dropped, and the last step may be short."""
    ledger, cursor = GroupLedger(state.consumed), state.cursor
    while (left := plan.groups - len(ledger.consumed)) > 0:
        ordinals = ledger.lease(min(plan.groups_per_step, left))
        sampling = SampleGroups(position.step + 1, ordinals, ledger.unrecorded, state.policy_version)
        sampled: Sequence[tuple[Group, str]] = yield sampling
        kept: list[Group] = []
        for group, reason in sampled:
            ledger.generated(group.ordinal)
            if plan.mode != "eval" and (why := group.failure or reason):
                ledger.drop(group.ordinal, why)
            else:
                kept.append(group)
        consumption = ledger.consumption([group.ordinal for group in kept])
        cursor = yield Write(position.step + 1, kept, consumption, cursor, sampling.timer)
        ledger.commit(consumption)
        position.step += 1
    yield Complete(position.step, cursor)
    return True


def _evals(state: State) -> list[tuple[int, float]]:
    return [(int(step), float(accuracy)) for step, accuracy in state.cursor.get("evals") or []]


def _evaluation_due(plan: RunPlan, step: int) -> bool:
    return step % plan.eval_every_steps == 0 or step >= plan.steps


def reached(eval_accuracy: Sequence[float], goal: float | None) -> bool:
    """Whether a run may end early: the last two evaluations reached the goal, so that chance in one does not end it."""
    return goal is not None and len(eval_accuracy) >= 2 and min(eval_accuracy[-2:]) >= goal
