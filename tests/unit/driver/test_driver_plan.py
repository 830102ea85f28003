"""The driver's plan: which engines are started and drained so that a pool has the desired number, and when."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.driver.plan import Running, StartBudget, plan
from elastic_rl.etcd.records import EngineState

STAYING = (EngineState.STARTING, EngineState.SYNCING, EngineState.READY, EngineState.RELEASED)
engine_lists = st.lists(st.tuples(st.sampled_from(EngineState), st.floats(0, 1e6), st.booleans()), max_size=12).map(
    lambda found: [Running(f"e{i}", state, at, placed) for i, (state, at, placed) in enumerate(found)])
gaps = st.lists(st.floats(0, 200), min_size=1, max_size=40)


@given(engine_lists, st.integers(0, 12))
def test_plan_leaves_exactly_the_desired_number_of_engines(engines, desired):
    todo = plan(desired, engines, may_start=64)
    staying = {e.id for e in engines if e.state in STAYING}
    assert len(staying - set(todo.drain)) + todo.start == desired
    assert set(todo.drain) <= staying
    assert not (todo.start and todo.drain)


@given(engine_lists, st.integers(0, 12))
def test_plan_drains_engines_without_room_first_and_ready_ones_last(engines, desired):
    def worth(engine):
        return engine.placed, engine.state in (EngineState.READY, EngineState.RELEASED)

    drained = set(plan(desired, engines, may_start=64).drain)
    kept = [worth(e) for e in engines if e.state in STAYING and e.id not in drained]
    gone = [worth(e) for e in engines if e.id in drained]
    assert not kept or not gone or min(kept) >= max(gone)


leaving_lists = st.lists(st.tuples(st.sampled_from(STAYING), st.booleans()), max_size=12).map(
    lambda found: [Running(f"e{i}", state, float(i), leaves=leaves) for i, (state, leaves) in enumerate(found)])


def serving(engines, drained=()):
    return sum(e.state in (EngineState.READY, EngineState.RELEASED) and e.id not in drained for e in engines)


@given(leaving_lists, st.integers(0, 12))
def test_plan_replaces_engines_of_hosts_that_leave_before_it_drains_them(engines, desired):
    todo = plan(desired, engines, may_start=64)
    staying = [e for e in engines if not e.leaves]
    assert todo.start == max(0, desired - len(staying))
    assert serving(engines, todo.drain) >= min(desired, serving(engines)), "as many serve as may"
    idle = {e.id for e in engines if e.leaves and not serving([e])}
    assert idle <= set(todo.drain), "they have nothing to hand over"
    if serving(staying) >= desired:
        assert {e.id for e in engines if e.leaves} <= set(todo.drain)


@given(leaving_lists, st.integers(0, 12))
def test_plan_drains_engines_at_once_whose_host_has_no_time_left(engines, desired):
    hurries = [replace(e, hurries=e.leaves) for e in engines]
    assert {e.id for e in hurries if e.leaves} <= set(plan(desired, hurries, may_start=0).drain)


def test_plan_without_start_budget_still_drains():
    young = Running("young", EngineState.READY, 2.0)
    assert plan(3, [young], may_start=0).start == 0
    assert plan(3, [young], may_start=-1).start == 0
    assert plan(0, [young], may_start=0).drain == ("young",)


def test_start_budget_doubles_the_wait_up_to_a_ceiling():
    budget, waits = StartBudget(), []
    for _ in range(10):
        now = budget.not_before
        budget = budget.after_failure(now)
        waits.append(budget.not_before - now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_start_budget_remembers_no_more_failures_than_reach_its_ceiling():
    budget = StartBudget()
    for _ in range(5000):
        budget = budget.after_failure(budget.not_before)
    assert budget.not_before - budget.failed_at == 60
    # So that a cause that is fixed is forgotten within minutes, however long it lasted.
    assert budget.failures(budget.not_before + 8 * budget.refill_s) == 0


def test_start_budget_takes_a_failure_back_for_each_minute_without_one():
    budget = StartBudget()
    for _ in range(4):
        budget = budget.after_failure(budget.not_before)
    at = budget.not_before
    assert [budget.failures(at + s) for s in (0, 59, 60, 125, 240, 1e6)] == [4, 4, 3, 2, 0, 0]
    assert budget.after_failure(at + 125).not_before == at + 125 + 4, "as the third failure"


def test_starts_that_began_before_the_last_failure_count_with_it():
    """Four engines that are started together and fail one after the other are one reason to wait, not four."""
    together = StartBudget().after_failure(100.0, started_at=0.0)
    for now in (100.1, 101.0, 150.0):
        together = together.after_failure(now, started_at=0.0)
    assert together == StartBudget().after_failure(100.0)
    assert together.after_failure(151.0, started_at=102.0).failures(151.0) == 2


@given(gaps, st.floats(0, 1))
def test_start_budget_always_opens_again_within_its_ceiling(waits, jitter):
    budget, now = StartBudget(), 0.0
    for wait in waits:
        now += wait
        budget = budget.after_failure(now, jitter=jitter)
        assert now + 0.74 * budget.base_s < budget.not_before <= now + budget.ceiling_s
        assert not budget.open(now) and budget.open(now + budget.ceiling_s)


@given(gaps, st.floats(0, 1e5))
def test_start_budget_never_waits_longer_for_more_time_without_failures(waits, later):
    budget, now = StartBudget(), 0.0
    for wait in waits:
        now = max(now + wait, budget.not_before)
        budget = budget.after_failure(now)
    at_once = budget.after_failure(budget.not_before)
    after = budget.after_failure(budget.not_before + later)
    assert after.not_before - after.failed_at <= at_once.not_before - at_once.failed_at + 1e-6
