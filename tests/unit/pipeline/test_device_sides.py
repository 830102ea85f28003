"""Who has the devices in each effect of each mode, where trainer and engines share them."""

from __future__ import annotations

import contextlib
import threading
import typing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.data.branch import Branch
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group, Prompt
from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.keys import Keys
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.schedule import RunPlan, State, TakenStep, UpdateMade
from elastic_rl.pipeline.training import device_phases
from elastic_rl.pipeline.training.device_phases import SharedDevices
from elastic_rl.pipeline.waits import Waits

TRAINER, ENGINES, RESUMES, EITHER = "trainer", "engines", "the trainer, once it is ready", "either"
SIDES: dict[type, str] = {
    schedule.Resume: RESUMES,
    schedule.SftUpdate: TRAINER,  # Trainers.update
    schedule.SftEvaluate: TRAINER,  # Trainers.forward_logprobs
    schedule.BeginRl: TRAINER,  # Trainers.save
    schedule.Take: ENGINES,  # Rollouts.generate
    schedule.Train: TRAINER,  # Trainers.update, and the forward passes of its batch
    schedule.Evaluate: ENGINES,  # Rollouts.await_version, Sampler.evaluation_groups
    schedule.Save: TRAINER,  # Trainers.save
    schedule.SampleGroups: EITHER,  # no trainer shares the devices
    schedule.Write: EITHER,
    schedule.Complete: EITHER,
    schedule.Finish: EITHER,
    schedule.Stop: EITHER,
}


class Devices(SharedDevices):
    """Device phases that only note which side has the devices."""

    def __init__(self) -> None:
        self.side, self.version = EITHER, 0

    def begin_resume(self) -> None:
        self.side = RESUMES

    def to_trainer(self, timer: StepTimer) -> None:
        self.side = TRAINER

    def to_engines(self, version: int, timer: StepTimer) -> None:
        self.side, self.version = ENGINES, version


def _outcome(effect: schedule.Effect) -> Any:
    """What a run is told that nothing disturbs."""
    match effect:
        case schedule.SftUpdate():
            return UpdateMade({}, 0.0)
        case schedule.Take():
            return TakenStep(StepGroups.from_groups([]), Consumption())
        case schedule.Train():
            return 7
        case schedule.SampleGroups(ordinals=ordinals):
            return [(Group(ordinal, Prompt((1,)), ()), "") for ordinal in ordinals]
        case schedule.Write():
            return {}
    return 0.1


def _sides(steps: schedule.Effects, *states: State) -> list[tuple[str, str, int]]:
    """Each effect, the side that has the devices, and the version of the engines. ``states``: of each ``Resume``."""
    found, outcome, left = list[tuple[str, str, int]](), None, iter(states)
    with contextlib.suppress(StopIteration):
        while True:
            effect = steps.send(outcome)
            devices = Devices()
            devices.before(effect)
            assert devices.side == SIDES[type(effect)], effect
            found.append((type(effect).__name__, devices.side, devices.version))
            outcome = next(left) if isinstance(effect, schedule.Resume) else _outcome(effect)
    return found


def test_every_effect_says_who_has_the_devices() -> None:
    assert set(typing.get_args(schedule.Effect)) == set(SIDES)


PLAN = replace(RunPlan.of(config.parse({"placement": "colocated", "train": {"steps": 1}})), sft_max_steps=1)
FLOW = SimpleNamespace(resume=lambda *_: None, trained=lambda *_: None)


def test_engines_of_a_colocated_job_generate_between_updates_of_the_trainer() -> None:
    supervised, begun = State("sft", 0, 0), State("rl", 0, 5, branch=Branch(0, 6))
    assert _sides(schedule.run_rl(PLAN, FLOW), supervised, begun) == [
        ("Resume", RESUMES, 0), ("SftUpdate", TRAINER, 0), ("SftEvaluate", TRAINER, 0), ("BeginRl", TRAINER, 0),
        ("Resume", RESUMES, 0), ("Evaluate", ENGINES, 6), ("Take", ENGINES, 6), ("Train", TRAINER, 0),
        ("Evaluate", ENGINES, 7), ("Save", TRAINER, 0), ("Finish", EITHER, 0)]


def test_supervised_job_leaves_the_devices_to_the_trainer() -> None:
    assert _sides(schedule.run_sft(replace(PLAN, mode="sft")), State("sft", 0, 0)) == [
        ("Resume", RESUMES, 0), ("SftUpdate", TRAINER, 0), ("SftEvaluate", TRAINER, 0), ("Save", TRAINER, 0),
        ("Finish", EITHER, 0)]


class Claims:
    """``log`` gets the phases that begin."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def begin_phase(self, side: Side, *_: Any) -> bool:
        self._log.append(f"phase {side.value}")
        return True


def test_trainer_keeps_its_memory_until_its_version_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the trainer does not repeat a publish that fails, and engines would wait for its version for ever."""
    log, heads = list[str](), [None, 6, 7]

    def head(*_: Any) -> Any:
        number = heads.pop(0)
        log.append(f"head {number}")
        return None if number is None else SimpleNamespace(number=number)

    monkeypatch.setattr(device_phases.reads, "head", head)
    monkeypatch.setattr(device_phases, "_LOOK_S", 0.0)
    shown = list[str]()
    waits = Waits(lambda stage, kind, what: shown.append(kind), threading.Event())
    trainer = SimpleNamespace(offload=lambda: log.append("offload"), onload=lambda: log.append("onload"))
    devices = SharedDevices(None, Keys("job"), None, waits, trainer, epoch=1, term=1)  # type: ignore[arg-type]
    devices._claims = Claims(log)  # type: ignore[assignment]
    devices.to_engines(7, StepTimer())
    assert log == ["head None", "head 6", "head 7", "offload", f"phase {Side.ENGINES.value}"] and "dcs" in shown


@pytest.mark.parametrize("mode", ["eval", "rejection_sampling"])
def test_job_that_trains_nothing_has_no_device_phases(mode: str) -> None:
    plan = replace(PLAN, mode=mode, groups=1, groups_per_step=1)
    assert _sides(schedule.run_sampled(plan), State("rl", 0, 3)) == [
        ("Resume", RESUMES, 0), ("SampleGroups", EITHER, 0), ("Write", EITHER, 0), ("Complete", EITHER, 0),
        ("Finish", EITHER, 0)]
