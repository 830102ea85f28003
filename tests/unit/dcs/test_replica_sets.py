"""Which nodes hold which part: what the replica sets are asked and how they change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.config.dcs import Replicas
from elastic_rl.dcs.catalog import repair, replica_sets
from elastic_rl.etcd.records import ReplicaSets, Version, VersionState

IDS = [f"n{i}" for i in range(6)]
sets = st.builds(ReplicaSets, parts=st.lists(st.lists(st.sampled_from(IDS), unique=True, max_size=4), max_size=8))


@given(st.sampled_from(IDS), st.sets(st.sampled_from(IDS)))
def test_successors_are_every_other_node_once_in_ring_order(source: str, ids: set[str]) -> None:
    found = replica_sets.successors(source, ids)
    assert set(found) == ids - {source} and len(found) == len(set(found))
    after = [n for n in found if n > source]
    assert found == sorted(after) + sorted(set(found) - set(after))


def test_copies_of_many_parts_are_spread_evenly() -> None:
    given_to = [replica_sets.successors(n, IDS)[0] for n in IDS]
    assert sorted(given_to) == IDS


@given(sets, st.integers(1, 8))
def test_sources_are_few_and_hold_parts(found: ReplicaSets, most: int) -> None:
    nodes = replica_sets.nodes_of(found)
    few = replica_sets.sources(found, most)
    assert len(few) == min(most, len(nodes)) == len(set(few)) and set(few) <= set(nodes)


def test_record_of_a_thousand_hosts_names_a_bounded_number_of_sources() -> None:
    hosts = [f"host-{i:04d}" for i in range(1000)]
    wide = ReplicaSets(parts=[[n, replica_sets.successors(n, hosts)[0]] for n in hosts])
    assert len(replica_sets.sources(wide)) == replica_sets.SOURCES
    assert len(wide.encode()) < 64 << 10


@given(sets)
def test_parts_by_node_inverts_the_replica_sets(found: ReplicaSets) -> None:
    by_node = replica_sets.parts_by_node(found)
    assert {(i, n) for n, parts in by_node.items() for i in parts} == {
        (i, n) for i, nodes in enumerate(found.parts) for n in nodes}


@given(sets, st.dictionaries(st.sampled_from(IDS), st.sets(st.integers(0, 7))))
def test_lost_parts_are_short_and_copies_make_up_for_them(found: ReplicaSets, lost: dict[str, set[int]]) -> None:
    left = replica_sets.without(found, lost)
    assert all(n not in nodes for n, parts in lost.items() for i, nodes in enumerate(left.parts) if i in parts)
    short = replica_sets.short_of(left, 2)
    made = [(i, n) for i in short for n in replica_sets.candidates(left, i, IDS)[:2 - len(left.parts[i])]]
    now = replica_sets.with_copies(left, made)
    assert replica_sets.short_of(now, 2) == []
    assert all(set(a) <= set(b) and len(b) == len(set(b)) for a, b in zip(left.parts, now.parts, strict=True))


@given(sets, st.lists(st.sampled_from(IDS), unique=True))
def test_candidates_are_the_registered_nodes_that_lack_the_part(found: ReplicaSets, ids: list[str]) -> None:
    for part, nodes in enumerate(found.parts):
        assert sorted(replica_sets.candidates(found, part, ids)) == sorted(set(ids) - set(nodes))


@pytest.mark.parametrize(("replicas", "nodes", "wanted", "required"), [
    ("auto", 0, 1, 1), ("auto", 1, 1, 1), ("auto", 2, 2, 1), ("auto", 9, 2, 1), (1, 9, 1, 1), (3, 2, 3, 3)])
def test_copies_that_are_wanted_and_required(replicas: Replicas, nodes: int, wanted: int, required: int) -> None:
    assert (replica_sets.wanted(replicas, nodes), replica_sets.required(replicas)) == (wanted, required)


def test_version_without_a_record_of_its_replica_sets_is_reported() -> None:
    version = Version(stream="policy", number=3, state=VersionState.COMMITTED, epoch=1)
    [line] = repair._report(version, ReplicaSets(parts=[]), made=[], replicas=2)
    assert "policy version 3 has no record of its replica sets" in line and "versions recover" in line
