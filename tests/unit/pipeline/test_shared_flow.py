"""The flow and the queue between two threads, and the queue on TransferQueue without its actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.queue.queued_batch import QueuedBatch, batch_of
from elastic_rl.data.queue.row_client import RowName, decode_row
from elastic_rl.data.queue.step_groups import SampleRef
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import GroupsLost, IllegalTransition, QueueUnavailable
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.pipeline.flow import transfer_queue
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.flow.group_flow import FlowLimits
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue
from elastic_rl.pipeline.flow.shared_flow import SharedFlow
from elastic_rl.pipeline.flow.transfer_queue import TransferQueueQueue
from elastic_rl.pipeline.waits import Waits


def group(ordinal: int, version: int = 1) -> Group:
    return Group(ordinal, Prompt((1,)), (Sample((Segment((2,), (-0.1,), version=version),)),) * 2)


class SlowQueue(EmbeddedQueue):
    """``at_drop`` is called before data is dropped."""

    at_drop: Callable[[], object] = staticmethod(lambda: None)

    def drop(self, ordinals: Collection[int]) -> None:
        self.at_drop()
        super().drop(ordinals)


@pytest.mark.parametrize("gives_up", ["trained", "stale", "consumed", "refused"])
def test_nothing_is_leased_before_abandoned_data_is_dropped(gives_up: str) -> None:
    queue = SlowQueue(2)
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=2, max_staleness=0, max_dropped_groups=0), queue)
    waits = Waits(lambda *_: None, threading.Event())
    flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    assert flow.lease(0.0) is not None
    for ordinal in (0, 1):
        flow.finished(group(ordinal), "", waits)
    meanwhile: list[Any] = []
    queue.at_drop = lambda: meanwhile.append(flow.lease(0.0))  # type: ignore[method-assign]
    if gives_up == "trained":
        taken = flow.take(waits, lambda: None, lambda loss: None, lambda groups, before: before)
        flow.trained(taken.chosen.consumption, 2)
    elif gives_up == "consumed":
        flow.resume(1, 3, IntervalSet.from_values([0, 1]), Branch(0, 3))
    elif gives_up == "refused":
        flow.refused([1])
    else:
        flow.resume(0, 2, IntervalSet(), Branch(1, 2))

        class Enough(Exception):
            pass

        def look() -> None:
            raise Enough

        with pytest.raises(Enough):
            flow.take(waits, look, lambda loss: None, lambda groups, before: before)
    grant = flow.lease(0.0)
    assert meanwhile == [None] and grant is not None
    for ordinal in grant.ordinals:
        flow.finished(group(ordinal, 3), "", waits)
    assert set(queue.get(grant.ordinals)) == set(grant.ordinals), "neither full, nor dropped"


class QueueThatLoses(EmbeddedQueue):
    """The second of its reads finds nothing."""

    reads = 0

    def get(self, ordinals: Collection[int]) -> dict[int, Any]:
        self.reads += 1
        return {} if self.reads == 2 else super().get(ordinals)


def test_step_that_is_chosen_again_begins_without_what_was_accumulated() -> None:
    """A part that was abandoned with its step would count twice otherwise."""
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=2, max_staleness=0, max_dropped_groups=0, groups_per_part=1),
                      QueueThatLoses(2))
    waits, before = Waits(lambda *_: None, threading.Event()), list[int]()
    flow.resume(0, 1, IntervalSet(), Branch(0, 1))

    def generate() -> None:
        grant = flow.lease(0.0)
        for ordinal in () if grant is None else grant.ordinals:
            flow.finished(group(ordinal), "", waits)

    def on_part(groups: Any, accumulated: Accumulated) -> Accumulated:
        before.append(accumulated.parts)
        return accumulated.plus({}, {}, 1)

    generate()
    taken = flow.take(waits, generate, lambda loss: None, on_part)
    assert before == [0, 0, 1] and taken.accumulated.parts == 2


def test_group_beyond_the_queues_capacity_is_an_error_and_no_wait() -> None:
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=2, max_staleness=0, max_dropped_groups=0), EmbeddedQueue(1))
    stopping = threading.Event()

    def end_wait(stage: str, kind: str, what: str) -> None:
        if kind:
            stopping.set()

    flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    assert flow.lease(0.0) is not None
    flow.finished(group(0), "", Waits(end_wait, stopping))
    with pytest.raises(IllegalTransition, match="queue is full"):
        flow.finished(group(1), "", Waits(end_wait, stopping))


class Rows:
    """The rows of TransferQueue's storage, whose next drops fail."""

    def __init__(self) -> None:
        self.data: dict[RowName, bytes] = {}
        self.failing = 0

    def put(self, rows: Mapping[RowName, bytes]) -> None:
        self.data |= rows

    def get(self, names: Sequence[RowName]) -> dict[RowName, tuple[Prompt, Sample]]:
        return {name: (prompt, sample) for name, prompt, sample in (
            decode_row(self.data[name]) for name in names if name in self.data)}

    def names(self) -> list[RowName]:
        return [*self.data]

    def drop(self, names: Collection[RowName]) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError("busy")
        for name in names:
            del self.data[name]


class Actors:
    """Those of TransferQueue."""

    made = 0
    address: ClassVar[dict[str, Any]] = {"units": {}}

    def __init__(self, units: int, call_s: float, host: str) -> None:
        type(self).made += 1
        self.rows = Rows()

    def run(self, call: Callable[[Any], Any]) -> Any:
        return call(self.rows)

    def dead(self) -> str:
        return ""

    def close(self) -> None:
        pass


def read(queue: TransferQueueQueue, *refs: SampleRef) -> list[tuple[Prompt, Sample]]:
    return queue.reader(queue.get([ordinal for ordinal, _ in refs]).values()).read(refs)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> TransferQueueQueue:
    Actors.made = 0
    monkeypatch.setattr(transfer_queue, "_Actors", Actors)
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", 60.0)
    monkeypatch.setattr(transfer_queue.importlib.util, "find_spec", lambda name: object())
    return TransferQueueQueue(3, units=1, call_s=1.0, host=LOOPBACK)


def test_data_that_could_not_be_dropped_is_dropped_with_the_next(queue: TransferQueueQueue) -> None:
    for ordinal in range(3):
        queue.put(group(ordinal))
    actors: Any = queue._actors
    actors.rows.failing = 1
    queue.drop([0, 1])
    assert {name.ordinal for name in actors.rows.data} == {0, 1, 2} and set(queue.get([0, 1, 2])) == {2}
    queue.put(group(1, version=5))
    assert {name.ordinal for name in actors.rows.data} == {1, 2} and len(actors.rows.data) == 4
    queue.drop([2])
    assert [name[1:] for name in actors.rows.data] == [(1, 0), (1, 1)], "the new samples stay"
    assert [sample.oldest_version for _, sample in read(queue, (1, 0), (1, 1))] == [5, 5]


def test_group_is_put_while_its_earlier_samples_are_dropped(queue: TransferQueueQueue) -> None:
    queue.put(group(0))
    actors: Any = queue._actors
    drop = actors.rows.drop

    def slow(names: Collection[RowName]) -> None:
        actors.rows.drop = drop
        queue.put(group(0, version=5))
        drop(names)

    actors.rows.drop = slow
    queue.drop([0])
    assert [sample.oldest_version for _, sample in read(queue, (0, 0), (0, 1))] == [5, 5]
    assert len(actors.rows.data) == 2


def test_rows_of_a_put_in_progress_are_not_dropped_with_others(queue: TransferQueueQueue) -> None:
    queue.put(group(0))
    actors: Any = queue._actors
    put = actors.rows.put

    def slow(rows: Mapping[RowName, bytes]) -> None:
        put(rows)
        queue.drop([0])

    actors.rows.put = slow
    queue.put(group(1))
    assert len(read(queue, (1, 0), (1, 1))) == len(actors.rows.data) == 2


def test_put_drops_what_failed_and_replaced_attempts_have_left_first(queue: TransferQueueQueue) -> None:
    """Tries of one group would add up otherwise, for as long as no step ends."""
    for ordinal in (0, 0, 1):
        queue.put(group(ordinal))
    actors: Any = queue._actors
    rows = actors.rows
    assert len(rows.data) == 4, "the group that was replaced is gone"
    put, written = rows.put, list[int]()

    def fails(new: Mapping[RowName, bytes]) -> None:
        put(new)
        written.append(len(rows.data))
        raise OSError("no answer")

    rows.put = fails
    for _ in range(2):
        with pytest.raises(QueueUnavailable, match="no answer"):
            queue.put(group(2))
    assert written == [6, 6]
    rows.put, rows.failing = put, 1
    with pytest.raises(QueueUnavailable, match="busy"):
        queue.put(group(2))
    queue.put(group(2))
    assert len(rows.data) == 6


def test_queue_says_that_its_actors_start_and_takes_groups_once_they_have(
        queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    room = threading.Event()

    class SlowActors(Actors):
        def __init__(self, units: int, call_s: float, host: str) -> None:
            super().__init__(units, call_s, host)
            room.wait()
            if self.made == 1:
                raise OSError("no room")

    monkeypatch.setattr(transfer_queue, "_Actors", SlowActors)
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", 0.01)
    for _ in range(3):
        with pytest.raises(QueueUnavailable, match="actors of TransferQueue start"):
            queue.put(group(0))
    assert SlowActors.made == 1
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", 60.0)
    starting = queue._starting
    room.set()
    assert starting is not None and "OSError: no room" in str(starting.future.exception(60))
    queue.put(group(0))
    assert SlowActors.made == 2 and set(queue.get([0])) == {0}


def test_actors_that_start_while_the_queue_is_closed_are_ended(
        queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    room, ended = threading.Event(), threading.Event()

    class SlowActors(Actors):
        def __init__(self, units: int, call_s: float, host: str) -> None:
            super().__init__(units, call_s, host)
            room.wait()

        def close(self) -> None:
            ended.set()

    monkeypatch.setattr(transfer_queue, "_Actors", SlowActors)
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", 0.01)
    with pytest.raises(QueueUnavailable, match="start"):
        queue.put(group(0))
    queue.close()
    room.set()
    assert ended.wait(60)


def test_closed_queue_starts_no_actors(queue: TransferQueueQueue) -> None:
    queue.close()
    with pytest.raises(QueueUnavailable, match="closed"):
        queue.put(group(0))
    assert Actors.made == 0


def test_queue_is_replaced_after_several_slow_calls_in_a_row(
        queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    run, slow = Actors.run, [False]

    def sometimes(self: Actors, call: Callable[[Any], Any]) -> Any:
        if slow[0]:
            raise TimeoutError("too long")
        return run(self, call)

    monkeypatch.setattr(Actors, "run", sometimes)
    queue.put(group(0))
    for _ in range(2):
        slow[0] = True
        for _ in range(transfer_queue._MAX_TIMEOUTS - 1):
            with pytest.raises(QueueUnavailable, match="too long"):
                queue.put(group(1))
        slow[0] = False
        assert len(read(queue, (0, 0))) == 1
    assert queue.take_loss() is None and Actors.made == 1
    slow[0] = True
    for _ in range(transfer_queue._MAX_TIMEOUTS):
        with pytest.raises(QueueUnavailable, match="too long"):
            queue.put(group(1))
    slow[0] = False
    loss = queue.take_loss()
    assert loss is not None and loss.groups == (0,) and "3 calls in a row took too long" in loss.why
    queue.put(group(0))
    assert Actors.made == 2 and set(queue.get([0, 1])) == {0}


def test_step_is_chosen_without_reading_its_groups(monkeypatch: pytest.MonkeyPatch, queue: TransferQueueQueue) -> None:
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=3, max_staleness=0, max_dropped_groups=0), queue)
    waits = Waits(lambda *_: None, threading.Event())
    flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    grant = flow.lease(0.0)
    assert grant is not None
    for ordinal in grant.ordinals:
        flow.finished(group(ordinal), "", waits)
    monkeypatch.setattr(Rows, "get", None)
    taken = flow.take(waits, lambda: None, lambda loss: None, lambda groups, before: before)
    assert [g.ordinal for g in taken.groups.groups] == list(grant.ordinals)
    assert isinstance(batch_of(taken.groups, [0.0] * 6), QueuedBatch)


def test_group_that_is_gone_when_it_is_read_is_generated_again(queue: TransferQueueQueue) -> None:
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=2, max_staleness=0, max_dropped_groups=0), queue)
    waits = Waits(lambda *_: None, threading.Event())
    flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    assert flow.lease(0.0) is not None
    for ordinal in (0, 1):
        flow.finished(group(ordinal), "", waits)
    taken = flow.take(waits, lambda: None, lambda loss: None, lambda groups, before: before)
    actors: Any = queue._actors
    del actors.rows.data[RowName(taken.groups.groups[1].attempt, 1, 1)]
    with pytest.raises(GroupsLost) as lost:
        taken.groups.reader.read(taken.groups.refs)
    assert lost.value.ordinals == (1,)
    flow.lost(lost.value.ordinals, lambda loss: None)
    grant = flow.lease(0.0)
    assert grant is not None and grant.ordinals == (1,)
    flow.finished(group(1, version=7), "", waits)
    again = flow.take(waits, lambda: None, lambda loss: None, lambda groups, before: before)
    assert [s.oldest_version for s in again.groups.samples] == [1, 1, 7, 7]
    assert len(again.groups.reader.read(again.groups.refs)) == 4


def test_loss_that_is_told_late_is_none_of_what_was_generated_again(queue: TransferQueueQueue) -> None:
    """A rank finds the chosen groups gone before anybody has looked for what the queue has lost."""
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=1, max_staleness=1, max_dropped_groups=0), queue)
    waits, told = Waits(lambda *_: None, threading.Event()), list[tuple[int, ...]]()
    flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    for ordinal in (0, 1):
        assert flow.lease(0.0) is not None
        flow.finished(group(ordinal), "", waits)
    taken = flow.take(waits, lambda: None, lambda loss: None, lambda groups, before: before)
    queue._replace(queue._generation, "its controller is gone")
    with pytest.raises(GroupsLost) as lost:
        taken.groups.reader.read(taken.groups.refs)
    flow.lost(lost.value.ordinals, lambda loss: told.append(loss.groups))
    assert told == [(0, 1)]
    for ordinal in (0, 1):
        grant = flow.lease(0.0)
        assert grant is not None and grant.ordinals == (ordinal,)
        flow.finished(group(ordinal), "", waits)
    again = flow.take(waits, lambda: None, lambda loss: told.append(loss.groups), lambda groups, before: before)
    assert told == [(0, 1)] and again.metrics["groups_lost"] == 2
