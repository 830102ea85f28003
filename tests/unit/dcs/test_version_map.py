"""The table of a version: what goes in comes out, and tensors are complete exactly when their chunks are here."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.codecs.digests import BLAKE3, XXH3, digest_of
from elastic_rl.dcs.fetch.version_map import TensorAssembly, VersionMap, encode, merged, to_ranges
from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry
from elastic_rl.errors import ChunkCorrupt

BYTES = 64
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12)


def digest(chunk: int, kind: str = XXH3) -> str:
    return digest_of(b"%d" % chunk, kind)


def manifest_of(shapes: list[list[int]], kind: str = XXH3) -> Manifest:
    """A tensor for each list: one byte of each of these chunks."""
    tensors = tuple(TensorEntry(f"t{i}é", ("uint8", "bool", "int8")[i % 3], (1, len(chunks)),
                                tuple(Slice(digest(c, kind), i, 1) for c in chunks)) for i, chunks in enumerate(shapes))
    made = Manifest(tensors, {digest(c, kind): BYTES + c for chunks in shapes for c in chunks})
    made.check()
    return made


def table_of(manifest: Manifest, offsets: dict[str, int] | None = None) -> VersionMap:
    table = VersionMap(memoryview(encode(manifest)))
    for number, name in enumerate(manifest.chunks):
        if offsets is not None and name in offsets:
            table.place(number, offsets[name])
    return table


@given(SHAPES, st.sampled_from([XXH3, BLAKE3]), st.integers(0, 60))
def test_table_has_everything_of_its_manifest(shapes: list[list[int]], kind: str, first_part: int) -> None:
    manifest = manifest_of(shapes, kind)
    if first_part < len(manifest.chunks):
        manifest = dataclasses.replace(manifest, parts=(first_part, len(manifest.chunks) - first_part))
    assert table_of(manifest).manifest() == manifest


@given(SHAPES, st.integers(0, 12), st.integers(0, 12))
def test_table_reads_any_range_of_tensors(shapes: list[list[int]], first: int, length: int) -> None:
    manifest = manifest_of(shapes)
    at = {name: 1000 * i for i, name in enumerate(manifest.chunks)}
    table = VersionMap(memoryview(bytes(table_of(manifest, at)._data)), table_of(manifest).digest())
    first = min(first, len(shapes))
    end = min(first + length, len(shapes))
    found = list(table.read([[first, end]]))
    assert [(t.name, t.dtype, t.shape) for t in found] == [t[:3] for t in manifest.tensors[first:end]]
    assert [t.pieces for t in found] == [merged((at[s.digest] + s.offset, 1) for s in t.slices)
                                         for t in manifest.tensors[first:end]]
    wanted = {s.digest for t in manifest.tensors[first:end] for s in t.slices}
    assert {c[0]: c[1:] for c in table.chunks_of([[first, end]])} == {d: (at[d], manifest.chunks[d]) for d in wanted}
    assert [c[0] for c in table.chunks_of()] == list(manifest.chunks)
    assert len(list(table.read())) == len(shapes)


@given(shapes=SHAPES, seed=st.integers(0, 1 << 32))
def test_tensor_is_complete_once_all_its_chunks_are_here(shapes: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    manifest = manifest_of(shapes)
    assembly = TensorAssembly(table_of(manifest))
    names = list(manifest.chunks)
    coming = [*range(len(names)), *rng.sample(range(len(names)), len(names) // 2)]  # some arrive twice
    rng.shuffle(coming)
    here: set[str] = set()
    while True:
        complete = {i for i, t in enumerate(manifest.tensors) if {s.digest for s in t.slices} <= here}
        assert sorted(assembly.complete) == sorted(complete)
        if not coming:
            break
        chunk = coming.pop()
        assembly.add(chunk)
        here.add(names[chunk])


def test_tensor_whose_chunk_is_absent_cannot_be_read() -> None:
    manifest = manifest_of([[0], [0, 1]])
    table = table_of(manifest, {digest(0): 0})
    assert len(list(table.read([[0, 1]]))) == 1
    with pytest.raises(ChunkCorrupt, match="before all of its chunks"):
        list(table.read([[0, 2]]))


@given(SHAPES, st.data())
def test_table_that_was_changed_is_rejected_by_its_digest(shapes: list[list[int]], data: st.DataObject) -> None:
    table = table_of(manifest_of(shapes))
    raw, expected = bytearray(table._data), table.digest()
    VersionMap(memoryview(raw), expected)
    raw[data.draw(st.integers(0, table._static_bytes - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ChunkCorrupt):
        VersionMap(memoryview(raw), expected)
    with pytest.raises(ChunkCorrupt):
        VersionMap(memoryview(raw[:-1]), expected)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=12))
def test_merged_pieces_cover_the_same_bytes_and_have_no_neighbours(parts: list[tuple[int, int]]) -> None:
    pieces = merged(parts)
    assert [b for o, n in pieces for b in range(o, o + n)] == [b for o, n in parts for b in range(o, o + n)]
    assert all(sum(a) != b[0] for a, b in zip(pieces, pieces[1:], strict=False))


@given(st.sets(st.integers(0, 40)))
def test_ranges_have_the_same_numbers(numbers: set[int]) -> None:
    ranges = to_ranges(numbers)
    assert [n for a, b in ranges for n in range(a, b)] == sorted(numbers)
    assert all(a[1] < b[0] for a, b in zip(ranges, ranges[1:], strict=False))
