"""Parts of a version become one manifest, however the tensors are distributed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.manifest import Manifest, Packer
from elastic_rl.dcs.publish.parts import Part, merge
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.checkpoint.ownership import assign, bucketed

Item = tuple[int, tuple[int, ...]]
"""Owner, shape."""
items = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 40), max_size=2).map(tuple)), max_size=12)


def part_of(rank: int, mine: list[tuple[int, tuple[int, ...]]]) -> Part:
    """What rank ``rank`` would write of (place, shape), to one of three nodes; its digests are its own."""
    packer = Packer(512)
    for at, shape in mine:
        packer.add(f"t{at}", "float32", shape)
    manifest = packer.manifest([f"{rank:02d}-{i}" for i in range(len(packer.sizes))])
    tensors = tuple((at, t) for (at, _), t in zip(mine, manifest.tensors, strict=True))
    return Part(f"n{rank % 3}", f"arena-{rank % 3}", tensors, manifest.chunks)


def deal(dealt: list[Item]) -> list[Part]:
    return [part_of(r, [(at, shape) for at, (owner, shape) in enumerate(dealt) if owner == r]) for r in range(4)]


@given(items)
def test_merge_keeps_order_of_tensors_and_has_each_chunk_once(dealt: list[Item]) -> None:
    parts = deal(dealt)
    manifest, _ = merge(parts)
    assert [(t.name, t.shape) for t in manifest.tensors] == [(f"t{i}", shape) for i, (_, shape) in enumerate(dealt)]
    assert sum(manifest.chunks.values()) == sum(p.nbytes for p in parts)
    assert Manifest.decode(manifest.encode()) == manifest


@given(items)
def test_merge_groups_chunks_by_the_node_that_wrote_them(dealt: list[Item]) -> None:
    parts = deal(dealt)
    manifest, nodes = merge(parts)
    assert len(nodes) == len(manifest.part_digests()) and len(set(nodes)) == len(nodes)
    for node, digests in zip(nodes, manifest.part_digests(), strict=True):
        assert digests == [d for p in parts if p.node == node for d in p.chunks]
    assert [d for digests in manifest.part_digests() for d in digests] == list(manifest.chunks)


def test_chunk_written_by_two_nodes_belongs_to_the_first() -> None:
    a, b = part_of(0, [(0, (300,)), (1, (5,))]), part_of(1, [(2, (3,))])
    shared = Part(b.node, b.incarnation, b.tensors, {**dict(list(a.chunks.items())[:1]), **b.chunks})
    manifest, nodes = merge([a, shared])
    assert nodes == ["n0", "n1"] and manifest.part_digests() == [list(a.chunks), list(b.chunks)]
    only_shared = Part(b.node, b.incarnation, (), dict(a.chunks))
    assert merge([a, only_shared])[1] == ["n0"]


@given(items)
def test_part_round_trips_as_json(dealt: list[Item]) -> None:
    for part in deal(dealt):
        assert Part.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_merge_rejects_parts_with_the_same_name_or_place() -> None:
    a, b = part_of(0, [(0, (3,))]), part_of(1, [(0, (3,))])
    with pytest.raises(ConfigError, match="place 0"):
        merge([a, b])
    with pytest.raises(ConfigError, match="tensor name 't0'"):
        merge([a, Part(b.node, b.incarnation, ((1, b.tensors[0][1]),), b.chunks)])


def test_merge_rejects_parts_that_disagree_on_the_size_of_a_chunk() -> None:
    a = part_of(0, [(0, (3,))])
    with pytest.raises(ConfigError, match="disagree"):
        merge([a, Part("x", "x", (), {digest: n + 1 for digest, n in a.chunks.items()})])


@pytest.mark.parametrize("value", [{}, {"node": "a", "incarnation": "x", "chunks": [], "tensors": [1]}, {
    "node": "a", "incarnation": "x", "chunks": [], "tensors": [[0, "t", "uint8", [1], [[0, 0, 1]]]]}])
def test_malformed_part_is_rejected(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="part"):
        Part.from_json(value)


def test_packer_stores_tied_tensor_once() -> None:
    packer = Packer(512)
    packer.add("embed", "float32", (8, 4))
    packer.alias("head", 0)
    manifest = packer.manifest(["d"])
    assert manifest.tensors[0].slices == manifest.tensors[1].slices and manifest.chunks == {"d": 128}
    manifest.check()
    with pytest.raises(ValueError, match="two tensors"):
        packer.alias("head", 0)


def test_packer_lays_out_tensor_over_four_gib_without_gaps() -> None:
    parts = Packer(64 << 20).add("huge", "uint8", ((4 << 30) + 5,))
    assert [p.source for p in parts] == [i * (64 << 20) for i in range(65)]
    assert sum(p.nbytes for p in parts) == (4 << 30) + 5


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_ownership_splits_bytes_evenly_over_ranks(sizes: list[int], ranks: int) -> None:
    load = [0] * ranks
    for size, owner in zip(sizes, assign(sizes, ranks), strict=True):
        load[owner] += size
    assert max(load) <= sum(sizes) / ranks + max(sizes, default=0)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 200))
def test_buckets_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    out = bucketed(range(len(sizes)), sizes, limit)
    assert [i for bucket in out for i in bucket] == list(range(len(sizes)))
    assert all(len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit for bucket in out)
