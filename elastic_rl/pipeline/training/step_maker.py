"""Has the trainer make a step: of all its groups together, or of parts whose gradients are computed while other groups
are still generated (``train.prompts_per_part``).

A step that the trainer refuses, since it cannot compute with its samples, is tried once more; then ``GroupTrials``
finds the groups that are to blame, which are dropped. The trainer's state is as it was before the step meanwhile, so
another actor that takes over begins with the step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    GroupsFailed,
    PluginFailed,
    StepRefused,
    StepsHeld,
    TrainerFailed,
)
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import TakenStep
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.training_batch import MadeBatch
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.trainer.progress import Phase

log = logging.getLogger(__name__)
T = TypeVar("T")

_REFUSED = (StepRefused, PluginFailed)
"""Errors by which the trainer says that it cannot compute with samples."""
_ATTEMPTS = 2
"""Attempts to make a step before its groups are tried one by one."""
_AGAIN_S = (1.0, 60.0)
"""First and longest pause before a step is tried again that the trainer refuses although it computes with every group.
"""


class HasStep(Protocol):
    """The status of the trainer (``TrainerStatus``), as far as trials need it."""

    @property
    def step(self) -> int: ...


class Stepping(Protocol):
    """The trainer (``Trainers``). Each call raises TrainerFailed, Conflict and Fenced."""

    def wait_ready(self) -> HasStep: ...

    def update(self, phase: Phase, step: int, batch: Batch, *, versions: Sequence[int] = (),
               consumption: Consumption = Consumption(), cursor: Mapping[str, Any] | None = None
               ) -> dict[str, Any]: ...

    def accumulate(self, step: int, batch: Batch, part: int, *, versions: Sequence[int]) -> None: ...

    def apply(self, step: int, parts: int, *, versions: Sequence[int], consumption: Consumption,
              cursor: Mapping[str, Any]) -> dict[str, Any]: ...

    def check(self, step: int, batch: Batch) -> object: ...


class Batches(Protocol):
    """See ``TrainingBatches``."""

    def make(self, groups: StepGroups, step: int, timer: StepTimer, *, tried: bool = False) -> MadeBatch: ...

    def forget(self) -> None: ...


class StepMaker:
    """Makes steps. The gradients of a step's parts are in the trainer's memory; once it has lost them, all parts of the
    step are added again."""

    def __init__(self, batches: Batches, trainer: Stepping, waits: Waits, trials: GroupTrials, *, in_parts: bool,
                 on_failed: Callable[[Sequence[int], str], None] = lambda ordinals, why: None,
                 on_batch: Callable[[int, Batch, Sequence[int]], None] = lambda step, batch, versions: None) -> None:
        """``on_failed``: called with groups that are dropped, and why; it raises nothing but Fenced. ``on_batch``:
        called with the batch of a step, and the versions that made its tokens, before the step is made; it raises
        nothing."""
        self._on_batch = on_batch
        self._batches, self._trainer, self._waits, self._in_parts = batches, trainer, waits, in_parts
        self._trials, self._on_failed = trials, on_failed
        self._refused: dict[int, str] = {}
        """Groups of a step that the trainer refused, and why, of which none was found to be to blame so far."""
        self._found: dict[int, str] = {}
        """Groups that were found to be to blame while the trainer went back, and why: they come again, to be dropped.
        """
        self._again = RetryBackoff(*_AGAIN_S)

    def add(self, groups: StepGroups, step: int, timer: StepTimer, before: Accumulated) -> Accumulated:
        """Has the gradients of a part computed, if steps are made of parts. Returns what the step's parts have added,
        ``before`` and this one. Raises TrainerFailed, Conflict and Fenced; and GroupsFailed when the trainer refuses
        the part, after which all parts are to be added again."""
        if not self._in_parts:
            return before
        if self._try_refused(groups, step, timer) and before.parts:
            raise GroupsFailed(f"the parts of step {step} are computed again: trials have discarded them", ())
        try:
            made = self._while_held(lambda: self._add(groups, step, timer, before.parts))
        except _REFUSED as e:
            self._raise_gone_back([group.ordinal for group in groups.groups], step, e)
            raise self._failed(groups, step, timer, e) from e
        self._batches.forget()
        self._waits.stage("generate")
        of_samples = iter(made.advantages)
        return before.plus({group.ordinal: [next(of_samples) for _ in group.samples] for group in groups.groups},
                           made.metrics, made.batch.loss_tokens)

    def _add(self, groups: StepGroups, step: int, timer: StepTimer, part: int) -> MadeBatch:
        """One attempt to add a part."""
        made = self._batches.make(groups, step, timer)
        self._waits.stage("train")
        with timer.stage("train"):
            self._waits.retry("trainer", lambda: self._trainer.accumulate(
                step, made.batch, part, versions=groups.versions), end_on=(TrainerFailed, Conflict, *_REFUSED))
        return made

    def make(self, taken: TakenStep, step: int, timer: StepTimer, cursor: Mapping[str, Any]
             ) -> tuple[dict[str, Any], list[float]]:
        """Makes the step of the groups that were taken. Returns its metrics, and the advantages of the groups' samples.
        Raises TrainerFailed, Conflict, Fenced and GroupsFailed."""
        groups, attempts = taken.groups, 1 if taken.accumulated.parts else _ATTEMPTS  # parts are gone after the first
        ordinals = [group.ordinal for group in groups.groups]
        if not taken.accumulated.parts:  # else ``add`` has tried them
            self._try_refused(groups, step, timer)
        while True:
            try:
                made = self._while_held(lambda: self._make(taken, step, timer, cursor))
            except _REFUSED as e:
                log.warning("the trainer refuses step %d: %s", step, e)
                attempts -= 1
                self._raise_gone_back(ordinals, step, e)
                if not attempts:
                    raise self._failed(groups, step, timer, e) from e
            else:
                for ordinal in ordinals:
                    self._refused.pop(ordinal, None)
                self._found = {ordinal: why for ordinal, why in self._found.items()
                               if not any(ordinal in gone for gone in taken.consumption.dropped.values())}
                self._again.reset()
                self._trials.made(len(ordinals))
                return made

    def _raise_gone_back(self, ordinals: Sequence[int], step: int, error: ElasticRLError) -> None:
        """Raises Conflict if the trainer has gone back, or is to, from a step with these groups: they are tried before
        the trainer computes with them again."""
        self._refused |= dict.fromkeys(ordinals, str(error))
        if isinstance(error, StepRefused) and error.went_back:
            raise Conflict(f"the trainer goes back from step {step}: {error}") from error

    def _while_held(self, attempt: Callable[[], T]) -> T:
        """The result of an attempt, made again for as long as the trainer makes no step since it waits for a person."""
        held: tuple[str, str, float] | None = None
        again = RetryBackoff(*_AGAIN_S)
        while True:
            try:
                with contextlib.nullcontext() if held is None else self._waits.holding(*held):
                    return attempt()
            except StepsHeld as e:
                held = "plugin", str(e), time.monotonic() if held is None else held[2]
            again.failed(time.monotonic())
            with self._waits.holding(*held):
                self._waits.works()  # but for what is held
                self._waits.pause(again.left_s(time.monotonic()))

    def _make(self, taken: TakenStep, step: int, timer: StepTimer, cursor: Mapping[str, Any]
              ) -> tuple[dict[str, Any], list[float]]:
        """One attempt to make a step."""
        groups, consumption, accumulated = taken.groups, taken.consumption, taken.accumulated
        made = None if accumulated.parts else self._batches.make(groups, step, timer)
        self._waits.stage("train")
        with timer.stage("train"):
            if made is None:
                trained = self._trainer.apply(step, accumulated.parts, versions=groups.versions,
                                              consumption=consumption, cursor=cursor)
                return {**accumulated.metrics, **trained}, [
                    a for group in groups.groups for a in accumulated.advantages[group.ordinal]]
            self._on_batch(step, made.batch, groups.versions)
            trained = self._trainer.update("rl", step, made.batch, versions=groups.versions,
                                           consumption=consumption, cursor=cursor)
        self._batches.forget()
        return made.metrics | trained, made.advantages

    def _failed(self, groups: StepGroups, step: int, timer: StepTimer, error: ElasticRLError) -> GroupsFailed:
        """What is raised after the trainer has refused these groups: with those that are to be dropped, or with none
        after a pause, since only the trainer may be to blame then."""
        self._raise_failed(groups, step, timer, str(error))
        self._again.failed(time.monotonic())
        self._waits.waits("trainer", f"the trainer to make step {step}, although it computes with every group: {error}")
        self._waits.pause(self._again.left_s(time.monotonic()))
        return GroupsFailed(f"step {step} is tried again: {error}", ())

    def _try_refused(self, groups: StepGroups, step: int, timer: StepTimer) -> bool:
        """Tries the groups of a step, or of a part, if some of them were in one that the trainer went back from, and
        says whether it has. Raises as ``_raise_failed``."""
        if known := [group.ordinal for group in groups.groups if group.ordinal in self._found]:
            raise GroupsFailed(f"the trainer cannot compute with groups {known}: {self._found[known[0]]}", known)
        found = [why for group in groups.groups if (why := self._refused.get(group.ordinal)) is not None]
        if found:
            self._raise_failed(groups, step, timer, found[0])
        return bool(found)

    def _raise_failed(self, groups: StepGroups, step: int, timer: StepTimer, why: str) -> None:
        """Raises GroupsFailed with those of these groups that are to be dropped, if there are any; and ConfigError for
        a batch that does not fit the trainer. ``why``: the trainer has refused them all together.

        A check that ends the trainer's ranks is followed by others at whichever state the group is back then: what has
        too little memory has so at each. The loop is to resume from that afterwards (Conflict)."""
        by_ordinal = {group.ordinal: group for group in groups.groups}
        at, went_back = step, False

        def check(ordinals: Sequence[int]) -> ElasticRLError | None:
            nonlocal at, went_back
            # Made of these groups alone: a pass before the trainer's may refuse some, or spoil the values of all.
            some = StepGroups(tuple(by_ordinal[ordinal] for ordinal in ordinals), groups.reader)
            try:
                batch = self._batches.make(some, at, timer, tried=True).batch
                self._waits.stage("train")
                with timer.stage("train"):
                    # A batch that does not fit the trainer blames no group, and never fits however often it is sent:
                    # the trial ends with the error, which the loop shows, and the next one has a new batch made.
                    self._waits.retry("trainer", lambda: self._trainer.check(at, batch),
                                      end_on=(TrainerFailed, Conflict, ConfigError, *_REFUSED))
            except StepsHeld as e:
                raise Conflict(f"the trainer makes no step: {e}") from e
            except _REFUSED as e:
                if isinstance(e, StepRefused) and e.went_back:
                    at, went_back = self._waits.retry("trainer", self._trainer.wait_ready).step + 1, True
                return e
            finally:
                self._batches.forget()
            return None

        dropped = self._trials.failed(step, list(by_ordinal), check, why)
        for ordinal in by_ordinal:
            self._refused.pop(ordinal, None)
        if dropped:
            reason = next(iter(dropped.values()))
            self._on_failed(sorted(dropped), reason)
        if went_back:
            self._found |= dropped
            raise Conflict(f"the trainer went back while the groups of step {step} were tried: {why}")
        if dropped:
            raise GroupsFailed(f"the trainer cannot compute with groups {sorted(dropped)}: {reason}", sorted(dropped))
