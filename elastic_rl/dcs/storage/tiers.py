"""The two places of a chunk's bytes, arena and disk: how they get from one to the other, and whether they still have
the chunk's digest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.manifest import aligned
from elastic_rl.dcs.storage.allocator import Allocator
from elastic_rl.dcs.storage.chunk import Chunk, Copy
from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.dcs.storage.save_queue import SaveQueue
from elastic_rl.errors import ArenaFull, ChunkCorrupt, ChunkMissing, DiskFull, ElasticRLError

log = logging.getLogger(__name__)


class Tiers:
    """The arena, and the movement of chunks between it and the disk.

    ``changed`` is a condition on the table's lock. Methods marked *locked* are called with that lock held, the others
    acquire it.
    """

    def __init__(self, view: memoryview, disk: DiskFolder | None, queue: SaveQueue, changed: threading.Condition, *,
                 verify_every_s: float, clock: Callable[[], float], on_lost: Callable[[Chunk, bool], None]) -> None:
        """``on_lost(chunk, corrupt)``, locked, is called when the last copy of a chunk is dropped for its bytes."""
        self.view, self.space = view, Allocator(len(view))
        self._disk, self._queue, self._changed, self._clock = disk, queue, changed, clock
        self._verify_every_s, self._on_lost = verify_every_s, on_lost
        self._resident: dict[str, Chunk] = {}  # chunks with a copy in the arena, least recently used first
        self._readers = 0
        self._verifications = 0

    # -- room in the arena: locked -----------------------------------------------------------------------------------
    def make_region(self, nbytes: int, wait_s: float, open_bytes: int | None = None) -> int:
        """Offset of a new region. Chunks that are on disk are spilled to make room for it; chunks that are about to be
        saved are waited for.

        ``open_bytes``: None for a chunk that comes back from disk; for a new one, the bytes of all regions that are
        being written. A new chunk displaces others only while the disk has room for it as well: otherwise chunks that
        cannot leave would fill the arena, and those on disk could not come back.

        Raises ArenaFull, and DiskFull when it is the disk that lacks room.
        """
        end = time.monotonic() + wait_s
        while True:
            try:
                return self.space.alloc(nbytes)
            except ArenaFull as e:
                full = e
            refusal = None if open_bytes is None else self._refusal(nbytes, open_bytes, full)
            if refusal is None and self._spill(aligned(nbytes)):
                continue
            left = end - time.monotonic()
            if left <= 0 or self._disk is None or not (self._readers or self._queue.busy()):
                raise refusal or full
            self._changed.wait(left)

    def _refusal(self, nbytes: int, open_bytes: int, full: ArenaFull) -> ElasticRLError | None:
        """Why a new chunk may not displace others."""
        if self._disk is None:
            return full
        trouble, room = self._queue.trouble, self._disk.room()
        if trouble is None and self._queue.nbytes + open_bytes + nbytes <= room:
            return None
        if trouble is None:
            trouble = DiskFull(f"{self._disk.folder} has room for {room} bytes",
                               hint="set a larger dcs.disk_bytes, or fewer dcs.keep_versions")
        kind = DiskFull if isinstance(trouble, DiskFull) else ArenaFull
        return kind(f"{full.message}; and nothing more can go to disk: {trouble.message}", hint=trouble.hint)

    def _spill(self, needed: int) -> bool:
        """Drops the arena copies of chunks that are on disk, least recently used first, until there is a free region of
        ``needed`` bytes; whether there is. Drops none where dropping all would not do."""
        room, idle = self.space.size - self.space.used, list[Chunk]()
        for chunk in list(self._resident.values()):
            if chunk.copy is None or chunk.copy.users or chunk.holders or not chunk.on_disk:
                continue
            idle.append(chunk)
            room += aligned(chunk.nbytes)
            if room < needed:
                continue
            for victim in idle:
                self.drop_copy(victim)
            idle.clear()
            if self.space.largest_free >= needed:
                return True
        return False

    def free(self, offset: int) -> None:
        """Frees a region."""
        self.space.free(offset)
        self._changed.notify_all()

    def touch(self, chunk: Chunk) -> None:
        """The chunk is used now: it becomes the last to be spilled."""
        if chunk.copy is not None:
            self._resident.pop(chunk.digest, None)
            self._resident[chunk.digest] = chunk

    def drop_copy(self, chunk: Chunk) -> None:
        """Drops the chunk's copy in the arena; the region is freed after its last user."""
        copy, chunk.copy = chunk.copy, None
        if copy is not None:
            self._resident.pop(chunk.digest, None)
            copy.dropped = True
            if not copy.users:
                self.free(copy.offset)

    def remove_user(self, copy: Copy) -> None:
        """The copy has one user less."""
        copy.users -= 1
        if copy.dropped and not copy.users:
            self.space.free(copy.offset)
        self._changed.notify_all()

    def resident(self) -> int:
        """Number of chunks in the arena."""
        return len(self._resident)

    def begin_verification(self) -> tuple[int, float]:
        """Number and time of a verification that begins now."""
        self._verifications += 1
        return self._verifications, self._clock()

    # -- reading -----------------------------------------------------------------------------------------------------
    @contextmanager
    def reading(self, chunk: Chunk, wait_s: float) -> Iterator[Copy]:
        """The chunk's copy in the arena, loaded from disk and verified if it is there only. It stays in place while the
        context is open. Raises ChunkMissing, ArenaFull and DiskFull."""
        copy = self._enter(chunk, wait_s)
        try:
            yield copy
        finally:
            with self._changed:
                self._readers -= 1
                self.remove_user(copy)

    def _enter(self, chunk: Chunk, wait_s: float) -> Copy:
        with self._changed:
            if chunk.copy is not None:
                return self._add_reader(chunk.copy)
        with chunk.busy:
            with self._changed:
                if chunk.copy is not None:
                    return self._add_reader(chunk.copy)
                offset = self.make_region(chunk.nbytes, wait_s)
                number, now = self.begin_verification()
            try:
                self._load(chunk, self.view[offset:offset + chunk.nbytes])
            except BaseException:
                with self._changed:
                    self.free(offset)
                raise
            with self._changed:
                if chunk.copy is not None:  # sealed again meanwhile
                    self.free(offset)
                    return self._add_reader(chunk.copy)
                copy = Copy(offset, now, number, dropped=chunk.gone)
                if not chunk.gone:
                    chunk.copy = copy
                    self.touch(chunk)
                return self._add_reader(copy)

    def _add_reader(self, copy: Copy) -> Copy:
        copy.users += 1
        self._readers += 1
        return copy

    def read_aside(self, chunk: Chunk) -> memoryview:
        """The verified bytes of a chunk on disk that the arena has no room for, in memory of their own. Raises
        ChunkMissing."""
        out = memoryview(bytearray(chunk.nbytes))
        self._load(chunk, out)
        return out

    def _load(self, chunk: Chunk, out: memoryview) -> None:
        if self._disk is None or not chunk.on_disk:
            raise ChunkMissing(f"this node does not have chunk {chunk.digest} any more")
        try:
            self._disk.read_into(chunk.digest, out)
            if matches(out, chunk.digest):
                return
            why: ElasticRLError = ChunkCorrupt("its bytes have another digest")
        except (ChunkMissing, ChunkCorrupt) as e:
            why = e
        with self._changed:
            if chunk.copy is None and not chunk.gone:
                log.error("chunk %s on disk is dropped: %s", chunk.digest, why.message)
                self._on_lost(chunk, isinstance(why, ChunkCorrupt))
        raise ChunkMissing(f"this node's copy of chunk {chunk.digest} was dropped: {why.message}")

    # -- verifying ---------------------------------------------------------------------------------------------------
    @property
    def verifications(self) -> int:
        """How many began so far."""
        return self._verifications

    def is_fresh(self, copy: Copy) -> bool:
        """Whether its bytes were verified less than ``verify_every_s`` ago."""
        return self._clock() < self.expires_at(copy)

    def expires_at(self, copy: Copy) -> float:
        """Until when its last verification counts, by the table's clock."""
        return copy.verified_at + self._verify_every_s

    def verify(self, chunk: Chunk, copy: Copy, since: int, *, force: bool) -> bool:
        """Whether the copy's bytes have the chunk's digest; a corrupt copy is dropped.

        The bytes are not read again if a verification after number ``since`` has read them or, without ``force``, if
        the last one is fresh.
        """
        with chunk.busy:
            if copy.verification > since:
                return True
            if not force and self.is_fresh(copy):
                return True
            with self._changed:
                number, now = self.begin_verification()
            if matches(self.view[copy.offset:copy.offset + chunk.nbytes], chunk.digest):
                copy.verification, copy.verified_at = number, now
                return True
            with self._changed:
                if chunk.copy is copy:
                    if chunk.on_disk:
                        log.error("chunk %s in the arena is corrupt; the copy on disk replaces it", chunk.digest)
                        self.drop_copy(chunk)
                    else:
                        log.error("chunk %s in the arena is corrupt and dropped", chunk.digest)
                        self._on_lost(chunk, True)
            return False
