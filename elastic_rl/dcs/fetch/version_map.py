"""A version as the processes of one host read it: a table of its tensors and of where their bytes lie in the arena.

Decoding a manifest of a large model takes every reader about a second and as much memory as the manifest has entries.
So the node decodes it once and writes this table into its arena; readers map it and read it as numpy arrays, without
parsing. It needs no torch, so a node does not load that.

    header | static part: chunks, parts, tensors (dtype, shape, slices, name) | offset of each chunk (int64)

All numbers are little-endian, every section starts at a multiple of 8 bytes. The static part is checked against its
digest. The offsets are filled in by the node as chunks arrive: -1 until then. An offset is written before the tensors
of that chunk are announced to a reader, and does not change while the version is open.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from elastic_rl.dcs.codecs.digests import digest_of, matches
from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry, uncollected
from elastic_rl.errors import ChunkCorrupt

Ranges = Sequence[Sequence[int]]
"""[first, end) of tensors, by their number in the order of publication."""

_HEADER = struct.Struct("<8sIIIIIIIQ")  # magic; numbers of chunks, parts, tensors, dims, slices; bytes of names, dtypes
_MAGIC = b"eRLmap01"                    # bytes of the header and the static part
_DIGEST = 32
_ABSENT = -1


class ReadableTensor(NamedTuple):
    """A tensor and its pieces, [(offset in the arena, bytes)] in order; neighbours are merged."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, int]]


def _sections(chunks: int, parts: int, tensors: int, dims: int, slices: int, names: int, dtypes: int
              ) -> list[tuple[str, Any, int]]:
    """Name, dtype and length of each section of the static part."""
    return [("chunk_nbytes", np.uint64, chunks), ("chunk_digest", np.uint8, _DIGEST * chunks),
            ("chunk_digest_bytes", np.uint8, chunks), ("part_chunks", np.uint32, parts),
            ("tensor_dtype", np.uint8, tensors),
            ("dims_end", np.uint32, tensors), ("dims", np.uint64, dims), ("slices_end", np.uint32, tensors),
            ("slice_chunk", np.uint32, slices), ("slice_offset", np.uint64, slices),
            ("slice_nbytes", np.uint64, slices), ("names_end", np.uint32, tensors), ("names", np.uint8, names),
            ("dtypes", np.uint8, dtypes)]


@uncollected()
def encode(manifest: Manifest) -> bytearray:
    """The table of a manifest, with no chunk present."""
    number = {digest: i for i, digest in enumerate(manifest.chunks)}
    tensors = manifest.tensors
    dtypes = sorted({t.dtype for t in tensors})
    slices = [s for t in tensors for s in t.slices]
    names = [t.name.encode() for t in tensors]
    digests = [bytes.fromhex(d) for d in manifest.chunks]
    content: dict[str, Any] = {
        "chunk_nbytes": list(manifest.chunks.values()),
        "chunk_digest": np.frombuffer(b"".join(d.ljust(_DIGEST, b"\0") for d in digests), np.uint8),
        "chunk_digest_bytes": [len(d) for d in digests], "part_chunks": manifest.parts,
        "tensor_dtype": [dtypes.index(t.dtype) for t in tensors],
        "dims_end": list(accumulate(len(t.shape) for t in tensors)), "dims": [n for t in tensors for n in t.shape],
        "slices_end": list(accumulate(len(t.slices) for t in tensors)),
        "slice_chunk": [number[s.digest] for s in slices], "slice_offset": [s.offset for s in slices],
        "slice_nbytes": [s.nbytes for s in slices],
        "names_end": list(accumulate(len(n) for n in names)), "names": np.frombuffer(b"".join(names), np.uint8),
        "dtypes": np.frombuffer("\n".join(dtypes).encode(), np.uint8)}
    counts = (len(digests), len(manifest.parts), len(tensors), len(content["dims"]), len(slices),
              len(content["names"]), len(content["dtypes"]))
    parts, at = [b""], _aligned(_HEADER.size)
    for name, dtype, _ in _sections(*counts):
        data = np.asarray(content[name], dtype).astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
        parts.append(data.ljust(_aligned(len(data)), b"\0"))
        at += len(parts[-1])
    parts[0] = _HEADER.pack(_MAGIC, *counts, at).ljust(_aligned(_HEADER.size), b"\0")
    parts.append(np.full(len(digests), _ABSENT, "<i8").tobytes())
    return bytearray(b"".join(parts))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class VersionMap:
    """A table in memory, seen through numpy arrays. The node passes a writable buffer, readers a read-only one."""

    def __init__(self, data: memoryview, digest: str = "") -> None:
        """``digest``: the digest of the static part; checked unless empty. Raises ChunkCorrupt."""
        self._data = data
        try:
            magic, *counts, self._static_bytes = _HEADER.unpack_from(data)
            if magic != _MAGIC or self._static_bytes + 8 * counts[0] != len(data):
                raise ChunkCorrupt("what the node announced as the table of a version is none",
                                   hint="run one release of elastic-rl everywhere")
            if digest and not matches(data[:self._static_bytes], digest):
                raise ChunkCorrupt("the table of a version does not have its digest")
            self._section: dict[str, np.ndarray[Any, Any]] = {}
            at = _aligned(_HEADER.size)
            for name, dtype, length in _sections(*counts):
                self._section[name] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), length, at)
                at += _aligned(self._section[name].nbytes)
            self._offsets = np.frombuffer(data, "<i8", counts[0], self._static_bytes)
        except (struct.error, ValueError) as e:
            raise ChunkCorrupt(f"the table of a version cannot be read: {e}") from e
        self.chunks, self.tensors = counts[0], counts[2]
        """Numbers of chunks and tensors."""

    def digest(self) -> str:
        """Digest of the static part."""
        return digest_of(self._data[:self._static_bytes])

    # -- the node ----------------------------------------------------------------------------------------------------
    def place(self, chunk: int, offset: int) -> None:
        """The chunk lies at ``offset`` of the arena from now on."""
        self._offsets[chunk] = offset

    def users(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Pairs (tensor, chunk), each once, ordered by chunk: which tensors have bytes in which chunks."""
        ends = self._section["slices_end"].astype(np.int64)
        tensor = np.repeat(np.arange(self.tensors), np.diff(ends, prepend=0))
        pairs = np.unique(self._section["slice_chunk"].astype(np.int64) * max(self.tensors, 1) + tensor)
        return pairs % max(self.tensors, 1), pairs // max(self.tensors, 1)

    # -- readers -----------------------------------------------------------------------------------------------------
    def read(self, ranges: Ranges | None = None) -> Iterator[ReadableTensor]:
        """The tensors of some ranges (all by default) in the order of publication. Raises ChunkCorrupt for one whose
        chunks are not all here."""
        dtypes = bytes(self._section["dtypes"]).decode().split("\n")
        for first, end in [(0, self.tensors)] if ranges is None else ranges:
            names, dims, slices = (self._bounds(s, first, end) for s in ("names_end", "dims_end", "slices_end"))
            text = bytes(self._section["names"][names[0]:names[-1]])
            shape = self._section["dims"][dims[0]:dims[-1]].tolist()
            part = slice(slices[0], slices[-1])
            chunk_at = self._offsets[self._section["slice_chunk"][part]]
            if (chunk_at < 0).any():
                raise ChunkCorrupt("a tensor was announced before all of its chunks were here")
            starts = (chunk_at + self._section["slice_offset"][part].astype(np.int64)).tolist()
            sizes = self._section["slice_nbytes"][part].tolist()
            kinds = self._section["tensor_dtype"][first:end].tolist()
            for i in range(end - first):
                a, b = slices[i] - slices[0], slices[i + 1] - slices[0]
                yield ReadableTensor(text[names[i] - names[0]:names[i + 1] - names[0]].decode(), dtypes[kinds[i]],
                                     tuple(shape[dims[i] - dims[0]:dims[i + 1] - dims[0]]),
                                     merged(zip(starts[a:b], sizes[a:b], strict=True)))

    def _bounds(self, section: str, first: int, end: int) -> list[int]:
        """Where each of the entries from ``first`` to ``end`` starts, and where the last one ends."""
        ends = self._section[section]
        return [int(ends[first - 1]) if first else 0, *ends[first:end].tolist()]

    def chunks_of(self, ranges: Ranges | None = None) -> list[tuple[str, int, int]]:
        """Digest, offset and bytes of the chunks that hold the tensors of some ranges (all by default)."""
        if ranges is None:
            numbers: Iterable[int] = range(self.chunks)
        else:
            found = [self._section["slice_chunk"][slice(*self._bounds("slices_end", a, b)[::max(b - a, 1)])]
                     for a, b in ranges if a < b]
            numbers = np.unique(np.concatenate(found)).tolist() if found else []
        return [(self._digest(i), int(self._offsets[i]), int(self._section["chunk_nbytes"][i])) for i in numbers]

    def _digest(self, chunk: int) -> str:
        at, nbytes = _DIGEST * chunk, int(self._section["chunk_digest_bytes"][chunk])
        return bytes(self._section["chunk_digest"][at:at + nbytes]).hex()

    def manifest(self) -> Manifest:
        """The manifest that this table was made of."""
        chunks = {self._digest(i): int(n) for i, n in enumerate(self._section["chunk_nbytes"])}
        digests = list(chunks)
        slices = [Slice(digests[c], o, n) for c, o, n in zip(
            *(self._section[s].tolist() for s in ("slice_chunk", "slice_offset", "slice_nbytes")), strict=True)]
        ends = self._bounds("slices_end", 0, self.tensors)
        dtypes = bytes(self._section["dtypes"]).decode().split("\n")
        dims, dim_ends = self._section["dims"].tolist(), self._bounds("dims_end", 0, self.tensors)
        names, name_ends = bytes(self._section["names"]), self._bounds("names_end", 0, self.tensors)
        return Manifest(tuple(
            TensorEntry(names[name_ends[i]:name_ends[i + 1]].decode(), dtypes[kind],
                        tuple(dims[dim_ends[i]:dim_ends[i + 1]]), tuple(slices[ends[i]:ends[i + 1]]))
            for i, kind in enumerate(self._section["tensor_dtype"].tolist())), chunks,
            tuple(self._section["part_chunks"].tolist()))


def merged(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, bytes) of the pieces, in order; pieces that are next to each other become one."""
    out: list[tuple[int, int]] = []
    for offset, nbytes in pieces:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((offset, nbytes))
    return out


class TensorAssembly:
    """Which tensors are complete while the chunks of a version arrive. Pure."""

    def __init__(self, table: VersionMap) -> None:
        tensors, chunks = table.users()
        self._lacking = np.bincount(tensors, minlength=table.tensors)
        self._tensors = tensors
        self._starts = np.searchsorted(chunks, np.arange(table.chunks + 1))
        self._present = np.zeros(table.chunks, bool)
        self.complete: list[int] = np.flatnonzero(self._lacking == 0).tolist()
        """Numbers of the tensors whose chunks are all here, in the order in which they became so."""

    def add(self, chunk: int) -> None:
        """The chunk is here; adding it again does nothing."""
        if self._present[chunk]:
            return
        self._present[chunk] = True
        users = self._tensors[self._starts[chunk]:self._starts[chunk + 1]]
        self._lacking[users] -= 1
        self.complete += users[self._lacking[users] == 0].tolist()


def to_ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as ascending [first, end) ranges."""
    out: list[list[int]] = []
    for number in sorted(numbers):
        if out and out[-1][1] == number:
            out[-1][1] += 1
        else:
            out.append([number, number + 1])
    return out
