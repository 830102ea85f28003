"""A run that is stopped ends, also where its commit fails for ever, and records what it has trained."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.errors import Conflict, TrainerFailed
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.events import build
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.pipeline import pipeline, schedule
from elastic_rl.pipeline.records.run_log import JobStatusWriter
from elastic_rl.pipeline.schedule import RunPlan, State, UpdateMade
from elastic_rl.pipeline.waits import Waits

PLAN = RunPlan(mode="sft", steps=0, groups_per_step=4, eval_every_steps=10, stop_eval_accuracy=None, sft_max_steps=100,
               sft_target=2.0, sft_eval_far=10, sft_eval_near=5)


class Trainer:
    """Carries out the effects of a job of supervised steps. ``save``: raises what ends a commit."""

    def __init__(self, stop_at: int, save: Callable[[], None] = lambda: None) -> None:
        self.effects, self.done = schedule.run_sft(PLAN), list[schedule.Effect]()
        self.stop_asked, self._stop_at, self._save, self._committed = threading.Event(), stop_at, save, 0

    def carry_out(self, effect: schedule.Effect) -> Any:
        self.done.append(effect)
        match effect:
            case schedule.Resume():
                return State("sft", self._committed, 0)
            case schedule.SftUpdate(step=step):
                if step == self._stop_at:
                    self.stop_asked.set()
                return UpdateMade({"loss": float(step)}, 1.0)
            case schedule.SftEvaluate():
                return 0.5
            case schedule.Save(step=step):
                self._save()
                self._committed = step
        return None

    def lost(self, error: Exception) -> None: ...

    def drive(self) -> list[schedule.Effect]:
        waits = Waits(lambda *_: None, threading.Event(), self.stop_asked)
        events = SimpleNamespace(trainer_lost=lambda *_, **__: None, resynced=lambda *_: None)
        term: Any = SimpleNamespace(waits=waits, step=0, events=events)
        pipeline._drive(self, term)  # type: ignore[arg-type]
        return self.done


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_LOST_RETRY_S", (0.001, 0.001))


@pytest.mark.parametrize("error", [TrainerFailed("no room to save"), Conflict("it is elsewhere")])
def test_stop_whose_commit_ends_the_trainer_each_time_ends_all_the_same(error: Exception) -> None:
    """What was to be committed is lost with the first one; the run would be stopped for ever."""
    saves = 0

    def save() -> None:
        nonlocal saves
        saves += 1
        trainer._committed = 2  # what the trainer goes back to
        raise error

    trainer = Trainer(3, save)
    assert trainer.drive()[-1] == schedule.Stop(None) and saves == 3


def test_stop_whose_commit_succeeds_after_a_loss_names_the_step_that_is_committed() -> None:
    errors = [TrainerFailed("it ended")]

    def save() -> None:
        if errors:
            trainer._committed = 2
            raise errors.pop()

    trainer = Trainer(3, save)
    assert trainer.drive()[-1] == schedule.Stop(2), "the updates since are lost, and are on no record"


@pytest.mark.parametrize(("stop_at", "updates"), [(3, 3), (10, 5), (11, 1), (14, 4)])
def test_stop_has_the_supervised_updates_since_the_last_evaluation(stop_at: int, updates: int) -> None:
    """A resumed run does not make them again, so that nobody else records them."""
    *_, save, stop = Trainer(stop_at).drive()
    assert isinstance(save, schedule.Save) and isinstance(stop, schedule.Stop)
    assert save.step == stop.step == stop_at
    assert [u.metrics["loss"] for u in stop.updates] == [float(s) for s in range(stop_at - updates + 1, stop_at + 1)]


class Writer:
    """``known``: events that are there."""

    def __init__(self) -> None:
        self.known, self.statuses = set[str](), list[JobStatus]()

    def write_event(self, event: Any, compares: Any = (), ops: Any = ()) -> bool:
        if event.id in self.known:
            return False
        self.known.add(event.id)
        self.write(*ops)
        return True

    def write(self, *ops: Any) -> None:
        self.statuses.append(JobStatus.decode(ops[0].data))


def test_end_of_a_run_is_written_again_beside_its_event_after_a_lost_answer() -> None:
    """Another thread may have written meanwhile that the run works."""
    writer: Any = Writer()
    status = JobStatusWriter(SimpleNamespace(get=lambda _: None), Keys("j"), writer,  # type: ignore[arg-type]
                             steps=10, seed=0)
    event = build(event_kinds.RUN_STOPPED, "j", "stopped")
    status.write("stopped", event=event)
    writer.statuses.append(JobStatus(phase="rl"))
    status.write("stopped", event=event)
    assert [s.phase for s in writer.statuses] == ["stopped", "rl", "stopped"] and len(writer.known) == 1
