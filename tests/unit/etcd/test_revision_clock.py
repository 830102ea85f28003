"""Ages of revisions are lower bounds, near the truth, in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd import revision_clock
from elastic_rl.etcd.revision_clock import RevisionClock


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=200), st.integers(0, 2000))
def test_ages_are_lower_bounds(steps: list[tuple[int, int]], age: int) -> None:
    now, revision = Now(), 1
    clock = RevisionClock(now)
    written: dict[int, float] = {}
    for pause, writes in steps:
        for _ in range(writes):
            revision += 1
            written[revision] = now.s
        now.s += pause
        clock.observe(revision)
    old = clock.newest_at_least(age)
    assert old == 0 or old not in written or now.s - written[old] >= age


def test_age_is_that_of_the_first_note_at_or_after_the_revision() -> None:
    now = Now()
    clock = RevisionClock(now)
    clock.observe(10)
    now.s += 60
    clock.observe(20)
    now.s += 5
    assert clock.newest_at_least(65) == 10 == clock.newest_at_least(6) and clock.newest_at_least(5) == 20
    assert clock.newest_at_least(66) == 0


def test_long_run_needs_bounded_memory_and_keeps_its_precision() -> None:
    now = Now()
    clock = RevisionClock(now)
    for revision in range(1, 100_000):
        now.s += 1
        clock.observe(revision)
    assert len(clock._notes) <= revision_clock._MAX_NOTES
    for age in (10, 300, 5_000, 50_000):
        revision = 99_999 - age
        assert revision - 0.12 * age <= clock.newest_at_least(age) <= revision


def test_older_revision_starts_the_clock_over() -> None:
    now = Now()
    clock = RevisionClock(now)
    clock.observe(1000)
    now.s += 600
    clock.observe(5)  # restored from a backup
    assert clock.newest_at_least(0) == 5 and clock.newest_at_least(1) == 0
