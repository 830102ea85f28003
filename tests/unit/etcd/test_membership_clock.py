"""Progress of a member under a clock that is set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd.membership import progress_time

SECONDS = st.floats(0, 1e5)


@given(SECONDS, st.floats(-1e6, 1e6))
def test_stall_is_the_same_after_the_clock_is_set(stalled_s: float, step_s: float) -> None:
    progress_at = 1e9
    now = progress_at + stalled_s + step_s
    assert abs(now - progress_time(progress_at, now, stalled_s) - stalled_s) <= 1.001


@given(SECONDS)
def test_time_of_the_last_progress_stays_while_the_clock_runs_on(stalled_s: float) -> None:
    assert progress_time(1e9, 1e9 + stalled_s, stalled_s) == 1e9
