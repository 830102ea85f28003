"""The driver's plan: which engines are started and drained so that a pool has the desired number."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.driver.plan import Running, StartBudget, plan
from elastic_rl.etcd.records import EngineState

STAYING = (EngineState.STARTING, EngineState.SYNCING, EngineState.READY)
engine_lists = st.lists(st.tuples(st.sampled_from(EngineState), st.floats(0, 1e6)), max_size=12).map(
    lambda pairs: [Running(f"e{i}", state, at) for i, (state, at) in enumerate(pairs)])


@given(engine_lists, st.integers(0, 12))
def test_plan_leaves_exactly_the_desired_number_of_engines(engines, desired):
    todo = plan(desired, engines, may_start=64)
    staying = {e.id for e in engines if e.state in STAYING}
    assert len(staying - set(todo.drain)) + todo.start == desired
    assert set(todo.drain) <= staying
    assert not (todo.start and todo.drain)


@given(engine_lists, st.integers(0, 12))
def test_plan_drains_ready_engines_last(engines, desired):
    drained = set(plan(desired, engines, may_start=64).drain)
    kept_idle = [e for e in engines if e.state in STAYING and e.state is not EngineState.READY and e.id not in drained]
    drained_ready = [e for e in engines if e.id in drained and e.state is EngineState.READY]
    assert not (kept_idle and drained_ready)


def test_plan_without_start_budget_still_drains():
    young = Running("young", EngineState.READY, 2.0)
    assert plan(3, [young], may_start=0).start == 0
    assert plan(0, [young], may_start=0).drain == ("young",)


def test_start_budget_doubles_the_wait_up_to_a_ceiling_and_resets_on_success():
    budget = StartBudget()
    waits = []
    for _ in range(10):
        budget = budget.after_failure(100.0)
        waits.append(budget.not_before - 100.0)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0] and max(waits) == 60.0
    assert not budget.open(100.0) and budget.after_success().open(0.0)


def test_start_budget_keeps_its_ceiling_after_thousands_of_failures():
    budget = StartBudget(failures=5000).after_failure(100.0)
    assert (budget.failures, budget.not_before) == (5001, 160.0)
