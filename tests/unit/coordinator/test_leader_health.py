"""When a leader whose passes fail resigns, under a virtual clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock

from elastic_rl.coordinator.election.leader_health import MAX_TOLERANCE_S, LeaderHealth

DEADLINE_S = 30.0


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def health(clock: Clock) -> LeaderHealth:
    return LeaderHealth(DEADLINE_S, clock)


def failed_pass(health: LeaderHealth, error: str = "ValueError: a bug", **more: bool) -> None:
    health.pass_began()
    health.pass_failed(error, **more)


def test_leader_is_healthy_until_no_pass_succeeded_for_the_deadline(health: LeaderHealth, clock: Clock) -> None:
    health.leading(True)
    clock.now += DEADLINE_S
    failed_pass(health)
    assert not health.problem() and not health.reason_to_resign()
    clock.now += 1.0
    assert "a bug" in health.problem() and health.problem() == health.reason_to_resign()
    health.pass_began()
    health.pass_succeeded()
    assert not health.problem() and not health.reason_to_resign()


def test_replica_that_does_not_lead_has_no_problem(health: LeaderHealth, clock: Clock) -> None:
    clock.now += 1e6
    assert not health.problem() and not health.reason_to_resign() and health.may_lead()
    health.leading(True)
    assert not health.problem(), "a term begins healthy"


def test_hanging_pass_ends_the_term_and_keeps_the_replica_out(health: LeaderHealth, clock: Clock) -> None:
    health.leading(True)
    health.pass_began()
    clock.now += DEADLINE_S + 1.0
    assert "does not return" in health.reason_to_resign() and health.may_lead()
    health.resigned()
    clock.now += 1e6
    assert not health.may_lead()
    health.pass_failed("Fenced")
    assert health.may_lead()


def test_leader_stays_when_no_other_replica_could_do_better(health: LeaderHealth, clock: Clock) -> None:
    health.leading(True)
    clock.now += 1e6
    failed_pass(health, "EtcdFull", stays=True)
    assert "EtcdFull" in health.problem() and not health.reason_to_resign()
    failed_pass(health)
    assert health.reason_to_resign()


@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 4), broken=st.sampled_from(["all", "all but one", "none"]))
def test_broken_replicas_leave_the_leadership_to_a_sound_one(seed: int, replicas: int, broken: str) -> None:
    """A day of a cluster in which all, all but one, or none of the replicas fail every pass."""
    rng, clock = random.Random(seed), Clock(1000.0)
    all_health = [LeaderHealth(DEADLINE_S, clock) for _ in range(replicas)]
    sound = {"all": set(), "all but one": {rng.randrange(replicas)}, "none": set(range(replicas))}[broken]
    leader, changes, end = 0, [], clock.now + 24 * 3600.0
    all_health[leader].leading(True)
    while clock.now < end:
        clock.now += rng.uniform(0.5, 10.0)
        health = all_health[leader]
        health.pass_began()
        if leader in sound:
            health.pass_succeeded()
        else:
            health.pass_failed("a bug")
        if health.reason_to_resign():
            health.resigned()
            health.leading(False)
            leader = (leader + 1) % replicas
            all_health[leader].leading(True)
            changes.append(clock.now)
    if broken == "all":
        per_replica = 6 + 24 * 3600.0 / MAX_TOLERANCE_S
        assert replicas <= len(changes) <= per_replica + 6 * replicas, "each replica has its turn, without a storm"
    else:
        assert leader in sound and len(changes) < replicas
