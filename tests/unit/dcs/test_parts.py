"""Parts of a version become one manifest, however the tensors are dealt out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.manifest import Manifest, Packer
from elastic_rl.dcs.publish.parts import Part, merge
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.ownership import assign, bucketed

Item = tuple[int, tuple[int, ...]]
"""Owner, shape."""
items = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 40), max_size=2).map(tuple)), max_size=12)


def part_of(rank: int, mine: list[tuple[int, tuple[int, ...]]]) -> Part:
    """What rank ``rank`` would write of (place, shape); its digests are its own."""
    packer = Packer(512)
    for at, shape in mine:
        packer.add(f"t{at}", "float32", shape)
    manifest = packer.manifest([f"{rank:02d}-{i}" for i in range(len(packer.sizes))])
    return Part(f"n{rank}", 7 + rank, tuple((at, t) for (at, _), t in zip(mine, manifest.tensors, strict=True)),
                manifest.chunks)


def deal(dealt: list[Item]) -> list[Part]:
    return [part_of(r, [(at, shape) for at, (owner, shape) in enumerate(dealt) if owner == r]) for r in range(4)]


@given(items)
def test_merged_parts_have_every_tensor_in_order_and_every_chunk_once(dealt: list[Item]) -> None:
    parts = deal(dealt)
    manifest = merge(parts)
    assert [(t.name, t.shape) for t in manifest.tensors] == [(f"t{i}", shape) for i, (_, shape) in enumerate(dealt)]
    assert sum(manifest.chunks.values()) == sum(p.nbytes for p in parts)
    assert Manifest.decode(manifest.encode()) == manifest


@given(items)
def test_a_part_survives_its_way_as_json(dealt: list[Item]) -> None:
    for part in deal(dealt):
        assert Part.of(json.loads(json.dumps(part.to_json()))) == part


def test_parts_that_claim_one_name_or_one_place_are_refused() -> None:
    a, b = part_of(0, [(0, (3,))]), part_of(1, [(0, (3,))])
    with pytest.raises(ConfigError, match="place 0"):
        merge([a, b])
    with pytest.raises(ConfigError, match="tensor name 't0'"):
        merge([a, Part(b.node, b.registered, ((1, b.tensors[0][1]),), b.chunks)])


def test_parts_that_disagree_on_a_chunk_are_refused() -> None:
    a = part_of(0, [(0, (3,))])
    with pytest.raises(ConfigError, match="disagree"):
        merge([a, Part("x", 1, (), {digest: n + 1 for digest, n in a.chunks.items()})])


@pytest.mark.parametrize("value", [{}, {"node": "a", "registered": "x", "chunks": [], "tensors": []}, {
    "node": "a", "registered": 1, "chunks": [], "tensors": [[0, "t", "uint8", [1], [[0, 0, 1]]]]}])
def test_what_is_no_part_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="part"):
        Part.of(value)


def test_a_tied_tensor_is_stored_once() -> None:
    packer = Packer(512)
    packer.add("embed", "float32", (8, 4))
    packer.alias("head", 0)
    manifest = packer.manifest(["d"])
    assert manifest.tensors[0].slices == manifest.tensors[1].slices and manifest.chunks == {"d": 128}
    manifest.check()
    with pytest.raises(ValueError, match="two tensors"):
        packer.alias("head", 0)


def test_a_tensor_over_four_gib_is_laid_out_without_a_gap() -> None:
    parts = Packer(64 << 20).add("huge", "uint8", ((4 << 30) + 5,))
    assert [p.source for p in parts] == [i * (64 << 20) for i in range(65)]
    assert sum(p.nbytes for p in parts) == (4 << 30) + 5


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_bytes_are_split_evenly_over_the_ranks(sizes: list[int], ranks: int) -> None:
    load = [0] * ranks
    for size, owner in zip(sizes, assign(sizes, ranks), strict=True):
        load[owner] += size
    assert max(load) <= sum(sizes) / ranks + max(sizes, default=0)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 200))
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    out = bucketed(range(len(sizes)), sizes, limit)
    assert [i for bucket in out for i in bucket] == list(range(len(sizes)))
    assert all(len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit for bucket in out)
