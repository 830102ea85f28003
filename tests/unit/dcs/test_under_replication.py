"""Versions with fewer copies than wanted: since when, and how they are named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.catalog import replica_sets
from elastic_rl.dcs.catalog.under_replication import ShortVersion, UnderReplication, described
from elastic_rl.etcd.records import ReplicaSets


def short(number: int, copies: int = 1, wanted: int = 2, stream: str = "policy") -> ShortVersion:
    return ShortVersion(stream, number, copies, wanted, "there is no other node that could have one")


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans(), st.booleans()), max_size=20))
def test_time_counts_from_the_first_of_the_last_looks_in_a_row_that_found_some(
        looks: list[tuple[float, bool, bool]]) -> None:
    state, now, since = UnderReplication(), 0.0, 0.0
    for number, (pause_s, some, complete) in enumerate(looks):
        now += pause_s
        if not some or not state.versions:
            since = now
        state = state.after([short(number)] if some else [], complete, now)
        assert state.since_s == since and state.complete is complete and bool(state.versions) is some


def test_versions_are_named_worst_first_and_many_are_counted() -> None:
    assert described([short(7)]) == "policy/7 has 1 of 2 copies"
    assert described([short(7), short(9)]) == "policy/9, policy/7 have 1 of 2 copies"
    many = [short(n) for n in range(9)] + [short(3, copies=0, stream="critic")]
    assert described(many) == "critic/3, policy/8, policy/7 and 7 more have at least 0 of 2 copies"


def test_copies_of_a_version_are_those_of_its_worst_part_on_nodes_that_are_there() -> None:
    sets = ReplicaSets(parts=[["a", "b"], ["b", "c"]])
    assert [replica_sets.fewest(sets, nodes) for nodes in ("abc", "ab", "ac", "a", "")] == [2, 1, 1, 0, 0]
    assert replica_sets.fewest(ReplicaSets(parts=[]), "ab") == 0
