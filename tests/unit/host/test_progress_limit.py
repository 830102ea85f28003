"""A limit on time without progress: slow work never reaches it, stalled work does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock

from elastic_rl.runtime.waiting import ProgressLimit


def limit(limit_s: float = 60.0, **steps: float) -> tuple[ProgressLimit, Clock]:
    clock = Clock()
    return ProgressLimit(limit_s, steps=steps, clock=clock), clock


@given(st.lists(st.tuples(st.floats(0.0, 29.0), st.integers(0, 5)), max_size=200))
def test_stalled_time_is_that_since_the_last_growth(turns) -> None:
    checked, clock = limit()
    checked.update({"bytes": 0})
    value, since = 0, 0.0
    for elapsed, growth in turns:
        clock.now += elapsed
        value += growth
        assert checked.update({"bytes": value}) == (growth > 0)
        since = 0.0 if growth else since + elapsed
        assert abs(checked.stalled_s - since) < 1e-6 and checked.expired == (checked.stalled_s >= 60.0)


def test_slow_work_is_never_too_late() -> None:
    checked, clock = limit(cpu_s=0.5)
    for tick in range(10_000):
        clock.now += 10.0
        checked.update({"cpu_s": tick * 0.15})  # 1.5% of a CPU
        assert not checked.expired


def test_growth_below_its_step_is_no_progress_until_it_adds_up() -> None:
    checked, clock = limit(1000.0, cpu_s=0.5)
    found = []
    for tick in range(11):
        clock.now += 1.0
        found.append(checked.update({"cpu_s": tick * 0.1}))
    assert found == [False] * 5 + [True] + [False] * 4 + [True]


def test_any_of_the_numbers_is_enough() -> None:
    checked, clock = limit()
    for tick in range(100):
        clock.now += 20.0
        checked.update({"cpu_s": 5.0, "log_bytes": tick})
        assert not checked.expired


def test_number_that_falls_counts_from_where_it_fell_to() -> None:
    """A process of the tree ended, and took its CPU time with it."""
    checked, _ = limit(cpu_s=1.0)
    assert [checked.update({"cpu_s": v}) for v in (50.0, 3.0, 3.5, 4.0)] == [False, False, False, True]


def test_gap_of_the_caller_counts_for_little() -> None:
    checked, clock = limit()
    checked.update({"x": 1})
    clock.now += 1e6
    checked.update({"x": 1})
    assert checked.stalled_s == 30.0 and not checked.expired
