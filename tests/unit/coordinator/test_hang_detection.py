"""Hang detection: by the member's own clock and the learned progress intervals."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.membership.hang_detection import HangLimits, IntervalLearner, limit_s, pace
from elastic_rl.coordinator.records import ProgressIntervals
from elastic_rl.etcd.records import Member, StatedWork

LIMITS = HangLimits(factor=10.0, floor_s=5.0, ceiling_s=100.0)


def at(progress_at: float, beat_at: float, phase: str = "train", incarnation: str = "a", n: int = 0,
       work: StatedWork | None = None) -> Member:
    return Member(role="trainer", id=f"rank-{n}", pid=1, host="h", incarnation=incarnation, phase=phase,
                  progress_at=progress_at, beat_at=beat_at, work=work)


def is_hung(member: Member, intervals: Mapping[str, ProgressIntervals], limits: HangLimits, load: float = 0.0) -> bool:
    return pace(member, intervals, limits, load).hung


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


def worked(micro_batches: list[tuple[float, float]]) -> IntervalLearner:
    """A rank that has done micro-batches of so many operations, each in so many seconds, and states them."""
    learner, now, rate = IntervalLearner({}), 0.0, 0.0
    for flops, seconds in micro_batches:
        learner.observe([at(now, now, work=StatedWork(flops=flops, s_per_flop=rate))])
        now, rate = now + seconds, seconds / flops
    learner.observe([at(now, now, work=StatedWork(flops=1.0, s_per_flop=rate))])
    return learner


def test_one_long_sequence_after_many_short_ones_is_not_hung() -> None:
    """Short ones take 2 s and so have a limit of 20 s; a sequence of 50 times the work is expected to take 100 s, far
    above what is ever learned."""
    intervals = worked([(1e12, 2.0)] * 50).intervals
    long = StatedWork(flops=50e12, s_per_flop=2e-12)
    assert is_hung(at(0.0, 21.0), intervals, LIMITS), "the limit without stated work"
    assert not is_hung(at(0.0, 999.0, work=long), intervals, LIMITS)
    assert is_hung(at(0.0, 1001.0, work=long), intervals, LIMITS)


def test_hang_in_long_work_is_found_within_a_bound_after_its_expected_end() -> None:
    """A hang in a sequence that takes an hour is not found only after ten."""
    intervals = worked([(1e12, 2.0)] * 50).intervals
    long = StatedWork(flops=1800e12, s_per_flop=2e-12)
    assert not is_hung(at(0.0, 3600.0 + LIMITS.factor * LIMITS.ceiling_s - 1.0, work=long), intervals, LIMITS)
    assert is_hung(at(0.0, 3600.0 + LIMITS.factor * LIMITS.ceiling_s + 1.0, work=long), intervals, LIMITS)


@given(flops=st.floats(1e6, 1e18), usual=st.floats(1e6, 1e18), seconds=st.floats(0.01, 60), slowness=st.floats(0.1, 10))
def test_work_within_the_factor_of_its_expected_time_is_never_hung(flops: float, usual: float, seconds: float,
                                                                   slowness: float) -> None:
    """Whatever was usual before, and whoever is up to ten times slower than that, up to ten ceilings."""
    intervals, stated = worked([(usual, seconds)] * 4).intervals, StatedWork(flops=flops, s_per_flop=seconds / usual)
    expected = flops * seconds / usual
    took = min(slowness * expected, expected + 10 * LIMITS.ceiling_s)
    assert not is_hung(at(0.0, took * 0.999, work=stated), intervals, LIMITS)


def test_rank_without_a_rate_of_its_own_has_that_of_the_slowest_of_its_role() -> None:
    learner = IntervalLearner({})
    learner.observe([at(0.0, 0.0, n=n, work=StatedWork(flops=1.0, s_per_flop=rate)) for n, rate in
                     enumerate((3.0, 1.0, 0.0))])
    fresh = at(0.0, 299.0, n=2, work=StatedWork(flops=10.0))
    assert not is_hung(fresh, learner.intervals, LIMITS)
    assert is_hung(fresh.replace(beat_at=301.0), learner.intervals, LIMITS)
    slow = StatedWork(flops=10.0, s_per_flop=5.0)
    assert not is_hung(at(0.0, 499.0, work=slow), learner.intervals, LIMITS), "its own rate, which is slower"


def test_stated_work_without_any_rate_has_the_ceiling_and_not_what_was_usual_for_other_work() -> None:
    intervals = watched([1.0] * 5).intervals
    assert limit_s(intervals["trainer"], "train", LIMITS) == pytest.approx(10.0)
    assert limit_s(intervals["trainer"], "train", LIMITS, StatedWork(flops=1e15)) == 100.0


def test_rate_of_a_role_is_stored_when_it_has_changed_much_and_known_to_the_next_leader() -> None:
    learner, writes = IntervalLearner({}), list[ProgressIntervals]()
    for now, rate in enumerate((1.0, 1.1, 0.9, 1.2, 4.0)):
        writes += learner.observe([at(0.0, float(now), work=StatedWork(flops=1.0, s_per_flop=rate))])
    assert [w.s_per_flop for w in writes] == [1.0, 4.0]
    assert limit_s(writes[-1], "train", LIMITS, StatedWork(flops=100.0)) == 400.0 + 1000.0


def test_member_is_late_before_it_is_hung_and_says_what_was_expected() -> None:
    intervals = worked([(1.0, 2.0)] * 5).intervals
    def found(seconds: float) -> str:
        return pace(at(0.0, seconds, work=StatedWork(flops=10.0, s_per_flop=2.0)), intervals, LIMITS).late
    assert not found(99.0)
    assert found(101.0) == ("101 s without progress, of 20 s that were expected; it counts as hung after 200 s")
    assert not pace(at(0.0, 1e6, "waiting for the other ranks"), intervals, LIMITS).late
