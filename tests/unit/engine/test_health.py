"""Health of a server: slow is not frozen, frozen is found within its limit, and nothing comes back from it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.server.health import Effort, EngineHealth, Health, HealthLimits

LIMITS = HealthLimits(waiting_s=30.0, working_s=300.0, gap_s=15.0)
FRESH = EngineHealth(LIMITS, observed_at=0.0)
SECONDS = st.floats(0.0, 100.0)
OBSERVATIONS = st.lists(st.tuples(st.sampled_from(["life", "silence", "silence", "skip"]), SECONDS, SECONDS, SECONDS),
                        max_size=60)


def after(health: EngineHealth, observation: tuple[str, float, float, float]) -> EngineHealth:
    kind, elapsed, worked, starved = observation
    now = health.observed_at + elapsed
    match kind:
        case "life":
            return health.sign_of_life(now)
        case "skip":
            return health.skip(now)
        case _:
            return health.silence(now, Effort(worked, starved))


@given(OBSERVATIONS)
def test_server_is_frozen_only_from_suspicion_and_beyond_a_limit(history) -> None:
    health = FRESH
    for observation in history:
        before, health = health, after(health, observation)
        if health.state is Health.FROZEN is not before.state:
            assert before.state is Health.SUSPECTED and observation[0] == "silence"
            assert health.waited_s >= LIMITS.waiting_s or health.worked_s >= LIMITS.working_s
        if before.state is Health.FROZEN:
            assert health is before
        elif observation[0] == "life":
            assert health.state is Health.HEALTHY and health.silent_s == 0
        assert min(health.waited_s, health.worked_s, health.starved_s) >= 0


@given(OBSERVATIONS)
def test_times_of_silence_never_exceed_the_time_that_has_passed(history) -> None:
    health, passed = FRESH, 0.0
    for observation in history:
        if health.state is Health.FROZEN:
            return
        health = after(health, observation)
        passed = 0.0 if observation[0] == "life" else passed + observation[1]
        assert health.silent_s <= passed + 1e-6


@given(st.lists(st.floats(0.1, 60.0), min_size=1, max_size=500))
def test_starved_server_is_never_frozen(pauses) -> None:
    """One that had no CPU for nearly all of the time, however long."""
    health = FRESH
    for pause in pauses:
        health = health.silence(health.observed_at + pause, Effort(worked_s=0.0, starved_s=pause))
    assert health.state is Health.SUSPECTED


@pytest.mark.parametrize(("effort_per_s", "limit_s"), [
    ((0.0, 0.0), 30.0), ((0.03, 0.0), 31.0), ((0.0, 0.5), 60.0), ((0.03, 0.9), 430.0), ((1.0, 0.0), 300.0),
    ((math.inf, 0.0), 300.0)], ids=["stopped", "idles", "half starved", "idles, starved", "spins", "sleeps on a disk"])
def test_silent_server_is_frozen_when_its_waiting_or_work_reaches_the_limit(effort_per_s, limit_s) -> None:
    health = FRESH
    while health.state is not Health.FROZEN:
        health = health.silence(health.observed_at + 1.0, Effort(*effort_per_s))
        assert health.observed_at <= limit_s + 1.0
    assert health.observed_at >= limit_s - 1.0


def test_one_long_gap_of_the_observer_condemns_nobody() -> None:
    """The machine was suspended, observer and server together."""
    health = FRESH.silence(5.0, Effort()).silence(4000.0, Effort())
    assert health.state is Health.SUSPECTED and health.waited_s == 20.0
    assert health.sign_of_life(4001.0).state is Health.HEALTHY


def test_first_unanswered_probe_only_suspects() -> None:
    assert FRESH.silence(1e6, Effort(math.inf)).state is Health.SUSPECTED


def test_time_that_was_skipped_counts_for_nothing() -> None:
    health = FRESH.silence(1.0, Effort()).skip(1000.0)
    assert health.silence(1001.0, Effort()).waited_s == 2.0


def test_limits_that_contradict_each_other_are_refused() -> None:
    for change in ({"gap_s": 30.0}, {"working_s": 29.0}, {"gap_s": 0.0}):
        with pytest.raises(ValueError, match="gap_s"):
            dataclasses.replace(LIMITS, **change)
