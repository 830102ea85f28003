"""Whose turn it is with chunks that only one node has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.fetch.super_seeding import SuperSeeding

IDS = st.lists(st.text("abcdefgh", min_size=1, max_size=4), min_size=1, max_size=20, unique=True)


def views(ids: list[str], chunks: list[str]) -> dict[str, SuperSeeding]:
    out = {}
    for own in ids:
        turns = out[own] = SuperSeeding(own)
        turns.nodes([i for i in ids if i != own])
        turns.line_up(chunks)
    return out


@given(IDS, st.integers(0, 200))
def test_each_chunk_is_at_first_the_turn_of_one_node_and_the_shares_are_even(ids: list[str], chunks: int) -> None:
    digests = [f"{i:04}" for i in range(chunks)]
    own = {i: [d for d in digests if t.may_take(d, 0)] for i, t in views(ids, digests).items()}
    assert sorted(d for taken in own.values() for d in taken) == digests
    assert max(map(len, own.values())) - min(map(len, own.values())) <= 1


@given(IDS)
def test_a_node_that_has_everything_has_no_share(ids: list[str]) -> None:
    digests = [f"{i:04}" for i in range(50)]
    seen = views([*ids, "source"], digests)
    for own, turns in seen.items():
        if own != "source":
            turns.complete("source", True)
    taken = sorted(d for own, t in seen.items() if own != "source" for d in digests if t.may_take(d, 0))
    assert taken == digests


@given(IDS, st.floats(0, 50), st.floats(0, 50))
def test_who_waited_longer_reaches_further_and_everything_in_the_end(ids: list[str], a: float, b: float) -> None:
    digests = [f"{i:04}" for i in range(50)]
    for turns in views(ids, digests).values():
        reach = [{d for d in digests if turns.may_take(d, waited)} for waited in sorted((a, b))]
        assert reach[0] <= reach[1]
        assert all(turns.may_take(d, len(ids).bit_length()) for d in digests)


def test_a_node_that_restarts_empty_has_a_share_again() -> None:
    turns = SuperSeeding("a")
    turns.nodes(["b"])
    turns.line_up(["x", "y"])
    turns.complete("b", True)
    assert turns.may_take("x", 0) and turns.may_take("y", 0)
    turns.complete("b", False)
    assert [turns.may_take(d, 0) for d in "xy"] == [True, False]
    turns.forget("y")
    assert turns.distance("y")[1] == 0
