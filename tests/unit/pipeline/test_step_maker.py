"""Steps whose gradients are computed in parts, and the time of a step that is tried again."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    Fenced,
    GroupsFailed,
    PluginFailed,
    RoleUnavailable,
    StepRefused,
    StepsHeld,
    TrainerFailed,
)
from elastic_rl.pipeline import pipeline, schedule
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import RunPlan, State, TakenStep
from elastic_rl.pipeline.training import group_trials, step_maker
from elastic_rl.pipeline.training.group_trials import GroupTrials
from elastic_rl.pipeline.training.step_maker import StepMaker
from elastic_rl.pipeline.waits import Waits


@settings(max_examples=seeds(40))
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(-10, 10)), min_size=1, max_size=6))
def test_accumulated_metric_is_the_mean_over_all_tokens(parts: list[tuple[int, float]]) -> None:
    total = Accumulated()
    for number, (tokens, mean) in enumerate(parts):
        total = total.plus({number: [mean]}, {"entropy": mean}, tokens)
    tokens = sum(t for t, _ in parts)
    assert (total.parts, total.tokens) == (len(parts), tokens) and list(total.advantages) == list(range(len(parts)))
    assert total.metrics["entropy"] == pytest.approx(sum(t * mean for t, mean in parts) / tokens, abs=1e-6)


CFG = config.parse({"train": {"prompts_per_step": 8}, "rollout": {"groups_per_request": 8}})


class Trainer:
    """``poison``: groups that it cannot compute with; samples have their ordinals as tokens. ``ahead``: refusals
    to come that no group is to blame for."""

    def __init__(self, poison: Collection[int] = (), ahead: int = 0) -> None:
        self.log: list[tuple[str, int]] = []
        self.versions: list[tuple[int, ...]] = []
        """Versions of the samples of each command."""
        self._poison, self._ahead = {*poison}, ahead

    def wait_ready(self) -> Any:
        raise AssertionError("its ranks do not end")

    def _compute(self, batch: Batch, *, checked: bool = False) -> None:
        self._ahead -= not checked
        if self._ahead >= 0 and not checked:
            raise StepRefused("there is no memory")
        if self._poison & {int(tokens[0]) for tokens in batch.by_sample("tokens")}:
            raise StepRefused("the norm of the gradient is nan")

    def check(self, step: int, batch: Batch) -> None:
        self.log.append(("check", batch.samples))
        self._compute(batch, checked=True)

    def accumulate(self, step: int, batch: Any, part: int, *, versions: Sequence[int]) -> None:
        self.log.append(("accumulate", part))
        self.versions.append(tuple(versions))
        self._compute(batch)

    def apply(self, step: int, parts: int, *, versions: Sequence[int], **_: Any) -> dict[str, Any]:
        self.log.append(("apply", parts))
        self.versions.append(tuple(versions))
        return {"loss": 1.0}

    def update(self, phase: str, step: int, batch: Any, *, versions: Sequence[int] = (), **_: Any) -> dict[str, Any]:
        self.log.append(("update", 0))
        self.versions.append(tuple(versions))
        self._compute(batch)
        return {"loss": 2.0}


class Batches:
    """``poison``: groups with which a pass that makes the batch is refused."""

    def __init__(self, poison: Collection[int] = (), error: type[ElasticRLError] = StepRefused) -> None:
        self._poison, self._error = {*poison}, error
        self.tried: list[bool] = []
        """Whether each batch was made for some groups that are tried."""

    def make(self, groups: StepGroups, step: int, timer: StepTimer, *, tried: bool = False) -> Any:
        self.tried.append(tried)
        if self._poison & {group.ordinal for group in groups.groups}:
            raise self._error("the reference's pass needs too much memory")
        batch = collate([(Prompt((g.ordinal,)), Sample((Segment((2,), (-0.1,), version=1),)))
                         for g in groups.groups for _ in g.samples])
        return SimpleNamespace(batch=batch, metrics={"kl": 0.5},
                               advantages=[float(g.ordinal) for g in groups.groups for _ in g.samples])

    def forget(self) -> None:
        pass


def _groups(*ordinals: int) -> StepGroups:
    """Each is of two versions, by its ordinal."""
    return StepGroups.from_groups([Group(o, Prompt((1,)), tuple(
        Sample((Segment((2,), (-0.1,), version=10 + o + i),)) for i in range(2))) for o in ordinals])


def _maker(trainer: Trainer, *, in_parts: bool, batches: Batches | None = None, waits: Waits | None = None
           ) -> StepMaker:
    waits = waits or Waits(lambda *_: None, threading.Event())
    return StepMaker(batches or Batches(), trainer, waits, GroupTrials(CFG, waits), in_parts=in_parts)


def _made(maker: StepMaker, groups: StepGroups, accumulated: Accumulated) -> tuple[Mapping[str, Any], list[float]]:
    return maker.make(TakenStep(groups, Consumption(), accumulated=accumulated), 1, StepTimer(), {})


def test_step_that_is_taken_again_has_only_the_last_parts() -> None:
    trainer = Trainer()
    maker, timer = _maker(trainer, in_parts=True), StepTimer()
    maker.add(_groups(7), 1, timer, Accumulated())  # of an attempt that failed
    first = maker.add(_groups(3), 1, timer, Accumulated())
    both = maker.add(_groups(1), 1, timer, first)
    metrics, advantages = _made(maker, _groups(1, 3), both)
    assert trainer.log == [("accumulate", 0), ("accumulate", 0), ("accumulate", 1), ("apply", 2)]
    assert metrics == {"kl": 0.5, "loss": 1.0} and advantages == [1.0, 1.0, 3.0, 3.0]
    assert (first.parts, both.parts) == (1, 2), "what was accumulated before does not change"
    assert trainer.versions == [(17, 18), (13, 14), (11, 12), (11, 12, 13, 14)], "those of the samples of each command"


def test_step_without_parts_is_one_update() -> None:
    trainer = Trainer()
    maker = _maker(trainer, in_parts=False)
    accumulated = maker.add(_groups(1), 1, StepTimer(), Accumulated())
    metrics, advantages = _made(maker, _groups(1), accumulated)
    assert trainer.log == [("update", 0)] and trainer.versions == [(11, 12)]
    assert metrics == {"kl": 0.5, "loss": 2.0} and advantages == [1.0, 1.0]


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_trials, step_maker):
        monkeypatch.setattr(module, "RetryBackoff", partial(no_pause, module.RetryBackoff))
    monkeypatch.setattr(group_trials, "_RETRY_S", (0.0, 0.0))


def no_pause(backoff: Any, *_: float) -> Any:
    return backoff(0.0, 0.0)


@pytest.mark.usefixtures("no_pauses")
def test_step_that_is_refused_is_tried_once_more_before_its_groups_are() -> None:
    trainer = Trainer(ahead=1)
    maker = _maker(trainer, in_parts=False)
    metrics, _ = _made(maker, _groups(1, 2), Accumulated())
    assert trainer.log == [("update", 0), ("update", 0)] and metrics["loss"] == 2.0
    _made(maker, _groups(1, 2), Accumulated())  # as after a rewind
    assert [kind for kind, _ in trainer.log] == ["update"] * 3, "it was made then, so they are above suspicion"


@pytest.mark.usefixtures("no_pauses")
def test_group_that_the_trainer_cannot_compute_with_is_found_and_no_other_one_is_blamed() -> None:
    trainer = Trainer(poison=[5])
    batches = Batches()
    with pytest.raises(GroupsFailed, match=r"groups \[5\]: the norm of the gradient is nan") as failed:
        _made(_maker(trainer, in_parts=False, batches=batches), _groups(3, 4, 5, 6), Accumulated())
    assert failed.value.ordinals == (5,)
    assert batches.tried[:2] == [False] * 2 and all(batches.tried[2:]), "a teacher may refuse all of what is tried"
    assert [kind for kind, _ in trainer.log if kind != "check"] == ["update", "update"]


@pytest.mark.usefixtures("no_pauses")
def test_refusal_that_no_group_is_to_blame_for_drops_none() -> None:
    with pytest.raises(GroupsFailed) as failed:
        _made(_maker(Trainer(ahead=2), in_parts=False), _groups(3, 4), Accumulated())
    assert failed.value.ordinals == (), "the same step is to be tried again"


@pytest.mark.usefixtures("no_pauses")
def test_part_that_is_refused_has_its_groups_tried_and_is_not_sent_again() -> None:
    trainer = Trainer(poison=[5])
    maker = _maker(trainer, in_parts=True)
    before = maker.add(_groups(1), 1, StepTimer(), Accumulated())
    with pytest.raises(GroupsFailed) as failed:
        maker.add(_groups(4, 5), 1, StepTimer(), before)
    assert failed.value.ordinals == (5,)
    assert [(kind, part) for kind, part in trainer.log if kind != "check"] == [("accumulate", 0), ("accumulate", 1)]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("error", [StepRefused, PluginFailed])
def test_group_with_which_a_pass_before_the_trainers_is_refused_is_found(error: type[ElasticRLError]) -> None:
    trainer = Trainer()
    with pytest.raises(GroupsFailed, match="the reference's pass") as failed:
        _made(_maker(trainer, in_parts=False, batches=Batches([5], error)), _groups(3, 4, 5, 6), Accumulated())
    assert failed.value.ordinals == (5,) and {kind for kind, _ in trainer.log} == {"check"}


class Unfit(Trainer):
    """It refuses its first steps, and has no use for what it is to check."""

    def check(self, step: int, batch: Batch) -> None:
        super().check(step, batch)
        if len(self.log) > 4:
            raise AssertionError("the same batch is sent again and again")
        raise ConfigError("the batch has no tensor 'values'")


@pytest.mark.usefixtures("no_pauses")
def test_batch_that_does_not_fit_the_trainer_ends_the_trial_and_blames_no_group() -> None:
    """The loop shows it as a wait for a person, and makes the batch anew."""
    trainer, blamed = Unfit(ahead=2), list[object]()
    waits = Waits(lambda *_: None, threading.Event())
    maker = StepMaker(Batches(), trainer, waits, GroupTrials(CFG, waits), in_parts=False,
                      on_failed=lambda *of: blamed.append(of))
    with pytest.raises(ConfigError, match="'values'"):
        _made(maker, _groups(3, 4), Accumulated())
    assert [kind for kind, _ in trainer.log] == ["update", "update", "check"] and not blamed


def test_batch_of_a_step_is_passed_on_before_the_trainer_may_refuse_it() -> None:
    trainer, seen = Trainer(), list[tuple[int, int, list[int]]]()
    waits = Waits(lambda *_: None, threading.Event())

    def note(step: int, batch: Any, versions: Sequence[int]) -> None:
        assert not trainer.log
        seen.append((step, batch.samples, list(versions)))

    maker = StepMaker(Batches(), trainer, waits, GroupTrials(CFG, waits), in_parts=False, on_batch=note)
    _made(maker, _groups(3, 4), Accumulated())
    assert seen == [(1, 4, [13, 14, 15])] and [kind for kind, _ in trainer.log] == ["update"]


class WentBack(Trainer):
    """The trainer goes back to an earlier step when it refuses one."""

    def update(self, phase: str, step: int, batch: Any, **_: Any) -> dict[str, Any]:
        try:
            return super().update(phase, step, batch)
        except StepRefused as e:
            raise StepRefused(e.message, went_back=True) from e


@pytest.mark.usefixtures("no_pauses")
def test_groups_of_a_step_that_the_trainer_went_back_from_are_tried_before_it_is_made_again() -> None:
    trainer = WentBack(poison=[5])
    maker = _maker(trainer, in_parts=False)
    with pytest.raises(Conflict, match="goes back from step 1"):
        _made(maker, _groups(4, 5, 6), Accumulated())
    assert [kind for kind, _ in trainer.log] == ["update"], "it is at another step"
    _made(maker, _groups(1, 2), Accumulated())  # of the steps that are made again
    del trainer.log[:]
    with pytest.raises(GroupsFailed) as failed:
        _made(maker, _groups(4, 5, 6), Accumulated())
    assert failed.value.ordinals == (5,) and {kind for kind, _ in trainer.log} == {"check"}
    del trainer.log[:]
    _made(maker, _groups(4, 6, 7), Accumulated())
    assert [kind for kind, _ in trainer.log] == ["update"], "the others are above suspicion"


@pytest.mark.usefixtures("no_pauses")
def test_groups_that_were_tried_are_not_tried_again() -> None:
    trainer = WentBack(ahead=1)
    maker = _maker(trainer, in_parts=False)
    with pytest.raises(Conflict):
        _made(maker, _groups(4, 5), Accumulated())
    assert _made(maker, _groups(4, 5), Accumulated())[0]["loss"] == 2.0
    assert {kind for kind, _ in trainer.log} == {"update", "check"}
    del trainer.log[:]
    _made(maker, _groups(4, 5), Accumulated())
    assert [kind for kind, _ in trainer.log] == ["update"]


class LostOnApply(Trainer):
    """It refuses the first step of parts, and is lost while its groups are tried."""

    was_lost = False

    def check(self, step: int, batch: Batch) -> None:
        if not self.was_lost:
            self.was_lost = True
            raise TrainerFailed("a rank was lost")
        super().check(step, batch)

    def apply(self, step: int, parts: int, **of: Any) -> dict[str, Any]:
        if not self.was_lost:
            raise StepRefused("the norm of the gradient is inf")
        return super().apply(step, parts, **of)


@pytest.mark.usefixtures("no_pauses")
def test_groups_of_a_refused_step_of_parts_are_tried_before_the_parts_are_computed_again() -> None:
    trainer, timer = LostOnApply(), StepTimer()
    maker = _maker(trainer, in_parts=True)
    both = maker.add(_groups(4), 1, timer, maker.add(_groups(3), 1, timer, Accumulated()))
    with pytest.raises(TrainerFailed):
        _made(maker, _groups(3, 4), both)
    first = maker.add(_groups(3), 1, timer, Accumulated())
    with pytest.raises(GroupsFailed) as failed:
        maker.add(_groups(4), 1, timer, first)
    assert failed.value.ordinals == (), "the trial has discarded the first part"
    both = maker.add(_groups(4), 1, timer, maker.add(_groups(3), 1, timer, Accumulated()))
    del trainer.log[:-1]
    assert _made(maker, _groups(3, 4), both)[0]["loss"] == 1.0
    assert [kind for kind, _ in trainer.log] == ["accumulate", "apply"], "no trial discards them now"


class Held(Trainer):
    """It makes no step until it was asked some times."""

    def update(self, phase: str, step: int, batch: Any, **of: Any) -> dict[str, Any]:
        made = super().update(phase, step, batch, **of)
        if len(self.log) <= 3:
            raise StepsHeld("the loss failed in a second update", hint="restart trainer")
        return made


class Ending(Trainer):
    """Its ranks end with each refusal. They form again at step 0, the last that was committed, and compute nothing
    before their state was read."""

    def __init__(self, poison: Collection[int]) -> None:
        super().__init__(poison)
        self.step, self._is_known = 0, True

    def wait_ready(self) -> Ending:
        self._is_known = True
        return self

    def _compute(self, batch: Batch, *, checked: bool = False) -> None:
        if not self._is_known:
            raise TrainerFailed("the group has re-formed")
        try:
            super()._compute(batch, checked=checked)
        except StepRefused as e:
            self.step, self._is_known = 0, False
            raise StepRefused("rank 1 has too little memory", went_back=True) from e

    def check(self, step: int, batch: Batch) -> None:
        if step != self.step + 1:
            raise Conflict("it does not follow")
        super().check(step, batch)

    def update(self, phase: str, step: int, batch: Any, **options: Any) -> dict[str, Any]:
        made = super().update(phase, step, batch, **options)
        self.step = step
        return made


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("poison", [{3}, {0, 7}, {1, 2, 5}])
def test_groups_that_end_the_ranks_whenever_they_are_computed_with_are_dropped(poison: set[int], at: int) -> None:
    """``at``: the step that they are in. The steps before it are made again, and the flow has forgotten what was
    dropped of a step that was not made, as that of ``schedule: sync`` has."""
    trainer, dropped, resumed = Ending(poison), set[int](), 0
    maker = _maker(trainer, in_parts=False)
    while trainer.wait_ready().step < at:
        step = trainer.step + 1
        groups = [o for o in range(8) if o not in dropped] if step == at else [100 * step]
        consumption = Consumption(IntervalSet.from_values(groups), {
            "train failed": IntervalSet.from_values(dropped)} if step == at and dropped else {})
        try:
            maker.make(TakenStep(_groups(*groups), consumption), step, StepTimer(), {})
        except GroupsFailed as e:
            assert set(e.ordinals) == poison
            dropped |= set(e.ordinals)
        except (Conflict, TrainerFailed):
            dropped.clear()
            resumed += 1
    assert dropped == poison and resumed == 2, "once for the step, and once for the trial of its groups"
    assert not maker._found and not maker._refused


@pytest.mark.usefixtures("no_pauses")
def test_part_that_ends_the_ranks_has_its_groups_tried_before_it_is_computed_again() -> None:
    trainer = Ending([3])
    maker = _maker(trainer, in_parts=True)
    for _ in range(2):
        trainer.wait_ready()
        with pytest.raises(Conflict):
            maker.add(_groups(1, 2, 3), 1, StepTimer(), Accumulated())
    with pytest.raises(GroupsFailed) as failed:
        maker.add(_groups(1, 2, 3), 1, StepTimer(), Accumulated())
    assert failed.value.ordinals == (3,) and [kind for kind, _ in trainer.log].count("accumulate") == 1


@pytest.mark.usefixtures("no_pauses")
def test_steps_that_are_held_for_a_person_are_waited_for_and_blame_no_group() -> None:
    trainer, shown = Held(), list[tuple[str, str]]()
    waits = Waits(lambda stage, kind, what: shown.append((kind, what)), threading.Event())
    assert _made(_maker(trainer, in_parts=False, waits=waits), _groups(4), Accumulated())[0]["loss"] == 2.0
    assert [kind for kind, _ in trainer.log] == ["update"] * 4
    began = next(i for i, (kind, _) in enumerate(shown) if kind)
    assert {*shown[began:]} == {("plugin", "the loss failed in a second update (restart trainer)")}, "in one wait"


class FailingOnce:
    """Stages whose first attempt of each effect fails; the timers that each kind of effect brought."""

    def __init__(self, effects: schedule.Effects) -> None:
        self.effects, self.failed = effects, set[type]()
        self.timers: dict[type, list[StepTimer]] = {}

    def carry_out(self, effect: schedule.Effect) -> Any:
        if (timer := getattr(effect, "timer", None)) is not None:
            self.timers.setdefault(type(effect), []).append(timer)
        if type(effect) not in self.failed:
            self.failed.add(type(effect))
            raise RoleUnavailable("away for a moment")
        match effect:
            case schedule.Resume():
                return State("rl", 0, 1)
            case schedule.Take():
                return TakenStep(_groups(0), Consumption(IntervalSet.from_values([0])))
            case schedule.Train():
                return 2
            case schedule.SampleGroups():
                return [(group, "") for group in [Group(0, Prompt((1,)), ())]]
            case schedule.Write():
                return effect.cursor
        return 0.0

    def lost(self, error: Exception) -> None:
        raise AssertionError(error)


PLAN = replace(RunPlan.of(config.parse({"train": {"steps": 1}})), groups_per_step=1, groups=1)
FLOW = SimpleNamespace(resume=lambda *_: None, trained=lambda *_: None)


@pytest.mark.parametrize(("effects", "of_step"), [
    (schedule.run_rl(PLAN, FLOW), (schedule.Take, schedule.Train)),
    (schedule.run_sampled(replace(PLAN, mode="eval")), (schedule.SampleGroups, schedule.Write))], ids=["rl", "eval"])
def test_step_begins_once_however_often_its_effects_are_tried(effects: schedule.Effects,
                                                             of_step: tuple[type, ...]) -> None:
    stages = FailingOnce(effects)
    pipeline._drive(stages, SimpleNamespace(waits=Waits(lambda *_: None, threading.Event())))  # type: ignore[arg-type]
    timers = [timer for kind in of_step for timer in stages.timers[kind]]
    assert len(timers) == 4 and len({id(timer) for timer in timers}) == 1


class Losing:
    """Stages whose step is lost, and then refused with nothing lost, again and again."""

    def __init__(self, most: int) -> None:
        self.effects, self._left = schedule.run_rl(PLAN, SimpleNamespace(
            resume=lambda *_: None, trained=lambda *_: None, failed=lambda *_: None)), most
        self._is_lost = False

    def carry_out(self, effect: schedule.Effect) -> Any:
        if isinstance(effect, schedule.Resume):
            return State("rl", 0, 1)
        if isinstance(effect, schedule.Take):
            return TakenStep(_groups(0), Consumption(IntervalSet.from_values([0])))
        if isinstance(effect, schedule.Evaluate):
            return 0.0
        if not self._left:
            raise Fenced("enough")
        self._is_lost = not self._is_lost
        if self._is_lost:
            self._left -= 1
            raise TrainerFailed("a rank was lost")
        return schedule.NotTrained(())

    def lost(self, error: Exception) -> None:
        pass


def test_pause_after_losses_grows_until_a_step_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, paused = Waits(lambda *_: None, threading.Event()), list[float]()
    monkeypatch.setattr(waits, "pause", paused.append)
    term = SimpleNamespace(waits=waits, step=0, events=SimpleNamespace(trainer_lost=lambda *_, **__: None))
    with pytest.raises(Fenced):
        pipeline._drive(Losing(6), term)  # type: ignore[arg-type]
    assert paused[0] == 0 and max(paused) > 4, "a step that is tried again is none that was made"
