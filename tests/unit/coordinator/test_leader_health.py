"""When a leader whose passes fail resigns, under a virtual clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock

from elastic_rl.coordinator.election.leader_health import MAX_TOLERANCE_S, LeaderHealth

DEADLINE_S = 30.0
JOB = "job j"


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def health(clock: Clock) -> LeaderHealth:
    made = LeaderHealth(DEADLINE_S, clock)
    made.expect(JOB)
    return made


def failed_pass(health: LeaderHealth, error: str = "ValueError: a bug", *, of: str = JOB, **more: bool) -> None:
    health.pass_began(of)
    health.pass_failed(of, error, **more)


def test_leader_is_healthy_until_no_pass_succeeded_for_the_deadline(health: LeaderHealth, clock: Clock) -> None:
    health.leading(True)
    clock.now += DEADLINE_S
    failed_pass(health)
    assert not health.problem() and not health.reason_to_resign()
    clock.now += 1.0
    assert "a bug" in health.problem() and health.problem() == health.reason_to_resign()
    health.pass_began(JOB)
    health.pass_succeeded(JOB)
    assert not health.problem() and not health.reason_to_resign()


def test_replica_that_does_not_lead_has_no_problem(health: LeaderHealth, clock: Clock) -> None:
    clock.now += 1e6
    assert not health.problem() and not health.reason_to_resign() and health.may_lead()
    health.leading(True)
    assert not health.problem(), "a term begins healthy"


def test_hanging_pass_ends_the_term_and_keeps_the_replica_out(health: LeaderHealth, clock: Clock) -> None:
    health.leading(True)
    health.pass_began(JOB)
    clock.now += DEADLINE_S + 1.0
    assert "does not return" in health.reason_to_resign() and health.may_lead()
    health.resigned()
    clock.now += 1e6
    assert not health.may_lead()
    health.pass_failed(JOB, "Fenced")
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
    for each in all_health:
        each.expect(JOB)
    sound = {"all": set(), "all but one": {rng.randrange(replicas)}, "none": set(range(replicas))}[broken]
    leader, changes, end = 0, [], clock.now + 24 * 3600.0
    all_health[leader].leading(True)
    while clock.now < end:
        clock.now += rng.uniform(0.5, 10.0)
        health = all_health[leader]
        health.pass_began(JOB)
        if leader in sound:
            health.pass_succeeded(JOB)
        else:
            health.pass_failed(JOB, "a bug")
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


def test_each_loop_of_a_leader_must_succeed_and_is_tolerated_by_its_own_measure(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    health.expect("good")
    health.expect("bad")
    health.leading(True)
    resigned = []
    for _ in range(int(8 * DEADLINE_S)):
        clock.now += 1.0
        health.pass_began("good")
        health.pass_succeeded("good")
        failed_pass(health, of="bad")
        if reason := health.reason_to_resign():
            assert "pass of bad" in reason and "good" not in reason
            resigned.append(clock.now)
            health.resigned()
            health.leading(True)
    first, second, third = resigned
    assert second - first > 1.5 * (DEADLINE_S + 1) and third - second > 1.5 * (second - first)
    health.ended("bad")
    clock.now += DEADLINE_S
    assert not health.problem() and not health.reason_to_resign()


def test_leader_is_of_use_while_one_loop_of_several_succeeds(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    for loop in ("one", "two"):
        health.expect(loop)
    health.leading(True)
    clock.now += DEADLINE_S + 1.0
    failed_pass(health, "a bug", of="one")
    health.pass_began("two")
    health.pass_succeeded("two")
    assert not health.problem() and health.problem_of("one") == "a bug" and not health.problem_of("two")
    clock.now += DEADLINE_S + 1.0
    failed_pass(health, "another bug", of="two")
    assert "pass of one" in health.problem() and "pass of two" in health.problem()


def test_leader_is_of_no_use_without_an_essential_loop(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    health.expect("the cluster", essential=True)
    health.expect(JOB)
    health.leading(True)
    clock.now += DEADLINE_S + 1.0
    failed_pass(health, of="the cluster")
    health.pass_began(JOB)
    health.pass_succeeded(JOB)
    assert "the cluster" in health.problem() and JOB not in health.problem()


def test_problem_of_a_loop_is_that_of_its_last_pass_and_stays_the_same(health: LeaderHealth, clock: Clock) -> None:
    failed_pass(health)
    assert not health.problem_of(JOB), "it does not lead"
    health.leading(True)
    assert not health.problem_of(JOB), "a term begins healthy"
    failed_pass(health)
    first = health.problem_of(JOB)
    assert "a bug" in first, "at once"
    clock.now += 1e3
    health.pass_began(JOB)
    assert health.problem_of(JOB) == first
    health.pass_succeeded(JOB)
    assert not health.problem_of(JOB)
    health.pass_began(JOB)
    clock.now += DEADLINE_S + 1.0
    assert health.problem_of(JOB) == "a pass does not return" and not health.problem_of("unknown")


def test_pass_of_any_loop_that_hangs_keeps_the_replica_out(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    for loop in ("one", "two"):
        health.expect(loop)
    health.leading(True)
    health.pass_began("one")
    clock.now += DEADLINE_S + 1.0
    assert "pass of one" in health.reason_to_resign()
    health.resigned()
    health.pass_began("two")
    health.pass_succeeded("two")
    assert not health.may_lead()
    health.pass_succeeded("one")
    assert health.may_lead()


def test_loop_that_has_ended_is_not_brought_back_by_its_last_pass(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    health.expect("gone")
    health.leading(True)
    health.pass_began("gone")
    health.ended("gone")
    health.pass_failed("gone", "late")
    clock.now += 1e6
    assert not health.problem() and health.may_lead()


def test_cause_that_no_replica_could_help_spares_its_own_loop_alone(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    for loop in ("full", "bad"):
        health.expect(loop)
    health.leading(True)
    clock.now += DEADLINE_S + 1.0
    failed_pass(health, "EtcdFull", of="full", stays=True)
    health.pass_began("bad")
    health.pass_succeeded("bad")
    assert not health.reason_to_resign()
    clock.now += DEADLINE_S + 1.0
    failed_pass(health, "a bug", of="bad")
    assert "pass of bad" in health.reason_to_resign() and "full" not in health.reason_to_resign()
    health.resigned()
    health.leading(True)
    assert not health.problem(), "a term begins healthy"
    clock.now += DEADLINE_S + 1.0
    failed_pass(health, "a bug", of="full")
    assert "pass of full" in health.reason_to_resign(), "this loop is tolerated for no longer than before"
    assert "bad" not in health.reason_to_resign()


def test_loop_that_is_expected_again_keeps_what_is_known_of_it(clock: Clock) -> None:
    health = LeaderHealth(DEADLINE_S, clock)
    health.expect("bad")
    health.leading(True)
    clock.now += DEADLINE_S + 1.0
    health.expect("bad")
    assert health.reason_to_resign()
