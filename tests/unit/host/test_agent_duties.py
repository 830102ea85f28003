"""What a host agent does about singletons, step by step and in any state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.cluster_records import Assignment
from elastic_rl.host.agent import duties
from elastic_rl.host.agent.duties import (
    Action,
    Adopt,
    AgentLease,
    KnownOrders,
    LocalSingleton,
    Order,
    Start,
    Stop,
    Wait,
)

TIMES = HostTimes(lease_ttl_s=9.0, start_margin_s=3.0)
HELD = AgentLease(renewed_at=100.0, granted_at=50.0)
NAME = "driver/j"
names = st.sampled_from(["ray-head", NAME])
generations = st.integers(1, 4)
local = st.builds(LocalSingleton, names, generations, st.booleans(), st.booleans())
orders = st.dictionaries(names, st.builds(Order, st.builds(
    Assignment, host=st.sampled_from(["", "a", "b"]), incarnation=st.sampled_from(["1", "2"])), generations))
leases = st.builds(AgentLease, st.floats(80.0, 100.0), st.none() | st.floats(0.0, 100.0))


def known(generation: int, host: str = "a", incarnation: str = "1", read_at: float = 99.0) -> KnownOrders:
    return KnownOrders().updated(read_at, 1, {NAME: Order(Assignment(host=host, incarnation=incarnation), generation)})


def act(order: KnownOrders, *here: LocalSingleton, lease: AgentLease = HELD, now: float = 101.0,
        not_before: float = 0.0) -> list[Action]:
    return duties.duties("a", "1", now, lease, order, here, {(NAME, 3): not_before}, TIMES)


def test_assignment_is_started_once_and_what_runs_is_adopted_once() -> None:
    assert act(known(3)) == [Start(NAME, 3, {})]
    assert act(known(3), LocalSingleton(NAME, 3, alive=True)) == [Adopt(NAME, 3)]
    assert act(known(3), LocalSingleton(NAME, 3, alive=True, adopted=True)) == []
    assert act(known(3), LocalSingleton(NAME, 3, alive=False, completed=True)) == []
    assert act(known(3, host="b")) == act(known(3, host="")) == []


def test_older_generation_ends_before_the_newer_one_starts() -> None:
    stop, wait = act(known(3), LocalSingleton(NAME, 2, alive=True, adopted=True))
    assert isinstance(stop, Stop) and stop.generation == 2 and wait == Wait(NAME, "waits for the end of generation 2")
    assert act(known(3), LocalSingleton(NAME, 2, alive=False)) == [Start(NAME, 3, {})]


def test_singletons_end_when_the_lease_has_ended_by_the_clock_of_the_host() -> None:
    runs = LocalSingleton(NAME, 3, alive=True, adopted=True)
    assert act(known(3), runs, now=108.9) == []
    [stop] = act(known(3), runs, now=109.0)
    assert isinstance(stop, Stop)


@pytest.mark.parametrize("lease", [AgentLease(100.0), AgentLease(94.0, 50.0), AgentLease(100.0, 99.5)])
def test_nothing_starts_without_a_lease_and_assignments_read_under_it(lease: AgentLease) -> None:
    [wait] = act(known(3), lease=lease)
    assert isinstance(wait, Wait) and "lease" in wait.reason


def test_restarted_agent_without_a_lease_leaves_what_runs_for_a_whole_lease() -> None:
    runs = LocalSingleton(NAME, 3, alive=True)
    assert act(KnownOrders(), runs, lease=AgentLease(100.0), now=108.0) == []
    assert isinstance(act(KnownOrders(), runs, lease=AgentLease(100.0), now=109.0)[0], Stop)


def test_assignment_of_an_earlier_boot_is_not_started_or_adopted() -> None:
    assert [type(a) for a in act(known(3, incarnation="0"))] == [Wait]
    assert act(known(3, incarnation="0"), LocalSingleton(NAME, 3, alive=True)) == []


def test_ended_singleton_waits_for_its_restart_policy() -> None:
    ended = LocalSingleton(NAME, 3, alive=False)
    assert act(known(3), ended, not_before=102.0) == [Wait(NAME, "has ended and waits for its restart")]
    assert act(known(3), ended, not_before=101.0) == [Start(NAME, 3, {})]


def test_generation_older_than_one_that_ran_here_is_refused_with_what_to_do() -> None:
    [wait] = act(known(2), LocalSingleton(NAME, 3, alive=False))
    assert isinstance(wait, Wait) and "etcd has lost assignments" in wait.reason


@given(st.lists(orders, max_size=5))
def test_readings_that_overtake_each_other_never_lower_a_generation(readings: list[dict[str, Order]]) -> None:
    now = KnownOrders()
    for at, reading in enumerate(readings):
        before, now = now, now.updated(float(at), at, reading)
        assert all(now.orders[name].generation >= order.generation for name, order in before.orders.items())


@given(orders, st.lists(local, max_size=4), leases, st.floats(80.0, 101.0))
def test_no_start_beside_a_process_without_lease_or_of_an_older_generation(
        assigned: dict[str, Order], here: list[LocalSingleton], lease: AgentLease, read_at: float) -> None:
    now = 101.0
    actions = duties.duties("a", "1", now, lease, KnownOrders().updated(read_at, 1, assigned), here, {}, TIMES)
    for action in actions:
        order = assigned.get(action.name)
        mine = [s for s in here if s.name == action.name]
        match action:
            case Start():
                assert lease.granted_at is not None and read_at >= lease.granted_at
                assert now - lease.renewed_at < TIMES.lease_ttl_s - TIMES.start_margin_s
                assert not any(s.alive for s in mine) and all(s.generation <= action.generation for s in mine)
                assert order is not None and (order.assignment.host, order.assignment.incarnation) == ("a", "1")
            case Stop():
                assert lease.ended(now, TIMES) or order is not None and order.generation > action.generation
            case Adopt():
                assert order is not None and order.generation == action.generation


def test_times_by_which_a_singleton_could_run_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="make lost_s at least"):
        HostTimes(lost_s=3.0)
    with pytest.raises(ConfigError, match="start_margin_s"):
        HostTimes(start_margin_s=9.0)


@given(st.floats(0.5, 60.0), st.floats(0.1, 5.0), st.floats(0.1, 20.0), st.floats(0.0, 0.3))
def test_hint_of_refused_times_is_one_that_is_accepted(ttl_s: float, pass_s: float, stop_s: float, error: float
                                                       ) -> None:
    try:
        HostTimes(ttl_s, 0.0, pass_s, stop_s, ttl_s / 3, error)
    except ConfigError as e:
        HostTimes(ttl_s, float(e.hint.split()[-1]) + 0.1, pass_s, stop_s, ttl_s / 3, error)
