"""The state machine of an engine: no order of events makes an unverified version routable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import EngineState

EVENTS = st.one_of(
    st.just(("up",)), st.just(("unrouted",)), st.just(("released",)), st.just(("resumed",)), st.just(("drain",)),
    st.just(("given_up",)), st.just(("unconfirmed",)),
    st.just(("routed",)), st.just(("torn", "half")), st.just(("died", "killed")),
    st.tuples(st.just("begin"), st.integers(0, 6)), st.tuples(st.just("verified"), st.integers(0, 6)))


@given(st.lists(EVENTS, max_size=30))
def test_engine_is_routable_only_with_a_version_that_was_begun_and_verified(history):
    lifecycle, began, seen, gone = EngineLifecycle(), 0, [], []
    for name, *args in history:
        before = lifecycle
        try:
            lifecycle = getattr(lifecycle, name)(*args)
        except IllegalTransition:
            assert lifecycle is before
            continue
        if name == "begin":
            began = args[0]
        if name == "verified":
            assert args[0] == began
            seen.append(args[0])
        if lifecycle.state is EngineState.READY:
            assert seen and lifecycle.version == seen[-1] > 0
        if name == "released":
            assert lifecycle.version == 0 and not lifecycle.applying
            gone.append(len(seen))
        if lifecycle.state is EngineState.READY is not before.state:
            assert name == "routed" and not lifecycle.applying
            assert len(seen) > (gone[-1] if gone else 0), "routed with weights that are gone"
    assert seen == sorted(seen), "a version was rolled back"
    for later in range(1, len(seen)):
        assert seen[later - 1] < seen[later] or later in gone, "a version was applied twice"


@given(st.lists(EVENTS, max_size=30), st.sampled_from(["torn", "died"]))
def test_quarantined_or_dead_engine_accepts_no_event(history, end):
    lifecycle = EngineLifecycle().up().begin(1)
    lifecycle = lifecycle.torn("half") if end == "torn" else lifecycle.died("killed")
    for name, *args in history:
        with pytest.raises(IllegalTransition):
            getattr(lifecycle, name)(*args)


def test_load_into_an_engine_without_weights_is_begun_again_where_it_cannot_be_confirmed():
    lifecycle = EngineLifecycle().up().begin(3).unconfirmed()
    assert (lifecycle.state, lifecycle.version, lifecycle.applying) == (EngineState.SYNCING, 0, 0)
    assert lifecycle.begin(3).verified(3).routed().state is EngineState.READY
    for refused in (lifecycle, EngineLifecycle().up().begin(1).verified(1).begin(2),
                    EngineLifecycle().up().begin(1).verified(1).routed().begin(2)):
        with pytest.raises(IllegalTransition, match="unconfirmed"):
            refused.unconfirmed()


def test_drain_during_an_update_survives_its_verification():
    lifecycle = EngineLifecycle().up().begin(1).verified(1).routed().begin(2).drain().verified(2)
    assert lifecycle.state is EngineState.DRAINING and lifecycle.version == 2


def test_engine_that_is_given_up_in_an_update_joins_the_router_with_the_version_of_that():
    lifecycle = EngineLifecycle().up().begin(1).verified(1).routed().begin(2).given_up()
    assert (lifecycle.state, lifecycle.applying) == (EngineState.SYNCING, 2)
    with pytest.raises(IllegalTransition, match="routed"):
        lifecycle.routed()
    assert lifecycle.verified(2).routed() == EngineLifecycle(EngineState.READY, 2, newest=2, launched=True)


def test_engine_that_no_router_takes_follows_the_head_and_is_not_ready():
    lifecycle = EngineLifecycle().up().begin(1).verified(1).begin(2).verified(2)
    assert lifecycle.state is EngineState.SYNCING and lifecycle.routed().state is EngineState.READY
    with pytest.raises(IllegalTransition, match="routed"):
        lifecycle.begin(3).routed()


def test_dead_engine_keeps_the_version_that_was_being_applied():
    lifecycle = EngineLifecycle().up().begin(1).verified(1).begin(2).died("killed")
    assert (lifecycle.version, lifecycle.applying) == (1, 2)


def test_update_to_an_older_version_is_rejected():
    with pytest.raises(IllegalTransition, match="roll"):
        EngineLifecycle().up().begin(4).verified(4).begin(3)


def test_released_engine_takes_its_version_again_and_no_older_one():
    lifecycle = EngineLifecycle().up().begin(4).verified(4).routed().unrouted().released().resumed()
    assert (lifecycle.state, lifecycle.version) == (EngineState.SYNCING, 0)
    with pytest.raises(IllegalTransition, match="routed"):
        lifecycle.routed()
    with pytest.raises(IllegalTransition, match="roll"):
        lifecycle.begin(3)
    assert lifecycle.begin(4).verified(4).routed().version == 4


def test_engine_that_waited_for_its_first_phase_starts_then():
    assert EngineLifecycle().released().resumed() == EngineLifecycle()
