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
from elastic_rl.pipeline.training.step_maker import HasStep
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

    def wait_ready(self) -> HasStep: ...


class SupervisedSteps:
    """Makes the supervised steps of one actor. Used by one thread."""

    def __init__(self, trainer: Supervising, waits: Waits, trials: GroupTrials,
                 on_failed: Callable[[Sequence[int], str], None]) -> None:
        """``on_failed``: called with the ordinals of demonstrations that are left out of a step, and why; it raises
        nothing but Fenced."""
        self._trainer, self._waits, self._trials, self._on_failed = trainer, waits, trials, on_failed
        self._refused: dict[int, str] = {}
        """Demonstrations of a step that the trainer went back from, and why; they are tried when they come again."""
        self._found: set[int] = set()
        """Demonstrations that were found to be to blame while the trainer went back: they are left out when they come
        again."""

    def make(self, step: int, demonstrations: Mapping[int, Prompt], cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a step of demonstrations, by their ordinals. Returns the trainer's metrics. Raises TrainerFailed,
        Conflict and Fenced; and StepRefused where none of them is found to be to blame, or a step without any is
        refused too, and ConfigError: then it is to be called again, after a pause."""
        left, attempts = {o: prompt for o, prompt in demonstrations.items() if o not in self._found}, 0
        if (why := next((self._refused[o] for o in left if o in self._refused), "")):
            left = self._without_failed(step, left, StepRefused(why))
        while True:
            if not left:
                made = self._make_of_nothing(step, demonstrations, cursor)
                self._found -= demonstrations.keys()
                return made
            try:
                made = self._trainer.update("sft", step, collate_answers(left.values()), cursor=cursor)
            except StepRefused as e:
                log.warning("the trainer refuses supervised step %d: %s", step, e)
                attempts += 1
                if e.went_back:
                    self._refused |= dict.fromkeys(left, str(e))
                    raise Conflict(f"the trainer goes back from supervised step {step}: {e}") from e
                if attempts % _ATTEMPTS == 0:
                    left = self._without_failed(step, left, e)
            else:
                self._trials.made(len(left))
                self._found -= demonstrations.keys()
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
        nothing, ConfigError for a batch that does not fit the trainer, and Conflict when a check has ended the
        trainer's ranks: others follow it, see ``StepMaker``, and then the loop is to resume."""
        at, went_back = step, False

        def check(ordinals: Sequence[int]) -> ElasticRLError | None:
            nonlocal at, went_back
            batch = collate_answers(demonstrations[ordinal] for ordinal in ordinals)
            try:
                self._waits.retry("trainer", lambda: self._trainer.check(at, batch, "sft"),
                                  end_on=(TrainerFailed, Conflict, ConfigError, StepRefused))
            except StepRefused as e:
                if e.went_back:
                    at, went_back = self._waits.retry("trainer", self._trainer.wait_ready).step + 1, True
                return e
            return None

        dropped = self._trials.failed(step, list(demonstrations), check, str(error))
        left = {ordinal: prompt for ordinal, prompt in demonstrations.items() if ordinal not in dropped}
        for ordinal in demonstrations:
            self._refused.pop(ordinal, None)
        if dropped:
            self._on_failed(sorted(dropped), next(iter(dropped.values())))
        if went_back:
            self._found |= dropped.keys()
            raise Conflict(f"the trainer went back while the demonstrations of step {step} were tried: {error}")
        if not dropped:
            raise error
        return left
