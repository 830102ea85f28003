"""Which events a step causes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.errors import OutcomeUnknown
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import KeyValue
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, StepMetrics
from elastic_rl.etcd.transaction import Compare, Op, TxnResult
from elastic_rl.pipeline.records.run_events import ReportLimit, RunEvents, emitter
from elastic_rl.pipeline.waits import Waits


@pytest.mark.parametrize(("staleness", "difference", "told"), [
    (0, 2e-4, True), (0, 1e-5, False), (1, 2e-4, False), (0, None, True), (2, None, True)])
def test_log_probs_are_compared_for_samples_of_the_newest_weights(staleness: int, difference: float | None,
                                                                  told: bool) -> None:
    kinds: list[str] = []

    def emit(kind: EventKind, subject: str, message: str, **_: Any) -> None:
        kinds.append(kind.name)

    events = RunEvents(None, Keys("job"), emit)  # type: ignore[arg-type]
    events.logprob_difference(StepMetrics(step=3, at=0.0, reward=0.0, staleness=staleness), difference, 1e-4)
    assert kinds == (["logprob.mismatch"] if told else [])


def test_event_whose_answer_was_lost_is_written_once() -> None:
    written: list[str] = []
    answers = iter([False, True])

    class Etcd:
        def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
            new = [op.key for op in then if op.key not in written]
            written.extend(new)
            if not next(answers):
                raise OutcomeUnknown("no member answers")
            return TxnResult(bool(new), 1, ())

    writer = FencedWriter(Etcd(), Keys("job"), list, "the actor")  # type: ignore[arg-type]
    emit = emitter(writer, Waits(lambda *_: None, threading.Event()))
    emit(event_kinds.QUEUE_REPLACED, "queue", "m")
    assert len(written) == 1 and next(answers, None) is None


class EventLog:
    """etcd with a log of events and nothing else."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kvs = [KeyValue(f"{n}", Event(id=f"{n}", at=float(n), kind=kind, subject="trainer", message="").encode(),
                             n, n, 1, 0) for n, kind in enumerate(kinds, 1)]

    def range(self, prefix: str, *, limit: int, newest_first: bool) -> tuple[list[KeyValue], int]:
        return list(reversed(self.kvs)), 9


@pytest.mark.parametrize(("log", "recovered"), [
    (["trainer.failed"], ["trainer.recovered"]), (["critic.agent_ended"], ["critic.recovered"]),
    (["trainer.failed", "trainer.recovered"], []), (["trainer.failed", "trainer.returned"], ["trainer.recovered"]),
    (["trainer.hung", "trainer.resumed"], []), (["trainer.failed", "trainer.resumed"], ["trainer.recovered"]),
    (["trainer.failed", "trainer.hung", "trainer.resumed"], ["trainer.recovered"]),
    (["trainer.hung", "trainer.failed", "trainer.recovered", "trainer.resumed"], []),
    (["trainer.recovered", "trainer.hung"], ["trainer.recovered"])])
def test_new_actor_reports_the_recovery_of_lost_groups_only(log: list[str], recovered: list[str]) -> None:
    kinds: list[str] = []

    def emit(kind: EventKind, subject: str, message: str, **_: Any) -> None:
        kinds.append(kind.name)

    events = RunEvents(EventLog(log), Keys("job"), emit)  # type: ignore[arg-type]
    events.trainers_recovered(set(), at_step=3, step=3, version=3)
    assert kinds == recovered


class EmptyStore(EventLog):
    """A job of which etcd has nothing yet."""

    def range(self, prefix: str, **_: Any) -> tuple[list[KeyValue], int]:
        return [], 9

    def get(self, key: str) -> None:
        return None


def test_loss_that_is_found_when_the_group_is_back_says_that_it_was_told_before() -> None:
    told: dict[str, bool] = {}

    def emit(kind: EventKind, subject: str, message: str, **data: Any) -> None:
        told[f"{kind.name} {message}"] = bool(data.get(event_kinds.ALREADY_REPORTED))

    events = RunEvents(EmptyStore([]), Keys("job"), emit)  # type: ignore[arg-type]
    events.trainer_lost(3, "no answer", "trainer")
    events.trainer_lost(4, "it is another one", "trainer", reformed=True)
    events.trainers_recovered({"critic"}, at_step=4, step=3, version=3)
    assert told == {"trainer.failed no answer": False, "trainer.failed it is another one": True,
                    "critic.failed the critic group re-formed": True,
                    "trainer.recovered resumed at step 3, version 3": False,
                    "critic.recovered resumed at step 3, version 3": False}


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 30)), max_size=40))
def test_reports_are_rare_and_count_everything(added: list[tuple[int, float]]) -> None:
    limit, now, reported, total, times = ReportLimit(60.0), 0.0, 0, 0, list[float]()
    for count, pause_s in added:
        now, total = now + pause_s, total + count
        if told := limit.add(count, now):
            times.append(now)
            reported += told
    assert reported + limit.add(0, now + 1000.0) == total
    assert all(later - earlier >= 60.0 for earlier, later in zip(times, times[1:], strict=False))
