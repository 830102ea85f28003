"""What a rank says of the cost of its work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.trainer.work import WorkMeter, in_flight

COSTS = [1.0, 20.0, 300.0, 4000.0]


@pytest.mark.parametrize(("stages", "stated"), [
    (1, [1.0, 1.0, 20.0, 300.0, 4000.0]),
    (2, [1.0, 21.0, 321.0, 4320.0, 4300.0]),
    (9, [4321.0] * 5)])
def test_stage_states_what_the_others_may_make_it_wait_for(stages: int, stated: list[float]) -> None:
    assert [in_flight(COSTS, number, stages) for number in range(-1, 4)] == stated
    assert in_flight([], -1, stages) == 0.0, "a replica without samples"


def test_rate_is_that_of_the_work_that_was_done() -> None:
    meter = WorkMeter()
    assert meter.stated(5.0).s_per_flop == 0.0
    meter.begin(1.0, 0.0)  # takes a hundred seconds, in which kernels are compiled
    meter.begin(10.0, 100.0)
    assert meter.stated(5.0).s_per_flop == 0.0, "none has ended"
    meter.begin(30.0, 105.0)
    assert meter.stated(7.0).flops == 7.0 and meter.stated(7.0).s_per_flop == pytest.approx(0.5)
    meter.end(120.0)
    meter.end(500.0)  # the time between two passes is nobody's
    assert meter.stated(1.0).s_per_flop == pytest.approx((0.98 * 5 + 15) / (0.98 * 10 + 30))


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=30), st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_rate_follows_a_rank_that_becomes_slower(costs: list[float], before: float, after: float) -> None:
    meter, now = WorkMeter(), 0.0
    meter.begin(1.0, now)
    for rate, cost in (*((before, cost) for cost in costs), *[(after, 1e6)] * 400):
        meter.begin(cost, now)
        now += rate * cost
    meter.end(now)
    assert meter.stated(1.0).s_per_flop == pytest.approx(after, rel=0.01, abs=before * 0.01)
