"""The schedule, the ledger and the writer gate in a world that crashes (``chaos_tests/sim/pipeline.py``): every
prompt group is trained on exactly once or dropped, and each guard is needed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.budget import seeds

from chaos_tests.sim.flow import ASYNC_LIMITS, AsyncWorld
from chaos_tests.sim.pipeline import LIMITS, PLAN, World
from chaos_tests.sim.violation import RuleViolated
from elastic_rl import config
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import ConsumedGroups, Consumption, GroupState, audit
from elastic_rl.data.samples import TRAIN_FAILED, TRAINER_REFUSED
from elastic_rl.errors import Conflict
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.flow import group_flow
from elastic_rl.pipeline.flow.group_flow import GroupFlow
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit
from elastic_rl.trainer.service import commands

SEEDS = seeds(40)
MUTANT_SEEDS = 600


def ran(seed: int, world: World) -> World:
    """The world after its run, in which nothing was violated; the failure of one that was names the seed."""
    try:
        world.run()
    except RuleViolated as e:
        raise AssertionError(f"seed {seed}: {e}") from e
    return world


def test_every_group_is_trained_on_exactly_once_or_dropped_whatever_crashes() -> None:
    waited: set[str] = set()
    groups = actors = 0
    for seed in range(SEEDS):
        world = ran(seed, World(seed))
        waited |= set(world.waits_shown)
        groups += world.groups - 1
        actors += world.term - 1
    assert waited == {"etcd", "engines"}, "the runs waited for everything that went away"
    assert groups > SEEDS and actors > SEEDS / 2, "the runs were disturbed"


def test_supervised_job_ends_with_its_policy_published_and_without_engines_whatever_crashes() -> None:
    groups = 0
    for seed in range(SEEDS):
        world = ran(seed, World(seed, replace(PLAN, mode="sft")))
        assert not any(e.phase == "rl" for e in world.executed)
        groups += world.groups - 1
    assert groups > SEEDS / 2, "the runs were disturbed"


def test_reference_passes_precede_their_step_whatever_crashes() -> None:
    passes = 0
    for seed in range(SEEDS):
        world = ran(seed, World(seed, asks_reference=True))
        passes += world.reference_passes
    assert passes > SEEDS * PLAN.steps, "some were repeated"


def test_no_group_of_abandoned_weights_is_trained_whatever_crashes() -> None:
    """Engines may serve a version that was abandoned, and whose number is within the staleness, for some time."""
    for seed in range(SEEDS):
        ran(seed, World(seed, limits=replace(LIMITS, max_staleness=4)))


def test_groups_that_the_trainer_cannot_compute_with_are_dropped_on_the_record_whatever_crashes() -> None:
    refused = 0
    poison = (0, 4, 5, 11)
    for seed in range(SEEDS):
        world = ran(seed, World(seed, poison=poison))
        rl = [e for e in world.executed if e.phase == "rl"]
        assert not any({*poison} & {*e.trained} for e in rl)
        assert {*poison} <= {g for e in rl for g in e.dropped}
        assert world.committed[-1].progress.consumed.dropped[TRAIN_FAILED] == len(poison) - sum(
            random.Random(g).random() < 0.2 for g in poison), "but for those that a filter drops first"
        refused += world.refused
    assert refused > 3 * SEEDS, "successors and groups that re-formed met them again"


def test_world_finds_a_group_that_was_refused_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(self: GroupFlow, ordinals: Any) -> list[int]:
        self.choose_again()
        for ordinal in ordinals:
            self._ledger._take(ordinal, *GroupState)
            self._ledger._consumed |= IntervalSet.from_values([ordinal])
        return []

    monkeypatch.setattr(GroupFlow, "failed", forgotten)
    with pytest.raises(RuleViolated, match="skipped"):
        for seed in range(MUTANT_SEEDS):
            World(seed, poison=(1, 2)).run()


def test_world_finds_samples_of_weights_that_the_trainer_went_back_from(monkeypatch: pytest.MonkeyPatch) -> None:
    branch_of = GroupFlow.resume
    monkeypatch.setattr(GroupFlow, "resume", lambda self, step, version, consumed, branch: branch_of(
        self, step, version, consumed, Branch()))
    with pytest.raises(RuleViolated, match="should have refused"):
        for seed in range(MUTANT_SEEDS):
            World(seed, limits=replace(LIMITS, max_staleness=4)).run()


LIARS = {"sync": lambda seed, staleness, **options: World(
             seed, limits=replace(LIMITS, max_staleness=staleness, drop_limit=DropLimit(1.0, 64)), lies=0.1, **options),
         "fully_async": lambda seed, staleness, **options: AsyncWorld(
             seed, replace(ASYNC_LIMITS, max_staleness=staleness, drop_limit=DropLimit(1.0, 64)), lies=0.1, **options)}
"""Worlds in which those who generate say versions that are older, of abandoned weights, or do not exist yet."""


def _stopped(seed: int) -> World:
    world = World(seed, stops=3)
    world.faults_left = 0
    return ran(seed, world)


def test_run_that_is_stopped_commits_what_it_has_trained_and_does_nothing_again() -> None:
    """Without other faults the resumed run begins where the stopped one was."""
    stops = 0
    for seed in range(SEEDS):
        world = _stopped(seed)
        known = [(step, at) for step, at in world.stopped_at if step is not None]
        assert all(at.step == step for step, at in known), f"seed {seed}: {known}"
        stops += len(known)
        assert not world.undone, f"seed {seed}: updates were made again"
    assert stops > SEEDS


def test_run_that_is_stopped_again_and_again_ends_as_if_it_was_not_whatever_crashes() -> None:
    stops = 0
    for mode in ("rl", "sft"):
        for seed in range(SEEDS):
            world = ran(seed, World(seed, replace(PLAN, mode=mode), stops=3))
            stops += len(world.stopped_at)
    assert stops > 2 * SEEDS


def _without_rule_in_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupFlow, "_stale", lambda self: [])


def _without_rule_in_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = commands.WriterGate.admit
    monkeypatch.setattr(commands.WriterGate, "admit", lambda self, command, now, rule: admit(self, command, now))


def _refused_groups_are_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_flow, "_REFUSALS", 1 << 30)


def _refused_groups_are_forgotten_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = GroupFlow._forget_refusals
    monkeypatch.setattr(GroupFlow, "_forget_refusals", lambda self, consumed: (
        forget(self, consumed), self._given_up.clear(), self._refusals.clear()))


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("schedule_name", LIARS)
def test_no_wrong_version_that_is_said_exceeds_the_staleness_or_holds_the_run_up(schedule_name: str, staleness: int
                                                                               ) -> None:
    refusals = given_up = 0
    for seed in range(SEEDS):
        world = ran(seed, LIARS[schedule_name](seed, staleness))
        refusals += world.refusals
        given_up += world.trainer.progress.consumed.dropped.get(TRAINER_REFUSED, 0)
    assert refusals > SEEDS and given_up > SEEDS / 2, "of versions that do not exist, which the trainer alone knows"


@pytest.mark.parametrize("schedule_name", LIARS)
def test_trainer_alone_keeps_the_bound_whatever_the_actor_sends(schedule_name: str, monkeypatch: pytest.MonkeyPatch
                                                              ) -> None:
    _without_rule_in_the_flow(monkeypatch)
    for seed in range(SEEDS):
        ran(seed, LIARS[schedule_name](seed, 1, trusts_trainer=True))


@pytest.mark.parametrize(("mutates", "what"), [
    ([_without_rule_in_the_flow], "should have refused"),
    ([_without_rule_in_the_trainer], "which there is not"),
    ([_refused_groups_are_tried_for_ever], "did not finish"),
    ([_without_rule_in_the_flow, _without_rule_in_the_trainer], "while|which there is not|went back from"),
], ids=lambda found: "-".join(m.__name__.strip("_") for m in found) if isinstance(found, list) else "")
@pytest.mark.parametrize("schedule_name", LIARS)
def test_world_finds_what_a_liar_gets_trained_without_a_check(
        mutates: list[Callable[[pytest.MonkeyPatch], None]], what: str, schedule_name: str,
        monkeypatch: pytest.MonkeyPatch) -> None:
    for mutate in mutates:
        mutate(monkeypatch)
    with pytest.raises(RuleViolated, match=what):
        for seed in range(MUTANT_SEEDS):
            LIARS[schedule_name](seed, 4).run()


def test_world_finds_synchronous_run_that_forgets_which_groups_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _refused_groups_are_forgotten_with_the_step(monkeypatch)
    with pytest.raises(RuleViolated, match="did not finish"):
        for seed in range(MUTANT_SEEDS):
            LIARS["sync"](seed, 1).run()


def test_undisturbed_run_consumes_the_groups_in_order() -> None:
    world = World(1)
    world.faults_left = 0
    world.run()
    trained = [g for e in world.executed if e.phase == "rl" for g in (*e.trained, *e.dropped)]
    assert sorted(trained) == list(range(len(trained))) and len(trained) > PLAN.steps * PLAN.groups_per_step
    assert world.groups == 1
    assert world.resumes == 2, "at the start, and once the supervised phase has ended"


def _steps(world: World) -> list[tuple[int, tuple[int, ...], list[int]]]:
    return [(e.step, e.trained, sorted(e.dropped)) for e in world.executed if e.phase == "rl"]


def test_disturbed_run_trains_and_drops_what_an_undisturbed_one_does() -> None:
    """Groups that were dropped for a step which is then made again would else be on the record of an earlier one."""
    limits = replace(LIMITS, max_dropped_groups=1)
    quiet = World(1, limits=limits)
    quiet.faults_left = 0
    quiet.run()
    for seed in range(300):
        world = World(seed, limits=limits)
        world.run()
        assert _steps(world) == _steps(quiet), f"seed {seed}"


@pytest.mark.parametrize(("accuracy", "steps"), [(None, 2), (0.0, 20), (0.09, 20), (0.1, 2), (0.39, 2), (0.7, 2)])
def test_supervised_phase_is_evaluated_often_only_near_its_target(accuracy: float | None, steps: int) -> None:
    plan = schedule.RunPlan.of(config.parse({"sft": {"target_eval_accuracy": 0.4}}))
    assert schedule._sft_interval(plan, accuracy) == steps


def test_supervised_phase_before_rl_has_a_target_and_alone_has_none() -> None:
    alone = schedule.RunPlan.of(config.parse({"mode": "sft"}))
    assert schedule.RunPlan.of(config.parse({})).sft_target == 0.4
    assert {schedule._sft_interval(alone, accuracy) for accuracy in (None, 0.0, 1.0)} == {alone.sft_eval_far}
    world = World(0, replace(PLAN, mode="sft", sft_target=alone.sft_target))
    world.faults_left = 0
    world.run()
    assert world.trainer.progress.step == PLAN.sft_max_steps


def test_update_that_repeats_groups_is_refused_despite_right_term_and_step() -> None:
    """The set of groups is in the state, so that not even a writer with a wrong ledger trains one twice."""
    world = World(3)
    world.faults_left = 0
    world.run()
    consumed = world.trainer.progress.consumed
    again = commands.Update(id="again", epoch=1, term=world.term, group="1", batch="shares", step=PLAN.steps + 1,
                            consumption=commands.Consumption(consumed.groups))
    with pytest.raises(Conflict, match="consumed already"):
        world.trainer.gate.admit(again, world.trainer.progress)


def test_audit_is_not_clean_if_a_group_is_repeated_or_lost() -> None:
    def trained(*steps: range) -> ConsumedGroups:
        state = ConsumedGroups()
        for step in steps:
            state = state.add(Consumption(IntervalSet.from_values(step)))
        return state

    assert audit([(2, trained(range(4), range(4, 8)))], groups_per_step=4).clean
    assert audit([(2, trained(range(4), range(4)))], groups_per_step=4).duplicated == 4
    assert audit([(2, trained(range(4), range(5, 9)))], groups_per_step=4).lost == 1
    assert audit([(2, trained(range(4), range(5, 9)))], groups_per_step=4, leased=IntervalSet(((4, 5),))).clean
    assert audit([(2, trained(range(4)))], groups_per_step=4).lost == 4
    dropped = trained(range(4)).add(Consumption(dropped={"uniform": IntervalSet.from_values([4])}))
    assert audit([(1, dropped)], groups_per_step=4).clean
    assert not audit([(1, dropped.add(Consumption(dropped={"x": IntervalSet.from_values([2])})))],
                     groups_per_step=4).clean


