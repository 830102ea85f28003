"""The thread that copies chunks to a node's disk and removes files that are not needed any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic_rl.dcs.storage.disk import DiskFolder, WriteBatch
from elastic_rl.dcs.storage.save_queue import SaveQueue
from elastic_rl.errors import ChunkMissing, ConfigError, ElasticRLError, NodeUnavailable

log = logging.getLogger(__name__)

_POLL_S = 0.5
_BATCH_CHUNKS, _BATCH_BYTES = 64, 128 << 20
"""Chunks that are synced together, and their bytes."""

CopyOut = Callable[[str, Callable[[memoryview], None]], None]
"""Hands a chunk's verified bytes to a function. Raises ChunkMissing."""
ReadManifest = Callable[[str], tuple[frozenset[str], str] | None]
"""Chunks and layout of a manifest; None when the chunk is none."""


class DiskSaver(threading.Thread):
    """The only thread that changes the disk, so a removal and a new copy of the same chunk never race."""

    def __init__(self, queue: SaveQueue, disk: DiskFolder, copy_out: CopyOut, read_manifest: ReadManifest) -> None:
        super().__init__(name="disk-saver", daemon=True)
        self._queue, self._disk, self._copy_out, self._read_manifest = queue, disk, copy_out, read_manifest
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.step(_POLL_S)
            except Exception as e:  # whatever it is: without this thread nothing would be saved ever again
                log.exception("saving chunks failed")
                self._queue.finished([], NodeUnavailable(f"chunks cannot be saved: {e!r}"))

    def step(self, timeout_s: float, *, max_chunks: int = _BATCH_CHUNKS) -> None:
        """Removes every file that is to be removed, then saves one batch of chunks, if there is one in time."""
        for digest in self._queue.take_removals():
            try:
                self._disk.remove(digest)
            except OSError as e:
                log.error("chunk %s cannot be removed from disk: %s", digest, e)
        for digest in self._queue.take_manifests():
            if (found := self._read_manifest(digest)) is not None:
                self._queue.add_version(digest, *found)
        if digests := self._queue.wait_batch(timeout_s, max_chunks=max_chunks, max_bytes=_BATCH_BYTES):
            self._save(digests)

    def _save(self, digests: list[str]) -> None:
        saved: list[str] = []
        trouble: ElasticRLError | None = None
        with self._disk.batch() as batch:
            try:
                for digest in digests:
                    self._write(batch, digest)
            except (ElasticRLError, OSError) as e:
                trouble = _as_error(e)
            try:
                saved = batch.commit()
            except (ElasticRLError, OSError) as e:
                trouble = _as_error(e)
        self._queue.finished(saved, trouble)

    def _write(self, batch: WriteBatch, digest: str) -> None:
        try:
            self._copy_out(digest, lambda data: batch.add(digest, data))
        except ChunkMissing:
            return  # dropped meanwhile, or corrupt: the table has taken it out of the queue

    def stop(self, flush_s: float) -> None:
        """Ends the thread once everything is saved, or after ``flush_s``."""
        self._queue.wait_idle(flush_s)
        self._stopping.set()
        self.join(flush_s + 2 * _POLL_S)


def _as_error(error: ElasticRLError | OSError) -> ElasticRLError:
    if isinstance(error, ElasticRLError):
        return error
    return NodeUnavailable(f"this node's disk fails: {error}", hint="check the disk of dcs.disk_dir")


def require_disk(disk: DiskFolder | None) -> DiskFolder:
    """Raises ConfigError on a node without a disk."""
    if disk is None:
        raise ConfigError("this node keeps chunks in memory only", hint="set dcs.disk_bytes")
    return disk
