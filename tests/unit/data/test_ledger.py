"""Which transitions of a prompt group the ledger allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import GroupLedger, GroupState
from elastic_rl.errors import IllegalTransition

TRANSITIONS: dict[str, tuple[Callable[[GroupLedger], object], set[GroupState]]] = {
    "generated": (lambda ledger: ledger.generated(0), {GroupState.LEASED}),
    "queued": (lambda ledger: ledger.queued(0), {GroupState.GENERATED, GroupState.CHOSEN}),
    "chosen": (lambda ledger: ledger.chosen(0), {GroupState.QUEUED}),
    "drop": (lambda ledger: ledger.drop(0, "uniform"), {GroupState.GENERATED, GroupState.QUEUED}),
    "release": (lambda ledger: ledger.release(0), {*GroupState}),
    "consumption": (lambda ledger: ledger.consumption([0]), {GroupState.GENERATED, GroupState.CHOSEN}),
}


def _in_state(state: GroupState | None) -> GroupLedger:
    ledger = GroupLedger(IntervalSet())
    if state is None:
        return ledger
    ledger.lease(1)
    for to, move in ((GroupState.GENERATED, ledger.generated), (GroupState.QUEUED, ledger.queued),
                     (GroupState.CHOSEN, ledger.chosen)):
        if ledger.state(0) is not state:
            move(0)
            assert ledger.state(0) is to
    return ledger


@pytest.mark.parametrize("state", [None, *GroupState])
@pytest.mark.parametrize("name", TRANSITIONS)
def test_group_moves_only_as_the_diagram_says(name: str, state: GroupState | None) -> None:
    move, allowed = TRANSITIONS[name]
    ledger = _in_state(state)
    if state in allowed:
        move(ledger)
    else:
        with pytest.raises(IllegalTransition):
            move(ledger)


def test_released_group_is_leased_again_and_stays_marked_as_stale() -> None:
    ledger = _in_state(GroupState.QUEUED)
    ledger.release(0, stale=True)
    assert ledger.lease(1) == [0] and 0 in ledger.stale and list(ledger.unrecorded) == [0]
    ledger.generated(0)
    ledger.commit(ledger.consumption([0]))
    assert not ledger.stale and not ledger.unrecorded and ledger.lease(1) == [1]


def test_chosen_group_that_waits_again_keeps_its_place() -> None:
    ledger = GroupLedger(IntervalSet())
    for ordinal in ledger.lease(3):
        ledger.generated(ordinal, (ordinal,))
    for ordinal in (2, 0, 1):
        ledger.queued(ordinal)
    ledger.chosen(2)
    ledger.queued(2)
    queued = ledger.in_state(GroupState.QUEUED)
    assert sorted(queued, key=lambda ordinal: queued[ordinal].place) == [2, 0, 1]
    assert [queued[ordinal].versions for ordinal in range(3)] == [(0,), (1,), (2,)]


@settings(max_examples=seeds(60))
@given(st.lists(st.tuples(st.sampled_from(("lease", "release", "drop", "commit", "go back")), st.integers(0, 40)),
                max_size=60))
def test_lease_takes_the_lowest_groups_that_nobody_has(moves: list[tuple[str, int]]) -> None:
    ledger, committed = GroupLedger(IntervalSet()), [IntervalSet()]
    taken, dropped = set[int](), set[int]()
    for move, number in moves:
        leased = sorted(ledger.in_state(GroupState.LEASED))
        one = leased[number % len(leased)] if leased else None
        if move == "lease":
            count = 1 + number % 5
            expected = itertools.islice((o for o in itertools.count() if o not in ledger.consumed and o not in (
                taken | dropped)), count)
            assert (found := ledger.lease(count)) == list(expected)
            taken |= {*found}
        elif move == "release" and one is not None:
            ledger.release(one)
            taken.discard(one)
        elif move == "drop" and one is not None:
            ledger.generated(one)
            ledger.drop(one, "uniform")
            taken.discard(one)
            dropped.add(one)
        elif move == "commit" and one is not None:
            ledger.generated(one)
            ledger.commit(ledger.consumption([one]))
            committed.append(ledger.consumed)
        elif move == "go back":
            ledger.rebase(committed[number % len(committed)])
        taken -= {o for o in taken if o in ledger.consumed}
        dropped = {o for groups in ledger.dropped.values() for o in groups}


def test_lease_does_not_look_at_the_groups_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for again and again under the lock of the flow, which may have a hundred thousand groups."""
    ledger = GroupLedger(IntervalSet())
    ledger.lease(1000)
    ledger.release(7)
    monkeypatch.setattr(GroupLedger, "in_progress", property(lambda self: pytest.fail("it looks at all of them")))
    assert ledger.lease(2) == [7, 1000]
