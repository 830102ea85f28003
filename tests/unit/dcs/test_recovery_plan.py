"""The catalog that a recovery derives from nodes, the durable store and what is left in etcd."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.catalog.reads import CatalogContents, Entry
from elastic_rl.dcs.connection import HeldVersion
from elastic_rl.dcs.durable.store import CommitMark
from elastic_rl.dcs.versions.recovery import NodeInventory, Sources, plan
from elastic_rl.errors import CatalogMismatch, ConfigError
from elastic_rl.etcd.records import CatalogIdentity, Version, VersionState

PARTS = 2


def version(number: int, state: VersionState = VersionState.COMMITTED, **fields: object) -> Version:
    return Version(stream="policy", number=number, state=state,
                   **{"epoch": 1, "manifest": f"m{number}", **fields})  # type: ignore[arg-type]


def node(*held: tuple[int, Sequence[int]], catalog: str = "x", commits: int = 9) -> NodeInventory:
    """An inventory: number and parts of each version that the node has the record of."""
    return NodeInventory(catalog, commits, [HeldVersion(version(n), PARTS, tuple(parts)) for n, parts in held])


def sources(nodes: Mapping[str, NodeInventory] = {}, *, etcd: Sequence[Version] = (), identity: int | None = None,
            next_number: int = 0, marks: Sequence[int] = (), catalog: str = "x") -> Sources:
    """``identity``: commits of the catalog in etcd."""
    return Sources(
        CatalogIdentity(id=catalog, commits=identity) if identity is not None else None,
        CatalogContents({"policy": [Entry(v, 100 + v.number) for v in etcd]} if etcd else {}, []),
        {"policy": next_number} if next_number else {}, nodes, [CommitMark(version(n), n, PARTS) for n in marks], {})


def test_plan_takes_versions_whose_parts_are_on_some_node() -> None:
    planned = plan(sources({"a": node((1, [0, 1]), (2, [0]), (3, [0])), "b": node((2, [1]), (3, []))}))
    assert [(r.version.number, r.replica_sets.parts) for r in planned.versions] == [
        (1, [["a"], ["a"]]), (2, [["a"], ["b"]])]
    assert [(v.number, why) for v, why in planned.lost] == [(3, "1 of 2 parts are on no registered node")]
    assert planned.catalog == "x" and planned.commits == 10
    assert planned.heads["policy"].number == 2 and planned.next_numbers["policy"] > 3


def test_plan_takes_versions_of_the_durable_store() -> None:
    planned = plan(sources({"a": node((4, [0]), (5, [0]))}, marks=[3, 4]))
    assert [(r.version.number, r.durable, r.replica_sets.parts) for r in planned.versions] == [
        (3, True, [[], []]), (4, True, [["a"], []])]
    assert [v.number for v, _ in planned.lost] == [5]
    only = plan(sources(marks=[7]))
    assert only.catalog == "" and only.heads["policy"].number == 7


def test_plan_without_any_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a registered node nor the durable store"):
        plan(sources({"a": NodeInventory("", 0, [])}))


def test_plan_over_an_older_etcd_adds_what_nodes_have() -> None:
    planned = plan(sources({"a": node((2, [0, 1]), (5, [0, 1]))}, identity=3, next_number=3, etcd=[
        version(1, VersionState.GONE), version(2), version(3, VersionState.ABORTED)]))
    assert [(r.version.number, r.revision) for r in planned.versions] == [(2, 102), (5, 0)]
    assert planned.commits == 10 and planned.next_numbers["policy"] == 105


def test_plan_over_a_current_etcd_leaves_numbers_and_released_versions_alone() -> None:
    planned = plan(sources({"a": node((1, [0, 1]), (2, [0, 1]), (3, [0, 1]))}, identity=9, next_number=4, etcd=[
        version(1, VersionState.GONE), version(2, VersionState.RELEASING), version(3)]))
    assert [r.version.number for r in planned.versions] == [3]
    assert planned.next_numbers["policy"] == 4


def test_head_in_etcd_does_not_go_back_for_missing_parts() -> None:
    planned = plan(sources({"a": node((1, [0, 1]), (2, [0]))}, identity=9, next_number=2,
                           etcd=[version(1), version(2)]))
    assert "policy" not in planned.heads and [v.number for v, _ in planned.lost] == [2]


def test_several_catalogs_must_be_chosen_from() -> None:
    nodes = {"a": node((1, [0, 1])), "b": node((1, [0, 1]), catalog="y")}
    with pytest.raises(ConfigError, match="2 catalogs: x .nodes a., y .nodes b."):
        plan(sources(nodes))
    chosen = plan(sources(nodes), "y")
    assert chosen.catalog == "y" and [r.replica_sets.parts for r in chosen.versions] == [[["b"], ["b"]]]
    with pytest.raises(ConfigError, match="no registered node belongs to catalog z"):
        plan(sources(nodes), "z")


def test_catalog_with_commits_in_etcd_is_not_replaced_by_another() -> None:
    with pytest.raises(CatalogMismatch, match="cannot be merged"):
        plan(sources({"a": node((1, [0, 1]))}, identity=2, catalog="y", etcd=[version(1)]))
    planned = plan(sources({"a": node((1, [0, 1]))}, identity=0, catalog="y"))
    assert planned.catalog == "x", "a catalog without a commit has nothing to lose"


def test_number_that_stands_for_two_versions_is_refused() -> None:
    other = dataclasses.replace(node(), held=[HeldVersion(version(1, manifest="other"), PARTS, (0, 1))])
    with pytest.raises(CatalogMismatch, match="stands for two versions"):
        plan(sources({"a": node((1, [0, 1])), "b": other}))


held = st.dictionaries(st.integers(1, 12), st.sets(st.integers(0, PARTS - 1)), max_size=6)


@given(st.dictionaries(st.sampled_from("abc"), st.tuples(held, st.integers(1, 40)), min_size=1),
       st.sets(st.integers(1, 12), max_size=3), st.sets(st.integers(1, 12), max_size=4), st.none() | st.integers(1, 40))
def test_recovered_catalog_loses_no_whole_version_and_reuses_no_number(
        given_nodes: dict[str, tuple[dict[int, set[int]], int]], marks: set[int], in_etcd: set[int],
        identity: int | None) -> None:
    nodes = {n: node(*((k, sorted(p)) for k, p in has.items()), commits=commits)
             for n, (has, commits) in given_nodes.items()}
    etcd = [version(n) for n in sorted(in_etcd)] if identity is not None else []
    everything = {n for has, _ in given_nodes.values() for n in has} | marks | {v.number for v in etcd}
    if not everything:
        return
    planned = plan(sources(nodes, etcd=etcd, identity=identity, next_number=max(in_etcd, default=0) if etcd else 0,
                           marks=sorted(marks)))
    whole = {n for n in everything if n in marks or all(
        any(part in has.get(n, ()) for has, _ in given_nodes.values()) for part in range(PARTS))}
    assert {r.version.number for r in planned.versions} == whole
    assert {v.number for v, _ in planned.lost} == everything - whole
    assert planned.commits > max(commits for _, commits in given_nodes.values())
    assert planned.next_numbers["policy"] >= max(everything)
    if "policy" in planned.heads:
        assert planned.heads["policy"].number == max(whole)
    for r in planned.versions:
        assert all(part in given_nodes[n][0][r.version.number]
                   for part, holders in enumerate(r.replica_sets.parts) for n in holders)
