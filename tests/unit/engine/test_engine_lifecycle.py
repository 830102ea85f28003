"""The engine's state machine: whatever happens in whatever order, an unverified version never becomes routable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import EngineState

EVENTS = st.one_of(
    st.just(("up",)), st.just(("drain",)), st.just(("torn", "half")), st.just(("died", "killed")),
    st.tuples(st.just("begin"), st.integers(0, 6)), st.tuples(st.just("verified"), st.integers(0, 6)))


@given(st.lists(EVENTS, max_size=30))
def test_an_engine_is_routable_only_with_a_version_that_was_begun_and_verified(history):
    life, began, seen = EngineLifecycle(), 0, []
    for name, *args in history:
        before = life
        try:
            life = getattr(life, name)(*args)
        except IllegalTransition:
            assert life is before
            continue
        if name == "begin":
            began = args[0]
        if name == "verified":
            assert args[0] == began
            seen.append(args[0])
        if life.routable:
            assert seen and life.version == seen[-1] > 0
        if life.routable and not before.routable:
            assert name == "verified"
    assert seen == sorted(set(seen)), "a version was rolled back or applied twice"


@given(st.lists(EVENTS, max_size=30), st.sampled_from(["torn", "died"]))
def test_an_engine_that_was_quarantined_or_died_never_lives_again(history, end):
    life = EngineLifecycle().up().begin(1)
    life = life.torn("half") if end == "torn" else life.died("killed")
    for name, *args in history:
        with pytest.raises(IllegalTransition):
            getattr(life, name)(*args)


def test_a_drain_during_an_update_stays_a_drain_when_the_update_is_verified():
    life = EngineLifecycle().up().begin(1).verified(1).begin(2).drain().verified(2)
    assert life.state is EngineState.DRAINING and life.version == 2 and not life.routable


def test_a_dead_engine_keeps_the_mark_of_the_update_it_died_in():
    life = EngineLifecycle().up().begin(1).verified(1).begin(2).died("killed")
    assert (life.version, life.applying) == (1, 2)


def test_an_update_does_not_roll_an_engine_back():
    with pytest.raises(IllegalTransition, match="roll"):
        EngineLifecycle().up().begin(4).verified(4).begin(3)
