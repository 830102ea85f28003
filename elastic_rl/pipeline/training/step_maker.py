"""Has the trainer make a step: of all its groups together, or of parts whose gradients are computed while other groups
are still generated (``train.prompts_per_part``).

A step that the trainer refuses, since it cannot compute with its samples, is tried once more; then ``GroupTrials``
finds the groups that are to blame, which are dropped. The trainer's state is as it was before the step meanwhile, so
another actor that takes over begins with the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.errors import Conflict, ElasticRLError, GroupsFailed, PluginFailed, StepRefused, TrainerFailed
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import TakenStep
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.training_batch import MadeBatch
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.trainer.progress import Phase

log = logging.getLogger(__name__)

_REFUSED = (StepRefused, PluginFailed)
"""Errors by which the trainer says that it cannot compute with samples."""
_ATTEMPTS = 2
"""Attempts to make a step before its groups are tried one by one."""
_AGAIN_S = (1.0, 60.0)
"""First and longest pause before a step is tried again that the trainer refuses although it computes with every group.
"""


class Stepping(Protocol):
    """The trainer (``Trainers``). Each call raises TrainerFailed, Conflict and Fenced."""

    def update(self, phase: Phase, step: int, batch: Batch, *, versions: Sequence[int] = (),
               consumption: Consumption = Consumption(), cursor: Mapping[str, Any] | None = None
               ) -> dict[str, Any]: ...

    def accumulate(self, step: int, batch: Batch, part: int, *, versions: Sequence[int]) -> None: ...

    def apply(self, step: int, parts: int, *, versions: Sequence[int], consumption: Consumption,
              cursor: Mapping[str, Any]) -> dict[str, Any]: ...

    def check(self, step: int, batch: Batch) -> object: ...


class Batches(Protocol):
    """See ``TrainingBatches``."""

    def make(self, groups: StepGroups, step: int, timer: StepTimer) -> MadeBatch: ...

    def forget(self) -> None: ...


class StepMaker:
    """Makes steps. The gradients of a step's parts are in the trainer's memory; once it has lost them, all parts of the
    step are added again."""

    def __init__(self, batches: Batches, trainer: Stepping, waits: Waits, trials: GroupTrials, *, in_parts: bool,
                 on_failed: Callable[[Sequence[int], str], None] = lambda ordinals, why: None) -> None:
        """``on_failed``: called with groups that are dropped, and why; it raises nothing but Fenced."""
        self._batches, self._trainer, self._waits, self._in_parts = batches, trainer, waits, in_parts
        self._trials, self._on_failed = trials, on_failed
        self._refused: frozenset[int] = frozenset()
        """Groups of a step that the trainer refused, of which none was found to be to blame so far."""
        self._again = RetryBackoff(*_AGAIN_S)

    def add(self, groups: StepGroups, step: int, timer: StepTimer, before: Accumulated) -> Accumulated:
        """Has the gradients of a part computed, if steps are made of parts. Returns what the step's parts have added,
        ``before`` and this one. Raises TrainerFailed, Conflict and Fenced; and GroupsFailed when the trainer refuses
        the part, after which all parts are to be added again."""
        if not self._in_parts:
            return before
        try:
            made = self._batches.make(groups, step, timer)
            self._waits.stage("train")
            with timer.stage("train"):
                self._waits.retry("trainer", lambda: self._trainer.accumulate(
                    step, made.batch, before.parts, versions=groups.versions),
                                  end_on=(TrainerFailed, Conflict, *_REFUSED))
        except _REFUSED as e:
            raise self._failed(groups, step, timer, e) from e
        self._batches.forget()
        self._waits.stage("generate")
        of_samples = iter(made.advantages)
        return before.plus({group.ordinal: [next(of_samples) for _ in group.samples] for group in groups.groups},
                           made.metrics, made.batch.loss_tokens)

    def make(self, taken: TakenStep, step: int, timer: StepTimer, cursor: Mapping[str, Any]
             ) -> tuple[dict[str, Any], list[float]]:
        """Makes the step of the groups that were taken. Returns its metrics, and the advantages of the groups' samples.
        Raises TrainerFailed, Conflict, Fenced and GroupsFailed."""
        groups, attempts = taken.groups, 1 if taken.accumulated.parts else _ATTEMPTS  # parts are gone after the first
        if not self._refused.isdisjoint(ordinals := [group.ordinal for group in groups.groups]):
            # The trainer went back to an earlier step then. These groups are tried before it makes the next one.
            self._raise_failed(groups, step, timer)
        while True:
            try:
                made = self._make(taken, step, timer, cursor)
            except _REFUSED as e:
                log.warning("the trainer refuses step %d: %s", step, e)
                attempts -= 1
                self._refused |= {*ordinals}
                if not attempts:
                    raise self._failed(groups, step, timer, e) from e
            else:
                self._refused -= {*ordinals}
                self._again.reset()
                self._trials.made(len(ordinals))
                return made

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
            trained = self._trainer.update("rl", step, made.batch, versions=groups.versions,
                                           consumption=consumption, cursor=cursor)
        self._batches.forget()
        return made.metrics | trained, made.advantages

    def _failed(self, groups: StepGroups, step: int, timer: StepTimer, error: ElasticRLError) -> GroupsFailed:
        """What is raised after the trainer has refused these groups: with those that are to be dropped, or with none
        after a pause, since only the trainer may be to blame then."""
        self._raise_failed(groups, step, timer)
        self._again.failed(time.monotonic())
        self._waits.waits("trainer", f"the trainer to make step {step}, although it computes with every group: {error}")
        self._waits.pause(self._again.left_s(time.monotonic()))
        return GroupsFailed(f"step {step} is tried again: {error}", ())

    def _raise_failed(self, groups: StepGroups, step: int, timer: StepTimer) -> None:
        """Raises GroupsFailed with those of these groups that are to be dropped, if there are any."""
        counts = [len(group.samples) for group in groups.groups]
        rows = dict(zip([group.ordinal for group in groups.groups], torch.arange(sum(counts)).split(counts),
                        strict=True))

        def check(ordinals: Sequence[int]) -> ElasticRLError | None:
            try:
                batch = self._batches.make(groups, step, timer).batch
                some = batch.rows(torch.cat([rows[ordinal] for ordinal in ordinals]))
                self._waits.stage("train")
                with timer.stage("train"):
                    self._waits.retry("trainer", lambda: self._trainer.check(step, some),
                                      end_on=(TrainerFailed, Conflict, *_REFUSED))
            except _REFUSED as e:
                return e
            return None

        dropped = self._trials.failed(list(rows), check)
        self._refused -= rows.keys()
        if dropped:
            self._batches.forget()
            why = next(iter(dropped.values()))
            self._on_failed(sorted(dropped), why)
            raise GroupsFailed(f"the trainer cannot compute with groups {sorted(dropped)}: {why}", sorted(dropped))
