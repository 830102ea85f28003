"""Versions that a node keeps readable for the processes of its host.

The first reader of a version makes the node *open* it: pin it in etcd, fetch its manifest, decode it into a table in
the arena (``version_map``), fetch and verify the chunks, and keep all of them in place. Further readers share that,
also while it is in progress: one pin, one decoded manifest and one verification a host, however many engines it runs.
When the last reader has released it, the pin ends and the memory can be reused.

A version that is open is shared with new readers for as long as the last verification of each chunk counts
(``dcs.verify_every_s``) and its pin lives. After that a new reader makes the node open it again beside the old one,
which verifies what is due; chunks that are still sound are shared, of course.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.fetch import version_map
from elastic_rl.dcs.fetch.fetcher import Fetcher
from elastic_rl.dcs.fetch.version_map import TensorAssembly, VersionMap
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.node.pins import NodePins, Pin
from elastic_rl.dcs.storage.chunk import Chunk
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import ChunkCorrupt, ElasticRLError, NodeUnavailable
from elastic_rl.etcd.records import Version
from elastic_rl.runtime.failpoints import reach

log = logging.getLogger(__name__)

_TOKEN = "open"
_FIRST_OWNER = -2
"""The table knows each open version as a connection of its own; those of clients count upwards from 1, and -1 is the
executor's."""


class Progress(NamedTuple):
    """How far the opening of a version is."""

    done: int
    """Bytes that are here, of ``total``; both 0 until the manifest is read."""
    total: int
    steps: int
    """Grows while the opening is alive."""
    over: bool


class OpenVersion:
    """One version, and the number of its readers. Thread-safe."""

    def __init__(self, stream: str, number: int, owner: int) -> None:
        self.stream, self.number, self.owner = stream, number, owner
        self.readers = 0
        """Guarded by ``OpenVersions``."""
        self.pin: Pin | None = None
        self.map_at: tuple[int, int, str] | None = None
        """Where the table lies: offset, bytes, digest."""
        self.complete: list[int] = []
        """Tensors whose chunks are all here, in the order in which they became so; only ever appended to."""
        self.tensors = 0
        """Number of all tensors."""
        self.expires_at = float("inf")
        """Until when it may be shared with new readers, by the clock of ``OpenVersions``."""
        self._changed = threading.Condition()
        self._done = self._total = self._steps = 0
        self._over = False
        self._error: ElasticRLError | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def ready(self) -> bool:
        return self._over and self._error is None

    @property
    def total(self) -> int:
        """Bytes of all chunks."""
        return self._total

    def wait(self, timeout_s: float) -> Progress:
        """Waits for the end of the opening, but not longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, timeout_s)
            return Progress(self._done, self._total, self._steps, self._over)

    def record(self) -> Version:
        """The version's record. Raises the error that the opening ended with, if it did."""
        if self._error is not None:
            raise type(self._error)(self._error.message, hint=self._error.hint)
        assert self.pin is not None
        return self.pin.version

    # -- for the thread that opens it --------------------------------------------------------------------------------
    def step(self, done: int = 0, total: int = 0) -> None:
        """The opening is alive; so many more bytes are here."""
        with self._changed:
            self._steps += 1
            self._done, self._total = self._done + done, self._total + total

    def end(self, error: ElasticRLError | None) -> None:
        with self._changed:
            self._over, self._error = True, error
            self._changed.notify_all()


class OpenVersions:
    """The open versions of a node. Thread-safe."""

    def __init__(self, table: ChunkTable, fetcher: Fetcher, pins: NodePins,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: the table's."""
        self._table, self._fetcher, self._pins, self._clock = table, fetcher, pins, clock
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, int], OpenVersion] = {}  # for new readers
        self._owners = itertools.count(_FIRST_OWNER, -1)
        self._last: dict[str, tuple[str, Manifest]] = {}  # stream -> digest and manifest opened last: its chunks are
        #                                                   likely to be here, so deltas are made against them

    def acquire(self, stream: str, number: int) -> OpenVersion:
        """The version for one more reader, who calls ``release``. It may still be opening: see ``OpenVersion.wait``."""
        with self._lock:
            shared = self._shared.get((stream, number))
            if shared is not None and self._shareable(shared):
                shared.readers += 1
                return shared
            version = OpenVersion(stream, number, next(self._owners))
            version.readers = 1
            try:
                threading.Thread(target=self._open, args=(version,), name=f"open-{stream}-{number}",
                                 daemon=True).start()
            except RuntimeError as e:
                raise NodeUnavailable(f"{stream} version {number} cannot be opened: {e}") from e
            self._shared[stream, number] = version
            return version

    def acquire_head(self, stream: str) -> OpenVersion:
        """The head of a stream, as by ``acquire``. Raises VersionNotFound, and EtcdUnavailable."""
        return self.acquire(stream, self._pins.head(stream))

    def _shareable(self, version: OpenVersion) -> bool:
        if version.failed or not version.readers:
            return False
        return not version.ready or (self._clock() < version.expires_at and version.pin is not None
                                     and version.pin.alive)

    def release(self, version: OpenVersion) -> None:
        """A reader does not need the version any more."""
        with self._lock:
            version.readers -= 1
            if version.readers:
                return
            if self._shared.get((version.stream, version.number)) is version:
                del self._shared[version.stream, version.number]
            if not version.ready and not version.failed:
                return  # the thread that opens it finds that it has no reader
        self._close(version)

    def _close(self, version: OpenVersion) -> None:
        self._table.close(version.owner)
        pin, version.pin = version.pin, None
        if pin is not None:
            self._pins.unpin(pin)

    # -- opening -----------------------------------------------------------------------------------------------------
    def _open(self, version: OpenVersion) -> None:
        error: ElasticRLError | None = None
        try:
            self._pin_and_fetch(version)
        except ElasticRLError as e:
            error = e
        except Exception as e:  # an error of ours: the readers must get it
            log.exception("%s version %d cannot be opened", version.stream, version.number)
            error = NodeUnavailable(f"the node failed to open {version.stream} version {version.number}: {e!r}",
                                    hint="its log says more")
        with self._lock:
            version.end(error)
            unused = not version.readers
        if error is not None or unused:
            self._close(version)

    def _pin_and_fetch(self, version: OpenVersion) -> None:
        version.pin = self._pins.pin(version.stream, version.number)
        reach("open.pinned")
        record = version.pin.version
        manifest = self._manifest(version, record.manifest, record.sources)
        reach("open.manifest")
        table = self._write_map(version, manifest)
        version.step(total=sum(manifest.chunks.values()))
        self._place_chunks(version, table, manifest, record.sources)
        reach("open.located")
        version.expires_at = self._table.proof_expires_at(version.owner)
        self._last[version.stream] = record.manifest, manifest

    def _manifest(self, version: OpenVersion, digest: str, nodes: list[str]) -> Manifest:
        self._fetcher.fetch([digest], nodes, None, tick=lambda: self._tick(version))
        last = self._last.get(version.stream)
        if last is not None and last[0] == digest:
            return last[1]
        with self._table.reading(digest) as data:
            if not matches(data, digest):
                raise ChunkCorrupt(f"the manifest {digest} of {version.stream} version {version.number} is corrupt")
            return Manifest.decode(data)

    def _write_map(self, version: OpenVersion, manifest: Manifest) -> VersionMap:
        """Writes the table into a region of the arena that stays open, and belongs to the version, until it closes."""
        blob = version_map.encode(manifest)
        region = self._table.alloc(version.owner, len(blob))
        memory = self._table.view[region:region + len(blob)]
        memory[:] = blob
        table = VersionMap(memory)
        version.tensors = table.tensors
        version.map_at = region, len(blob), table.digest()
        return table

    def _place_chunks(self, version: OpenVersion, table: VersionMap, manifest: Manifest, nodes: list[str]) -> None:
        digests = list(manifest.chunks)
        located = self._table.locate_all(digests, version.owner, _TOKEN)
        if located is not None:
            for number, (_, offset, nbytes) in enumerate(located):
                table.place(number, offset)
                version.step(nbytes)
            version.complete = list(range(table.tensors))
            return
        numbers = {digest: i for i, digest in enumerate(digests)}
        assembly = TensorAssembly(table)
        version.complete = assembly.complete
        missing = set(digests)

        def place(digest: str) -> None:
            offset, nbytes = self._table.locate(digest, version.owner, _TOKEN)
            missing.discard(digest)
            table.place(numbers[digest], offset)
            assembly.add(numbers[digest])
            version.step(nbytes)

        def on_chunk(chunk: Chunk) -> None:
            self._tick(version)
            place(chunk.digest)

        last = self._last.get(version.stream)
        self._fetcher.fetch(digests, nodes, None, manifest.chunks, delta.bases(last[1], manifest) if last else None,
                            stream=version.stream, on_chunk=on_chunk, tick=lambda: self._tick(version))
        for digest in list(missing):
            place(digest)

    def _tick(self, version: OpenVersion) -> None:
        """Raises NodeUnavailable when no reader waits for the version any longer."""
        version.step()
        if not version.readers:
            raise NodeUnavailable(f"opening {version.stream} version {version.number} was cancelled: it has no readers")
