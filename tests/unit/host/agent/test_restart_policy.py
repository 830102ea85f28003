"""When a service that ended is started again: at once after a quiet time, ever later in a row, always at last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_rl.host.agent import restart_policy
from elastic_rl.host.agent.restart_policy import Phase, RestartLimits, ServiceState

LIMITS = RestartLimits()
lives = st.lists(st.floats(0.0, 200.0), min_size=1, max_size=60)
jitters = st.floats(0.0, 1.0)


def crash(state: ServiceState, now: float, jitter: float = 0.0) -> ServiceState:
    return restart_policy.on_ended(state, now, LIMITS, jitter=jitter)


def test_first_end_is_answered_at_once() -> None:
    state = crash(ServiceState.running(0.0, LIMITS), 100.0)
    assert state.due(100.0)


def test_running_service_is_never_due() -> None:
    assert not ServiceState.running(0.0, LIMITS).due(1e9)


def test_service_that_had_ended_before_it_was_seen_is_started() -> None:
    assert ServiceState.ended(5.0, LIMITS).due(5.0)


def test_end_that_is_seen_again_changes_nothing() -> None:
    state = crash(ServiceState.running(0.0, LIMITS), 10.0)
    assert crash(state, 11.0) == state


def test_ends_in_a_row_wait_longer_and_a_stable_run_forgets_them() -> None:
    state, now, pauses = ServiceState.running(0.0, replace(LIMITS, budget=100)), 0.0, []
    for _ in range(8):
        state = crash(replace(state, budget=100.0), now)
        pauses.append(state.start_at - now)
        now = state.start_at
        state = restart_policy.on_started(state, now, LIMITS)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    now += LIMITS.stable_s
    assert crash(restart_policy.on_running(state, now, LIMITS), now + 1.0).ends == 1
    assert crash(state, now + 1.0).ends == 1, "also where nobody looked in between"


def test_start_by_another_command_is_adopted_and_costs_nothing() -> None:
    state = crash(ServiceState.running(0.0, LIMITS), 10.0)
    adopted = restart_policy.on_running(state, 10.5, LIMITS)
    assert adopted.phase is Phase.RUNNING and adopted.budget == LIMITS.budget and not adopted.due(1e9)


def test_start_that_fails_counts_as_an_end() -> None:
    state = crash(ServiceState.running(0.0, LIMITS), 10.0)
    state = restart_policy.on_start_failed(state, 10.0, LIMITS, jitter=0.0)
    assert state.phase is Phase.ENDED and state.ends == 2 and state.start_at == 11.0


@given(lives, jitters)
def test_service_is_always_started_again_within_a_bound(lives: list[float], jitter: float) -> None:
    state, now = ServiceState.running(0.0, LIMITS), 0.0
    for life in lives:
        now += life
        state = crash(restart_policy.on_running(state, now, LIMITS), now, jitter)
        assert now <= state.start_at <= now + LIMITS.longest_wait_s
        now = state.start_at
        assert state.due(now)
        state = restart_policy.on_started(state, now, LIMITS)


@given(lives, jitters, st.floats(1.0, 2000.0))
@example([0.0] * 60, 1.0, 800.0)  # it ends at once, and jitter halves each pause
def test_number_of_starts_in_any_time_is_bounded(lives: list[float], jitter: float, window_s: float) -> None:
    state, now, starts = ServiceState.running(0.0, LIMITS), 0.0, []
    for life in lives:
        now += life
        state = crash(state, now, jitter)
        now = state.start_at
        starts.append(now)
        state = restart_policy.on_started(state, now, LIMITS)
    most = LIMITS.budget + window_s / LIMITS.refill_s + 1
    assert all(sum(begin <= at < begin + window_s for at in starts) <= most for begin in starts)


@pytest.mark.parametrize("ends", [40, 10**6])
def test_pause_stays_finite_after_any_number_of_ends(ends: int) -> None:
    state = replace(ServiceState.running(0.0, LIMITS), ends=ends)
    assert crash(state, 1.0).start_at <= 1.0 + LIMITS.longest_wait_s
