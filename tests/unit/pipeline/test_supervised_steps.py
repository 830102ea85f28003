"""Supervised steps with demonstrations that the trainer cannot compute with."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.data.batch import Batch
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import ConfigError, Conflict, Fenced, StepRefused
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
        """Prompts of the step whose answers were learned."""
        self.tokens = 0
        """Tokens of the step."""
        self.updates = 0
        self.checks: set[tuple[int, str]] = set()
        """Steps and phases of checks."""
        self._poison, self._ahead = {*poison}, ahead

    def _compute(self, batch: Batch) -> list[int]:
        prompts = [int(tokens[0]) for tokens in batch.by_sample("tokens")]
        learned = [prompt for prompt, tokens in zip(prompts, batch.loss_counts.tolist(), strict=True) if tokens]
        if self._poison & {*learned}:
            raise StepRefused("the norm of the gradient is nan")
        return learned

    def update(self, phase: str, step: int, batch: Batch, *, cursor: Mapping[str, Any] | None = None
               ) -> dict[str, Any]:
        assert phase == "sft" and cursor == {"at": 1}
        self.updates += 1
        if self.updates <= self._ahead:
            raise StepRefused("there is no memory")
        self.made, self.tokens = self._compute(batch), int(batch["lengths"].sum())
        return {"loss": 0.5}

    def wait_ready(self) -> Any:
        raise AssertionError("its ranks do not end")

    def check(self, step: int, batch: Batch, phase: str) -> None:
        self.checks.add((step, phase))
        self._compute(batch)


class Made:
    """The steps of a trainer; ``left_out``: what was reported. The loop ends once it waits for a person to correct
    something, since too many were dropped, or after ``most`` reports of a wait."""

    def __init__(self, trainer: Trainer, cfg: config.Config = CFG, most: int = 200) -> None:
        self.left_out: list[tuple[list[int], str]] = []
        self.shown: list[str] = []
        stopping = threading.Event()

        def report(stage: str, kind: str, what: str) -> None:
            if kind:
                self.shown.append(f"{kind}: {what}")
            if "rollout.max_failed_groups" in what or len(self.shown) >= most:
                stopping.set()

        waits = Waits(report, stopping)
        self._steps = SupervisedSteps(trainer, waits, GroupTrials(cfg, waits, "sft"),
                                      lambda ordinals, why: self.left_out.append(([*ordinals], why)))

    def make(self, demonstrations: Mapping[int, Prompt] = DEMONSTRATIONS, step: int = 6) -> dict[str, Any]:
        return self._steps.make(step, demonstrations, {"at": 1})


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


def config_of(batch_size: int, prompts_per_step: int, groups_per_request: int, share: float = 0.5) -> config.Config:
    return config.parse({"mode": "sft", "sft": {"batch_size": batch_size}, "train": {
        "prompts_per_step": prompts_per_step}, "rollout": {
            "groups_per_request": groups_per_request, "max_failed_groups": share}})


def demonstrations(first: int, count: int) -> dict[int, Prompt]:
    return {ordinal: Prompt((ordinal,), answer_ids=(2, 3)) for ordinal in range(first, first + count)}


def test_supervised_step_leaves_out_as_many_as_the_share_of_its_own_size_allows() -> None:
    """Whatever the sizes of RL are: with these four were the most."""
    poison = range(100, 164, 7)
    made = Made(trainer := Trainer(poison), config_of(64, 8, 1))
    made.make(demonstrations(100, 64))
    [(left_out, _)] = made.left_out
    assert left_out == [*poison] and len(trainer.made) == 54


def test_supervised_step_of_which_too_many_fail_leaves_out_what_the_share_allows_and_waits() -> None:
    made = Made(trainer := Trainer(range(100, 106)), config_of(8, 64, 16))
    with pytest.raises(Fenced):
        made.make(demonstrations(100, 8))
    [(left_out, _)] = made.left_out
    assert len(left_out) == 4 and {*left_out} <= {*range(100, 106)} and not trainer.made
    assert made.shown[-1].startswith("trainer: ") and "rollout.max_failed_groups" in made.shown[-1]


def test_only_demonstration_of_a_step_is_left_out_where_steps_were_made_before() -> None:
    made = Made(trainer := Trainer([41, 43]), config_of(1, 8, 1))
    for step, ordinal in enumerate(range(40, 45), start=6):
        assert made.make(demonstrations(ordinal, 1), step) == {"loss": 0.5}
        assert trainer.made == ([] if ordinal in (41, 43) else [ordinal]), "nothing is learned of the others"
    assert [ordinals for ordinals, _ in made.left_out] == [[41], [43]]


def test_step_whose_only_demonstration_was_left_out_is_made_again_after_a_loss() -> None:
    made = Made(Trainer([40]), config_of(1, 8, 1))
    for _ in range(2):
        made.make(demonstrations(40, 1))
    assert [ordinals for ordinals, _ in made.left_out] == [[40], [40]]


def test_trainer_that_refuses_each_only_demonstration_is_waited_for() -> None:
    made = Made(Trainer(range(100)), config_of(1, 8, 1, share=0.75))
    with pytest.raises(Fenced):
        for step in range(6, 100):
            made.make(demonstrations(step, 1), step)
    assert [ordinals for ordinals, _ in made.left_out] == [[step] for step in range(6, 12)], "six of the last eight: "\
        "a step in which nothing was learned is no sign that the trainer works"


def test_only_demonstration_of_the_first_step_is_not_left_out() -> None:
    made = Made(Trainer([40]), config_of(1, 8, 1))
    with pytest.raises(Fenced):
        made.make(demonstrations(40, 1), step=1)
    assert not made.left_out and made.shown[-1].startswith("trainer: the norm of the gradient is nan")


def test_only_demonstration_is_left_out_with_its_prompt_which_may_be_what_has_no_room() -> None:
    made = Made(trainer := Trainer([40]), config_of(1, 8, 1))
    made.make({40: Prompt((40,) * 1000, answer_ids=(2, 3))})
    assert made.left_out and trainer.tokens == 1


def test_trainer_that_refuses_a_step_without_demonstrations_too_is_waited_for() -> None:
    made = Made(Trainer(ahead=1000, poison=[40]), config_of(1, 8, 1))
    with pytest.raises(StepRefused, match="no memory"):
        made.make(demonstrations(40, 1))


def test_demonstrations_that_do_not_fit_the_trainer_are_not_checked_again_and_again() -> None:
    class Unfit(Trainer):
        def check(self, step: int, batch: Batch, phase: str) -> None:
            raise ConfigError("the batch has no tensor 'lengths'")

    made = Made(Unfit(poison=[41]))
    with pytest.raises(ConfigError):
        made.make()
    assert not made.left_out and not made.shown


class Ending(Trainer):
    """Its ranks end with each refusal, and form again at step 3."""

    step = 3

    def wait_ready(self) -> Ending:
        return self

    def _compute(self, batch: Batch) -> list[int]:
        try:
            return super()._compute(batch)
        except StepRefused as e:
            raise StepRefused("rank 1 has too little memory", went_back=True) from e


@pytest.mark.parametrize("poison", [[41], [40, 46]])
def test_demonstrations_that_end_the_ranks_are_tried_and_left_out_when_their_step_comes_again(poison: list[int]
                                                                                              ) -> None:
    made = Made(trainer := Ending(poison))
    for _ in range(2):  # as the loop does, which resumes in between: for the step, and for the trial
        with pytest.raises(Conflict):
            made.make()
    assert trainer.updates == 1 and trainer.checks == {(6, "sft"), (4, "sft")}, "what follows a restart is of its state"
    assert made.make() == {"loss": 0.5} and trainer.made == [o for o in DEMONSTRATIONS if o not in poison]
    assert [ordinals for ordinals, _ in made.left_out] == [poison]


def test_only_demonstration_that_ends_the_ranks_is_left_out() -> None:
    made = Made(trainer := Ending([40]), config_of(1, 8, 1))
    for _ in range(2):
        with pytest.raises(Conflict):
            made.make(demonstrations(40, 1))
    assert made.make(demonstrations(40, 1)) == {"loss": 0.5} and trainer.made == []
