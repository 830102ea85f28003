"""Groups that the loop itself generates when a step takes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import GroupsLost, StaleSamples, TrainerFailed
from elastic_rl.pipeline.flow.group_flow import FlowLimits
from elastic_rl.pipeline.flow.inline import InlineGeneration
from elastic_rl.pipeline.flow.shared_flow import Taken
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.stages.rl import RlStages
from elastic_rl.pipeline.waits import Waits

LIMITS = FlowLimits(steps=9, groups_per_step=3, max_staleness=0, max_dropped_groups=2, beside_steps=False)


class Rollouts:
    """Groups of the version that is asked for. ``drops``: ordinals that a filter drops; ``fails``: whether the next
    attempt does; ``log``: what was done, in this order."""

    def __init__(self, drops: set[int]) -> None:
        self.waits = Waits(lambda *_: None, threading.Event())
        self.prompts = SimpleNamespace(training=lambda ordinals: [(o, Prompt((1,))) for o in ordinals])
        self.sampler = SimpleNamespace(training_groups=self._groups)
        self.asked: list[tuple[int, ...]] = []
        self.drops, self.fails, self.rewarded = drops, False, 0
        self.log: list[str] = []

    def _groups(self, prompts: list[tuple[int, Prompt]], min_version: int, on_done: Callable[[int], None]
                ) -> list[tuple[Group, str]]:
        for ordinal, _ in prompts[:self.rewarded]:
            on_done(ordinal)
        self.asked.append(tuple(o for o, _ in prompts))
        if self.fails:
            self.fails = False
            raise TrainerFailed("the weights cannot be published again")
        sample = Sample((Segment((2,), (-0.1,), version=min_version),))
        return [(Group(o, prompt, (sample,)), "odd" if o in self.drops else "") for o, prompt in prompts]

    def generate(self, step: int, min_version: int, timer: StepTimer, sample: Callable[[], Any]) -> Any:
        self.log.append("generate")
        return sample()


def _generation(rollouts: Rollouts, leased: list[IntervalSet]) -> InlineGeneration:
    def lease(groups: IntervalSet) -> None:
        rollouts.log.append("lease")
        leased.append(groups)

    generation = InlineGeneration(LIMITS, rollouts, lease)  # type: ignore[arg-type]
    generation.flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    return generation


def _take(generation: InlineGeneration) -> Taken:
    return generation.take(1, StepTimer(), lambda groups, before: before)


def test_dropped_groups_are_replaced_up_to_the_limit_by_ordinal() -> None:
    rollouts, leased = Rollouts({0, 2, 3}), list[IntervalSet]()
    taken = _take(_generation(rollouts, leased))
    assert rollouts.asked == [(0, 1, 2), (3, 4)]
    assert taken.chosen.ordinals == (1, 3, 4), "a third one is not dropped"
    assert taken.chosen.consumption.dropped == {"odd": IntervalSet.from_values([0, 2])} and taken.metrics == {}
    assert [list(groups) for groups in leased] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_rewarded_groups_are_progress_before_the_others_of_their_step_are_and_once() -> None:
    rollouts = Rollouts(set())
    generation = _generation(rollouts, [])
    for rewarded, finished in ((2, 2), (1, 2), (3, 3)):
        rollouts.fails, rollouts.rewarded = True, rewarded
        with pytest.raises(TrainerFailed):
            _take(generation)
        assert generation.flow.finished_groups == finished, "one that is generated again is the same one"
        generation.flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    taken = _take(generation)
    generation.flow.trained(taken.chosen.consumption, 2)
    assert generation.flow.finished_groups == 0


def test_groups_are_dropped_by_ordinal_until_the_limit() -> None:
    taken = _take(_generation(Rollouts({0, 1, 2}), []))
    assert taken.chosen.ordinals == (2, 3, 4)
    assert taken.chosen.consumption.dropped == {"odd": IntervalSet.from_values([0, 1])}


def test_groups_are_generated_once_their_lease_is_written() -> None:
    rollouts = Rollouts(set())
    _take(_generation(rollouts, []))
    assert rollouts.log == ["lease", "generate"]


def test_repeated_step_takes_the_same_groups() -> None:
    rollouts = Rollouts(set())
    generation = _generation(rollouts, [])
    rollouts.fails = True
    with pytest.raises(TrainerFailed):
        _take(generation)
    assert _take(generation).chosen.ordinals == (0, 1, 2) and rollouts.asked == [(0, 1, 2)] * 2


def test_nothing_that_was_generated_outlives_a_return_to_the_committed_state() -> None:
    rollouts = Rollouts({0})
    generation = _generation(rollouts, [])
    with contextlib.closing(generation):
        first = _take(generation)
        generation.flow.resume(0, 2, IntervalSet(), Branch(0, 2))
        rollouts.drops = set()
        again = _take(generation)
    assert (first.chosen.ordinals, again.chosen.ordinals) == ((1, 2, 3), (0, 1, 2))
    assert not again.chosen.consumption.dropped


def test_stages_have_groups_generated_again_whose_versions_the_trainer_refuses() -> None:
    rollouts = Rollouts(set())
    generation = _generation(rollouts, [])
    stages = object.__new__(RlStages)  # without the parts of a run: it has but the generation
    stages._generation = generation
    versions = _take(generation).groups.versions
    for error in (TrainerFailed("a rank was lost"), GroupsLost("the queue is another", [0])):
        stages.lost(error)
        assert generation.flow.lease(0.0) is None, "they are chosen, or generated again when the flow resumes"
    stages.lost(StaleSamples("version 1 was never published", versions))
    grant = generation.flow.lease(0.0)
    assert grant is not None and grant.ordinals == (0, 1, 2)
