"""One rank's part of a publish: copies tensors into the arena of this host's node and has them hashed there."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import XXH3
from elastic_rl.dcs.codecs.tensors import dtype_name, to_bytes
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.manifest import Packer, TensorEntry, aligned
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.storage.arena import ArenaFile
from elastic_rl.errors import DeadlineExceeded, NodeUnavailable
from elastic_rl.runtime import failpoints

_View = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype, bool, bool, int]
_EXTENT_CHUNKS = 16
"""Chunks whose room is allocated at once: training waits for each request, and they lie one behind the other."""


class LocalArena:
    """The arena of this host's node as a uint8 tensor; the mapping is kept between publishes."""

    def __init__(self, client: DcsClient) -> None:
        self.client = client
        self._file: ArenaFile | None = None
        self._view: torch.Tensor | None = None
        self._lock = threading.Lock()

    def attach(self, node: NodeConnection) -> torch.Tensor:
        """Raises NodeUnavailable."""
        path = Path(node.node.arena_path)
        with self._lock:
            if self._file is None or self._view is None or self._file.path != path:
                self._detach()
                try:
                    self._file = ArenaFile.attach(path)
                except OSError as e:
                    raise NodeUnavailable(
                        f"the arena {path} of node {node.node.id} cannot be mapped: {e.strerror}") from e
                self._view = torch.frombuffer(self._file.map, dtype=torch.uint8)
            return self._view

    def _detach(self) -> None:
        self._view = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        with self._lock:
            self._detach()


class PartWriter:
    """Takes tensors one after the other; ``add`` only copies, ``seal`` has the node hash what was copied.

    A tensor that views the same elements of the same memory as an earlier one (tied weights) is stored once. Between
    two calls, change tensors through torch only: it counts changes, by which a changed tensor is recognised.
    """

    def __init__(self, arena: LocalArena, *, chunk_bytes: int, digest: str = XXH3, seal_early: bool = False) -> None:
        """``seal_early``: seal each chunk as soon as the next one begins. Raises NodeUnavailable and AccessDenied."""
        self._node = arena.client.local()
        self._arena = arena.attach(self._node)
        self._packer = Packer(chunk_bytes)
        self._digest, self._seal_early = digest, seal_early
        self._regions: list[int] = []
        self._filled: list[int] = []
        self._ends: list[int] = []  # of the extent that contains each region
        self._digests: list[str] = []
        self._orders: list[int] = []
        self._views: dict[_View, tuple[StorageWeakRef, int]] = {}
        self.copy_s = 0.0
        """Seconds spent in ``add``."""

    @property
    def node_id(self) -> str:
        return self._node.node.id

    def add(self, name: str, tensor: torch.Tensor, order: int | None = None) -> None:
        """Copies a tensor of any device, dtype and layout. ``order``: its place in the version; the next one by
        default. Raises ValueError for a double name or a dtype that cannot be stored, ArenaFull, NodeUnavailable."""
        start = time.perf_counter()
        self._orders.append(order if order is not None else len(self._orders))
        view = _view_of(tensor)
        if view in self._views:
            self._packer.alias(name, self._views[view][1])
            return
        # The weak reference keeps the key from being reused for other memory.
        self._views[view] = (StorageWeakRef(tensor.untyped_storage()), len(self._orders) - 1)
        data = to_bytes(tensor)
        for part in self._packer.add(name, dtype_name(tensor.dtype), tuple(tensor.shape)):
            if part.chunk == len(self._regions):
                self._open_region()
            region, filled = self._regions[part.chunk], self._filled[part.chunk]
            if part.offset > filled:
                self._arena[region + filled:region + part.offset] = 0  # the region may hold old bytes
            self._arena[region + part.offset:region + part.offset + part.nbytes] = (
                data[part.source:part.source + part.nbytes])
            self._filled[part.chunk] = part.offset + part.nbytes
        self.copy_s += time.perf_counter() - start

    def _open_region(self) -> None:
        size = self._packer.chunk_bytes
        start, end = (self._regions[-1] + aligned(self._filled[-1]), self._ends[-1]) if self._regions else (0, 0)
        fits = end - start >= size
        if self._seal_early and self._regions:
            self._seal_next(keep_rest=fits)
        if not fits:
            start, nbytes = self._node.alloc(size, upto=_EXTENT_CHUNKS * size)
            end = start + nbytes
        self._regions.append(start)
        self._filled.append(0)
        self._ends.append(end)

    def _seal_next(self, *, keep_rest: bool) -> None:
        """``keep_rest``: whether the next chunk lies in the same extent."""
        i = len(self._digests)
        self._digests.append(self._node.seal(self._regions[i], self._filled[i], digest=self._digest,
                                             keep_rest=keep_rest))
        self._packer.resolve(self._digests)
        failpoints.reach("publish.sealed")

    def seal(self, deadline: float = float("inf")) -> Part:
        """Has every chunk hashed; what was written. ``deadline``: monotonic time, after which DeadlineExceeded is
        raised."""
        while (i := len(self._digests)) < len(self._regions):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"node {self.node_id} hashed only {i} of "
                                       f"{len(self._regions)} chunks in time")
            self._seal_next(keep_rest=self._ends[i:i + 1] == self._ends[i + 1:i + 2])
        manifest = self._packer.manifest(self._digests)
        entries: tuple[TensorEntry, ...] = manifest.tensors
        return Part(self.node_id, self._node.node.incarnation, tuple(zip(self._orders, entries, strict=True)),
                    manifest.chunks)


def _view_of(tensor: torch.Tensor) -> _View:
    """Equal for two tensors if they view the same elements of the same memory, unchanged in between."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()),
            tensor.dtype, tensor.is_conj(), tensor.is_neg(), 0 if tensor.is_inference() else tensor._version)
