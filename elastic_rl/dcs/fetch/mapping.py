"""Reading a pulled version where it lies: maps the arena of this host read-only and hands out tensor views.

Knows neither etcd nor the network, so that it can run inside an inference engine. What to read comes as a *reference*,
a JSON-able dict that ``Pulled.reference()`` makes:

    {"format": 1, "path": arena file, "stream": str, "version": int,
     "chunks": [[digest, offset, nbytes], ...], "tensors": [[name, dtype, shape, [[offset, nbytes], ...]], ...]}

Offsets are into the arena file. It is good for as long as whoever made it keeps the version pinned.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.codecs.tensors import from_bytes
from elastic_rl.dcs.manifest import DTYPES
from elastic_rl.errors import ChunkCorrupt, NodeUnavailable

FORMAT = 1
_KEEP = 2
_MOST_THREADS = 4
"""More do not make memory faster."""
_WORTH_THREADS = 32 << 20
"""Bytes from which on threads are worth their start."""
_maps: dict[tuple[str, int], torch.Tensor] = {}
_lock = threading.Lock()


def load_tensors(reference: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) in the order of publication; on the CPU, **read-only**, and views of the arena where a
    tensor lies in one piece, be it of several chunks: copy what you keep, write to none.

    Every chunk is verified before the first tensor is handed out, so that what is corrupt is never half applied.
    Raises ChunkCorrupt, and NodeUnavailable when the arena is gone.
    """
    arena = verify(reference)
    for name, dtype, shape, parts in reference["tensors"]:
        yield name, from_bytes(_gathered(arena, merged(parts), DTYPES[dtype]), dtype, tuple(shape))


def merged(parts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(offset, bytes) of the pieces, in order, with those that lie next to each other made one. Pure."""
    out: list[tuple[int, int]] = []
    for offset, nbytes in parts:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((offset, nbytes))
    return out


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


def verify(reference: Mapping[str, Any]) -> torch.Tensor:
    """Checks the digest of every chunk; the mapped arena (uint8). Raises ChunkCorrupt and NodeUnavailable."""
    if reference.get("format") != FORMAT:
        raise ChunkCorrupt(f"a reference has format {reference.get('format')}; this release reads {FORMAT}",
                           hint="run one release of elastic-rl everywhere")
    arena = _map(str(reference["path"]))
    memory = memoryview(arena.numpy())

    def bad(chunk: Sequence[Any]) -> bool:
        digest, offset, nbytes = chunk
        return offset < 0 or offset + nbytes > len(memory) or not matches(memory[offset:offset + nbytes], digest)

    if (found := _first(reference["chunks"], bad)) is not None:
        digest, offset, _ = found
        raise ChunkCorrupt(f"chunk {digest} at {offset} of {reference['path']} does not have its digest "
                           f"({reference.get('stream')} version {reference.get('version')})")
    return arena


def _first(chunks: Sequence[Sequence[Any]], fits: Callable[[Sequence[Any]], bool]) -> Sequence[Any] | None:
    """The first chunk that fits. Several threads look where there are cores for them and enough to look at: digests
    are made without the interpreter's lock."""
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS, len(chunks))
    if threads < 2 or sum(nbytes for _, _, nbytes in chunks) < _WORTH_THREADS:
        return next((c for c in chunks if fits(c)), None)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        verdicts = pool.map(lambda share: next((c for c in share if fits(c)), None),
                            [chunks[i::threads] for i in range(threads)])
        found = [c for c in verdicts if c is not None]
    return min(found, key=chunks.index, default=None)


def _map(path: str) -> torch.Tensor:
    """The arena as a uint8 tensor; the last few mappings are kept, since a process reads the same one again and
    again."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as e:
        raise NodeUnavailable(f"the arena {path} cannot be opened: {e.strerror}",
                              hint="did its node end? pull again") from e
    try:
        stat = os.fstat(fd)
        with _lock:
            key = (path, stat.st_ino)
            if key not in _maps:
                while len(_maps) >= _KEEP:
                    del _maps[next(iter(_maps))]  # unmapped once no tensor refers to it
                memory = mmap.mmap(fd, stat.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*not writable.*")  # it is not meant to be
                    _maps[key] = torch.frombuffer(memory, dtype=torch.uint8)
            return _maps[key]
    finally:
        os.close(fd)


def read(path: str, digest: str, offset: int, nbytes: int) -> memoryview:
    """The bytes of one chunk, verified. Raises ChunkCorrupt and NodeUnavailable."""
    data = memoryview(_map(path).numpy())[offset:offset + nbytes]
    if not matches(data, digest):
        raise ChunkCorrupt(f"chunk {digest} at {offset} of {path} does not have its digest")
    return data
