"""The driver's plan: what is started and drained to make a pool what the operator asked for."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.driver.plan import Running, StartBudget, plan
from elastic_rl.etcd.records import EngineState

STAYING = (EngineState.STARTING, EngineState.SYNCING, EngineState.READY)
engine_lists = st.lists(st.tuples(st.sampled_from(EngineState), st.floats(0, 1e6)), max_size=12).map(
    lambda pairs: [Running(f"e{i}", state, at) for i, (state, at) in enumerate(pairs)])


@given(engine_lists, st.integers(0, 12))
def test_after_the_plan_exactly_the_desired_number_stays(engines, desired):
    todo = plan(desired, engines, may_start=64)
    staying = {e.id for e in engines if e.state in STAYING}
    assert len(staying - set(todo.drain)) + todo.start == desired
    assert set(todo.drain) <= staying
    assert not (todo.start and todo.drain)


@given(engine_lists, st.integers(0, 12))
def test_a_ready_engine_is_never_drained_while_one_that_serves_nothing_stays(engines, desired):
    drained = set(plan(desired, engines, may_start=64).drain)
    kept_idle = [e for e in engines if e.state in STAYING and e.state is not EngineState.READY and e.id not in drained]
    drained_ready = [e for e in engines if e.id in drained and e.state is EngineState.READY]
    assert not (kept_idle and drained_ready)


def test_a_closed_budget_starts_nothing_but_still_drains():
    young = Running("young", EngineState.READY, 2.0)
    assert plan(3, [young], may_start=0).start == 0
    assert plan(0, [young], may_start=0).drain == ("young",)


def test_each_failure_doubles_the_wait_up_to_the_ceiling_and_a_success_opens_at_once():
    budget = StartBudget()
    waits = []
    for _ in range(10):
        budget = budget.after_failure(100.0)
        waits.append(budget.not_before - 100.0)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0] and max(waits) == 60.0
    assert not budget.open(100.0) and budget.after_success().open(0.0)
