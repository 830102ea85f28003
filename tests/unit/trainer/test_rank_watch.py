"""Which stopped ranks count as lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.host.processes import StoppedProcesses

LIMIT_S = 3.0


def test_rank_that_stays_stopped_is_lost_after_the_limit() -> None:
    ranks = StoppedProcesses(LIMIT_S)
    assert ranks.lost(0.0, [10]) == [] and ranks.lost(2.9, [10, 11]) == []
    assert ranks.lost(3.0, [10, 11]) == [10]
    assert ranks.lost(6.0, [10, 11]) == [10, 11]


def test_rank_that_continues_in_time_is_left_alone() -> None:
    ranks = StoppedProcesses(LIMIT_S)
    assert ranks.lost(0.0, [10]) == [] and ranks.lost(2.0, []) == []
    assert ranks.lost(4.0, [10]) == [], "the time it was stopped before does not count"


@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.sets(st.integers(1, 4))), max_size=30))
def test_rank_is_lost_exactly_when_every_look_within_the_limit_found_it_stopped(
        looks: list[tuple[float, set[int]]]) -> None:
    ranks, now, history = StoppedProcesses(LIMIT_S), 0.0, list[tuple[float, set[int]]]()
    for pause, stopped in looks:
        now += pause
        history.append((now, stopped))
        for pid in range(1, 5):
            run = []
            for at, found in reversed(history):
                if pid not in found:
                    break
                run.append(at)
            expected = bool(run) and now - run[-1] >= LIMIT_S
            if pid == 1:
                lost = ranks.lost(now, stopped)
            assert (pid in lost) == expected
