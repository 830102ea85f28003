"""Reading a version where it lies: views where that is possible, copies where it is not, and no corrupt bytes if they
are verified."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.fetch.version_map import VersionMap, encode
from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry
from elastic_rl.dcs.storage import arena
from elastic_rl.errors import ChunkCorrupt, NodeUnavailable

SIZE, MAP_AT = 1 << 17, 1 << 16


class File:
    """An arena file with chunks and a version in it. Tests place chunks below ``MAP_AT``."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, bytearray(SIZE)
        self.at: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.tensors: list[TensorEntry] = []

    def chunk(self, offset: int, nbytes: int) -> str:
        self.data[offset:offset + nbytes] = bytes((offset + 7 * i) % 251 for i in range(nbytes))
        digest = digest_of(self.data[offset:offset + nbytes])
        self.at[digest], self.sizes[digest] = offset, nbytes
        return digest

    def tensor(self, name: str, dtype: str, shape: Sequence[int], *slices: Sequence[Any]) -> None:
        """``slices``: (digest, offset in the chunk, bytes)."""
        self.tensors.append(TensorEntry(name, dtype, tuple(shape), tuple(Slice(*s) for s in slices)))

    def whole(self, name: str, *digests: str) -> None:
        """A tensor of bytes that has all of these chunks."""
        self.tensor(name, "uint8", [sum(map(self.sizes.__getitem__, digests))],
                    *[(d, 0, self.sizes[d]) for d in digests])

    def reference(self, *, verify: bool = True) -> dict[str, Any]:
        blob = encode(Manifest(tuple(self.tensors), self.sizes))
        table = VersionMap(memoryview(blob))
        for number, offset in enumerate(self.at.values()):
            table.place(number, offset)
        self.data[MAP_AT:MAP_AT + len(blob)] = blob
        self.path.write_bytes(self.data)
        return {"format": mapping.FORMAT, "path": str(self.path), "stream": "s", "version": 1, "verify": verify,
                "map": [MAP_AT, len(blob), table.digest()]}

    def load(self, *, verify: bool = True) -> dict[str, torch.Tensor]:
        return dict(mapping.load_tensors(self.reference(verify=verify)))

    def bytes_of(self, *digests: str) -> list[int]:
        return [b for d in digests for b in self.data[self.at[d]:self.at[d] + self.sizes[d]]]


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "arena")


def is_view(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == SIZE


def test_tensor_in_contiguous_chunks_is_a_view(file: File) -> None:
    chunks = [file.chunk(256, 64), file.chunk(320, 64), file.chunk(384, 32)]
    file.whole("t", *chunks)
    tensor = file.load()["t"]
    assert is_view(tensor) and tensor.tolist() == file.bytes_of(*chunks)


@pytest.mark.parametrize("offsets", [(1024, 256), (320, 256)])
def test_tensor_in_chunks_apart_or_out_of_order_is_a_copy(file: File, offsets: tuple[int, int]) -> None:
    chunks = [file.chunk(offset, 64) for offset in offsets]
    file.whole("t", *chunks)
    tensor = file.load()["t"]
    assert not is_view(tensor) and tensor.tolist() == file.bytes_of(*chunks)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("start", [0, 1, 2, 8])
def test_misaligned_tensor_is_copied(file: File, dtype: str, start: int) -> None:
    chunk = file.chunk(512, 128)
    itemsize = getattr(torch, dtype).itemsize
    file.tensor("t", dtype, [64 // itemsize], (chunk, start, 64))
    tensor = file.load()["t"]
    assert is_view(tensor) == (start % itemsize == 0)
    assert tensor.view(torch.uint8).tolist() == file.bytes_of(chunk)[start:start + 64]


def test_empty_and_scalar_tensors_are_read(file: File) -> None:
    file.tensor("none", "float32", [0, 3])
    file.tensor("scalar", "float64", [], (file.chunk(64, 64), 0, 8))
    tensors = file.load()
    assert tensors["none"].shape == (0, 3)
    assert tensors["scalar"].shape == ()


def test_only_the_tensors_of_the_given_ranges_are_read(file: File) -> None:
    for i in range(6):
        file.whole(f"t{i}", file.chunk(i * 64, 64))
    reference = file.reference()
    found = dict(mapping.load_tensors({**reference, "tensors": [[0, 1], [3, 5]]}))
    assert list(found) == ["t0", "t3", "t4"] and found["t4"].tolist() == list(file.data[256:320])


@pytest.mark.parametrize("threads", [1, 3])
def test_first_corrupt_chunk_is_reported_if_chunks_are_verified(
        file: File, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_WORTH_THREADS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(threads)))
    digests = [file.chunk(i * 64, 64) for i in range(20)]
    for digest in digests:
        file.whole(digest, digest)
    file.load()
    for corrupt in (13, 7):
        file.data[corrupt * 64 + 5] ^= 1
        with pytest.raises(ChunkCorrupt, match=digests[corrupt]):
            file.load()
    assert file.load(verify=False)[digests[7]].tolist() == list(file.data[448:512])


def test_reference_to_a_corrupt_table_or_of_another_release_is_refused(file: File) -> None:
    file.whole("t", file.chunk(0, 64))
    reference = file.reference()
    with pytest.raises(ChunkCorrupt, match="format"):
        list(mapping.load_tensors({**reference, "format": 99}))
    offset, nbytes, digest = reference["map"]
    with pytest.raises(ChunkCorrupt, match="leads out"):
        list(mapping.load_tensors({**reference, "map": [SIZE - 8, nbytes, digest]}))
    with pytest.raises(ChunkCorrupt, match="digest"):
        list(mapping.load_tensors({**reference, "map": [offset, nbytes, "0" * 32]}))
    file.path.unlink()
    with pytest.raises(NodeUnavailable):
        list(mapping.load_tensors(reference))


def test_chunk_beyond_the_arena_is_refused(file: File) -> None:
    digest = file.chunk(0, 64)
    file.whole("t", digest)
    file.at[digest] = SIZE - 8
    with pytest.raises(ChunkCorrupt, match="leads out"):
        file.load()


def test_bytes_are_locked_while_a_view_of_them_is_referenced(file: File) -> None:
    file.whole("a", file.chunk(8192, 64))
    file.whole("b", file.chunk(16384, 64))
    tensors = file.load()
    fd = os.open(file.path, os.O_RDWR)

    def locked(start: int, end: int) -> bool:
        return arena._lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, end)[0] != fcntl.F_UNLCK

    assert locked(8192, 16448) and not locked(0, 8192) and not locked(20480, MAP_AT)
    part = tensors.pop("b")[:3]
    del tensors
    gc.collect()
    assert locked(16384, 16385)
    del part
    gc.collect()
    assert not locked(0, SIZE)
    os.close(fd)
