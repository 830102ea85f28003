"""Which chunks are to be copied to a node's disk, in which order, and which files are to be removed.

A restart needs whole versions, so chunks are saved version by version. A version that was begun is completed first;
then comes the newest version of the stream that has waited longest. An older version is *superseded* once there is a
newer one of the same tensors: it is saved only when nothing else is left to do. So if versions are published faster
than the disk takes them, some are skipped, and what is on disk is always one whole version of each stream, never many
halves.

The node knows a version by its manifest, which lies among the chunks (``add_version``), and a stream by its layout: the
names, dtypes and shapes of its tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.errors import ElasticRLError

log = logging.getLogger(__name__)

_RETRY_S = 5.0
"""Pause after a failed copy; a removal ends it."""


@dataclass(eq=False)
class _Version:
    manifest: str
    chunks: frozenset[str]
    """The manifest among them."""
    layout: str
    ready: dict[str, None] = field(default_factory=dict)
    """Chunks that can be saved now."""


class SaveQueue:
    """Chunks to be copied to disk, and files to be removed. It holds each chunk once, so it is never longer than the
    table.

    ``chunks`` is the table's own dict, ``lock`` its lock, and ``changed`` a condition on that lock for callers that
    wait for room or for the disk. Methods marked *locked* are called with the lock held, the others acquire it.
    """

    def __init__(self, chunks: Mapping[str, Chunk], lock: threading.Lock, changed: threading.Condition,
                 clock: Callable[[], float], *, enabled: bool) -> None:
        """``enabled``: whether there is a disk."""
        self._chunks, self._changed, self._clock, self._enabled = chunks, changed, clock, enabled
        self._work = threading.Condition(lock)
        self._unsaved: dict[str, int] = {}  # digest -> bytes, also of chunks that are held
        self._waiting: dict[str, None] = {}  # not held, but the grace of a holder is not over; oldest first
        self._ready: dict[str, None] = {}  # can be saved now; oldest first
        self._loose: dict[str, None] = {}  # of these, those of no known version
        self._versions: list[_Version] = []  # oldest first
        self._current: _Version | None = None
        self._served: dict[str, int] = {}  # layout -> when a version of it was begun last, as a count
        self._manifests: dict[str, None] = {}  # to be read
        self._removals: dict[str, None] = {}
        self._retry_at = 0.0
        self.trouble: ElasticRLError | None = None
        """Why the last chunk could not be saved; locked."""
        self.nbytes = 0
        """Bytes of all chunks that are not on disk, also of those that are held; locked."""

    # -- what the table reports: locked ------------------------------------------------------------------------------
    def schedule(self, chunk: Chunk, *, is_manifest: bool = False) -> None:
        """The chunk belongs on disk as soon as nothing holds it. ``is_manifest``: it looks like one."""
        if not self._enabled or chunk.on_disk or chunk.copy is None:
            return
        if chunk.digest not in self._unsaved:
            self._unsaved[chunk.digest] = chunk.nbytes
            self.nbytes += chunk.nbytes
        if chunk.holders:
            return
        if is_manifest:
            self._manifests[chunk.digest] = None
        if chunk.keep_until <= self._clock():
            self._make_ready(chunk.digest)
        else:
            self._waiting.pop(chunk.digest, None)
            self._waiting[chunk.digest] = None
        self._work.notify()

    def forget(self, chunk: Chunk) -> None:
        """The chunk is dropped; its file, if it has one, is to be removed."""
        self._unschedule(chunk.digest)
        self._manifests.pop(chunk.digest, None)
        self._versions = [v for v in self._versions if v.manifest != chunk.digest]
        if chunk.on_disk or chunk.stale_file:
            chunk.on_disk = chunk.stale_file = False
            self._removals[chunk.digest] = None
            self._work.notify()

    def busy(self) -> bool:
        """Whether there is something that can be done now."""
        return bool(self._removals) or self.trouble is None and self._pick()[1] is not None

    def __len__(self) -> int:
        """Chunks that are not on disk."""
        return len(self._unsaved)

    # -- order: locked -----------------------------------------------------------------------------------------------
    def _make_ready(self, digest: str) -> None:
        self._waiting.pop(digest, None)
        self._ready[digest] = None
        owners = [v for v in self._versions if digest in v.chunks]
        for version in owners:
            version.ready[digest] = None
        if not owners:
            self._loose[digest] = None

    def _not_ready(self, digest: str) -> None:
        for ready in (self._ready, self._waiting, self._loose, *(v.ready for v in self._versions)):
            ready.pop(digest, None)

    def _unschedule(self, digest: str) -> None:
        self._not_ready(digest)
        self.nbytes -= self._unsaved.pop(digest, 0)
        if not self._unsaved:
            self.trouble = None  # of chunks that are gone

    def _pick(self) -> tuple[_Version | None, str | None]:
        """The next chunk and the version that it is saved for."""
        while self._waiting:
            digest = next(iter(self._waiting))
            if self._chunks[digest].keep_until > self._clock():
                break
            self._make_ready(digest)
        for version in self._order():
            if (found := self._first(version.ready, last=version.manifest)) is not None:
                return version, found
        return None, self._first(self._loose)

    def _order(self) -> Iterator[_Version]:
        """Versions by urgency: the current one; the newest of each layout, those of the layout that was served longest
        ago first; then the superseded ones, newest first."""
        if self._current is not None and self._current in self._versions:
            yield self._current
        newest: dict[str, _Version] = {}
        superseded = [v for v in reversed(self._versions) if newest.setdefault(v.layout, v) is not v]
        yield from sorted(newest.values(), key=lambda v: self._served.get(v.layout, 0))
        yield from superseded

    def _first(self, ready: dict[str, None], last: str = "") -> str | None:
        """The first chunk that nothing holds; ``last`` only after all others."""
        held = []
        found = None
        for digest in ready:
            if self._chunks[digest].holders:
                held.append(digest)
            elif digest != last or len(ready) == len(held) + 1:
                found = digest
                break
        for digest in held:
            self._not_ready(digest)  # until its last holder lets go
        if found is None and last in ready:
            return last
        return found

    # -- for the saver -----------------------------------------------------------------------------------------------
    def take_removals(self) -> list[str]:
        """Digests whose files are to be removed now."""
        with self._work:
            removals = list(self._removals)
            self._removals.clear()
            if removals:
                self._retry_at = 0.0
            return removals

    def take_manifests(self) -> list[str]:
        """Chunks that look like manifests and were not read yet, oldest first."""
        with self._work:
            manifests = list(self._manifests)
            self._manifests.clear()
            return manifests

    def add_version(self, manifest: str, chunks: frozenset[str], layout: str) -> None:
        """A manifest was read: these are its chunks. It is newer than all that were added before."""
        with self._work:
            if manifest not in self._chunks or any(v.manifest == manifest for v in self._versions):
                return
            version = _Version(manifest, chunks | {manifest}, layout)
            version.ready = {d: None for d in self._ready if d in version.chunks}
            for digest in version.ready:
                self._loose.pop(digest, None)
            self._versions.append(version)
            layouts = {v.layout for v in self._versions}
            self._served = {k: n for k, n in self._served.items() if k in layouts}

    def wait_batch(self, timeout_s: float, *, max_chunks: int, max_bytes: int) -> list[str]:
        """Chunks to be saved now, of one version, if there are any in time. Returns early when a file is to be removed
        or a manifest to be read."""
        with self._work:
            self._changed.notify_all()  # for callers that wait for files to be removed
            end = time.monotonic() + timeout_s
            while not self._removals and not self._manifests:
                now = time.monotonic()
                if now >= self._retry_at and (batch := self._batch(max_chunks, max_bytes)):
                    return batch
                if now >= end:
                    break
                self._work.wait(end - now)
            return []

    def _batch(self, max_chunks: int, max_bytes: int) -> list[str]:
        version, digest = self._pick()
        if digest is None:
            return []
        if version is not None and version is not self._current:
            self._current = version
            self._served[version.layout] = max(self._served.values(), default=0) + 1
        rest = self._loose if version is None else version.ready
        batch, nbytes = [digest], self._chunks[digest].nbytes
        for other in rest:
            chunk = self._chunks[other]
            if len(batch) == max_chunks or nbytes + chunk.nbytes > max_bytes:
                break
            if other == digest or version is not None and other == version.manifest or chunk.holders:
                continue
            batch.append(other)
            nbytes += chunk.nbytes
        return batch

    def finished(self, saved: Sequence[str], trouble: ElasticRLError | None = None) -> None:
        """A batch is over: these chunks are on disk now. ``trouble``: why others are not; they are tried again
        later."""
        with self._changed:
            if (trouble is None) != (self.trouble is None) and (saved or trouble is not None):
                if trouble is None:
                    log.info("saving chunks works again")
                else:
                    log.error("chunks cannot be saved, a restart would lose them: %s", trouble)
            if trouble is not None:
                self.trouble, self._retry_at = trouble, time.monotonic() + _RETRY_S
            elif saved:
                self.trouble = None
            for digest in saved:
                self._unschedule(digest)
                chunk = self._chunks.get(digest)
                if chunk is None:
                    self._removals[digest] = None  # dropped meanwhile
                else:
                    chunk.on_disk, chunk.stale_file = True, False
                    self._removals.pop(digest, None)  # of the file that this one replaced
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> None:
        """Returns when nothing is left to do, the disk fails, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self.busy(), timeout_s)
