"""The flow and the queue between two threads, and the queue on TransferQueue without its actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest

from elastic_rl.data.branch import Branch
from elastic_rl.data.group_codec import decode_group
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import QueueUnavailable
from elastic_rl.pipeline.fully_async import transfer_queue
from elastic_rl.pipeline.fully_async.group_queue import EmbeddedQueue
from elastic_rl.pipeline.fully_async.shared_flow import SharedFlow
from elastic_rl.pipeline.fully_async.transfer_queue import TransferQueueQueue
from elastic_rl.pipeline.group_flow import FlowLimits
from elastic_rl.pipeline.waits import Waits


def group(ordinal: int, version: int = 1) -> Group:
    return Group(ordinal, Prompt((1,)), (Sample((Segment((2,), (-0.1,), version=version),)),))


class SlowQueue(EmbeddedQueue):
    """``at_drop`` is called before data is dropped."""

    at_drop: Callable[[], object] = staticmethod(lambda: None)

    def drop(self, ordinals: Collection[int]) -> None:
        self.at_drop()
        super().drop(ordinals)


@pytest.mark.parametrize("gives_up", ["trained", "stale", "rewound"])
def test_nothing_is_leased_before_the_data_of_what_was_given_up_is_dropped(gives_up: str) -> None:
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
        taken = flow.take(waits, lambda: None, lambda loss: None, lambda groups, first: None)
        flow.trained(taken.chosen.consumption, 2)
    elif gives_up == "rewound":
        flow.resume(0, 3, IntervalSet(), Branch(0, 3))
    else:
        flow.resume(0, 2, IntervalSet(), Branch(1, 2))

        class Enough(Exception):
            pass

        def look() -> None:
            raise Enough

        with pytest.raises(Enough):
            flow.take(waits, look, lambda loss: None, lambda groups, first: None)
    grant = flow.lease(0.0)
    assert meanwhile == [None] and grant is not None
    for ordinal in grant.ordinals:
        flow.finished(group(ordinal, 3), "", waits)
    assert set(queue.get(grant.ordinals)) == set(grant.ordinals), "neither full, nor dropped"


class Actors:
    """The storage of TransferQueue, whose next drops fail."""

    made = 0

    def __init__(self, units: int, call_s: float, host: str) -> None:
        type(self).made += 1
        self.data: dict[int, bytes] = {}
        self.failing = 0

    def run(self, calls: Collection[Callable[[], Any]]) -> list[Any]:
        return [call() for call in calls]

    def dead(self) -> str:
        return ""

    def put(self, ordinal: int, raw: bytes) -> None:
        self.data[ordinal] = raw

    def get(self, ordinal: int) -> Group | None:
        return decode_group(self.data[ordinal]) if ordinal in self.data else None

    def drop(self, ordinals: Collection[int]) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError("busy")
        for ordinal in ordinals:
            del self.data[ordinal]

    def close(self) -> None:
        pass


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> TransferQueueQueue:
    Actors.made = 0
    monkeypatch.setattr(transfer_queue, "_Actors", Actors)
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", 60.0)
    monkeypatch.setattr(transfer_queue.importlib.util, "find_spec", lambda name: object())
    return TransferQueueQueue(3, units=1, call_s=1.0)


def test_data_that_could_not_be_dropped_is_dropped_with_the_next_and_takes_no_room(queue: TransferQueueQueue) -> None:
    for ordinal in range(3):
        queue.put(group(ordinal))
    actors: Any = queue._actors
    actors.failing = 1
    queue.drop([0, 1])
    assert set(actors.data) == {0, 1, 2} and set(queue.get([0, 1, 2])) == {2}
    queue.put(group(1, version=5))
    queue.drop([2])
    assert set(actors.data) == {1} and queue.get([1])[1].oldest_version == 5, "the new samples stay"


def test_group_is_not_put_while_its_earlier_samples_are_dropped(queue: TransferQueueQueue) -> None:
    queue.put(group(0))
    actors: Any = queue._actors
    found: list[BaseException] = []
    drop = actors.drop

    def slow(ordinals: Collection[int]) -> None:
        try:
            queue.put(group(0, version=5))
        except QueueUnavailable as e:
            found.append(e)
        drop(ordinals)

    actors.drop = slow
    queue.drop([0])
    assert len(found) == 1
    queue.put(group(0, version=5))
    assert queue.get([0])[0].oldest_version == 5


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
    assert starting is not None and "OSError: no room" in str(starting.exception(60))
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


def test_call_that_takes_too_long_names_the_setting() -> None:
    actors, answer = transfer_queue._Actors.__new__(transfer_queue._Actors), threading.Event()
    actors._call_s = 0.2
    assert actors.run([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(TimeoutError, match="queue_call_timeout_s"):
        actors.run([lambda: 1, answer.wait])
    answer.set()


def test_time_limit_is_that_of_a_call_however_large_the_step(monkeypatch: pytest.MonkeyPatch,
                                                             queue: TransferQueueQueue) -> None:
    """A queue that takes a while for each group would be replaced, with all that it holds, at every large step."""
    asked: list[int] = []

    def run(self: Actors, calls: Collection[Callable[[], Any]]) -> list[Any]:
        asked.append(len(calls))
        return [call() for call in calls]

    size = 3 * queue.at_once + 1
    queue._capacity = size
    monkeypatch.setattr(Actors, "run", run)
    flow = SharedFlow(FlowLimits(steps=9, groups_per_step=size, max_staleness=0, max_dropped_groups=0), queue)
    waits = Waits(lambda *_: None, threading.Event())
    flow.resume(0, 1, IntervalSet(), Branch(0, 1))
    grant = flow.lease(0.0)
    assert grant is not None and len(grant.ordinals) == size
    for ordinal in grant.ordinals:
        flow.finished(group(ordinal), "", waits)
    asked.clear()
    taken = flow.take(waits, lambda: None, lambda loss: None, lambda groups, first: None)
    assert [g.ordinal for g in taken.groups] == list(grant.ordinals)
    assert asked == [queue.at_once] * 3 + [1]


def test_call_of_a_dead_actor_is_given_up_long_before_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_queue, "_LOOK_EVERY_S", 0.01)
    actors, answer = transfer_queue._Actors.__new__(transfer_queue._Actors), threading.Event()
    actors._call_s = 3600.0
    lives = iter(["", ""])
    monkeypatch.setattr(actors, "dead", lambda: next(lives, "its controller is gone"))
    with pytest.raises(QueueUnavailable, match="controller is gone"):
        actors.run([lambda: 1, answer.wait])
    assert next(lives, None) is None, "as long as they live, it waits"
    answer.set()
