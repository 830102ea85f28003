"""Has the trainer make a step: of all its groups together, or of parts whose gradients are computed while other groups
are still generated (``train.prompts_per_part``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from elastic_rl.data.batch import Batch
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.errors import Conflict, TrainerFailed
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training.training_batch import MadeBatch
from elastic_rl.pipeline.waits import Waits
from elastic_rl.trainer.progress import Phase


class Stepping(Protocol):
    """The trainer (``Trainers``). Each call raises TrainerFailed, Conflict and Fenced."""

    def update(self, phase: Phase, step: int, batch: Batch, *, consumption: Consumption = Consumption(),
               cursor: Mapping[str, Any] | None = None) -> dict[str, Any]: ...

    def accumulate(self, step: int, batch: Batch, part: int) -> None: ...

    def apply(self, step: int, parts: int, *, consumption: Consumption, cursor: Mapping[str, Any]
              ) -> dict[str, Any]: ...


class Batches(Protocol):
    """See ``TrainingBatches``."""

    def make(self, groups: StepGroups, step: int, timer: StepTimer) -> MadeBatch: ...

    def forget(self) -> None: ...


class StepMaker:
    """Makes one step at a time. The gradients of parts are the trainer's; once it has lost them, all parts of the step
    are added again."""

    def __init__(self, batches: Batches, trainer: Stepping, waits: Waits, *, in_parts: bool) -> None:
        self._batches, self._trainer, self._waits, self._in_parts = batches, trainer, waits, in_parts
        self._parts = self._tokens = 0
        self._advantages: dict[int, list[float]] = {}
        """Group → the advantages of its samples, of each group that was added."""
        self._metrics: dict[str, float] = {}

    def add(self, groups: StepGroups, step: int, timer: StepTimer, *, first: bool) -> None:
        """Has the gradients of a part computed, if steps are made of parts. ``first``: what was added before is of no
        step. Raises TrainerFailed, Conflict and Fenced."""
        if not self._in_parts:
            return
        if first:
            self._parts = self._tokens = 0
            self._advantages, self._metrics = {}, {}
        made = self._batches.make(groups, step, timer)
        self._waits.stage("train")
        with timer.phase("train"):
            self._waits.retry("trainer", lambda: self._trainer.accumulate(step, made.batch, self._parts),
                              end_on=(TrainerFailed, Conflict))
        self._batches.forget()
        self._parts += 1
        self._note(groups, made)
        self._waits.stage("generate")

    def _note(self, groups: StepGroups, made: MadeBatch) -> None:
        of_samples, tokens = iter(made.advantages), made.batch.loss_tokens
        self._advantages |= {group.ordinal: [next(of_samples) for _ in group.samples] for group in groups.groups}
        self._tokens += tokens
        for name, mean in made.metrics.items():  # over tokens
            before = self._metrics.get(name, 0.0)
            self._metrics[name] = before + (mean - before) * tokens / max(self._tokens, 1)

    def make(self, groups: StepGroups, step: int, timer: StepTimer, consumption: Consumption,
             cursor: Mapping[str, Any]) -> tuple[dict[str, Any], list[float]]:
        """Makes the step of these groups, which are all that were added where steps are made of parts. Its metrics, and
        the advantages of the groups' samples. Raises as ``add``."""
        made = None if self._in_parts else self._batches.make(groups, step, timer)
        self._waits.stage("train")
        with timer.phase("train"):
            if made is None:
                trained = self._trainer.apply(step, self._parts, consumption=consumption, cursor=cursor)
                return self._metrics | trained, [a for group in groups.groups for a in self._advantages[group.ordinal]]
            trained = self._trainer.update("rl", step, made.batch, consumption=consumption, cursor=cursor)
        self._batches.forget()
        return made.metrics | trained, made.advantages
