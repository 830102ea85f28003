"""How long a run that was stopped is waited for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.driver.stop_window import StopWindow
from elastic_rl.etcd.records import ENDED_PHASES, WORKING_PHASES

PHASES = (None, "", "starting", *WORKING_PHASES, *ENDED_PHASES)


@settings(max_examples=seeds(40))
@given(st.floats(0, 600), st.lists(st.tuples(st.floats(0, 100), st.sampled_from(PHASES), st.booleans()), max_size=20))
def test_run_is_waited_for_until_its_limit_unless_etcd_says_that_there_is_nothing_to_commit(
        limit_s: float, looks: list[tuple[float, str | None, bool]]) -> None:
    """Each look is so many seconds after the one before; etcd may not answer it, and the stop may be seen again."""
    window, now, began = StopWindow(limit_s), 1000.0, 1000.0
    window.begin(began)
    for seconds, phase, again in looks:
        now += seconds
        if again:
            window.begin(now)
        nothing = phase in ("", "starting")
        assert window.is_over(now, phase) == (now >= began + limit_s or nothing)


def test_run_that_was_not_stopped_has_no_limit() -> None:
    assert not StopWindow(0.0).is_over(1e9, None) and not StopWindow(0.0).is_over(1e9, "rl")
