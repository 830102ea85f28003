"""The two places of a chunk's bytes: a copy in the arena, one on disk, or both; how it gets from one to the other, and
whether its bytes are still what its digest says."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.manifest import aligned
from elastic_rl.dcs.storage.arena import Allocator
from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.errors import ArenaFull, ChunkCorrupt, ChunkMissing, DiskFull, ElasticRLError

if TYPE_CHECKING:
    from elastic_rl.dcs.storage.disk_saver import SaveQueue

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Copy:
    """A chunk's bytes in the arena. Its region is given back once it is dropped and nobody uses it."""

    offset: int
    verified_at: float
    """By the table's clock, when the last verification began."""
    verification: int
    """Number of that verification."""
    users: int = 0
    """Threads of this node that read it, and processes that were told where it is."""
    dropped: bool = False


@dataclass(eq=False)
class Chunk:
    """A sealed chunk."""

    digest: str
    nbytes: int
    copy: Copy | None = None
    on_disk: bool = False
    gone: bool = False
    """Whether the table has given it up."""
    touched: int = 0
    holders: set[int] = field(default_factory=set)
    keep_until: float = 0.0
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held while its bytes are verified or read from disk, so that all who want that share one pass. Taken before the
    table's lock, never under it."""

    @property
    def offset(self) -> int:
        """Where it lies in the arena now, -1 when it does not."""
        return self.copy.offset if self.copy else -1


class Tiers:
    """The arena, and the way of chunks between it and the disk.

    ``changed`` is a condition on the table's lock. Methods marked *locked* are called with that lock held, the others
    take it.
    """

    def __init__(self, view: memoryview, disk: DiskFolder | None, queue: SaveQueue, changed: threading.Condition, *,
                 verify_every_s: float, clock: Callable[[], float], lose: Callable[[Chunk, bool], None]) -> None:
        """``lose(chunk, rotten)``, locked, is called when the last copy of a chunk is given up."""
        self.view, self.space = view, Allocator(len(view))
        self._disk, self._queue, self._changed, self._clock = disk, queue, changed, clock
        self._verify_every_s, self._lose = verify_every_s, lose
        self._resident: dict[str, Chunk] = {}  # chunks with a copy in the arena, least recently used first
        self._readers = 0
        self._verifications = 0

    # -- room in the arena: locked -----------------------------------------------------------------------------------
    def region(self, nbytes: int, wait_s: float, open_bytes: int | None = None) -> int:
        """Offset of a region for ``nbytes``; chunks that are on disk make room for it, and those that are about to be
        are waited for.

        ``open_bytes``: None where a chunk comes back from disk; for a new one, the bytes of all regions that are being
        written. A new one displaces others only while the disk has room for it as well: otherwise chunks that cannot
        leave would fill the arena, and those on disk could not come back.

        Raises ArenaFull, and DiskFull when it is the disk's room that is missing.
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

    def _spill(self, want: int) -> bool:
        """Takes chunks out of the arena, least recently used first, until it has a free piece of ``want`` bytes;
        whether it has. Takes none where even all of them would not do."""
        room, idle = self.space.size - self.space.used, list[Chunk]()
        for chunk in list(self._resident.values()):
            if chunk.copy is None or chunk.copy.users or chunk.holders or not chunk.on_disk:
                continue
            idle.append(chunk)
            room += aligned(chunk.nbytes)
            if room < want:
                continue
            for victim in idle:
                self.drop_copy(victim)
            idle.clear()
            if self.space.largest_free >= want:
                return True
        return False

    def free(self, offset: int) -> None:
        """Gives a region back."""
        self.space.free(offset)
        self._changed.notify_all()

    def touch(self, chunk: Chunk) -> None:
        """The chunk was used now: others leave the arena before it."""
        if chunk.copy is not None:
            self._resident.pop(chunk.digest, None)
            self._resident[chunk.digest] = chunk

    def drop_copy(self, chunk: Chunk) -> None:
        """Takes the chunk out of the arena; the region is given back after its last user."""
        copy, chunk.copy = chunk.copy, None
        if copy is not None:
            self._resident.pop(chunk.digest, None)
            copy.dropped = True
            if not copy.users:
                self.free(copy.offset)

    def leave(self, copy: Copy) -> None:
        """One user fewer."""
        copy.users -= 1
        if copy.dropped and not copy.users:
            self.space.free(copy.offset)
        self._changed.notify_all()

    def resident(self) -> int:
        """Chunks in the arena."""
        return len(self._resident)

    def begin_verification(self) -> tuple[int, float]:
        """Number and time of a verification that begins now."""
        self._verifications += 1
        return self._verifications, self._clock()

    # -- reading -----------------------------------------------------------------------------------------------------
    @contextmanager
    def reading(self, chunk: Chunk, wait_s: float) -> Iterator[Copy]:
        """The chunk's copy in the arena, brought back and verified if it is on disk only; it stays in place while the
        context is open. Raises ChunkMissing, ArenaFull and DiskFull."""
        copy = self._enter(chunk, wait_s)
        try:
            yield copy
        finally:
            with self._changed:
                self._readers -= 1
                self.leave(copy)

    def _enter(self, chunk: Chunk, wait_s: float) -> Copy:
        with self._changed:
            if chunk.copy is not None:
                return self._read(chunk.copy)
        with chunk.busy:
            with self._changed:
                if chunk.copy is not None:
                    return self._read(chunk.copy)
                offset = self.region(chunk.nbytes, wait_s)
                number, now = self.begin_verification()
            try:
                self._load(chunk, self.view[offset:offset + chunk.nbytes])
            except BaseException:
                with self._changed:
                    self.free(offset)
                raise
            with self._changed:
                if chunk.copy is not None:  # sealed anew meanwhile
                    self.free(offset)
                    return self._read(chunk.copy)
                copy = Copy(offset, now, number, dropped=chunk.gone)
                if not chunk.gone:
                    chunk.copy = copy
                    self.touch(chunk)
                return self._read(copy)

    def _read(self, copy: Copy) -> Copy:
        copy.users += 1
        self._readers += 1
        return copy

    def read_aside(self, chunk: Chunk) -> memoryview:
        """The bytes, verified, of a chunk on disk that the arena has no room for, in memory of their own. Raises
        ChunkMissing."""
        out = memoryview(bytearray(chunk.nbytes))
        self._load(chunk, out)
        return out

    def _load(self, chunk: Chunk, out: memoryview) -> None:
        if self._disk is None or not chunk.on_disk:
            raise ChunkMissing(f"this node has chunk {chunk.digest} no more")
        try:
            self._disk.read_into(chunk.digest, out)
            if matches(out, chunk.digest):
                return
            why: ElasticRLError = ChunkCorrupt("its bytes have another digest")
        except (ChunkMissing, ChunkCorrupt) as e:
            why = e
        with self._changed:
            if chunk.copy is None and not chunk.gone:
                log.error("chunk %s on disk is given up: %s", chunk.digest, why.message)
                self._lose(chunk, isinstance(why, ChunkCorrupt))
        raise ChunkMissing(f"this node's copy of chunk {chunk.digest} is no more: {why.message}")

    # -- verifying ---------------------------------------------------------------------------------------------------
    @property
    def verifications(self) -> int:
        """How many began so far."""
        return self._verifications

    def fresh(self, copy: Copy) -> bool:
        """Whether its bytes were verified less than ``verify_every_s`` ago."""
        return self._clock() - copy.verified_at < self._verify_every_s

    def verify(self, chunk: Chunk, copy: Copy, asked: int, *, anew: bool) -> bool:
        """Whether the copy's bytes have the chunk's digest; a rotten copy is given up.

        Not read again if that was done since ``asked`` (a number of a verification) or, unless it is to be ``anew``,
        within ``verify_every_s``.
        """
        with chunk.busy:
            if copy.verification > asked:
                return True
            if not anew and self.fresh(copy):
                return True
            with self._changed:
                number, now = self.begin_verification()
            if matches(self.view[copy.offset:copy.offset + chunk.nbytes], chunk.digest):
                copy.verification, copy.verified_at = number, now
                return True
            with self._changed:
                if chunk.copy is copy:
                    if chunk.on_disk:
                        log.error("chunk %s in the arena is corrupt; the one on disk takes its place", chunk.digest)
                        self.drop_copy(chunk)
                    else:
                        self._lose(chunk, True)
            return False
