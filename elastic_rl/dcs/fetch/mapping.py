"""Reads an opened version where it lies: maps the arena of this host read-only and returns tensor views.

Knows neither etcd nor the network, so that it can run inside an inference engine. What to read comes as a *reference*,
a JSON-able dict that ``Pulled.reference()`` makes:

    {"format": 2, "path": arena file, "stream": str, "version": int, "map": [offset, bytes, digest],
     "tensors": [[first, end], ...] or absent for all, "verify": bool, "once": bool or absent}

``map`` is the table of the version (``version_map``) in the arena. A reference is valid for as long as the process that
made it keeps the version open.

Why may a reader trust bytes that it did not verify (I4)? The node opens a version only when each of its chunks was
verified *after* it was written to this arena: when it was sealed, when it arrived, or again if that is longer ago than
``dcs.verify_every_s``. Chunks are immutable, their regions are neither moved nor reused while the version is open, and
``path`` names one process's arena: a node that is started again has another file. What is left:

- the node is killed, and a new one frees the arena: a mapping holds a lock on the range that it reads (``arena``);
- the connection that keeps the version open breaks while the node lives, so the regions are reused: the process that
  holds that connection calls ``Pulled.confirm`` after the last byte was read and before the result is used;
- a bit flips in memory, or a process writes to an arena that it has mapped. A node finds that at the next verification
  that is due, before it saves the chunk to disk, and when another node receives the chunk. A reader finds it with
  ``verify``, which checks every chunk here: the default of ``Pulled.tensors``, for those who read once and keep the
  result (restoring a trainer, exporting). Engines do without: the coordinator compares the checksums of what engines of
  one layout have loaded, and quarantines the odd one.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.codecs.tensors import from_bytes
from elastic_rl.dcs.fetch.version_map import ReadableTensor, VersionMap
from elastic_rl.dcs.manifest import DTYPES
from elastic_rl.dcs.storage.arena import open_for_reading
from elastic_rl.errors import ChunkCorrupt

FORMAT = 2
_KEEP = 2
_MAX_THREADS = 4
"""Most threads: more do not make memory faster."""
_WORTH_THREADS = 32 << 20
"""Bytes from which on threads are worth their start."""
_maps: dict[tuple[str, int], mmap.mmap] = {}
_lock = threading.Lock()


def load_tensors(reference: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) in the order of publication; on the CPU, **read-only**, and views of the arena where a
    tensor lies in one piece, be it of several chunks: copy what you keep, write to none.

    With ``verify`` in the reference every chunk is verified before the first tensor is yielded, so that a corrupt
    version is never applied in part. With ``once`` the pages that were read leave this process's resident memory after
    the last tensor (they stay in the arena). Raises ChunkCorrupt, and NodeUnavailable when the arena is gone.
    """
    if reference.get("format") != FORMAT:
        raise ChunkCorrupt(f"a reference has format {reference.get('format')}; this release reads {FORMAT}",
                           hint="run one release of elastic-rl everywhere")
    path, ranges = str(reference["path"]), reference.get("tensors")
    table = read_map(path, *reference["map"])
    tensors = list(table.read(ranges))
    pieces = [piece for t in tensors for piece in t.pieces]
    chunks = table.chunks_of(ranges) if reference.get("verify") else []
    spans = [*pieces, *((offset, nbytes) for _, offset, nbytes in chunks)]
    arena = _map(path, min((o for o, _ in spans), default=0), max((o + n for o, n in spans), default=0))
    _require_inside(arena, spans)
    _verify(arena, chunks, reference)
    for tensor in tensors:
        yield tensor.name, _tensor(arena, tensor)
    if reference.get("once"):
        _evict(path, spans)


def read_map(path: str, offset: int, nbytes: int, digest: str) -> VersionMap:
    """The table of a version. Raises ChunkCorrupt and NodeUnavailable."""
    arena = _map(path, offset, offset + nbytes)
    _require_inside(arena, [(offset, nbytes)])
    return VersionMap(memoryview(arena.numpy())[offset:offset + nbytes], digest)


def _tensor(arena: torch.Tensor, tensor: ReadableTensor) -> torch.Tensor:
    return from_bytes(_gathered(arena, tensor.pieces, DTYPES[tensor.dtype]), tensor.dtype, tensor.shape)


def _gathered(arena: torch.Tensor, pieces: Sequence[tuple[int, int]], itemsize: int) -> torch.Tensor:
    """The pieces as one uint8 tensor, which can be viewed as elements of ``itemsize`` bytes: a view of the arena where
    there is one piece that begins at a multiple of it, a copy otherwise."""
    if not pieces:
        return torch.empty(0, dtype=torch.uint8)
    if len(pieces) > 1:
        return torch.cat([arena[offset:offset + nbytes] for offset, nbytes in pieces])
    [(offset, nbytes)] = pieces
    data = arena[offset:offset + nbytes]
    return data.clone() if offset % itemsize else data


def _require_inside(arena: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> None:
    if any(offset < 0 or offset + nbytes > len(arena) for offset, nbytes in pieces):
        raise ChunkCorrupt("a reference leads out of the arena")


# -- verifying ---------------------------------------------------------------------------------------------------------
def _verify(arena: torch.Tensor, chunks: Sequence[tuple[str, int, int]], reference: Mapping[str, Any]) -> None:
    memory = memoryview(arena.numpy())

    def is_corrupt(chunk: tuple[str, int, int]) -> bool:
        digest, offset, nbytes = chunk
        return not matches(memory[offset:offset + nbytes], digest)

    if (found := _first(chunks, is_corrupt)) is not None:
        digest, offset, _ = found
        raise ChunkCorrupt(f"chunk {digest} at {offset} of {reference['path']} does not have its digest "
                           f"({reference.get('stream')} version {reference.get('version')})")


def _first(chunks: Sequence[tuple[str, int, int]], test: Callable[[tuple[str, int, int]], bool]
           ) -> tuple[str, int, int] | None:
    """The first chunk that passes the test; tested in a few threads where there is much to read, since digests are
    computed without the interpreter's lock."""
    threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS, len(chunks))
    if threads < 2 or sum(nbytes for _, _, nbytes in chunks) < _WORTH_THREADS:
        return next((c for c in chunks if test(c)), None)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        verdicts = pool.map(lambda part: next((c for c in part if test(c)), None),
                            [chunks[i::threads] for i in range(threads)])
        found = [c for c in verdicts if c is not None]
    return min(found, key=chunks.index, default=None)


# -- mapping -----------------------------------------------------------------------------------------------------------
def _map(path: str, start: int, end: int) -> torch.Tensor:
    """The arena as a uint8 tensor; the bytes from ``start`` to ``end`` stay while it, or a view of it, is referenced.

    The last few mappings are kept, since a process reads the same arena again and again and mapping costs a page fault
    for each page; the memory of an arena whose node is gone is freed all the same (``arena.Leftovers``).
    """
    fd = open_for_reading(Path(path), start, end)
    try:
        stat = os.fstat(fd)
        with _lock:
            key = (path, stat.st_ino)
            if key not in _maps:
                while len(_maps) >= _KEEP:
                    del _maps[next(iter(_maps))]  # unmapped once no tensor refers to it
                _maps[key] = _mapped(fd, stat.st_size)
            view = memoryview(_maps[key])
    except BaseException:
        os.close(fd)
        raise
    # A buffer of this call's own: the lock goes with the last tensor that refers to it.
    weakref.finalize(view, os.close, fd).atexit = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # it is not meant to be
        return torch.frombuffer(view, dtype=torch.uint8)


def _evict(path: str, spans: Sequence[tuple[int, int]]) -> None:
    """Views stay valid: reading them brings the pages back."""
    with _lock:
        for memory in (m for (mapped, _), m in _maps.items() if mapped == path):
            for offset, nbytes in spans:
                start = offset - offset % mmap.PAGESIZE
                memory.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)


def _mapped(fd: int, size: int) -> mmap.mmap:
    # Opened again: a mapping keeps its open file description, and with it the lock of that.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return mmap.mmap(own, size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(own)
