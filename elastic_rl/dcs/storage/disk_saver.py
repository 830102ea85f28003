"""Keeping a node's disk in step with its chunk table: what is to be copied there or removed, and who does it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.dcs.storage.tiers import Chunk
from elastic_rl.errors import (
    ChunkMissing,
    ConfigError,
    DeadlineExceeded,
    ElasticRLError,
    NodeUnavailable,
)

log = logging.getLogger(__name__)

_POLL_S = 0.5
_RETRY_S = 5.0
"""Pause after a copy that failed; a removal ends it."""


class SaveQueue:
    """Chunks to be copied to disk, and files to be removed. It holds each chunk once, so it is never longer than the
    table, and nothing has to be left out.

    ``chunks`` is the table's own dict, ``lock`` its lock, and ``changed`` a condition on that for those who wait for
    room or for the disk. Methods marked *locked* are called with the lock held, the others take it.
    """

    def __init__(self, chunks: Mapping[str, Chunk], lock: threading.Lock, changed: threading.Condition,
                 clock: Callable[[], float], *, enabled: bool) -> None:
        """``enabled``: whether there is a disk."""
        self._chunks, self._changed, self._clock, self._enabled = chunks, changed, clock, enabled
        self._work = threading.Condition(lock)
        self._unsaved: dict[str, int] = {}  # digest -> bytes; also what is held still
        self._due: dict[str, None] = {}  # of these what nobody holds, oldest first
        self._urgent: dict[str, None] = {}  # asked for by ``persist``: at once, also while they are held
        self._doomed: dict[str, None] = {}
        self._retry_at = 0.0
        self.trouble: ElasticRLError | None = None
        """Why the last chunk could not be saved; locked."""
        self.nbytes = 0
        """Bytes of all chunks that are not on disk yet, those that are held too; locked."""

    def later(self, chunk: Chunk) -> None:
        """Locked: the chunk belongs on disk once nobody holds it."""
        if self._enabled and not chunk.on_disk and chunk.copy is not None:
            if chunk.digest not in self._unsaved:
                self._unsaved[chunk.digest] = chunk.nbytes
                self.nbytes += chunk.nbytes
            if not chunk.holders:
                self._due[chunk.digest] = None
                self._work.notify()

    def forget(self, chunk: Chunk) -> None:
        """Locked: the chunk is given up, and its file, if it has one, is to go."""
        self._over(chunk.digest)
        if chunk.on_disk:
            chunk.on_disk = False
            self._doomed[chunk.digest] = None
            self._work.notify()

    def next(self) -> str | None:
        """Locked: the chunk to be saved now."""
        if self._urgent:
            return next(iter(self._urgent))
        held, found = [], None
        for digest in self._due:
            chunk = self._chunks[digest]
            if chunk.holders:
                held.append(digest)
            elif chunk.keep_until <= self._clock():
                found = digest
                break
        for digest in held:
            del self._due[digest]  # until they are let go
        return found

    def _over(self, digest: str) -> None:
        self._urgent.pop(digest, None)
        self._due.pop(digest, None)
        self.nbytes -= self._unsaved.pop(digest, 0)

    def busy(self) -> bool:
        """Locked: whether there is something that can be done now."""
        return bool(self._doomed) or self.trouble is None and self.next() is not None

    def __len__(self) -> int:
        """Locked."""
        return len(self._unsaved)

    # -- for the saver -----------------------------------------------------------------------------------------------
    def take_doomed(self) -> list[str]:
        """Digests whose files are to be removed now."""
        with self._work:
            doomed = list(self._doomed)
            self._doomed.clear()
            if doomed:
                self._retry_at = 0.0
            return doomed

    def wait_next(self, timeout_s: float) -> str | None:
        """The chunk to be saved now, if there is one in time. Returns early when a file is to be removed."""
        with self._work:
            self._changed.notify_all()  # for those who wait for files to go
            end = time.monotonic() + timeout_s
            while not self._doomed:
                now = time.monotonic()
                if now >= self._retry_at and (digest := self.next()):
                    return digest
                if now >= end:
                    break
                self._work.wait(end - now)
            return None

    def done(self, digest: str) -> None:
        """The chunk is on disk now."""
        with self._changed:
            if self.trouble is not None:
                log.info("chunks are saved again")
            self.trouble = None
            self._over(digest)
            chunk = self._chunks.get(digest)
            if chunk is None:
                self._doomed[digest] = None  # dropped meanwhile
            else:
                chunk.on_disk = True
            self._changed.notify_all()

    def failed(self, why: ElasticRLError) -> None:
        """A chunk could not be saved; it is tried again later."""
        with self._changed:
            if self.trouble is None:
                log.error("chunks cannot be saved, so a restart would lose them: %s", why)
            self.trouble, self._retry_at = why, time.monotonic() + _RETRY_S
            self._changed.notify_all()

    # -- waiting -----------------------------------------------------------------------------------------------------
    def persist(self, digests: Sequence[str], timeout_s: float) -> None:
        """Returns when the chunks are on disk. Raises ChunkMissing, DiskFull, NodeUnavailable (the disk fails) and
        DeadlineExceeded."""
        with self._changed:
            self.trouble, self._retry_at = None, 0.0  # tried anew
            self._urgent.update(dict.fromkeys(d for d in digests if not self._is_saved(d)))
            self._work.notify()
            end = time.monotonic() + timeout_s
            for saved, digest in enumerate(digests):  # about in the order in which they are done
                while not self._is_saved(digest):
                    if self.trouble is not None:
                        raise self.trouble
                    if not self._changed.wait(end - time.monotonic()):
                        raise DeadlineExceeded(f"only {saved} of {len(digests)} chunks were saved in {timeout_s:g} s")

    def _is_saved(self, digest: str) -> bool:
        chunk = self._chunks.get(digest)
        if chunk is None:
            raise ChunkMissing(f"this node has no chunk {digest}")
        return chunk.on_disk

    def wait_idle(self, timeout_s: float) -> None:
        """Returns when nothing is left to do, the disk refuses, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.busy(), timeout_s)


class Saver(threading.Thread):
    """The only one that changes the disk, so that a removal and a new copy of the same chunk never race."""

    def __init__(self, queue: SaveQueue, disk: DiskFolder, copy: Callable[[str, Callable[[memoryview], None]], None]
                 ) -> None:
        """``copy(digest, write)`` hands the chunk's bytes, verified, to ``write``; raises ChunkMissing."""
        super().__init__(name="saver", daemon=True)
        self._queue, self._disk, self._copy = queue, disk, copy
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            self.step(_POLL_S)

    def step(self, timeout_s: float) -> None:
        """Removes every file that is to go, then copies one chunk, if there is one in time."""
        for digest in self._queue.take_doomed():
            try:
                self._disk.remove(digest)
            except OSError as e:
                log.error("chunk %s cannot be removed from disk: %s", digest, e)
        if wanted := self._queue.wait_next(timeout_s):
            self._save(wanted)

    def _save(self, digest: str) -> None:
        try:
            self._copy(digest, lambda data: self._disk.write(digest, data))
        except ChunkMissing:
            return  # dropped meanwhile, or gone bad: the queue knows
        except ElasticRLError as e:
            self._queue.failed(e)
        except OSError as e:
            self._queue.failed(NodeUnavailable(f"the disk of this node fails: {e}", hint="look at dcs.disk_dir"))
        else:
            self._queue.done(digest)

    def stop(self, flush_s: float) -> None:
        """Ends the thread, after what is to be saved is, for ``flush_s`` at most."""
        self._queue.wait_idle(flush_s)
        self._stopping.set()
        self.join(flush_s + 2 * _POLL_S)


def require_disk(disk: DiskFolder | None) -> DiskFolder:
    """Raises ConfigError on a node without a disk."""
    if disk is None:
        raise ConfigError("this node keeps chunks in memory only", hint="set dcs.disk_bytes")
    return disk
