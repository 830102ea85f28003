"""Tensors of a version are handed out once each, as soon as all their chunks are there."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.fetch.assembly import Assembly
from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry
from elastic_rl.etcd.records import Version, VersionState

BYTES = 64


def manifest(shapes: list[list[int]]) -> Manifest:
    """A tensor for each list: one byte of each of these chunks."""
    tensors = tuple(TensorEntry(f"t{i}", "uint8", (len(chunks),), tuple(Slice(f"c{c}", i, 1) for c in chunks))
                    for i, chunks in enumerate(shapes))
    made = Manifest(tensors, {f"c{c}": BYTES for chunks in shapes for c in chunks})
    made.check()
    return made


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12), seed=st.integers(0, 1 << 32))
def test_every_tensor_is_handed_out_once_and_no_sooner_than_all_its_chunks_are_there(
        shapes: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    made = manifest(shapes)
    version = Version(stream="policy", number=7, state=VersionState.COMMITTED, epoch=1)
    assembly = Assembly(version, made, "/arena")
    at = {digest: 1000 * i for i, digest in enumerate(made.chunks)}
    coming = [(digest, at[digest], BYTES) for digest in made.chunks]
    coming += rng.sample(coming, len(coming) // 2)  # some are told twice
    rng.shuffle(coming)
    here: set[str] = set()
    tensors: list[str] = []
    chunks: list[str] = []
    while True:
        if (part := assembly.part()) is not None:
            for name, _, _, pieces in part["tensors"]:
                entry = made.tensors[int(name[1:])]
                assert {s.digest for s in entry.slices} <= here
                assert pieces == [[at[s.digest] + s.offset, 1] for s in entry.slices]
            tensors += [t[0] for t in part["tensors"]]
            chunks += [c[0] for c in part["chunks"]]
            assert set(chunks) <= here and (part["path"], part["version"]) == ("/arena", 7)
        if not coming:
            break
        few, coming = coming[:2], coming[2:]
        assembly.add(few)
        here.update(digest for digest, _, _ in few)
    assert sorted(tensors) == sorted(t.name for t in made.tensors)
    assert sorted(chunks) == sorted(made.chunks), "a chunk was not handed out for verification, or twice"
    assert assembly.part() is None
