"""What a node holds: regions being written by publishers, and sealed chunks under their digests. Thread-safe.

When may a sealed chunk be dropped, so that no committed version ever loses one?
- A *hold* belongs to a connection: sealing a chunk, also one that is there already, holds it until that connection
  settles (after the commit) or closes. After a close without settling the chunk stays for ``orphan_grace_s``, longer
  than a publish can still commit by itself.
- Each use of a chunk, and the end of a hold, gives it a new *touch* number. The janitor takes the node's ``mark`` (the
  last number) first, then reads from etcd which versions live, then asks to drop what none of them refers to. A chunk
  that was touched after the mark is spared; one touched before it and held no more belongs to a version whose commit
  the janitor has seen, or to none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic_rl.dcs.arena import Allocator
from elastic_rl.dcs.manifest import Manifest, digest_of
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, ConfigError

_ROTTEN_KEPT = 10_000


@dataclass
class Chunk:
    """A sealed chunk. ``offset`` is where it lies in the arena."""

    digest: str
    offset: int
    nbytes: int
    touched: int
    holders: set[int] = field(default_factory=set)
    readers: int = 0
    """Threads of this node that read the bytes now; the region is not given back before they are done."""
    keep_until: float = 0.0
    gone: bool = False


@dataclass
class Pending:
    """A region that a connection writes."""

    conn: int
    nbytes: int


class ChunkTable:
    """The chunks in ``view``, a writable buffer whose length is the arena's."""

    def __init__(self, view: memoryview, *, orphan_grace_s: float = 15.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.view = view
        self._space = Allocator(len(view))
        self._grace_s = orphan_grace_s
        self._clock = clock
        self._lock = threading.Lock()
        self._touch = 0
        self._pending: dict[int, Pending] = {}
        self._chunks: dict[str, Chunk] = {}
        self._rotten: dict[str, None] = {}  # given up for their bytes, oldest first
        self._parsed: dict[str, frozenset[str]] = {}  # manifest digest -> its chunks

    # -- writing -----------------------------------------------------------------------------------------------------
    def alloc(self, conn: int, nbytes: int) -> int:
        """Offset of a region for ``conn`` to write. Raises ArenaFull."""
        if nbytes <= 0:
            raise ConfigError(f"cannot allocate {nbytes} bytes")
        with self._lock:
            offset = self._space.alloc(nbytes)
            self._pending[offset] = Pending(conn, nbytes)
            return offset

    def discard(self, conn: int, offset: int) -> None:
        """Gives a region back unsealed."""
        with self._lock:
            self._take_pending(conn, offset)
            self._space.free(offset)

    def seal(self, conn: int, offset: int, nbytes: int, *, expect: str = "", hold: bool = True) -> Chunk:
        """Hashes the first ``nbytes`` of a region and makes them a chunk; the rest of the region is given back.

        A chunk of the same bytes that is there already (and still sound) takes its place. Raises ChunkCorrupt when the
        digest is not the one expected; the region is then given back.
        """
        with self._lock:
            pending = self._pending.get(offset)
            if pending is None or pending.conn != conn or not 0 < nbytes <= pending.nbytes:
                raise ConfigError(f"no region of {nbytes} bytes at {offset} is open on this connection")
        digest = digest_of(self.view[offset:offset + nbytes])  # outside the lock: the region is this connection's alone
        if expect and digest != expect:
            self.discard(conn, offset)
            raise ChunkCorrupt(f"chunk {expect} arrived as {digest}")
        self.sound(digest)  # gives up a copy that went bad: no version may rest on one
        with self._lock:
            self._take_pending(conn, offset)
            chunk = self._chunks.get(digest)
            if chunk is not None:
                self._space.free(offset)
            else:
                self._space.shrink(offset, nbytes)
                chunk = self._chunks[digest] = Chunk(digest, offset, nbytes, 0)
                self._rotten.pop(digest, None)
            self._use(chunk, conn if hold else None)
            return chunk

    def _take_pending(self, conn: int, offset: int) -> None:
        pending = self._pending.get(offset)
        if pending is None or pending.conn != conn:
            raise ConfigError(f"no region at {offset} is open on this connection")
        del self._pending[offset]

    def _use(self, chunk: Chunk, conn: int | None) -> None:
        self._touch += 1
        chunk.touched = self._touch
        if conn is not None:
            chunk.holders.add(conn)

    # -- reading -----------------------------------------------------------------------------------------------------
    @contextmanager
    def reading(self, digest: str) -> Iterator[memoryview]:
        """The chunk's bytes, which stay in place while the context is open. Raises ChunkMissing."""
        with self._lock:
            chunk = self._chunks.get(digest)
            if chunk is None:
                raise ChunkMissing(f"this node has no chunk {digest}")
            chunk.readers += 1
        try:
            yield self.view[chunk.offset:chunk.offset + chunk.nbytes]
        finally:
            with self._lock:
                chunk.readers -= 1
                if chunk.gone and not chunk.readers:
                    self._space.free(chunk.offset)

    def sound(self, digest: str) -> bool:
        """Whether the chunk is here and its bytes still have its digest; a rotten copy is given up."""
        try:
            with self.reading(digest) as data:
                if digest_of(data) == digest:
                    return True
        except ChunkMissing:
            return False
        with self._lock:
            if chunk := self._chunks.get(digest):
                # Another thread may have put a sound copy here since: look at the one that is here now.
                if digest_of(self.view[chunk.offset:chunk.offset + chunk.nbytes]) == digest:
                    return True
                del self._chunks[digest]
                self._forget(chunk)
                self._rotten[digest] = None
                while len(self._rotten) > _ROTTEN_KEPT:
                    del self._rotten[next(iter(self._rotten))]
        return False

    def was_rotten(self, digest: str) -> bool:
        """Whether the chunk was here, went bad, and has not come back since."""
        with self._lock:
            return digest in self._rotten

    def use(self, digest: str, conn: int | None) -> Chunk | None:
        """The chunk if it is here, marked as used now, and held for ``conn`` unless None."""
        with self._lock:
            if chunk := self._chunks.get(digest):
                self._use(chunk, conn)
            return chunk

    def has(self, digest: str) -> bool:
        with self._lock:
            return digest in self._chunks

    # -- giving back -------------------------------------------------------------------------------------------------
    def settle(self, conn: int) -> None:
        """Ends the connection's holds: what it sealed is committed by now, or given up."""
        self._release(conn, 0.0)

    def close(self, conn: int) -> None:
        """The connection is gone: its open regions are given back at once, its holds end after the grace."""
        with self._lock:
            for offset in [o for o, p in self._pending.items() if p.conn == conn]:
                del self._pending[offset]
                self._space.free(offset)
        self._release(conn, self._clock() + self._grace_s)

    def _release(self, conn: int, keep_until: float) -> None:
        with self._lock:
            for chunk in self._chunks.values():
                if conn in chunk.holders:
                    chunk.holders.discard(conn)
                    # A touch of its own: a janitor that took its mark and read the catalog while the chunk was held,
                    # before the commit, and asks to drop only now, must find it touched after its mark.
                    self._touch += 1
                    chunk.touched = self._touch
                    chunk.keep_until = max(chunk.keep_until, keep_until)

    def mark(self) -> int:
        """The last touch number; see the module's docstring."""
        with self._lock:
            return self._touch

    def drop(self, live: set[str], mark: int) -> tuple[int, int]:
        """Drops what no live manifest refers to, was not touched after ``mark`` and is not held: (chunks, bytes).

        ``live``: digests of manifests. Raises ChunkCorrupt, and drops nothing, when one of them is here but unreadable.
        """
        keep = set(live)
        for digest in live:
            keep |= self._chunks_of(digest)
        now = self._clock()
        with self._lock:
            victims = [c for c in self._chunks.values() if c.digest not in keep and c.touched <= mark
                       and not c.holders and c.keep_until <= now]
            for chunk in victims:
                del self._chunks[chunk.digest]
                self._forget(chunk)
            self._parsed = {d: chunks for d, chunks in self._parsed.items() if d in live}
        return len(victims), sum(c.nbytes for c in victims)

    def _chunks_of(self, manifest: str) -> frozenset[str]:
        known = self._parsed.get(manifest)
        if known is None:
            try:
                with self.reading(manifest) as data:
                    known = frozenset(Manifest.decode(data).chunks)
            except ChunkMissing:
                return frozenset()  # nothing of that version was ever asked of this node
            with self._lock:
                self._parsed[manifest] = known
        return known

    def _forget(self, chunk: Chunk) -> None:
        chunk.gone = True
        if not chunk.readers:
            self._space.free(chunk.offset)

    def stat(self) -> dict[str, int]:
        """Bytes used and in all, sealed chunks, open regions, chunks that are held."""
        with self._lock:
            return {"used_bytes": self._space.used, "arena_bytes": self._space.size, "chunks": len(self._chunks),
                    "pending": len(self._pending), "held": sum(1 for c in self._chunks.values() if c.holders)}
