"""Reading a version where it lies: views where that is possible, copies where it is not, and no wrong bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch import mapping
from elastic_rl.errors import ChunkCorrupt, NodeUnavailable


class File:
    """An arena file with chunks in it."""

    def __init__(self, path: Path, size: int = 1 << 16) -> None:
        self.path, self.data = path, bytearray(size)
        self.chunks: list[list[Any]] = []
        self.tensors: list[list[Any]] = []

    def chunk(self, offset: int, nbytes: int) -> list[int]:
        self.data[offset:offset + nbytes] = bytes((offset + 7 * i) % 251 for i in range(nbytes))
        self.chunks.append([digest_of(self.data[offset:offset + nbytes]), offset, nbytes])
        return [offset, nbytes]

    def tensor(self, name: str, dtype: str, shape: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
        self.tensors.append([name, dtype, list(shape), [list(p) for p in parts]])

    def load(self) -> dict[str, torch.Tensor]:
        self.path.write_bytes(self.data)
        return dict(mapping.load_tensors(self.reference()))

    def reference(self) -> dict[str, Any]:
        return {"format": mapping.FORMAT, "path": str(self.path), "stream": "s", "version": 1, "chunks": self.chunks,
                "tensors": self.tensors}

    def bytes_of(self, *parts: Sequence[int]) -> list[int]:
        return [b for offset, nbytes in parts for b in self.data[offset:offset + nbytes]]


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "arena")


def is_view(tensor: torch.Tensor, file: File) -> bool:
    return tensor.untyped_storage().nbytes() == len(file.data)


def test_a_tensor_in_chunks_that_lie_next_to_each_other_is_a_view(file: File) -> None:
    parts = [file.chunk(256, 64), file.chunk(320, 64), file.chunk(384, 32)]
    file.tensor("t", "uint8", [160], parts)
    tensor = file.load()["t"]
    assert is_view(tensor, file) and tensor.tolist() == file.bytes_of(*parts)


def test_a_tensor_in_chunks_that_lie_apart_is_a_copy(file: File) -> None:
    parts = [file.chunk(1024, 64), file.chunk(256, 64)]
    file.tensor("t", "uint8", [128], parts)
    tensor = file.load()["t"]
    assert not is_view(tensor, file) and tensor.tolist() == file.bytes_of(*parts)


def test_chunks_in_the_wrong_order_are_not_taken_for_one_piece(file: File) -> None:
    parts = [file.chunk(320, 64), file.chunk(256, 64)]
    file.tensor("t", "uint8", [128], parts)
    assert file.load()["t"].tolist() == file.bytes_of(*parts)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("start", [0, 1, 2, 8])
def test_a_tensor_that_does_not_begin_at_a_multiple_of_its_elements_is_copied(file: File, dtype: str, start: int
                                                                              ) -> None:
    offset, _ = file.chunk(512, 128)
    part = [offset + start, 64]
    itemsize = getattr(torch, dtype).itemsize
    file.tensor("t", dtype, [64 // itemsize], [part])
    tensor = file.load()["t"]
    assert is_view(tensor, file) == (start % itemsize == 0)
    assert tensor.view(torch.uint8).tolist() == file.bytes_of(part)


def test_empty_and_scalar_tensors_are_read(file: File) -> None:
    part = file.chunk(64, 64)
    file.tensor("none", "float32", [0, 3], [])
    file.tensor("scalar", "float64", [], [[part[0], 8]])
    tensors = file.load()
    assert tensors["none"].shape == (0, 3)
    assert tensors["scalar"].shape == ()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=12))
def test_merged_pieces_cover_the_same_bytes_in_the_same_order_and_cannot_be_merged_further(
        parts: list[tuple[int, int]]) -> None:
    pieces = mapping.merged(parts)
    assert [b for o, n in pieces for b in range(o, o + n)] == [b for o, n in parts for b in range(o, o + n)]
    assert all(sum(a) != b[0] for a, b in zip(pieces, pieces[1:], strict=False))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_corrupt_chunk_is_told_also_when_several_threads_look(
        file: File, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_WORTH_THREADS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(threads)))
    for i in range(20):
        file.chunk(i * 64, 64)
    file.load()
    for damaged in (13, 7):
        file.data[damaged * 64 + 5] ^= 1
        with pytest.raises(ChunkCorrupt, match=file.chunks[damaged][0]):
            file.load()


def test_a_reference_beyond_the_arena_or_of_another_release_is_refused(file: File) -> None:
    file.chunk(0, 64)
    file.load()
    with pytest.raises(ChunkCorrupt, match="format"):
        mapping.verify({**file.reference(), "format": 99})
    file.chunks.append([file.chunks[0][0], len(file.data) - 8, 64])
    with pytest.raises(ChunkCorrupt):
        mapping.verify(file.reference())
    file.path.unlink()
    with pytest.raises(NodeUnavailable):
        mapping.verify(file.reference())
