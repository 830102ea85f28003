"""Limits of a node's connections: callers that do not authenticate take nothing from those that do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.node.admission import Admission, ConnectionLimits

LIMITS = ConnectionLimits(connections=6, unauthenticated=8, unauthenticated_per_host=3, deadline_s=10.0)


def test_silent_callers_of_many_hosts_do_not_keep_out_one_that_authenticates() -> None:
    admission = Admission(LIMITS)
    for conn in range(1000):
        assert admission.enter(conn, f"stranger-{conn % 5}", conn / 1000) is not None
    assert admission.enter(5000, "ours", 1.0) and admission.authenticated(5000)
    assert len(admission) == LIMITS.unauthenticated


def test_silent_callers_of_one_host_evict_their_own_oldest() -> None:
    admission = Admission(LIMITS)
    assert [admission.enter(conn, "a", 0) for conn in range(5)] == [[], [], [], [0], [1]]
    assert admission.enter(5, "b", 0) == []
    assert not admission.authenticated(0), "it was evicted"
    assert admission.authenticated(2)


def test_caller_that_does_not_authenticate_in_time_is_overdue() -> None:
    admission = Admission(LIMITS)
    admission.enter(1, "a", 0.0)
    admission.enter(2, "a", 5.0)
    admission.authenticated(2)
    admission.enter(3, "a", 9.0)
    assert admission.overdue(9.9) == [] and admission.overdue(10.0) == [1] and admission.overdue(10.0) == []
    assert not admission.authenticated(1)


def test_authenticated_connections_are_limited_until_one_leaves() -> None:
    admission = Admission(LIMITS)
    for conn in range(LIMITS.connections):
        admission.enter(conn, "a", 0.0)
        assert admission.authenticated(conn)
    assert admission.enter(100, "b", 0.0) is None
    admission.leave(3)
    assert admission.enter(101, "b", 0.0) == [] and admission.authenticated(101)


@given(st.lists(st.tuples(st.sampled_from(["enter", "authenticate", "leave", "wait"]), st.integers(0, 9)),
                max_size=100))
def test_limits_hold_after_any_sequence_of_events(steps: list[tuple[str, int]]) -> None:
    admission, now = Admission(LIMITS), 0.0
    waiting: dict[int, str] = {}
    authenticated: set[int] = set()
    for conn, (what, pick) in enumerate(steps):
        match what:
            case "enter":
                evicted = admission.enter(conn, f"h{pick % 4}", now)
                assert (evicted is None) == (len(authenticated) == LIMITS.connections)
                if evicted is not None:
                    waiting[conn] = f"h{pick % 4}"
                    for old in evicted:
                        del waiting[old]
            case "authenticate" if waiting:
                chosen = list(waiting)[pick % len(waiting)]
                if admission.authenticated(chosen):
                    authenticated.add(chosen)
                    del waiting[chosen]
            case "leave" if authenticated:
                authenticated.discard(gone := sorted(authenticated)[pick % len(authenticated)])
                admission.leave(gone)
            case "wait":
                now += pick
                for late in admission.overdue(now):
                    del waiting[late]
        assert len(admission) == len(waiting) + len(authenticated)
        assert len(waiting) <= LIMITS.unauthenticated and len(authenticated) <= LIMITS.connections
        assert all(list(waiting.values()).count(h) <= LIMITS.unauthenticated_per_host for h in waiting.values())
