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
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastic_rl.dcs.manifest import digest_of
from elastic_rl.dcs.tensors import from_bytes
from elastic_rl.errors import ChunkCorrupt, NodeUnavailable

FORMAT = 1
_KEEP = 2
_maps: dict[tuple[str, int], torch.Tensor] = {}
_lock = threading.Lock()


def load_tensors(reference: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) in the order of publication; on the CPU, **read-only**, and views of the arena where a
    tensor lies in one piece: copy what you keep, write to none.

    Every chunk is verified before the first tensor is handed out, so that what is corrupt is never half applied.
    Raises ChunkCorrupt, and NodeUnavailable when the arena is gone.
    """
    arena = verify(reference)
    for name, dtype, shape, parts in reference["tensors"]:
        if len(parts) == 1:
            offset, nbytes = parts[0]
            data = arena[offset:offset + nbytes]
        elif parts:
            data = torch.cat([arena[offset:offset + nbytes] for offset, nbytes in parts])
        else:
            data = torch.empty(0, dtype=torch.uint8)
        yield name, from_bytes(data, dtype, tuple(shape))


def verify(reference: Mapping[str, Any]) -> torch.Tensor:
    """Checks the digest of every chunk; the mapped arena (uint8). Raises ChunkCorrupt and NodeUnavailable."""
    if reference.get("format") != FORMAT:
        raise ChunkCorrupt(f"a reference has format {reference.get('format')}; this release reads {FORMAT}",
                           hint="run one release of elastic-rl everywhere")
    arena = _map(str(reference["path"]))
    memory = memoryview(arena.numpy())
    for digest, offset, nbytes in reference["chunks"]:
        if offset < 0 or offset + nbytes > len(memory) or digest_of(memory[offset:offset + nbytes]) != digest:
            raise ChunkCorrupt(f"chunk {digest} at {offset} of {reference['path']} does not have its digest "
                               f"({reference.get('stream')} version {reference.get('version')})")
    return arena


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
    if digest_of(data) != digest:
        raise ChunkCorrupt(f"chunk {digest} at {offset} of {path} does not have its digest")
    return data
