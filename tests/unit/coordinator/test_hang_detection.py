"""Hang detection: by the member's own clock and the learned progress intervals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.membership.hang_detection import HangLimits, IntervalLearner, is_hung, limit_s
from elastic_rl.coordinator.records import ProgressIntervals
from elastic_rl.etcd.records import Member

LIMITS = HangLimits(factor=10.0, floor_s=5.0, ceiling_s=100.0)


def at(progress_at: float, beat_at: float, phase: str = "train", incarnation: str = "a", n: int = 0) -> Member:
    return Member(role="trainer", id=f"rank-{n}", pid=1, host="h", incarnation=incarnation, phase=phase,
                  progress_at=progress_at, beat_at=beat_at)


def watched(gaps: list[float], phase: str = "train") -> IntervalLearner:
    learner, now = IntervalLearner({}), 0.0
    for gap in [0.0, *gaps]:
        now += gap
        learner.observe([at(now, now, phase)])
    return learner


@pytest.mark.parametrize(("usual", "limit"), [(0.1, 5.0), (2.0, 20.0), (50.0, 100.0)])
def test_limit_is_a_multiple_of_the_usual_interval_between_floor_and_ceiling(usual: float, limit: float) -> None:
    assert limit_s(watched([usual] * 3).intervals["trainer"], "train", LIMITS) == pytest.approx(limit)


def test_unknown_phase_has_only_the_ceiling() -> None:
    learner = watched([1.0, 1.0])
    assert limit_s(learner.intervals["trainer"], "train", LIMITS) == 100.0
    assert limit_s(learner.intervals["trainer"], "another", LIMITS) == 100.0
    assert limit_s(None, "train", LIMITS) == 100.0


def test_member_without_progress_is_hung_whatever_the_leaders_clock_says() -> None:
    intervals = watched([1.0] * 3).intervals
    for clock in (0.0, 1e9, -1e9):
        assert not is_hung(at(clock, clock + 9.0), intervals, LIMITS)
        assert is_hung(at(clock, clock + 11.0), intervals, LIMITS)


@pytest.mark.parametrize("phase", ["", "idle", "finished", "waiting for the trainer"])
def test_idle_member_is_never_hung(phase: str) -> None:
    assert not is_hung(at(0.0, 1e6, phase), watched([1.0] * 3, phase).intervals, LIMITS)


def test_new_incarnation_teaches_nothing() -> None:
    learner = IntervalLearner({})
    learner.observe([at(0.0, 0.0)])
    learner.observe([at(500.0, 500.0, incarnation="b")])
    assert learner.intervals == {}


def test_intervals_are_stored_rarely_and_known_to_the_next_leader() -> None:
    learner = IntervalLearner({})
    stored: dict[str, ProgressIntervals] = {}
    now, writes = 0.0, 0
    for _ in range(200):
        now += 1.0
        changed = learner.observe([at(now, now)])
        writes += len(changed)
        stored |= {p.role: p for p in changed}
    assert writes <= 5, "steady work is not stored again"
    assert limit_s(IntervalLearner(stored).intervals["trainer"], "train", LIMITS) == pytest.approx(10.0)


def test_one_slow_step_fades() -> None:
    learner = watched([9.0] + [1.0] * 200)
    assert limit_s(learner.intervals["trainer"], "train", LIMITS) == pytest.approx(10.0)


def test_limit_grows_with_the_machines_load_up_to_a_bound() -> None:
    intervals = watched([1.0] * 3).intervals  # 10 s
    for load, limit in ((0.0, 10.0), (0.5, 10.0), (2.5, 25.0), (100.0, 40.0)):
        assert not is_hung(at(0.0, limit), intervals, LIMITS, load)
        assert is_hung(at(0.0, limit + 0.1), intervals, LIMITS, load)


@given(gaps=st.lists(st.floats(0.01, 50.0), min_size=3, max_size=60))
def test_progress_within_the_factor_is_never_a_hang(gaps: list[float]) -> None:
    """Each interval is at most the factor times the shortest one seen, so none of them may be a hang."""
    low = min(gaps)
    gaps = [min(g, low * LIMITS.factor) for g in gaps]
    learner, now = IntervalLearner({}), 0.0
    learner.observe([at(now, now)])
    for gap in gaps:
        assert not is_hung(at(now, now + gap), learner.intervals, LIMITS)
        now += gap
        learner.observe([at(now, now)])
