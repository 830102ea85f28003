"""What changed in a chunk against another of the same length: sparse absolute values. Pure.

At the learning rates of RL a step changes few of the elements of bf16 weights (the updates of the others are lost in
rounding), and their positions take few bytes. A delta holds the new values themselves and not differences, so applying
it twice is harmless, and its result is always checked against the digest of the chunk that it stands for.

    magic 4 | element bytes 1 | 0 x 3 | chunk bytes u64 | changed elements u64 | long gaps u64
    gaps  u8 each: unchanged elements before a changed one; 255: the number is the next of the long gaps
    long gaps u32 each
    values, ``element bytes`` each
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import ChunkCorrupt

_HEADER = struct.Struct("<4sB3xQQQ")
_MAGIC = b"eRD1"
_LONG = 255
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MAX_CHUNK = 1 << 32
"""Bytes; longer chunks have gaps that u32 cannot hold."""
_SAMPLE_BLOCKS, _BLOCK = 256, 256
"""A sample is so many blocks of so many bytes, spread evenly: 64 KiB of a chunk of any size."""
_SAMPLE_MARGIN = 1.5
"""The estimate may exceed the limit by this before the chunk is not compared in full."""


def encode(base: memoryview, new: memoryview, itemsize: int = 2, max_ratio: float = 0.5) -> bytes | None:
    """The delta that makes ``new`` of ``base``, whose elements have ``itemsize`` bytes (1, 2, 4 or 8).

    None when the lengths differ, are not whole elements, or the delta would be larger than ``max_ratio`` of ``new``.
    A sample of a large chunk is compared first: where most of it changed, comparing all of it would take many times as
    long as sending it.
    """
    nbytes = len(new)
    if len(base) != nbytes or nbytes % itemsize or not 0 < nbytes <= _MAX_CHUNK:
        return None
    if _estimate(base, new, itemsize) > _SAMPLE_MARGIN * max_ratio:
        return None
    positions, values = _changes(base, new, itemsize)
    if _HEADER.size + len(positions) * (1 + itemsize) > max_ratio * nbytes:
        return None
    gaps = np.diff(positions, prepend=-1) - 1
    is_long = gaps >= _LONG
    long = gaps[is_long].astype("<u4")
    if _HEADER.size + len(positions) * (1 + itemsize) + long.nbytes > max_ratio * nbytes:
        return None
    short = np.where(is_long, _LONG, gaps).astype(np.uint8)
    header = _HEADER.pack(_MAGIC, itemsize, nbytes, len(positions), len(long))
    return b"".join((header, short.data, long.data, values.data))


def _estimate(base: memoryview, new: memoryview, itemsize: int) -> float:
    """Size of the delta as a fraction of the chunk, by a sample of a large one; 0 for a small one."""
    blocks = len(new) // _BLOCK
    if blocks < 4 * _SAMPLE_BLOCKS:
        return 0.0
    kind, step = _TYPES[itemsize], blocks // _SAMPLE_BLOCKS
    old, now = (np.frombuffer(data, kind, blocks * _BLOCK // itemsize).reshape(blocks, -1)[::step]
                for data in (base, new))
    return float((old != now).mean()) * (1 + itemsize) / itemsize


def _changes(base: memoryview, new: memoryview, itemsize: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions (int64, ascending) and new values of the elements that differ.

    Words of eight bytes are compared first: most of them are equal, and only the others are examined.
    """
    kind, lanes = _TYPES[itemsize], 8 // itemsize
    old, now = np.frombuffer(base, kind), np.frombuffer(new, kind)
    whole = len(now) // lanes * lanes
    old_words, now_words = old[:whole].view(np.uint64), now[:whole].view(np.uint64)
    words = np.flatnonzero(old_words != now_words)
    picked = now_words[words].view(kind)
    lane = np.flatnonzero(picked != old_words[words].view(kind))
    positions = words[lane // lanes] * lanes + lane % lanes
    values = picked[lane]
    rest = np.flatnonzero(old[whole:] != now[whole:])
    if len(rest):
        positions, values = np.concatenate([positions, whole + rest]), np.concatenate([values, now[whole:][rest]])
    return positions, values


def decode(delta: bytes | memoryview, base: memoryview, out: memoryview) -> None:
    """Writes the chunk that ``delta`` makes of ``base`` into ``out``, which has the same length and is not ``base``.

    Raises ChunkCorrupt when the delta is malformed or not for a chunk of this length; ``out`` is undefined then.
    """
    raw = memoryview(delta)
    try:
        magic, itemsize, nbytes, count, longs = _HEADER.unpack_from(raw)
        kind = _TYPES[itemsize]
    except (struct.error, KeyError) as e:
        raise ChunkCorrupt("the header of a delta cannot be read") from e
    elements = nbytes // itemsize
    if (magic != _MAGIC or nbytes != len(base) or nbytes != len(out) or nbytes % itemsize or count > elements
            or longs > count or len(raw) != _HEADER.size + count + 4 * longs + itemsize * count):
        raise ChunkCorrupt("a delta does not fit its chunk")
    at = _HEADER.size
    gaps = np.frombuffer(raw, np.uint8, count, at).astype(np.int64)
    long = np.frombuffer(raw, "<u4", longs, at + count)
    values = np.frombuffer(raw, kind, count, at + count + 4 * longs)
    is_long = gaps == _LONG
    if int(is_long.sum()) != longs:
        raise ChunkCorrupt("a delta has two different numbers of long gaps")
    gaps[is_long] = long
    positions = np.cumsum(gaps + 1) - 1
    if count and int(positions[-1]) >= elements:
        raise ChunkCorrupt("a delta exceeds its chunk")
    out[:] = base
    np.frombuffer(out, kind)[positions] = values


def bases(old: Manifest, new: Manifest) -> dict[str, str]:
    """The chunk of ``old`` at the same place as each chunk of ``new``, where they differ and have the same length.

    A place is a slice of a tensor of the same name, dtype and shape, so nothing is found where the layouts differ.
    """
    before = {t.name: t for t in old.tensors}
    found: dict[str, str] = {}
    for tensor in new.tensors:
        was = before.get(tensor.name)
        if was is None or (was.dtype, was.shape, len(was.slices)) != (tensor.dtype, tensor.shape, len(tensor.slices)):
            continue
        for a, b in zip(was.slices, tensor.slices, strict=True):
            if (a.offset == b.offset and a.digest != b.digest and b.digest not in old.chunks
                    and old.chunks[a.digest] == new.chunks[b.digest]):
                found.setdefault(b.digest, a.digest)
    return found
