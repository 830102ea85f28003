"""How an engine that leaves ends the requests that it has, over simulated time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.departure import ABORT_GRACE_S, SETTLE_S, Departure, LeaveStep, Quiet

LIMIT_S = 60.0
TICK_S = 0.1


class World:
    """An engine with requests, each of which ends by itself after some seconds, or when it is aborted, unless it is
    stuck. The router sends ``late`` ones, at these times, after it was told to forget the engine."""

    def __init__(self, seconds: list[float], late: list[float] = [], *, stuck: int = 0) -> None:  # noqa: B006
        self.now, self.ends, self.late, self.stuck = 0.0, list(seconds), sorted(late), stuck
        self.kept = 0
        """Requests whose clients got all tokens that were sampled."""

    @property
    def in_flight(self) -> int:
        return len(self.ends) + self.stuck

    def leave(self, can_hand_over: bool, *, may_abort: bool = True, hurry_at: float = float("inf")
              ) -> tuple[LeaveStep, Departure]:
        """``hurry_at``: when the time of the host's drain is over."""
        departure = Departure(self.now, LIMIT_S, may_abort=may_abort)
        while True:
            if self.now >= hurry_at:
                departure.hurry(self.now)
            step = departure.step(self.now, self.in_flight, can_hand_over=can_hand_over)
            if step in (LeaveStep.DONE, LeaveStep.GIVE_UP):
                return step, departure
            if step is LeaveStep.ABORT:
                self.kept, self.ends = self.kept + len(self.ends), []
            self.now += TICK_S
            while self.late and self.late[0] <= self.now:
                self.late.pop(0)
                self.ends.append(self.now + 30.0)
            self.kept += sum(end <= self.now for end in self.ends)
            self.ends = [end for end in self.ends if end > self.now]


seconds = st.lists(st.floats(0.0, 200.0), max_size=8)


@given(seconds, st.lists(st.floats(0.0, 0.4), max_size=2), st.booleans())
def test_no_request_in_flight_is_lost_however_long_it_would_take(ends: list[float], late: list[float],
                                                                can_hand_over: bool) -> None:
    world = World([e for e in ends if e > 0], late)
    asked = world.in_flight + len(late)
    step, _ = world.leave(can_hand_over)
    assert step is LeaveStep.DONE and world.kept == asked and not world.late
    assert world.now <= LIMIT_S + ABORT_GRACE_S


@given(seconds)
def test_engine_leaves_at_once_when_another_one_can_go_on(ends: list[float]) -> None:
    world = World(ends)
    world.leave(can_hand_over=True)
    assert world.now <= SETTLE_S + 3 * TICK_S


@given(st.lists(st.floats(0.1, LIMIT_S - 1), max_size=8))
def test_requests_are_finished_where_nobody_can_go_on_with_them(ends: list[float]) -> None:
    world = World(ends)
    _, departure = world.leave(can_hand_over=False)
    assert departure.handed_over == 0 and world.now >= max(ends, default=0.0)


@given(seconds, st.booleans(), st.floats(0.0, 2 * LIMIT_S))
def test_engine_hands_over_as_soon_as_its_host_ends_or_its_own_limit_is_over(
        ends: list[float], can_hand_over: bool, hurry_at: float) -> None:
    world = World([e for e in ends if e > 0])
    asked = world.in_flight
    step, _ = world.leave(can_hand_over, hurry_at=hurry_at)
    assert step is LeaveStep.DONE and world.kept == asked
    assert world.now <= min(hurry_at, LIMIT_S) + SETTLE_S + 4 * TICK_S


def test_request_that_does_not_end_keeps_a_host_that_ends_for_the_grace_only() -> None:
    world = World([], stuck=1)
    step, _ = world.leave(can_hand_over=False, hurry_at=5.0)
    assert step is LeaveStep.GIVE_UP and world.now <= 5.0 + ABORT_GRACE_S + 2 * TICK_S


@given(st.floats(0.1, 10 * LIMIT_S), st.booleans(), st.booleans())
def test_engine_gives_no_request_up_before_it_was_aborted(blocked_s: float, hurries: bool, can_hand_over: bool) -> None:
    """The router or etcd holds a look up for longer than the limit and the grace."""
    departure = Departure(0.0, LIMIT_S)
    if hurries:
        departure.hurry(0.0)
    elif blocked_s < LIMIT_S:
        blocked_s += LIMIT_S
    assert departure.step(blocked_s, 2, can_hand_over=can_hand_over) is LeaveStep.ABORT
    assert departure.step(blocked_s + ABORT_GRACE_S + 0.1, 1, can_hand_over=can_hand_over) is LeaveStep.GIVE_UP


@given(st.lists(st.booleans(), max_size=60))
def test_engine_is_quiet_once_every_look_of_a_while_found_nothing(looks: list[bool]) -> None:
    quiet = Quiet()
    for number, busy in enumerate(looks):
        if quiet.observe(number * TICK_S, int(busy)):
            assert not any(looks[max(0, number - int(SETTLE_S / TICK_S) + 1):number + 1])


@given(seconds)
def test_requests_of_a_server_that_lives_on_are_never_aborted(ends: list[float]) -> None:
    world = World(ends)
    step, departure = world.leave(can_hand_over=True, may_abort=False)
    assert departure.handed_over == 0 and world.now <= LIMIT_S + SETTLE_S + 2 * TICK_S
    assert (step is LeaveStep.DONE) == (not world.in_flight)


def test_request_that_does_not_end_does_not_keep_the_engine() -> None:
    world = World([], stuck=1)
    step, _ = world.leave(can_hand_over=True)
    assert step is LeaveStep.GIVE_UP and world.now >= LIMIT_S + ABORT_GRACE_S
