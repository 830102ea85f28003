"""The schedule with groups that are generated beside the steps, in a world that crashes
(``chaos_tests/sim/flow.py``), and the flow by itself."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.budget import seeds

from chaos_tests.sim.flow import ASYNC_LIMITS, AsyncWorld
from chaos_tests.sim.pipeline import World
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.samples import FAILED, TRAINER_REFUSED
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.flow.group_flow import (
    ChosenPart,
    ChosenStep,
    FlowLimits,
    GroupFlow,
)
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit

SEEDS = seeds(40)


def _run(world: AsyncWorld, seed: int) -> AsyncWorld:
    try:
        world.run()
    except RuleViolated as e:
        raise AssertionError(f"seed {seed}: {e}") from e
    return world


@pytest.mark.parametrize(("staleness", "part"), [(0, None), (1, None), (3, None), (0, 1), (1, 2)])
def test_every_group_is_trained_on_once_within_the_staleness_whatever_crashes(staleness: int, part: int | None) -> None:
    groups = actors = stale = lost = at_ranks = overlaps = parts = steps = 0
    for seed in range(SEEDS):
        world = _run(AsyncWorld(seed, replace(ASYNC_LIMITS, max_staleness=staleness, groups_per_part=part)), seed)
        parts, steps = parts + world.parts, steps + sum(e.phase == "rl" for e in world.executed)
        groups, actors = groups + world.groups - 1, actors + world.term - 1
        stale, lost = stale + sum(c.stale for c in world.flow_counts), lost + sum(c.lost for c in world.flow_counts)
        overlaps, at_ranks = overlaps + world.overlaps, at_ranks + world.lost_at_ranks
    assert groups > SEEDS and actors > SEEDS, "the runs were disturbed"
    assert lost > SEEDS // 10 and stale > 0, "groups were generated again"
    assert at_ranks == 0 if part else at_ranks or staleness, "some of them when the trainer read them"
    assert bool(overlaps) == bool(staleness or part), "generation goes on during a step where the settings allow it"
    assert parts > 1.5 * steps if part else parts >= steps


@pytest.mark.parametrize("part", [None, 1])
@pytest.mark.parametrize("waits", [True, False])
def test_rollout_slower_than_the_staleness_allows_is_waited_for(waits: bool, part: int | None,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    if not waits:
        monkeypatch.setattr(GroupFlow, "_must_wait", lambda self: False)
    most = 0
    for seed in range(20):
        world = AsyncWorld(seed, replace(ASYNC_LIMITS, max_staleness=1, steps=20, groups_per_part=part),
                           loses=False, turns=lambda ordinal: 150 if ordinal == 0 else 0)
        world.faults_left = 0
        _run(world, seed)
        most = max(most, sum(c.stale for c in world.flow_counts))
    assert (most <= 1) is waits


@pytest.mark.parametrize("at_once", [1, None])
def test_undisturbed_run_of_staleness_0_trains_what_a_synchronous_one_trains(at_once: int | None) -> None:
    for seed in range(SEEDS):
        sync, flow = World(seed), AsyncWorld(
            seed, replace(ASYNC_LIMITS, max_staleness=0, max_in_flight=at_once), loses=False)
        sync.faults_left = flow.faults_left = 0
        sync.run()
        _run(flow, seed)
        assert [(e.step, e.trained, sorted(e.dropped)) for e in flow.executed if e.phase == "rl"] == [
            (e.step, e.trained, sorted(e.dropped)) for e in sync.executed if e.phase == "rl"]
        if at_once == 1:
            assert flow.generated == sorted(flow.generated), "in the order of a synchronous run"


LIMITS = FlowLimits(steps=10, groups_per_step=2, max_staleness=1, max_dropped_groups=4)


def _flow(step: int = 0, version: int = 1, **limits: Any) -> GroupFlow:
    flow = GroupFlow(replace(LIMITS, **limits))
    flow.resume(step, version, IntervalSet(), Branch())
    return flow


def _queue(flow: GroupFlow, *ordinals: int, version: int) -> None:
    for ordinal in ordinals:
        assert flow.finished(ordinal, (version,), "") and flow.arrived(ordinal)


def _step(flow: GroupFlow) -> ChosenStep | None:
    part = flow.choose()
    return None if part is None else part.step


def test_later_groups_ask_for_versions_that_will_be_out_then() -> None:
    flow = _flow(version=5, max_staleness=2)
    grants = [flow.lease() for _ in range(4)]
    assert [(g.ordinals, g.min_version) for g in grants[:3] if g] == [((0, 1), 3), ((2, 3), 4), ((4, 5), 5)]
    assert grants[3] is None


def test_no_more_groups_are_leased_than_the_last_steps_take() -> None:
    flow = _flow(step=9)
    assert flow.lease() is not None and flow.lease() is None
    assert flow.generation_cap is GenerationCap.NONE, "nothing is left to ask for"


def test_flow_says_which_limit_leaves_no_room() -> None:
    flow = _flow(max_in_flight=3)
    assert flow.generation_cap is GenerationCap.NONE
    while flow.lease() is not None:
        pass
    assert flow.generation_cap is GenerationCap.GROUPS_IN_FLIGHT
    _queue(flow, 0, version=1)
    assert flow.lease() is not None and flow.generation_cap is GenerationCap.STALENESS


def test_group_that_was_too_stale_is_leased_again_and_waited_for() -> None:
    flow = _flow(version=5)
    assert flow.lease() and flow.lease()
    _queue(flow, 1, 2, 3, version=5)
    first = _step(flow)
    assert first is not None and first.ordinals == (1, 2) and first.staleness.most == 0
    assert flow.trained(first.consumption, 6) == [1, 2]
    _queue(flow, 0, version=4)
    assert flow.take_stale() == [0] and flow.counts.stale == 1
    grants = [grant for grant in iter(flow.lease, None) if grant is not None]
    assert grants[0].ordinals == (0,) and grants[0].min_version == 5
    _queue(flow, *(o for g in grants[1:] for o in g.ordinals), version=6)
    assert flow.choose() is None, "another step would make version 5 too stale"
    assert flow.finished(0, (5,), "") and flow.choose() is None, "its data is on its way into the queue"
    assert flow.arrived(0)
    chosen = _step(flow)
    assert chosen is not None and chosen.ordinals == (0, 3)
    assert chosen.staleness.least == chosen.staleness.most == 1


def test_open_groups_are_all_that_were_begun_and_are_not_consumed() -> None:
    """Also one that was dropped since the last update, and one that is to be generated again: what a run that ends
    early leaves behind."""
    flow = _flow(max_staleness=2, groups_per_step=2)
    while flow.lease() is not None:
        pass
    _queue(flow, 1, 2, 3, version=1)
    assert not flow.finished(0, (1,), "uniform") and flow.lost([3]) == [3]
    chosen = _step(flow)
    assert chosen is not None and chosen.ordinals == (1, 2)
    assert not flow.finished(4, (1,), "uniform")
    flow.trained(chosen.consumption, 2)
    assert list(flow.open) == [3, 4, 5]


def test_parts_are_chosen_as_they_finish_and_the_last_completes_the_step() -> None:
    flow = _flow(groups_per_step=5, groups_per_part=2)
    while flow.lease() is not None:
        pass
    _queue(flow, 3, version=1)
    assert flow.choose() is None
    _queue(flow, 0, version=1)
    assert flow.choose() == ChosenPart((0, 3), True, None) and flow.choose() is None
    _queue(flow, 4, 2, 1, 5, version=1)
    assert flow.choose() == ChosenPart((2, 4), False, None)
    last = flow.choose()
    assert last is not None and last.ordinals == (1,) and not last.first, "what is left is less than a part"
    assert last.step is not None and last.step.ordinals == (0, 1, 2, 3, 4)
    assert flow.choose() is None and flow.depth.queued == 1
    flow.choose_again()
    assert flow.choose() == ChosenPart((0, 3), True, None), "in the order in which they finished"


def test_stale_group_cannot_be_chosen() -> None:
    flow = _flow(version=5)
    flow.lease()
    _queue(flow, 0, 1, version=3)
    with pytest.raises(IllegalTransition, match="too stale"):
        flow.choose()


def test_only_a_step_that_was_not_made_is_chosen_again() -> None:
    flow = _flow()
    flow.lease()
    _queue(flow, 0, 1, version=1)
    assert flow.choose() is not None
    assert flow.resume(0, 1, IntervalSet(), Branch()) == []
    chosen = _step(flow)
    assert chosen is not None and chosen.ordinals == (0, 1)
    assert flow.resume(1, 2, IntervalSet.from_values([0, 1]), Branch()) == [0, 1] and flow.choose() is None


@pytest.mark.parametrize("finished", [True, False])
def test_run_leaves_no_group_out_where_the_step_that_dropped_it_was_undone(finished: bool) -> None:
    """Later groups are open already, as many as the last steps take: the highest one makes room, once it has finished.
    """
    flow = _flow(step=8)
    assert flow.lease() and flow.lease() and not flow.finished(0, (1,), "uniform")
    _queue(flow, 1, 2, 3, version=1)
    assert (grant := flow.lease()) is not None and grant.ordinals == (4,)
    if finished:
        _queue(flow, 4, version=1)
    assert (first := _step(flow)) is not None and first.ordinals == (1, 2)
    flow.trained(first.consumption, 2)
    assert flow.resume(8, 2, IntervalSet(), Branch()) == [4] * finished, "nobody needs its data"
    assert finished or not flow.finished(4, (2,), "")
    assert sorted(o for grant in iter(flow.lease, None) if grant is not None for o in grant.ordinals) == [0, 1, 2]
    _queue(flow, 0, 1, 2, version=2)
    for ordinals in ((0, 3), (1, 2)):
        assert (step := _step(flow)) is not None and step.ordinals == ordinals
        flow.trained(step.consumption, 3)


@pytest.mark.parametrize(("steps", "size", "staleness"), [(3, 1, 3), (3, 2, 3), (5, 2, 1)])
def test_run_consumes_its_lowest_groups_whatever_is_dropped_refused_and_undone(
        steps: int, size: int, staleness: int) -> None:
    for seed in range(400):
        consumed = _random_run(Random(seed), steps, size, staleness)
        assert not consumed.complement(consumed.stop), f"seed {seed}: a group was left out"


def _random_run(choose: Random, steps: int, size: int, staleness: int) -> IntervalSet:
    """The groups that a run has consumed whose updates are undone now and then."""
    flow = _flow(steps=steps, groups_per_step=size, max_staleness=staleness, drop_limit=DropLimit(1.0, 99))
    states, version, leased, generated = [IntervalSet()], 1, list[int](), list[int]()
    undone, refused = 3, choose.randint(0, 4)
    while len(states) <= steps:
        match choose.choice(["lease", "finish", "finish", "arrive", "arrive", "undo", "refuse", "train"]):
            case "lease" if (grant := flow.lease()) is not None:
                leased += grant.ordinals
            case "finish" if leased:
                ordinal = leased.pop(choose.randrange(len(leased)))
                if flow.finished(ordinal, (version,), choose.choice(["", "uniform"])):
                    generated.append(ordinal)
            case "arrive" if generated:
                flow.arrived(generated.pop(choose.randrange(len(generated))))
            case "undo" if undone and len(states) > 1:
                undone, version = undone - 1, version + 1
                del states[choose.randrange(1, len(states)):]
                flow.resume(len(states) - 1, version, states[-1], Branch())
            case "refuse" if refused:
                refused -= 1
                flow.refused([version])
            case "train":
                flow.take_stale()
                if (part := flow.choose()) is not None and part.step is not None:
                    version += 1
                    states.append(states[-1] | part.step.consumption.groups)
                    flow.trained(part.step.consumption, version)
    return states[-1]


def test_group_that_the_trainer_has_consumed_meanwhile_is_ignored_when_it_finishes() -> None:
    flow = _flow()
    flow.lease()
    flow.resume(1, 2, IntervalSet.from_values([0, 1]), Branch())
    assert not flow.finished(0, (1,), "")


def test_groups_of_weights_that_the_trainer_went_back_from_are_generated_again() -> None:
    """The trainer goes back to the state of version 10, which it publishes as 21; others of that branch stay."""
    flow = _flow(step=19, version=20, max_staleness=12, steps=100)
    grants = [flow.lease() for _ in range(4)]
    assert [g.ordinals for g in grants if g] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    for ordinal, versions in ((0, (9, 10)), (1, (10,)), (2, (10, 11)), (3, (20,))):
        assert flow.finished(ordinal, versions, "") and flow.arrived(ordinal)
    assert flow.finished(4, (15,), ""), "it is on its way into the queue"
    branch = Branch(9, 10).restored(10).published(21)
    assert flow.resume(10, 21, IntervalSet(), branch) == [] and flow.arrived(4)
    _queue(flow, 5, version=20)
    assert flow.finished(6, (10, 21), "") and flow.arrived(6)
    assert flow.take_stale() == [2, 3, 4, 5] and flow.counts.stale == 4 and not flow.has_stale
    again = flow.lease()
    assert again is not None and again.ordinals[0] == 2 and again.min_version == 21, "of no engine that serves 20 still"
    assert flow.resume(11, 24, IntervalSet(), branch.restored(22).published(24)) == []
    _queue(flow, 2, version=20)
    assert flow.take_stale() == [0, 1, 6, 2], "three are too old, and both branches are remembered"


def test_groups_that_the_trainer_refuses_twice_are_dropped_within_the_limit() -> None:
    """The trainer alone knows that version 9 was never published."""
    flow = _flow(version=5, groups_per_step=4, max_staleness=0, drop_limit=DropLimit(0.5, 4))
    assert flow.lease() is not None
    _queue(flow, 0, 1, 2, version=9)
    _queue(flow, 3, version=5)
    first = _step(flow)
    assert first is not None and flow.refused([9]) == [0, 1, 2] and flow.counts.stale == 3
    again = flow.lease()
    assert again is not None and again.ordinals == (0, 1, 2), "a wrong version may have been said once"
    _queue(flow, 0, 1, 2, version=9)
    assert _step(flow) is not None and flow.refused([9]) == [0, 1, 2]
    others = flow.lease()
    assert others is not None and others.ordinals == (2, 4, 5), "no more than half of a step's groups are dropped"
    _queue(flow, *others.ordinals, version=5)
    chosen = _step(flow)
    assert chosen is not None and chosen.ordinals == (2, 3, 4, 5)
    assert chosen.consumption.dropped == {TRAINER_REFUSED: IntervalSet.from_values([0, 1])}


def test_refused_groups_stay_dropped_where_nothing_else_outlives_the_step() -> None:
    """A synchronous run goes on from the committed state after each refusal."""
    flow = _flow(beside_steps=False, max_staleness=0)
    for _ in range(2):
        assert flow.lease() is not None
        _queue(flow, 0, version=9)
        _queue(flow, 1, version=1)
        assert _step(flow) is not None and flow.refused([9]) == [0]
        flow.resume(0, 1, IntervalSet(), Branch())
    grant = flow.lease()
    assert grant is not None and grant.ordinals == (1, 2)
    _queue(flow, 1, 2, version=1)
    chosen = _step(flow)
    assert chosen is not None and chosen.consumption.dropped == {TRAINER_REFUSED: IntervalSet.from_values([0])}
    flow.trained(chosen.consumption, 2)
    flow.resume(1, 2, IntervalSet.from_values([0, 1, 2]), Branch())
    assert list(flow.open) == [], "it is on the record"
    assert flow.lease() is not None
    _queue(flow, 3, 4, version=2)
    chosen = _step(flow)
    assert chosen is not None and chosen.consumption.dropped == {}, "and not twice"


def test_each_flow_has_a_limit_of_refused_groups_for_itself() -> None:
    limits = replace(LIMITS, max_staleness=0, beside_steps=False, drop_limit=DropLimit(0.5, 2))
    for _ in range(2):  # as of actors that follow one another
        flow = GroupFlow(limits)
        flow.resume(0, 1, IntervalSet(), Branch())
        for _ in range(2):
            assert flow.lease() is not None
            _queue(flow, 0, version=9)
            _queue(flow, 1, version=1)
            assert _step(flow) is not None and flow.refused([9]) == [0]
            flow.resume(0, 1, IntervalSet(), Branch())
        grant = flow.lease()
        assert grant is not None and grant.ordinals == (1, 2), "group 0 is dropped"


def test_groups_that_were_not_generated_after_all_are_leased_again() -> None:
    flow = _flow(max_staleness=0, beside_steps=False)
    grant = flow.lease()
    assert grant is not None and grant.ordinals == (0, 1) and flow.lease() is None
    _queue(flow, 0, version=1)
    flow.give_back(grant.ordinals)
    again = flow.lease()
    assert again is not None and again.ordinals == (1,)
    _queue(flow, 1, version=1)
    chosen = _step(flow)
    assert chosen is not None and chosen.ordinals == (0, 1)


@pytest.mark.parametrize("reason", sorted(FAILED))
def test_failed_groups_are_dropped_beyond_the_limit_of_filters_and_replaced(reason: str) -> None:
    flow = _flow(beside_steps=False)
    failing = LIMITS.max_dropped_groups + 2
    while (chosen := _step(flow)) is None:
        grant = flow.lease()
        assert grant is not None
        for ordinal in grant.ordinals:
            if flow.finished(ordinal, (1,), reason if ordinal < failing else ""):
                flow.arrived(ordinal)
    assert chosen.ordinals == (failing, failing + 1)
    assert {reason: len(groups) for reason, groups in chosen.consumption.dropped.items()} == {reason: failing}


def test_failed_groups_leave_the_limit_of_filters_as_it_is() -> None:
    flow = _flow(groups_per_step=8)
    assert flow.lease() is not None
    for ordinal in range(LIMITS.max_dropped_groups):
        assert not flow.finished(ordinal, (1,), "reward failed")
    assert not flow.finished(LIMITS.max_dropped_groups, (1,), "uniform"), "filtered, and not kept beyond the limit"


def test_lost_group_of_a_chosen_step_is_generated_again_alone() -> None:
    flow = _flow()
    flow.lease()
    _queue(flow, 0, 1, version=1)
    assert flow.choose() is not None
    assert flow.not_loaded([1]) == [1] and flow.counts.lost == 1
    grant = flow.lease()
    assert grant is not None and grant.ordinals == (1,)


@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 8) | st.none(), st.randoms())
def test_open_groups_are_bounded_by_the_staleness_and_the_setting(
        staleness: int, size: int, at_once: int | None, random: Any) -> None:
    flow = _flow(max_staleness=staleness, groups_per_step=size, max_in_flight=at_once, steps=100)
    version, leased = 1, []
    for _ in range(60):
        generation_cap = flow.generation_cap
        grant = flow.lease()
        assert bool(generation_cap) is (grant is None and staleness > 0)
        assert at_once is not None or generation_cap in (GenerationCap.NONE, GenerationCap.STALENESS)
        if grant is not None:
            leased += grant.ordinals
            assert grant.min_version <= version
        depth = flow.depth
        assert depth.leased + depth.queued + depth.training <= (staleness + 1) * size
        assert at_once is None or depth.leased <= at_once
        if leased and random.random() < 0.6:
            ordinal = leased.pop(random.randrange(len(leased)))
            if flow.finished(ordinal, (version,), random.choice(["", "", "uniform"])):
                flow.arrived(ordinal)
        flow.take_stale()
        if (chosen := _step(flow)) is not None:
            assert len(chosen.ordinals) == size and chosen.staleness.most <= staleness
            version += 1
            flow.trained(chosen.consumption, version)
