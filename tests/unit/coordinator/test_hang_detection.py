"""How a hung member is told from a slow one: from its own two clocks and from what is usual."""

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
def test_the_limit_is_a_multiple_of_what_is_usual_between_floor_and_ceiling(usual: float, limit: float) -> None:
    assert limit_s(watched([usual] * 3).intervals["trainer"], "train", LIMITS) == pytest.approx(limit)


def test_before_three_signs_of_a_phase_only_the_ceiling_holds() -> None:
    learner = watched([1.0, 1.0])
    assert limit_s(learner.intervals["trainer"], "train", LIMITS) == 100.0
    assert limit_s(learner.intervals["trainer"], "another", LIMITS) == 100.0
    assert limit_s(None, "train", LIMITS) == 100.0


def test_who_beats_without_working_is_hung_whatever_the_leaders_clock_says() -> None:
    intervals = watched([1.0] * 3).intervals
    for clock in (0.0, 1e9, -1e9):
        assert not is_hung(at(clock, clock + 9.0), intervals, LIMITS)
        assert is_hung(at(clock, clock + 11.0), intervals, LIMITS)


@pytest.mark.parametrize("phase", ["", "idle", "finished", "waiting for the trainer"])
def test_who_is_at_rest_is_never_hung(phase: str) -> None:
    assert not is_hung(at(0.0, 1e6, phase), watched([1.0] * 3, phase).intervals, LIMITS)


def test_a_new_process_and_a_first_sight_teach_nothing() -> None:
    learner = IntervalLearner({})
    learner.observe([at(0.0, 0.0)])
    learner.observe([at(500.0, 500.0, incarnation="b")])
    assert learner.intervals == {}


def test_what_was_learned_is_kept_when_it_matters_and_taken_up_by_the_next_leader() -> None:
    learner = IntervalLearner({})
    kept: dict[str, ProgressIntervals] = {}
    now, writes = 0.0, 0
    for _ in range(200):
        now += 1.0
        news = learner.observe([at(now, now)])
        writes += len(news)
        kept |= {p.role: p for p in news}
    assert writes <= 5, "steady work is no news"
    assert limit_s(IntervalLearner(kept).intervals["trainer"], "train", LIMITS) == pytest.approx(10.0)


def test_one_slow_step_is_forgotten() -> None:
    learner = watched([9.0] + [1.0] * 200)
    assert limit_s(learner.intervals["trainer"], "train", LIMITS) == pytest.approx(10.0)


@given(gaps=st.lists(st.floats(0.01, 50.0), min_size=3, max_size=60))
def test_steady_work_within_the_factor_is_never_taken_for_a_hang(gaps: list[float]) -> None:
    """Each silence is at most the factor times the shortest one seen, so none of them may be a hang."""
    low = min(gaps)
    gaps = [min(g, low * LIMITS.factor) for g in gaps]
    learner, now = IntervalLearner({}), 0.0
    learner.observe([at(now, now)])
    for gap in gaps:
        assert not is_hung(at(now, now + gap), learner.intervals, LIMITS)
        now += gap
        learner.observe([at(now, now)])
