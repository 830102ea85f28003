"""What a version consists of: tensors, and where in which chunks their bytes lie. Pure, and free of torch, so that
nodes and coordinators can read manifests without loading it.

The chunks are divided into *parts*: what one node was given by the publisher's ranks on its host. Copies are made, kept
track of and repaired by part (``catalog/replica_sets.py``); readers need not know of them.

Tensors are little-endian and row-major. Within a chunk each tensor starts at a multiple of ALIGN, so that a mapped
chunk can be viewed in any dtype without a copy; the bytes between are zero, so that equal tensors always make equal
chunks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from elastic_rl.errors import ChunkCorrupt, ConfigError

SCHEMA = 2
ALIGN = 64
"""Bytes; a multiple of every itemsize, and a cache line."""
DTYPES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Names of torch dtypes that can be stored, and the bytes of one element."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection meanwhile: making 100,000 tuples triggers collections that find nothing and take as
    long again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


class Slice(NamedTuple):
    """A run of a tensor's bytes within a chunk."""

    digest: str
    offset: int
    nbytes: int


class TensorEntry(NamedTuple):
    """One tensor: ``dtype`` is torch's name without the prefix; ``slices`` in the order of its bytes, none if empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Every tensor of a version in the order of publication, and every chunk with its size."""

    tensors: tuple[TensorEntry, ...]
    chunks: Mapping[str, int]
    """Digest → bytes, each chunk once, part after part."""
    parts: tuple[int, ...] = ()
    """Number of chunks of each part; empty: all are one part."""

    def part_digests(self) -> list[list[str]]:
        """Digests of the chunks of each part; at least one part."""
        rest = iter(self.chunks)
        return [list(itertools.islice(rest, n)) for n in self.parts or (len(self.chunks),)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(t.nbytes for t in self.tensors)

    @uncollected()
    def encode(self) -> bytes:
        """Compact JSON; equal manifests make equal bytes."""
        index = {digest: i for i, digest in enumerate(self.chunks)}
        return orjson.dumps({
            "schema": SCHEMA, "chunks": [(d, n) for d, n in self.chunks.items()],
            "parts": self.parts or (len(self.chunks),),
            "tensors": [(name, dtype, shape, [(index[digest], offset, nbytes) for digest, offset, nbytes in slices])
                        for name, dtype, shape, slices in self.tensors]})

    @classmethod
    @uncollected()
    def decode(cls, raw: bytes | memoryview) -> Manifest:
        """Decodes ``encode``'s bytes and checks them. Raises ChunkCorrupt."""
        try:
            value = orjson.loads(raw)
            if value["schema"] != SCHEMA:
                raise ChunkCorrupt(f"a manifest has schema {value['schema']}; this release reads {SCHEMA}",
                                   hint="run one release of elastic-rl everywhere")
            chunks = [(str(d), int(n)) for d, n in value["chunks"]]
            numbered = dict(enumerate(chunks))  # unlike a list, without negative indexes
            tensors = tuple(
                TensorEntry(str(name), str(dtype), tuple(int(n) for n in shape),
                            tuple(Slice(numbered[i][0], int(offset), int(nbytes)) for i, offset, nbytes in slices))
                for name, dtype, shape, slices in value["tensors"])
            parts = tuple(int(n) for n in value["parts"])
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ChunkCorrupt(f"a manifest cannot be read: {e!r}") from e
        manifest = cls(tensors, dict(chunks), parts if len(parts) > 1 else ())
        if sum(parts) != len(manifest.chunks) or any(n < 0 for n in parts):
            raise ChunkCorrupt(f"a manifest of {len(manifest.chunks)} chunks has parts of {list(parts)[:10]}")
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raises ChunkCorrupt when slices do not cover their tensors, or exceed their chunks."""
        names: set[str] = set()
        for t in self.tensors:
            if t.name in names or t.dtype not in DTYPES or any(n < 0 for n in t.shape):
                raise ChunkCorrupt(f"a manifest's tensor {t.name!r} ({t.dtype}, {t.shape}) is a duplicate or malformed")
            names.add(t.name)
            for s in t.slices:
                if s.offset < 0 or s.nbytes <= 0 or s.offset + s.nbytes > self.chunks.get(s.digest, -1):
                    raise ChunkCorrupt(f"a manifest's tensor {t.name!r} exceeds its chunk {s.digest}")
            if sum(s.nbytes for s in t.slices) != t.nbytes:
                raise ChunkCorrupt(f"a manifest's tensor {t.name!r} has slices that do not add up to its shape")


class SliceCopy(NamedTuple):
    """Copy ``nbytes`` from a tensor's ``source`` offset to ``offset`` of chunk number ``chunk``."""

    chunk: int
    offset: int
    source: int
    nbytes: int


@dataclass
class Packer:
    """Lays tensors out in chunks one after the other, without knowing those to come.

    A tensor that fits in a chunk is never split, so that it can be viewed in place; a larger one starts a new chunk.
    """

    chunk_bytes: int
    sizes: list[int] = field(default_factory=list)
    """Bytes in use of each chunk so far; only the last one still grows."""
    _tensors: list[tuple[str, str, tuple[int, ...], list[SliceCopy]]] = field(default_factory=list)
    _entries: list[TensorEntry] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.chunk_bytes -= self.chunk_bytes % ALIGN
        if self.chunk_bytes <= 0:
            raise ConfigError(f"chunks must have at least {ALIGN} bytes", hint="set a larger dcs.chunk_bytes")

    def add(self, name: str, dtype: str, shape: Sequence[int]) -> list[SliceCopy]:
        """Where the next tensor's bytes go. Raises ValueError for a name used before or a dtype not in DTYPES."""
        if name in self._names:
            raise ValueError(f"two tensors are named {name!r}")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, which cannot be stored")
        self._names.add(name)
        nbytes = math.prod(shape) * DTYPES[dtype]
        parts: list[SliceCopy] = []
        at = 0
        while at < nbytes:
            room = self.chunk_bytes - aligned(self.sizes[-1]) if self.sizes else 0
            if room < min(nbytes - at, self.chunk_bytes):
                self.sizes.append(0)
                room = self.chunk_bytes
            start, n = aligned(self.sizes[-1]), min(room, nbytes - at)
            parts.append(SliceCopy(len(self.sizes) - 1, start, at, n))
            self.sizes[-1] = start + n
            at += n
        self._tensors.append((name, dtype, tuple(shape), parts))
        return parts

    def alias(self, name: str, index: int) -> None:
        """Another name for the ``index``-th tensor added, whose bytes it shares: tied weights are stored once. Raises
        ValueError for a name used before."""
        if name in self._names:
            raise ValueError(f"two tensors are named {name!r}")
        self._names.add(name)
        _, dtype, shape, parts = self._tensors[index]
        self._tensors.append((name, dtype, shape, parts))

    @uncollected()
    def resolve(self, digests: Sequence[str]) -> None:
        """Makes the manifest entries of tensors that lie in the first chunks alone, whose digests are known now."""
        known = len(digests)
        for i in range(len(self._entries), len(self._tensors)):
            name, dtype, shape, parts = self._tensors[i]
            if parts and parts[-1].chunk >= known:
                return
            self._entries.append(TensorEntry(name, dtype, shape, tuple(
                [Slice(digests[chunk], offset, nbytes) for chunk, offset, _, nbytes in parts])))

    def manifest(self, digests: Sequence[str]) -> Manifest:
        """The manifest, given the digest of each chunk in order."""
        self.resolve(digests)
        return Manifest(tuple(self._entries), dict(zip(digests, self.sizes, strict=True)))
