"""What a run does next, as a function of committed state. Pure.

The schedule is a generator of effects: it yields what is to be done and is sent the outcome. It does no I/O and has no
clock, so the same code runs the job and is run thousands of times in a simulated world that crashes.

Nothing that a run decides lives in the actor alone. Its position is the trainer's committed state: phase, step, the
consumed groups, and the cursor, in which the schedule keeps its evaluations. A replaced actor therefore asks the
trainer where it is and goes on; so does one whose trainer was lost. ``Lost`` is thrown into the generator for both.
Where nothing is trained the committed state is that of the output (``pipeline.untrained.output``), and the same holds.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elastic_rl.config import Config
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption, GroupLedger
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group
from elastic_rl.pipeline.group_flow import ChosenStep, FlowLimits
from elastic_rl.trainer.progress import Phase

_KEPT_EVALS = 4
_SFT_TARGET = 0.4
"""Of the phase before RL, where the settings have none."""
REWARD_FAILED, GENERATE_FAILED = "reward failed", "generate failed"
"""Why groups are dropped whose reward failed, or for which the user's function to generate did."""


class Lost(Exception):
    """The trainer is not where the schedule believes: its group was lost and has gone back, or another actor's command
    was executed. Go on from its state."""


@dataclass(frozen=True)
class Plan:
    """The settings that the schedule goes by."""

    mode: str
    steps: int
    groups_per_step: int
    max_staleness: int
    eval_every_steps: int
    stop_eval_accuracy: float | None
    max_dropped_groups: int
    sft_max_steps: int
    sft_target: float
    sft_eval_far: int
    sft_eval_near: int
    groups_per_part: int | None = None
    """With a flow: of which gradients are computed while others of the step are generated; None: of all together."""
    groups: int = 0
    """Prompt groups of a job that trains nothing: each is sampled once."""

    @classmethod
    def of(cls, cfg: Config, groups: int = 0) -> Plan:
        """``groups``: of a job that trains nothing, whose steps follow from them."""
        per_step = cfg.eval.prompts_per_step if cfg.mode == "eval" else cfg.train.prompts_per_step
        return cls(mode=cfg.mode, groups=groups, groups_per_step=per_step,
                   steps=cfg.train.steps if cfg.uses_trainer else math.ceil(groups / per_step),
                   max_staleness=cfg.train.max_staleness, eval_every_steps=cfg.train.eval_every_steps,
                   stop_eval_accuracy=cfg.train.stop_eval_accuracy, max_dropped_groups=cfg.rollout.max_dropped_groups,
                   groups_per_part=cfg.train.prompts_per_part if cfg.computes_parts else None,
                   sft_max_steps=cfg.sft.max_steps, sft_target=_sft_target(cfg),
                   sft_eval_far=cfg.sft.eval_every_steps, sft_eval_near=cfg.sft.eval_every_steps_near_target)

    def flow_limits(self, max_in_flight: int | None = None) -> FlowLimits:
        return FlowLimits(self.steps, self.groups_per_step, self.max_staleness, self.max_dropped_groups, max_in_flight,
                          self.groups_per_part)


class Flow(Protocol):
    """The groups that are generated while others are trained, as the schedule sees them (``GroupFlow``)."""

    def resume(self, step: int, version: int, consumed: IntervalSet, branch: Branch) -> object:
        """The trainer is at this committed state."""

    def trained(self, consumption: Consumption, version: int) -> object:
        """The step that was taken last was made, and its policy has this number."""


@dataclass(frozen=True)
class State:
    """Where the trainer, or the output, is."""

    phase: str
    step: int
    policy_version: int
    consumed: IntervalSet = IntervalSet()
    cursor: Mapping[str, Any] = field(default_factory=dict)
    branch: Branch = Branch()
    """Which versions are of the weights that the trainer has."""

    def min_version(self, max_staleness: int) -> int:
        """The oldest version whose samples are of use now: no engine shall sample from weights that the trainer went
        back from, whose numbers are all below that of the branch's first version."""
        return max(self.policy_version - max_staleness, self.branch.first)


# -- effects: what the schedule asks for. The comment says what it is sent.

@dataclass(frozen=True)
class Resume:
    """→ State. ``reason``: why the trainer was lost; "" at the start."""

    reason: str
    at_step: int


@dataclass(frozen=True)
class SftUpdate:
    """→ None."""

    step: int
    cursor: Mapping[str, Any]


@dataclass(frozen=True)
class SftEvaluate:
    """→ accuracy on held-out demonstrations."""

    step: int


@dataclass(frozen=True)
class BeginRl:
    """→ None, once the supervised phase has ended; ``Resume`` follows."""

    step: int
    cursor: Mapping[str, Any]


@dataclass(frozen=True)
class Lease:
    """→ None, once it is written down that this writer works on these groups."""

    groups: IntervalSet


@dataclass(frozen=True)
class Generate:
    """→ [(Group with rewards, reason to drop it or "")], one for each ordinal."""

    step: int
    ordinals: Sequence[int]
    min_version: int


@dataclass(frozen=True)
class Take:
    """→ (groups, ChosenStep), once enough groups have finished that may be trained in this step. Gradients of parts of
    them are computed meanwhile, if the settings say so."""

    step: int


@dataclass(frozen=True)
class Train:
    """→ the number of the policy version that the step makes, once it is being published."""

    step: int
    groups: StepGroups
    consumption: Consumption
    cursor: Mapping[str, Any]
    policy_version: int
    """The newest one before the step."""


@dataclass(frozen=True)
class Evaluate:
    """→ accuracy of the policy on the held-out prompts."""

    step: int
    min_version: int


@dataclass(frozen=True)
class Save:
    """→ None, once the trainer's state of this step is committed. ``publish``: and its policy too."""

    phase: Phase
    step: int
    cursor: Mapping[str, Any]
    publish: bool = False


@dataclass(frozen=True)
class Write:
    """→ None, once the samples to be kept are on disk and the state of this step is committed."""

    step: int
    groups: Sequence[Group]
    """Those that are not dropped."""
    consumption: Consumption
    cursor: Mapping[str, Any]


@dataclass(frozen=True)
class Complete:
    """→ None, once the output of all steps is one file, with a summary beside it."""

    step: int


@dataclass(frozen=True)
class Finish:
    """→ None. The last effect."""

    step: int


Effect = (Resume | SftUpdate | SftEvaluate | BeginRl | Lease | Generate | Take | Train | Evaluate | Save | Write
          | Complete | Finish)
Steps = Generator[Effect, Any, None]


def run(plan: Plan, flow: Flow | None = None) -> Steps:
    """A whole job. Ends after ``Finish``. With a ``flow`` groups are generated beside the steps (``train.schedule:
    fully_async``), and each step takes those that have finished; without one each step has its groups generated."""
    reason, at_step = "", 0
    while True:
        state: State = yield Resume(reason, at_step)
        position = _Position(state.step)
        try:
            if plan.groups:
                yield from _sampled(plan, state, position)
                return
            if state.phase == "sft":
                cursor = yield from _sft(plan, state, position)
                if plan.mode == "sft":
                    yield Save("sft", position.step, cursor, publish=True)
                    yield Finish(position.step)
                    return
                yield BeginRl(position.step, cursor)
                reason = ""
                continue
            yield from _rl(plan, state, position, flow)
            return
        except Lost as e:
            reason, at_step = str(e) or "the trainer was lost", position.step


@dataclass
class _Position:
    step: int


def _sft(plan: Plan, state: State, position: _Position) -> Generator[Effect, Any, dict[str, Any]]:
    """Supervised steps with evaluations in between, until the target accuracy or the last step; returns the cursor."""
    cursor = dict(state.cursor)
    found = dict(cursor.get("sft") or {})
    accuracy, evaluated_at = found.get("accuracy"), int(found.get("step", 0))
    while state.step < plan.sft_max_steps and not (accuracy is not None and accuracy >= plan.sft_target):
        until = min(evaluated_at + _sft_interval(plan, accuracy), plan.sft_max_steps)
        for step in range(position.step + 1, until + 1):
            yield SftUpdate(step, cursor)
            position.step = step
        accuracy = yield SftEvaluate(position.step)
        evaluated_at = position.step
        cursor["sft"] = {"step": evaluated_at, "accuracy": accuracy}
        if position.step >= plan.sft_max_steps:
            break
    return cursor


def _sft_target(cfg: Config) -> float:
    """The accuracy that ends the supervised phase; infinite where none does."""
    if cfg.sft.target_eval_accuracy is not None:
        return cfg.sft.target_eval_accuracy
    return _SFT_TARGET if cfg.mode == "rl" else math.inf


def _sft_interval(plan: Plan, accuracy: float | None) -> int:
    """Supervised steps until the next evaluation: few from a quarter of the target accuracy on, where it rises fast."""
    far = math.isinf(plan.sft_target) or (accuracy is not None and accuracy < 0.25 * plan.sft_target)
    return plan.sft_eval_far if far else min(plan.sft_eval_near, plan.sft_eval_far)


def _rl(plan: Plan, state: State, position: _Position, flow: Flow | None) -> Steps:
    ledger = GroupLedger(state.consumed)
    if flow is not None:
        flow.resume(state.step, state.policy_version, state.consumed, state.branch)
    while True:
        evals = _evals(state)
        if _evaluation_due(plan, state.step) and (not evals or evals[-1][0] != state.step):
            accuracy = yield Evaluate(state.step, state.min_version(0))  # of this step, however stale samples may be
            evals = [*evals, (state.step, float(accuracy))][-_KEPT_EVALS:]
            # Committed with the next step; until then a successor finds it missing, and evaluates again.
            state = replace(state, cursor={**state.cursor, "evals": [list(e) for e in evals]})
        if state.step >= plan.steps or reached([a for _, a in evals], plan.stop_eval_accuracy):
            break
        version = yield from (_step(plan, state, ledger) if flow is None else _taken_step(state, flow))
        position.step = state.step + 1
        state = replace(state, step=position.step, policy_version=version)
    yield Save("rl", state.step, state.cursor)
    yield Finish(state.step)


def _step(plan: Plan, state: State, ledger: GroupLedger) -> Generator[Effect, Any, int]:
    """One RL step; returns the version that it makes."""
    kept: list[Group] = []
    dropped = 0
    min_version = state.min_version(plan.max_staleness)
    while len(kept) < plan.groups_per_step:
        ordinals = ledger.lease(plan.groups_per_step - len(kept))
        yield Lease(ledger.open)
        for group, reason in (yield Generate(state.step + 1, ordinals, min_version)):
            ledger.generated(group.ordinal)
            if group.failed:
                # It has no rewards, so no limit makes the step take it.
                ledger.drop(group.ordinal, failure(group))
            elif reason and dropped < plan.max_dropped_groups:
                dropped += 1
                ledger.drop(group.ordinal, reason)
            else:
                kept.append(group)
    kept.sort(key=lambda group: group.ordinal)
    consumption = ledger.consumption([group.ordinal for group in kept])
    version: int = yield Train(state.step + 1, StepGroups.from_groups(kept), consumption, state.cursor,
                               state.policy_version)
    ledger.consumed(consumption)
    return version


def _taken_step(state: State, flow: Flow) -> Generator[Effect, Any, int]:
    """One RL step on groups that were generated beside the steps before it; returns the version that it makes."""
    taken: tuple[StepGroups, ChosenStep] = yield Take(state.step + 1)
    groups, chosen = taken
    version: int = yield Train(state.step + 1, groups, chosen.consumption, state.cursor, state.policy_version)
    flow.trained(chosen.consumption, version)
    return version


def _sampled(plan: Plan, state: State, position: _Position) -> Steps:
    """A job that trains nothing: each group is sampled once, and is in the output or dropped. No other is generated in
    the place of one that is dropped. An evaluation drops none: what is left out would change its result."""
    ledger = GroupLedger(state.consumed)
    while (left := plan.groups - len(ledger.taken)) > 0:
        ordinals = ledger.lease(min(plan.groups_per_step, left))
        yield Lease(ledger.open)
        kept: list[Group] = []
        for group, reason in (yield Generate(position.step + 1, ordinals, state.policy_version)):
            ledger.generated(group.ordinal)
            if plan.mode != "eval" and (group.failed or reason):
                ledger.drop(group.ordinal, failure(group) if group.failed else reason)
            else:
                kept.append(group)
        consumption = ledger.consumption([group.ordinal for group in kept])
        yield Write(position.step + 1, kept, consumption, state.cursor)
        ledger.consumed(consumption)
        position.step += 1
    yield Complete(position.step)
    yield Finish(position.step)


def failure(group: Group) -> str:
    """Why a group that failed is dropped: one that could not be generated has no samples."""
    return REWARD_FAILED if group.samples else GENERATE_FAILED


def _evals(state: State) -> list[tuple[int, float]]:
    return [(int(step), float(accuracy)) for step, accuracy in state.cursor.get("evals") or []]


def _evaluation_due(plan: Plan, step: int) -> bool:
    return step % plan.eval_every_steps == 0 or step >= plan.steps


def reached(eval_accuracy: Sequence[float], goal: float | None) -> bool:
    """Whether a run may end early: the last two evaluations reached the goal, so that chance in one does not end it."""
    return goal is not None and len(eval_accuracy) >= 2 and min(eval_accuracy[-2:]) >= goal
