"""What a node stores: regions that publishers are writing, and sealed chunks under their digests. Thread-safe.

A sealed chunk has a copy in the arena, one on disk, or both; readers never see which.

When may a chunk be *dropped*, so that no committed version ever loses one?
- A *hold* belongs to a connection: sealing a chunk, also one that is there already, holds it until that connection
  releases its holds (after the commit) or closes. After a close without that the chunk stays for ``orphan_grace_s``,
  longer than a publish can still commit by itself.
- Each use of a chunk, and the end of a hold, gives it a new *touch* number. The garbage collector takes the node's
  ``mark`` (the last number) first, then reads from etcd which versions are live, then requests a drop of what none of
  them refers to. A chunk that was touched after the mark stays; one that was touched before it and is not held belongs
  to a version whose commit the garbage collector has seen, or to none.
- A manifest comes to a node before its chunks may be dropped. A live manifest that is absent therefore stands for a
  version of which nothing is here, unless chunks were found on disk at the start or a chunk was lost: then nothing that
  had come by the time at which it was first missed is dropped before it is here (``manifests_to_fetch``). What came
  later still is: a manifest that is lost everywhere must not fill the node, but for what each restart finds.

When is a chunk *saved* to disk? When nothing holds it and the grace is over, in the background, version by version
(``save_queue``).

When may a chunk be *spilled*, that is, its copy in the arena be dropped to make room? When it is on disk, not held, not
read by a thread of this node, and not *located*: processes of this host that were given an offset map those bytes until
they release them or their connection closes. Locating a chunk does not keep it from being dropped (pins do that), but
even then its region is freed only after the release.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from elastic_rl.dcs.codecs.digests import XXH3, digest_of, kind_of, matches
from elastic_rl.dcs.manifest import Manifest, aligned
from elastic_rl.dcs.storage.chunk import Chunk, Copy
from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.dcs.storage.disk_saver import DiskSaver, require_disk
from elastic_rl.dcs.storage.save_queue import SaveQueue
from elastic_rl.dcs.storage.tiers import Tiers
from elastic_rl.errors import ArenaFull, ChunkCorrupt, ChunkMissing, ConfigError, DiskFull
from elastic_rl.runtime import failpoints

_CORRUPT_KEPT = 10_000
_EXTENT_FRACTION = 8
"""An extent takes at most this part of what is free."""
_MANIFEST_PREFIX = b'{"schema":'
"""What an encoded manifest begins with."""


@dataclass
class Pending:
    """A region that a connection writes."""

    conn: int
    nbytes: int


class ChunkTable:
    """The chunks in ``view``, a writable buffer whose length is the arena's, and in ``disk``."""

    def __init__(self, view: memoryview, *, disk: DiskFolder | None = None, orphan_grace_s: float = 15.0,
                 verify_every_s: float = 0.0, wait_s: float = 10.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``verify_every_s``: see ``verify``. ``wait_s``: longest wait for room in the arena. Chunks that are on disk
        already are indexed, and verified before they are used."""
        self.view = view
        self._disk, self._grace_s, self._wait_s, self._clock = disk, orphan_grace_s, wait_s, clock
        self._lock = threading.Lock()
        changed = threading.Condition(self._lock)
        self._touch = 0
        self._pending: dict[int, Pending] = {}
        self._open_bytes = 0  # of those
        self._chunks: dict[str, Chunk] = {}
        self._held: dict[int, dict[str, Chunk]] = {}  # connection -> what it holds
        self._located: dict[int, dict[str, dict[int, Copy]]] = {}  # connection -> token -> offset -> copy
        self._corrupt: dict[str, None] = {}  # dropped for their bytes, oldest first
        self._lost = 0  # chunks that were dropped for their bytes
        # Chunks that came with this use or before may be of a version whose manifest is absent; -1: none may.
        self._unsure_upto = -1
        self._missed: dict[str, int] = {}  # live manifest that is absent -> that number when it was first missed
        self._parsed: dict[str, frozenset[str]] = {}  # manifest digest -> its chunks
        self._queue = SaveQueue(self._chunks, self._lock, changed, clock, enabled=disk is not None)
        self._tiers = Tiers(view, disk, self._queue, changed, verify_every_s=verify_every_s, clock=clock,
                            on_lost=self._lose)
        if disk is not None:
            self._chunks.update((d, Chunk(d, nbytes, on_disk=True)) for d, nbytes in disk.index().items())
            self._unsure_upto = 0 if self._chunks else -1

    # -- writing -----------------------------------------------------------------------------------------------------
    def alloc(self, conn: int, nbytes: int) -> int:
        """Offset of a region for ``conn`` to write; chunks that are on disk are spilled to make room. Raises ArenaFull,
        and DiskFull when the disk has no room for what would have to leave the arena."""
        if nbytes <= 0:
            raise ConfigError(f"cannot allocate {nbytes} bytes")
        with self._lock:
            return self._open(conn, self._tiers.make_region(nbytes, self._wait_s, self._open_bytes), nbytes)

    def _open(self, conn: int, offset: int, nbytes: int) -> int:
        self._pending[offset] = Pending(conn, nbytes)
        self._open_bytes += nbytes
        return offset

    def alloc_extent(self, conn: int, nbytes: int, upto: int) -> tuple[int, int]:
        """Offset and bytes of a region, as by ``alloc``, but of up to ``upto`` bytes where there is plenty of room:
        for a writer whose chunks are to be contiguous (see ``seal``)."""
        with self._lock, contextlib.suppress(ArenaFull):  # enough is free, but not in one region
            space = self._tiers.space
            if (size := min(upto, (space.size - space.used) // _EXTENT_FRACTION)) > nbytes:
                return self._open(conn, space.alloc(size), size), size
        return self.alloc(conn, nbytes), nbytes

    def discard(self, conn: int, offset: int) -> None:
        """Frees a region that is not sealed."""
        with self._lock:
            self._take_pending(conn, offset)
            self._tiers.free(offset)

    def seal(self, conn: int, offset: int, nbytes: int, *, expect: str = "", kind: str = XXH3,
             hold: bool = True, keep_rest: bool = False) -> Chunk:
        """Hashes the first ``nbytes`` of a region and makes them a chunk. The rest of the region is freed, or with
        ``keep_rest`` stays open as a region of its own, from the next multiple of ``manifest.ALIGN`` on.

        If there is a chunk of the same bytes already, and it is not corrupt, that one is returned. Raises ChunkCorrupt
        when the digest is not the expected one; the region is freed then.
        """
        with self._lock:
            pending = self._pending.get(offset)
            if pending is None or pending.conn != conn or not 0 < nbytes <= pending.nbytes:
                raise ConfigError(f"no region of {nbytes} bytes at {offset} is open on this connection")
            number, now = self._tiers.begin_verification()
        # Outside of the lock: the region is this connection's alone.
        digest = digest_of(self.view[offset:offset + nbytes], kind_of(expect) if expect else kind)
        if expect and digest != expect:
            self.discard(conn, offset)
            raise ChunkCorrupt(f"chunk {expect} arrived as {digest}")
        if self._in_arena(digest):
            self.verify(digest, force=True)  # drops a copy that is corrupt: no version may rest on it
        with self._lock:
            self._take_pending(conn, offset)
            if keep_rest and (left := pending.nbytes - aligned(nbytes)) > 0:
                self._open(conn, self._tiers.space.split(offset, nbytes), left)
            chunk = self._chunks.get(digest)
            if chunk is not None and chunk.copy is not None:
                self._tiers.free(offset)
            else:
                self._tiers.space.shrink(offset, nbytes)
                chunk = chunk or self._chunks.setdefault(digest, Chunk(digest, nbytes, first_touch=self._touch + 1))
                chunk.copy = Copy(offset, now, number)
                if chunk.on_disk:  # that file was not verified: it is written again
                    chunk.on_disk, chunk.stale_file = False, True
                self._corrupt.pop(digest, None)
            self._use(chunk, conn if hold else None)
            self._schedule(chunk)
        failpoints.reach("node.sealed")
        return chunk

    def _schedule(self, chunk: Chunk) -> None:
        """Locked: has the chunk saved when that is due."""
        at = chunk.offset
        self._queue.schedule(chunk, is_manifest=at >= 0 and (
            self.view[at:at + min(len(_MANIFEST_PREFIX), chunk.nbytes)] == _MANIFEST_PREFIX))

    def _in_arena(self, digest: str) -> bool:
        with self._lock:
            return (chunk := self._chunks.get(digest)) is not None and chunk.copy is not None

    def _take_pending(self, conn: int, offset: int) -> None:
        pending = self._pending.get(offset)
        if pending is None or pending.conn != conn:
            raise ConfigError(f"no region at {offset} is open on this connection")
        self._open_bytes -= self._pending.pop(offset).nbytes

    def _use(self, chunk: Chunk, conn: int | None) -> None:
        self._touch += 1
        chunk.touched = self._touch
        self._tiers.touch(chunk)
        if conn is not None:
            chunk.holders.add(conn)
            self._held.setdefault(conn, {})[chunk.digest] = chunk

    # -- reading -----------------------------------------------------------------------------------------------------
    @contextmanager
    def reading(self, digest: str) -> Iterator[memoryview]:
        """The chunk's bytes, which stay in place while the context is open. Raises ChunkMissing.

        Bytes that come from disk are verified; those that are in the arena already are not (see ``verify``).
        """
        chunk = self._known(digest)
        with contextlib.ExitStack() as stack:
            try:
                copy = stack.enter_context(self._tiers.reading(chunk, 0.0))
                data = self.view[copy.offset:copy.offset + chunk.nbytes]
            except (ArenaFull, DiskFull):
                data = self._tiers.read_aside(chunk)
            yield data

    def _known(self, digest: str) -> Chunk:
        with self._lock:
            chunk = self._chunks.get(digest)
            if chunk is None:
                raise ChunkMissing(f"this node has no chunk {digest}")
            return chunk

    def verify(self, digest: str, *, force: bool = False) -> bool:
        """Whether the chunk is here and its bytes have its digest; loads it into the arena if there is room.

        A copy that was verified less than ``verify_every_s`` ago is not read again without ``force``; concurrent
        callers share one verification. A corrupt copy is dropped, and the one on disk, if any, replaces it.
        """
        since = self._tiers.verifications
        while chunk := self._chunks.get(digest):
            with contextlib.suppress(ChunkMissing):  # dropped meanwhile; another may have replaced it
                try:
                    with self._tiers.reading(chunk, self._wait_s) as copy:
                        if self._tiers.verify(chunk, copy, since, force=force):
                            return True
                except (ArenaFull, DiskFull):
                    self._tiers.read_aside(chunk)
                    return True
        return False

    def was_corrupt(self, digest: str) -> bool:
        """Whether the chunk was here, was dropped as corrupt, and has not come back since."""
        with self._lock:
            return digest in self._corrupt

    def use(self, digest: str, conn: int | None) -> Chunk | None:
        """The chunk if it is here, marked as used now, and held for ``conn`` unless None."""
        with self._lock:
            if chunk := self._chunks.get(digest):
                self._use(chunk, conn)
            return chunk

    def has(self, digest: str) -> bool:
        """Whether the chunk is here, not verified."""
        with self._lock:
            return digest in self._chunks

    # -- locating ----------------------------------------------------------------------------------------------------
    def locate(self, digest: str, conn: int, token: str) -> tuple[int, int]:
        """Offset and bytes of a chunk, which stays there until ``release`` or ``close``. Raises ChunkMissing, ArenaFull
        and DiskFull."""
        chunk = self._known(digest)
        with self._tiers.reading(chunk, self._wait_s) as copy, self._lock:
            return self._locate(chunk, copy, self._located.setdefault(conn, {}).setdefault(token, {}))

    def locate_all(self, digests: Sequence[str], conn: int, token: str) -> list[tuple[str, int, int]] | None:
        """Digest, offset and bytes of chunks, as by ``locate``, if each is in the arena with a fresh verification;
        otherwise does nothing and returns None. Most pulls on a publisher's host come down to this one lock."""
        with self._lock:
            chunks: list[tuple[Chunk, Copy]] = []
            for digest in digests:
                chunk = self._chunks.get(digest)
                if chunk is None or chunk.copy is None or not self._tiers.is_fresh(chunk.copy):
                    return None
                chunks.append((chunk, chunk.copy))
            located = self._located.setdefault(conn, {}).setdefault(token, {})
            return [(chunk.digest, *self._locate(chunk, copy, located)) for chunk, copy in chunks]

    def _locate(self, chunk: Chunk, copy: Copy, located: dict[int, Copy]) -> tuple[int, int]:
        if copy.offset not in located:
            located[copy.offset] = copy
            copy.users += 1
        self._use(chunk, None)
        return copy.offset, chunk.nbytes

    def proof_expires_at(self, conn: int) -> float:
        """Until when the last verification of every copy that the connection located counts, by the table's clock."""
        with self._lock:
            return min((self._tiers.expires_at(copy) for located in self._located.get(conn, {}).values()
                        for copy in located.values()), default=float("inf"))

    def release(self, conn: int, token: str) -> None:
        """The connection does not read any more what it located under this token."""
        with self._lock:
            for copy in self._located.get(conn, {}).pop(token, {}).values():
                self._tiers.remove_user(copy)

    # -- saving ------------------------------------------------------------------------------------------------------
    def saver(self) -> DiskSaver:
        """The thread that keeps the disk up to date; not started. Raises ConfigError on a node without a disk."""
        return DiskSaver(self._queue, require_disk(self._disk), self._copy_out, self._read_manifest)

    def _copy_out(self, digest: str, write: Callable[[memoryview], None]) -> None:
        if not self.verify(digest):
            raise ChunkMissing(f"this node has no sound copy of chunk {digest}")
        with self.reading(digest) as data:
            write(data)

    def _read_manifest(self, digest: str) -> tuple[frozenset[str], str] | None:
        """Chunks of a manifest, and a digest of its tensors' names, dtypes and shapes; None when the chunk is none."""
        try:
            with self.reading(digest) as data:
                manifest = Manifest.decode(data)
        except (ChunkMissing, ChunkCorrupt):
            return None
        layout = "\n".join(f"{t.name} {t.dtype} {t.shape}" for t in manifest.tensors)
        return frozenset(manifest.chunks), digest_of(layout.encode())

    # -- releasing and dropping --------------------------------------------------------------------------------------
    def release_holds(self, conn: int) -> None:
        """Ends the connection's holds: what it sealed is committed by now, or abandoned."""
        self._end_holds(conn, 0.0)

    def close(self, conn: int) -> None:
        """The connection is closed: its open regions and what it located are freed at once, its holds end after the
        grace."""
        with self._lock:
            for offset in [o for o, p in self._pending.items() if p.conn == conn]:
                self._take_pending(conn, offset)
                self._tiers.free(offset)
            for located in self._located.pop(conn, {}).values():
                for copy in located.values():
                    self._tiers.remove_user(copy)
        self._end_holds(conn, self._clock() + self._grace_s)

    def _end_holds(self, conn: int, keep_until: float) -> None:
        with self._lock:
            for chunk in self._held.pop(conn, {}).values():
                chunk.holders.discard(conn)
                # A touch of its own: a garbage collector that took its mark and read the catalog while the chunk was
                # held, before the commit, and requests the drop only now, must find it touched after its mark.
                self._touch += 1
                chunk.touched = self._touch
                chunk.keep_until = max(chunk.keep_until, keep_until)
                if not chunk.gone:
                    self._schedule(chunk)

    def mark(self) -> int:
        """The last touch number; see the module's docstring."""
        with self._lock:
            return self._touch

    def manifests_to_fetch(self, live: set[str]) -> list[str]:
        """The live manifests that are not here, and without which ``drop`` keeps more than what is live."""
        with self._lock:
            if self._unsure_upto < 0:
                return []
            return sorted(d for d in live if d not in self._chunks)

    def drop(self, live: set[str], mark: int) -> tuple[int, int]:
        """Drops what no live manifest refers to, was not touched after ``mark`` and is not held: (chunks, bytes).

        ``live``: digests of manifests. While one of them is absent, what may be of its version is kept. Raises
        ChunkCorrupt, and drops nothing, for one that cannot be decoded: it may be of a newer release.
        """
        keep, unsure_upto, absent = set(live), self._unsure_upto, list[str]()
        for digest in live:
            if (chunks := self._chunks_of(digest)) is None:
                absent.append(digest)
            else:
                keep |= chunks
        now = self._clock()
        with self._lock:
            self._missed = {digest: self._missed.get(digest, self._unsure_upto) for digest in absent}
            kept_upto = max(self._missed.values(), default=-1)
            in_use = {c.digest for c in self._chunks.values() if c.touched > mark or c.holders or c.keep_until > now}
            # What came by a loss, and is or was in use since the mark, may be of a version that ``live`` does not know.
            if (live <= self._chunks.keys() and unsure_upto == self._unsure_upto
                    and not any(self._chunks[digest].first_touch <= unsure_upto for digest in in_use)):
                self._unsure_upto = -1
            victims = [c for c in self._chunks.values() if c.digest not in keep and c.digest not in in_use
                       and kept_upto < c.first_touch]
            for chunk in victims:
                self._forget(chunk)
            self._parsed = {d: chunks for d, chunks in self._parsed.items() if d in live}
        return len(victims), sum(c.nbytes for c in victims)

    def _chunks_of(self, manifest: str) -> frozenset[str] | None:
        """The chunks of a manifest; None where that is not here. Raises ChunkCorrupt for one that cannot be decoded."""
        known = self._parsed.get(manifest)
        while known is None:
            try:
                with self.reading(manifest) as data:
                    if sound := matches(data, manifest):
                        known = frozenset(Manifest.decode(data).chunks)
            except ChunkMissing:
                return None
            if not sound and not self.verify(manifest, force=True):  # which drops it, as lost or for the copy on disk
                return None
        with self._lock:
            self._parsed[manifest] = known
        return known

    def _forget(self, chunk: Chunk) -> None:
        del self._chunks[chunk.digest]
        chunk.gone = True
        self._tiers.drop_copy(chunk)
        self._queue.forget(chunk)

    def _lose(self, chunk: Chunk, corrupt: bool) -> None:
        if chunk.gone:
            return
        self._forget(chunk)
        self._lost += 1
        self._unsure_upto = self._touch
        self._missed.pop(chunk.digest, None)
        if corrupt:
            self._corrupt[chunk.digest] = None
            while len(self._corrupt) > _CORRUPT_KEPT:
                del self._corrupt[next(iter(self._corrupt))]

    def usage(self) -> dict[str, int]:
        """``used_bytes`` of ``arena_bytes``, ``disk_used_bytes`` of ``disk_bytes``; ``chunks`` in all, and of these
        those that are not saved to disk yet (``unsaved``); ``lost_chunks``: dropped for their bytes since the start.
        Cheap: a node reports it each second."""
        disk = self._disk
        with self._lock:
            return {"used_bytes": self._tiers.space.used, "arena_bytes": self._tiers.space.size,
                    "disk_used_bytes": disk.used_bytes if disk else 0, "disk_bytes": disk.limit_bytes if disk else 0,
                    "chunks": len(self._chunks), "unsaved": len(self._queue), "lost_chunks": self._lost}

    def disk_fault(self) -> str:
        """Why the last chunk could not be saved, if not for the limit of the disk; empty while saving works."""
        with self._lock:
            trouble = self._queue.trouble if len(self._queue) else None
        return "" if trouble is None or isinstance(trouble, DiskFull) else str(trouble)

    def stat(self) -> dict[str, int]:
        """``usage``, and the number of chunks in the arena (``resident``) and of those that are ``held``; ``pending``:
        regions that are being written; ``located``: copies that processes of this host may read."""
        usage = self.usage()
        with self._lock:
            located = {c.offset for tokens in self._located.values() for uses in tokens.values() for c in uses.values()}
            return {**usage, "resident": self._tiers.resident(), "pending": len(self._pending),
                    "held": len({d for held in self._held.values() for d, c in held.items() if not c.gone}),
                    "located": len(located)}
