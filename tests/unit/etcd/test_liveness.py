"""Watches and a member of etcd that falls silent, in a world without threads: when each of them asks, and leaves."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.etcd.liveness import ANSWER_S, ASK_AFTER_S, SECOND_S, STREAM_S, MemberLife, StreamLife, member_life
from elastic_rl.etcd.mirror import SILENT_S

FOREVER = float("inf")
ROUNDING_S = 1e-6


@dataclass
class Stream:
    """A watch on one stream, as its thread uses it."""

    opened_at: float
    dead_at: float = FOREVER
    """From when on nothing arrives on this stream."""
    closed_at: float = FOREVER
    life: StreamLife | None = None
    asked: list[float] = field(default_factory=list)
    answered_at: float = 0.0
    left_at: float = FOREVER

    @property
    def ended_at(self) -> float:
        return min(self.left_at, self.closed_at)


class World:
    """One member and the streams to it. What happens at the same time happens in the order in which it was planned."""

    def __init__(self, streams: Sequence[Stream], *, latency_s: float, member_dead_at: float = FOREVER,
                 calls: Sequence[float] = ()) -> None:
        """``latency_s``: of an answer. ``calls``: when other calls are answered, while the member lives."""
        self.member, self.streams, self.latency_s = MemberLife(), streams, latency_s
        self.member_dead_at = member_dead_at
        self._planned: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self.sign_at = 0.0
        """The last sign of the member's life that has arrived."""
        for call in calls:
            self._plan(call, self._call)
        for stream in streams:
            self._plan(stream.opened_at, lambda now, s=stream: self._open(s, now))

    def run(self, until: float) -> None:
        while self._planned and self._planned[0][0] <= until:
            now, _, happens = heapq.heappop(self._planned)
            happens(now)

    def _plan(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._planned, (at, next(self._order), happens))

    def _call(self, now: float) -> None:
        if now < self.member_dead_at:
            self.sign_at = now
            self.member.heard(now)

    def _open(self, stream: Stream, now: float) -> None:
        stream.life, stream.answered_at = StreamLife(self.member, now), now
        self._plan(now + self.latency_s, lambda at: self._answer(stream, now, at))  # that the watch was created
        self._wake(stream, now)

    def _answer(self, stream: Stream, asked_at: float, now: float) -> None:
        if now < min(stream.ended_at, stream.dead_at, self.member_dead_at):
            assert stream.life is not None
            stream.answered_at = self.sign_at = now
            stream.life.answered(now)

    def _wake(self, stream: Stream, now: float) -> None:
        assert stream.life is not None
        if now >= stream.closed_at:
            return
        if stream.life.due_s(now) <= 0:
            if stream.life.is_over(now):
                stream.left_at = now
                return
            if stream.life.asks(now):
                stream.asked.append(now)
                self._plan(now + self.latency_s, lambda at: self._answer(stream, now, at))
        assert stream.life.due_s(now) > 0, "its thread would spin"
        self._plan(now + max(stream.life.due_s(now), 1e-9), lambda at: self._wake(stream, at))


times = st.floats(0, 20).map(lambda at: round(at, 2))
latencies = st.sampled_from([0.0001, 0.01, 0.2, SECOND_S - 0.01])


@settings(max_examples=seeds(60))
@given(opened=st.lists(times, min_size=1, max_size=6), closed=st.lists(times, max_size=5), latency_s=latencies,
       dead_at=times, calls=st.lists(times, max_size=30))
def test_every_stream_on_a_silent_member_is_left_in_time(
        opened: list[float], closed: list[float], latency_s: float, dead_at: float, calls: list[float]) -> None:
    streams = [Stream(at, closed_at=end) for at, end in
               itertools.zip_longest(opened, closed[:len(opened) - 1], fillvalue=FOREVER)]
    world = World(streams, latency_s=latency_s, member_dead_at=dead_at, calls=calls)
    world.run(60)
    for stream in streams:
        limit = max(world.sign_at, stream.opened_at) + ASK_AFTER_S + ANSWER_S + ROUNDING_S
        assert stream.ended_at <= max(limit, stream.closed_at if stream.closed_at < FOREVER else 0.0)
        if stream.left_at < FOREVER:
            assert stream.left_at - stream.asked[-1] >= SECOND_S - ROUNDING_S, "it was not asked itself for long enough"


@settings(max_examples=seeds(60))
@given(opened=st.lists(times, min_size=1, max_size=6), closed=st.lists(times, max_size=5), latency_s=latencies,
       calls=st.lists(times, max_size=30))
def test_stream_of_a_living_member_is_never_left(
        opened: list[float], closed: list[float], latency_s: float, calls: list[float]) -> None:
    streams = [Stream(at, closed_at=max(at, end)) for at, end in
               itertools.zip_longest(opened, closed[:len(opened)], fillvalue=FOREVER)]
    World(streams, latency_s=latency_s, calls=calls).run(60)
    assert all(stream.left_at == FOREVER for stream in streams)


@settings(max_examples=seeds(60))
@given(others=st.integers(0, 4), latency_s=latencies, dead_at=times, every_s=st.sampled_from([0.1, 0.5, 1.0]))
@example(others=1, latency_s=0.01, dead_at=0.0, every_s=0.1)
def test_dead_stream_of_a_living_member_is_left_in_time_and_alone(
        others: int, latency_s: float, dead_at: float, every_s: float) -> None:
    dead, living = Stream(0.0, dead_at=dead_at), [Stream(0.1 * (i + 1)) for i in range(others)]
    world = World([dead, *living], latency_s=latency_s, calls=[i * every_s for i in range(int(60 / every_s))])
    world.run(60)
    was_answered = dead.answered_at > dead.opened_at  # else there was no sign that the stream was ever opened
    assert dead.left_at <= dead.answered_at + (STREAM_S if was_answered else ASK_AFTER_S) + ANSWER_S + ROUNDING_S
    assert all(stream.left_at == FOREVER for stream in living)


@settings(max_examples=seeds(40))
@given(count=st.integers(1, 12), latency_s=st.sampled_from([0.001, 0.05]))
def test_silent_time_of_a_member_costs_one_request_and_not_one_a_watch(count: int, latency_s: float) -> None:
    streams = [Stream(0.01 * i) for i in range(count)]
    World(streams, latency_s=latency_s).run(120)
    assert sum(len(s.asked) for s in streams) <= 120 / ASK_AFTER_S + count * (120 / STREAM_S + 1)
    assert count < 6 or sum(len(s.asked) for s in streams) < 0.6 * count * 120 / ASK_AFTER_S


def test_one_of_several_watches_asks_a_silent_member_and_the_others_a_little_later() -> None:
    member = MemberLife()
    first, second = StreamLife(member, 0.0), StreamLife(member, 0.0)
    first.answered(1.0)
    second.answered(1.0)
    assert first.due_s(1.0) == ASK_AFTER_S and not first.asks(1.0 + ASK_AFTER_S / 2)
    assert first.asks(1.0 + ASK_AFTER_S) and not second.asks(1.0 + ASK_AFTER_S)
    assert second.asks(1.0 + ASK_AFTER_S + SECOND_S) and not second.asks(1.0 + ASK_AFTER_S + SECOND_S)


def test_watch_of_a_process_that_was_suspended_asks_before_it_leaves() -> None:
    stream = StreamLife(MemberLife(), 0.0)
    stream.answered(1.0)
    assert not stream.is_over(100.0) and stream.asks(100.0)
    assert not stream.is_over(100.0 + SECOND_S / 2) and stream.is_over(100.0 + SECOND_S)


def test_member_that_is_called_all_the_time_is_asked_only_for_its_streams() -> None:
    stream = Stream(0.0)
    World([stream], latency_s=0.001, calls=[0.1 * i for i in range(1200)]).run(120)
    assert len(stream.asked) <= 120 / STREAM_S


def test_reader_of_a_watch_knows_less_than_a_mirror_tolerates() -> None:
    assert STREAM_S + ANSWER_S < SILENT_S, "a watch on which all is well would count as silent"


def test_life_of_a_member_is_shared_while_a_client_keeps_it() -> None:
    life = member_life("member:1")
    life.heard(7.0)
    assert member_life("member:1") is life and member_life("member:2") is not life
    del life
    assert member_life("member:1").heard_at == float("-inf")
