"""Has the trainer make a step: of all its groups together, or of parts whose gradients are computed while other groups
are still generated (``train.prompts_per_part``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.errors import Conflict, TrainerFailed
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import TakenStep
from elastic_rl.pipeline.training.training_batch import MadeBatch
from elastic_rl.pipeline.waits import Waits
from elastic_rl.trainer.progress import Phase


class Stepping(Protocol):
    """The trainer (``Trainers``). Each call raises TrainerFailed, Conflict and Fenced."""

    def update(self, phase: Phase, step: int, batch: Batch, *, versions: Sequence[int] = (),
               consumption: Consumption = Consumption(), cursor: Mapping[str, Any] | None = None
               ) -> dict[str, Any]: ...

    def accumulate(self, step: int, batch: Batch, part: int, *, versions: Sequence[int]) -> None: ...

    def apply(self, step: int, parts: int, *, versions: Sequence[int], consumption: Consumption,
              cursor: Mapping[str, Any]) -> dict[str, Any]: ...


class Batches(Protocol):
    """See ``TrainingBatches``."""

    def make(self, groups: StepGroups, step: int, timer: StepTimer) -> MadeBatch: ...

    def forget(self) -> None: ...


class StepMaker:
    """Makes steps. The gradients of a step's parts are in the trainer's memory; once it has lost them, all parts of the
    step are added again."""

    def __init__(self, batches: Batches, trainer: Stepping, waits: Waits, *, in_parts: bool) -> None:
        self._batches, self._trainer, self._waits, self._in_parts = batches, trainer, waits, in_parts

    def add(self, groups: StepGroups, step: int, timer: StepTimer, before: Accumulated) -> Accumulated:
        """Has the gradients of a part computed, if steps are made of parts. Returns what the step's parts have added,
        ``before`` and this one. Raises TrainerFailed, Conflict and Fenced."""
        if not self._in_parts:
            return before
        made = self._batches.make(groups, step, timer)
        self._waits.stage("train")
        with timer.stage("train"):
            self._waits.retry("trainer", lambda: self._trainer.accumulate(
                step, made.batch, before.parts, versions=groups.versions),
                              end_on=(TrainerFailed, Conflict))
        self._batches.forget()
        self._waits.stage("generate")
        of_samples = iter(made.advantages)
        return before.plus({group.ordinal: [next(of_samples) for _ in group.samples] for group in groups.groups},
                           made.metrics, made.batch.loss_tokens)

    def make(self, taken: TakenStep, step: int, timer: StepTimer, cursor: Mapping[str, Any]
             ) -> tuple[dict[str, Any], list[float]]:
        """Makes the step of the groups that were taken. Returns its metrics, and the advantages of the groups' samples.
        Raises as ``add``."""
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
