"""How chunks that only one node has are divided among the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.fetch.super_seeding import SuperSeeding

IDS = st.lists(st.text("abcdefgh", min_size=1, max_size=4), min_size=1, max_size=20, unique=True)


def views(ids: list[str], chunks: list[str]) -> dict[str, SuperSeeding]:
    out = {}
    for own in ids:
        seeding = out[own] = SuperSeeding(own)
        seeding.set_nodes([i for i in ids if i != own])
        seeding.add(chunks)
    return out


@given(IDS, st.integers(0, 200))
def test_each_chunk_has_one_node_and_shares_are_even(ids: list[str], chunks: int) -> None:
    digests = [f"{i:04}" for i in range(chunks)]
    own = {i: [d for d in digests if t.may_take(d, 0)] for i, t in views(ids, digests).items()}
    assert sorted(d for taken in own.values() for d in taken) == digests
    assert max(map(len, own.values())) - min(map(len, own.values())) <= 1


@given(IDS)
def test_complete_node_has_no_share(ids: list[str]) -> None:
    digests = [f"{i:04}" for i in range(50)]
    seen = views([*ids, "source"], digests)
    for own, seeding in seen.items():
        if own != "source":
            seeding.set_complete("source", True)
    taken = sorted(d for own, t in seen.items() if own != "source" for d in digests if t.may_take(d, 0))
    assert taken == digests


@given(IDS, st.floats(0, 50), st.floats(0, 50))
def test_reach_grows_with_the_wait_to_everything(ids: list[str], a: float, b: float) -> None:
    digests = [f"{i:04}" for i in range(50)]
    for seeding in views(ids, digests).values():
        reach = [{d for d in digests if seeding.may_take(d, waited)} for waited in sorted((a, b))]
        assert reach[0] <= reach[1]
        assert all(seeding.may_take(d, len(ids).bit_length()) for d in digests)


def test_restarted_node_has_a_share_again() -> None:
    seeding = SuperSeeding("a")
    seeding.set_nodes(["b"])
    seeding.add(["x", "y"])
    seeding.set_complete("b", True)
    assert seeding.may_take("x", 0) and seeding.may_take("y", 0)
    seeding.set_complete("b", False)
    assert [seeding.may_take(d, 0) for d in "xy"] == [True, False]
    seeding.remove("y")
    assert seeding.distance("y")[1] == 0
