"""Groups of a step that the trainer cannot compute with are found by checks of halves; nobody is dropped for a trainer
that computes with none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

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
    """A trainer that computes with all groups but some. It ends the loop after ``most`` checks."""

    def __init__(self, poison: Sequence[int], most: int = 10_000) -> None:
        self.checks: list[tuple[int, ...]] = []
        self.shown: list[tuple[str, str]] = []
        self._poison, self._most, self._stopping = {*poison}, most, threading.Event()
        self.trials = GroupTrials(CFG, Waits(lambda stage, kind, what: self.shown.append((kind, what)), self._stopping))

    def check(self, ordinals: Sequence[int]) -> ElasticRLError | None:
        self.checks.append(tuple(ordinals))
        if len(self.checks) >= self._most:
            self._stopping.set()
        return StepRefused("the norm of the gradient is nan") if self._poison & {*ordinals} else None


@settings(max_examples=seeds(60), deadline=None)
@given(st.sets(st.integers(0, SIZE - 1), max_size=SIZE // 2))
def test_exactly_the_groups_that_fail_alone_are_dropped(poison: set[int]) -> None:
    world = World([*poison])
    assert {*world.trials.failed(range(SIZE), world.check)} == poison
    # Halves down to each of them, and then each is tried alone, with another group in between.
    assert len(world.checks) <= 2 + len(poison) * (2 * SIZE.bit_length() + 2 * CFG.rollout.reward_attempts)
    assert world.checks[0] != tuple(range(SIZE)), "the whole step has been tried by then"


def test_group_is_blamed_only_after_others_were_computed_with_between_its_failures() -> None:
    world = World([3])
    world.trials.failed(range(4), world.check)
    alone = [i for i, ordinals in enumerate(world.checks) if ordinals == (3,)]
    assert len(alone) == CFG.rollout.reward_attempts
    assert all(any(3 not in other for other in world.checks[a:b]) for a, b in zip(alone, alone[1:], strict=False))


def test_trainer_that_computes_with_no_group_has_none_dropped() -> None:
    world = World(range(4), most=200)
    with pytest.raises(Fenced):
        world.trials.failed(range(4), world.check)
    assert world.shown[-1][0] == "trainer" and "nan" in world.shown[-1][1]


def test_more_groups_than_the_share_allows_are_not_dropped() -> None:
    world = World(range(SIZE - 1), most=2000)
    with pytest.raises(Fenced):
        world.trials.failed(range(SIZE), world.check)
    assert any("rollout.max_failed_rewards" in what for _, what in world.shown)


def test_loss_of_the_user_that_fails_for_every_group_waits_for_the_user() -> None:
    world = World([], most=100)

    def check(ordinals: Sequence[int]) -> ElasticRLError | None:
        world.check(ordinals)
        return PluginFailed("the token_loss of algorithm.name=mine:loss failed")

    with pytest.raises(Fenced):
        world.trials.failed(range(4), check)
    assert world.shown[-1][0] == "plugin" and "mine:loss" in world.shown[-1][1]
