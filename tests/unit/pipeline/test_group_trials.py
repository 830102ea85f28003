"""Groups of a step that the trainer cannot compute with are found by checks of halves; nobody is dropped for a trainer
that computes with none."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.errors import ElasticRLError, Fenced, PluginFailed, StepRefused
from elastic_rl.pipeline.training import group_trials
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.waits import Waits

SIZE = 16
CFG = config.parse({"train": {"prompts_per_step": SIZE}, "rollout": {"groups_per_request": SIZE}})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_trials, "_RETRY_S", (0.0, 0.0))


class World:
    """A trainer that computes with all groups but some, and not with all of ``together``. It ends the loop after
    ``most`` checks."""

    def __init__(self, poison: Sequence[int], most: int = 10_000, *, together: Collection[int] = (),
                 cfg: config.Config = CFG) -> None:
        self.checks: list[tuple[int, ...]] = []
        self.shown: list[tuple[str, str]] = []
        self._poison, self._together = {*poison}, {*together}
        self._most, self._stopping = most, threading.Event()
        self.trials = GroupTrials(cfg, Waits(lambda stage, kind, what: self.shown.append((kind, what)), self._stopping))

    def check(self, ordinals: Sequence[int]) -> ElasticRLError | None:
        self.checks.append(tuple(ordinals))
        if len(self.checks) >= self._most:
            self._stopping.set()
        refuses = self._poison & {*ordinals} or (self._together and self._together <= {*ordinals})
        return StepRefused("the norm of the gradient is nan") if refuses else None

    def failed(self, ordinals: Sequence[int], step: int = 1) -> dict[int, str]:
        return self.trials.failed(step, ordinals, self.check, "the step is refused")


@settings(max_examples=seeds(60), deadline=None)
@given(st.sets(st.integers(0, SIZE - 1), max_size=SIZE // 2))
def test_exactly_the_groups_that_fail_alone_are_dropped(poison: set[int]) -> None:
    world = World([*poison])
    assert {*world.failed(range(SIZE))} == poison
    # Halves down to each of them, and then each is tried alone, with another group in between.
    assert len(world.checks) <= 2 + len(poison) * (2 * SIZE.bit_length() + 2 * CFG.rollout.reward_attempts)
    assert world.checks[0] != tuple(range(SIZE)), "the whole step has been tried by then"


def test_group_is_blamed_only_after_others_were_computed_with_between_its_failures() -> None:
    world = World([3])
    world.failed(range(4))
    alone = [i for i, ordinals in enumerate(world.checks) if ordinals == (3,)]
    assert len(alone) == CFG.rollout.reward_attempts
    assert all(any(3 not in other for other in world.checks[a:b]) for a, b in zip(alone, alone[1:], strict=False))


def test_trainer_that_computes_with_no_group_has_none_dropped() -> None:
    world = World(range(4), most=200)
    with pytest.raises(Fenced):
        world.failed(range(4))
    assert world.shown[-1][0] == "trainer" and "nan" in world.shown[-1][1]


def test_more_groups_than_the_share_allows_are_not_dropped() -> None:
    world = World(range(SIZE - 1), most=2000)
    dropped = world.failed(range(SIZE))
    assert len(dropped) == SIZE // 2 and {*dropped} < {*range(SIZE - 1)}, "what was found is not lost in the wait"
    with pytest.raises(Fenced):
        world.failed([ordinal for ordinal in range(SIZE) if ordinal not in dropped])
    assert any("rollout.max_failed_groups" in what for _, what in world.shown)


def test_loss_of_the_user_that_fails_for_every_group_waits_for_the_user() -> None:
    world = World([], most=100)

    def check(ordinals: Sequence[int]) -> ElasticRLError | None:
        world.check(ordinals)
        return PluginFailed("the token_loss of algorithm.name=mine:loss failed")

    with pytest.raises(Fenced):
        world.trials.failed(1, range(4), check, "")
    assert world.shown[-1][0] == "plugin" and "mine:loss" in world.shown[-1][1]


@pytest.mark.parametrize("size", [1, 4])
def test_one_group_is_dropped_where_the_trainer_computes_with_none_but_has_made_steps_before(size: int) -> None:
    world = World(range(100), most=200)
    [(dropped, why)] = world.failed(range(size), step=7).items()
    assert dropped in range(size) and "nan" in why
    assert world.checks.count((dropped,)) == CFG.rollout.reward_attempts
    with pytest.raises(Fenced):  # nor with what came in its place: the trainer is at fault
        world.failed([*range(1, size), 50], step=7)


def test_single_groups_are_dropped_in_further_steps_within_the_share() -> None:
    limited = config.parse({"train": {"prompts_per_step": 1}, "rollout": {"groups_per_request": 8}})
    world = World(range(100), most=200, cfg=limited)
    for step in (2, 3, 4, 5):  # half of the last eight
        assert list(world.failed([step], step=step)) == [step]
        world.trials.made(1)
    with pytest.raises(Fenced):
        world.failed([6], step=6)


def test_no_group_is_dropped_of_the_first_step_without_evidence() -> None:
    with pytest.raises(Fenced):
        World([0], most=50).failed([0], step=1)


@settings(max_examples=seeds(60), deadline=None)
@given(st.sets(st.integers(0, SIZE - 1), min_size=2, max_size=SIZE))
def test_one_of_the_groups_that_fail_together_only_is_dropped_after_some_trials(together: set[int]) -> None:
    world = World([], together=together)
    for _ in range(CFG.rollout.reward_attempts - 1):
        assert world.failed(range(SIZE)) == {}
    [(dropped, why)] = world.failed(range(SIZE)).items()
    tried = [set(ordinals) for ordinals in world.checks if together <= {*ordinals}]
    assert dropped in min(tried, key=len, default=set(range(SIZE))) and "together" in why
    assert world.failed(range(SIZE), step=2) == {}, "another step has its own trials"


def test_no_group_is_dropped_for_its_company_where_the_share_is_zero() -> None:
    none = CFG.model_copy(update={"rollout": CFG.rollout.model_copy(update={"max_failed_groups": 0.0})})
    world = World([], together=[1, 2], cfg=none)
    assert [world.failed(range(4)) for _ in range(10)] == [{}] * 10
