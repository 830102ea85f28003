"""Makes supervised steps. One that the trainer refuses is tried once more; then ``GroupTrials`` finds the
demonstrations that are to blame, as it finds prompt groups, and the step is made of the others.

A supervised step imitates the same demonstrations whenever it is made, so it would be refused again and again. It is
recorded by no ledger: what is left out of a step is in an event, and comes again with the next pass over the data.
Nothing takes the place of what is left out. A step of which that is the only demonstration is made of the first token
of its prompt, of which nothing is learned: the step is the same one whichever actor makes it, and nothing that the
trainer could not compute with is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from elastic_rl.data.batch import Batch, collate_answers
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import ConfigError, Conflict, ElasticRLError, StepRefused, TrainerFailed
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.waits import Waits
from elastic_rl.trainer.progress import Phase

log = logging.getLogger(__name__)

_ATTEMPTS = 2
"""Attempts to make a step before its demonstrations are tried."""


class Supervising(Protocol):
    """The trainer (``Trainers``). Each call raises TrainerFailed, Conflict, Fenced and StepRefused."""

    def update(self, phase: Phase, step: int, batch: Batch, *, cursor: Mapping[str, Any] | None = None
               ) -> dict[str, Any]: ...

    def check(self, step: int, batch: Batch, phase: Phase) -> object: ...


class SupervisedSteps:
    """Makes the supervised steps of one actor. Used by one thread."""

    def __init__(self, trainer: Supervising, waits: Waits, trials: GroupTrials,
                 on_failed: Callable[[Sequence[int], str], None]) -> None:
        """``on_failed``: called with the ordinals of demonstrations that are left out of a step, and why; it raises
        nothing but Fenced."""
        self._trainer, self._waits, self._trials, self._on_failed = trainer, waits, trials, on_failed

    def make(self, step: int, demonstrations: Mapping[int, Prompt], cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a step of demonstrations, by their ordinals. Returns the trainer's metrics. Raises TrainerFailed,
        Conflict and Fenced; and StepRefused where none of them is found to be to blame, or a step without any is
        refused too, and ConfigError: then it is to be called again, after a pause."""
        left, attempts = dict(demonstrations), 0
        while True:
            try:
                made = self._trainer.update("sft", step, collate_answers(left.values()), cursor=cursor)
            except StepRefused as e:
                log.warning("the trainer refuses supervised step %d: %s", step, e)
                attempts += 1
                if attempts % _ATTEMPTS == 0:
                    left = self._without_failed(step, left, e)
                    if not left:
                        return self._make_of_nothing(step, demonstrations, cursor)
            else:
                self._trials.made(len(left))
                return made

    def _make_of_nothing(self, step: int, demonstrations: Mapping[int, Prompt], cursor: Mapping[str, Any]
                         ) -> dict[str, Any]:
        """Makes a step of which all demonstrations are left out."""
        unlearned = [replace(prompt, token_ids=prompt.token_ids[:1], answer_ids=())
                     for prompt in demonstrations.values()]
        made = self._trainer.update("sft", step, collate_answers(unlearned), cursor=cursor)
        self._trials.made(0)
        return made

    def _without_failed(self, step: int, demonstrations: Mapping[int, Prompt], error: StepRefused) -> dict[int, Prompt]:
        """The demonstrations without those that the trainer cannot compute with. Raises ``error`` when that changes
        nothing, and ConfigError for a batch that does not fit the trainer."""
        def check(ordinals: Sequence[int]) -> ElasticRLError | None:
            batch = collate_answers(demonstrations[ordinal] for ordinal in ordinals)
            try:
                self._waits.retry("trainer", lambda: self._trainer.check(step, batch, "sft"),
                                  end_on=(TrainerFailed, Conflict, ConfigError, StepRefused))
            except StepRefused as e:
                return e
            return None

        dropped = self._trials.failed(step, list(demonstrations), check, str(error))
        left = {ordinal: prompt for ordinal, prompt in demonstrations.items() if ordinal not in dropped}
        if not dropped:
            raise error
        self._on_failed(sorted(dropped), next(iter(dropped.values())))
        return left
