"""Supervised steps with demonstrations that the trainer cannot compute with."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.data.batch import Batch
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import StepRefused
from elastic_rl.pipeline.training import group_trials
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.supervised_steps import SupervisedSteps
from elastic_rl.pipeline.waits import Waits

CFG = config.parse({"mode": "sft", "sft": {"batch_size": 8}})
DEMONSTRATIONS = {ordinal: Prompt((ordinal,), answer_ids=(2, 3)) for ordinal in range(40, 48)}


class Trainer:
    """``poison``: prompts that it cannot compute with. ``ahead``: refusals to come that none is to blame for."""

    def __init__(self, poison: Collection[int] = (), ahead: int = 0) -> None:
        self.made: list[int] = []
        """Prompts of the step."""
        self.updates = 0
        self.checks: set[tuple[int, str]] = set()
        """Steps and phases of checks."""
        self._poison, self._ahead = {*poison}, ahead

    def _compute(self, batch: Batch) -> list[int]:
        prompts = [int(tokens[0]) for tokens in batch.by_sample("tokens")]
        if self._poison & {*prompts}:
            raise StepRefused("the norm of the gradient is nan")
        return prompts

    def update(self, phase: str, step: int, batch: Batch, *, cursor: Mapping[str, Any] | None = None
               ) -> dict[str, Any]:
        assert phase == "sft" and cursor == {"at": 1}
        self.updates += 1
        if self.updates <= self._ahead:
            raise StepRefused("there is no memory")
        self.made = self._compute(batch)
        return {"loss": 0.5}

    def check(self, step: int, batch: Batch, phase: str) -> None:
        self.checks.add((step, phase))
        self._compute(batch)


class Made:
    """The steps of a trainer; ``left_out``: what was reported."""

    def __init__(self, trainer: Trainer) -> None:
        self.left_out: list[tuple[list[int], str]] = []
        waits = Waits(lambda *_: None, threading.Event())
        self._steps = SupervisedSteps(trainer, waits, GroupTrials(CFG, waits, "sft"),
                                      lambda ordinals, why: self.left_out.append(([*ordinals], why)))

    def make(self, demonstrations: Mapping[int, Prompt] = DEMONSTRATIONS) -> dict[str, Any]:
        return self._steps.make(6, demonstrations, {"at": 1})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_trials, "_RETRY_S", (0.0, 0.0))


def test_supervised_step_is_made_without_the_demonstrations_that_are_to_blame() -> None:
    made = Made(trainer := Trainer(poison=[41, 46]))
    assert made.make() == {"loss": 0.5}
    assert trainer.made == [40, 42, 43, 44, 45, 47] and trainer.checks == {(6, "sft")}
    assert made.left_out == [([41, 46], "the norm of the gradient is nan")]


def test_supervised_step_is_tried_once_more_before_its_demonstrations_are() -> None:
    made = Made(trainer := Trainer(ahead=1))
    made.make()
    assert trainer.made == [*DEMONSTRATIONS] and not trainer.checks and not made.left_out


def test_supervised_step_without_anybody_to_blame_is_refused() -> None:
    made = Made(trainer := Trainer(ahead=2))
    with pytest.raises(StepRefused, match="no memory"):
        made.make()
    made.make()
    assert trainer.made == [*DEMONSTRATIONS] and not made.left_out


def test_only_demonstration_of_a_step_is_not_left_out() -> None:
    made = Made(Trainer(poison=[40]))
    with pytest.raises(StepRefused):
        made.make({40: DEMONSTRATIONS[40]})
    assert not made.left_out
