"""Copying committed versions to the durable store, behind everybody's back, and bringing a catalog back from there.

One node copies for the whole job: one that has the newest version, so that it need not fetch what it copies. It takes
the newest version of each stream, whole or as deltas against the last whole copy; what was outdated meanwhile is left
out.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.catalog import catalog
from elastic_rl.dcs.catalog.retention import durable_to_drop
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.durable.store import DurableStore, Mark
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import ChunkMissing, Conflict, ElasticRLError, EtcdUnavailable, VersionNotFound
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeptLease, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity, Version, VersionState

log = logging.getLogger(__name__)

_POLL_S = 1.0
_RETRY_S = (1.0, 60.0)
"""First and longest pause after a failure; doubled each time, with jitter."""
_LEASE_S = 15
_SWEEP_EVERY = 16
"""Copies between two looks for objects that nothing refers to."""
_RESTORED_MOST = 60
"""Versions of a stream that are brought back: they go into one transaction of etcd."""


class Chunks(Protocol):
    """What the uploader needs of a node's chunk table."""

    def reading(self, digest: str) -> AbstractContextManager[memoryview]:
        """The chunk's bytes. Raises ChunkMissing."""
        ...


@dataclass
class Anchor:
    """The last whole copy of a stream. It stays pinned, so that its chunks are at hand to make deltas against."""

    version: Version
    manifest: Manifest
    copies: int = 0
    """Copies that were made since."""


class Uploader(threading.Thread):
    """The copying thread of one node."""

    def __init__(self, etcd: EtcdClient, keys: Keys, dcs: DcsConfig, chunks: Chunks, node_id: str,
                 durable: DurableStore, *,
                 poll_s: float = _POLL_S) -> None:
        super().__init__(name="uploader", daemon=True)
        self._etcd, self._keys, self._dcs, self._chunks = etcd, keys, dcs, chunks
        self._node_id, self._durable, self._poll_s = node_id, durable, poll_s
        self._lease: KeptLease | None = None
        self._claimed = 0  # mod revision of the claim; 0: another node copies, or nobody does
        self._anchors: dict[str, Anchor] = {}
        self._stored: set[str] = set()  # whole chunks that this process has seen in the store
        self._copied = 0
        self._failures = 0
        self._stopping = threading.Event()

    # -- the thread --------------------------------------------------------------------------------------------------
    def run(self) -> None:
        pause = self._poll_s
        while not self._stopping.wait(pause):
            pause = self._poll_s
            try:
                self.step()
            except ElasticRLError as e:
                low, high = _RETRY_S
                pause = min(high, low * 2 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
                self._failed(e)

    def step(self) -> list[Version]:
        """Copies the newest version of each stream that is not there yet; which. Raises what stands in the way."""
        done = []
        for stream in self._dcs.durable_streams:
            head = catalog.head(self._etcd, self._keys, stream)
            if head is None or self._etcd.get(self._keys.durable(stream, head.number)) is not None:
                continue
            if self._node_id not in head.nodes:
                self._step_down()
            elif self._claim():
                with contextlib.suppress(VersionNotFound):  # released meanwhile: there is a newer one
                    self._copy(head)
                    done.append(head)
        if done:
            self._recovered()
        return done

    def close(self) -> None:
        """Ends the thread and gives the work up to another node."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=self._dcs.io_timeout_s)
        with contextlib.suppress(EtcdUnavailable):
            self._step_down()

    # -- who copies --------------------------------------------------------------------------------------------------
    def _claim(self) -> bool:
        """Whether it is this node that copies."""
        if self._claimed and self._lease is not None and self._lease.alive:
            return True
        self._step_down()
        self._lease = self._etcd.keepalive(_LEASE_S)
        key = self._keys.uploader()
        outcome = self._etcd.txn([Compare.absent(key)], [Op.put(key, self._node_id.encode(), self._lease.id)])
        if not outcome.succeeded:
            self._step_down()
            return False
        self._claimed = outcome.revision
        return True

    def _step_down(self) -> None:
        """Ends the claim, and every pin with it."""
        self._claimed = 0
        self._anchors.clear()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _guard(self) -> Compare:
        return Compare.mod(self._keys.uploader(), "==", self._claimed)

    # -- copying -----------------------------------------------------------------------------------------------------
    def _copy(self, version: Version) -> None:
        assert self._lease is not None
        stream, started = version.stream, time.monotonic()
        catalog.pin(self._etcd, self._keys, stream, version.number, self._holder, self._lease.id)
        try:
            manifest, anchor = self._copy_pinned(version)
        except ElasticRLError:
            with contextlib.suppress(EtcdUnavailable):
                catalog.unpin(self._etcd, self._keys, stream, version.number, self._holder)
            raise
        self._keep_as_anchor(version, manifest, anchor)
        log.info("%s version %d is durable after %.3f s", stream, version.number, time.monotonic() - started)
        self._clean(stream)

    def _copy_pinned(self, version: Version) -> tuple[Manifest, Anchor | None]:
        """Copies it; its manifest, and the anchor that its deltas rest on, None for a whole copy."""
        stream = version.stream
        with self._chunks.reading(version.manifest) as data:
            manifest = Manifest.decode(data)
        anchor = self._anchors.get(stream)
        if anchor is not None and anchor.copies + 1 >= self._dcs.durable_full_every:
            anchor = None
        bases = delta.bases(anchor.manifest, manifest) if anchor else {}
        objects = {d: self._put(d, bases.get(d, "")) for d in (version.manifest, *manifest.chunks)}
        self._durable.commit(Mark(version, anchor.version.number if anchor else version.number, objects))
        done = self._etcd.txn([self._guard()], [Op.put(self._keys.durable(stream, version.number), b"{}")])
        if not done.succeeded:
            self._step_down()
            raise Conflict(f"another node copies for job {self._keys.job} now")
        return manifest, anchor

    @property
    def _holder(self) -> str:
        return f"durable-{self._node_id}"

    def _put(self, digest: str, base: str) -> str:
        """Stores a chunk; the base of the delta that it was stored as, empty for a whole one."""
        if digest in self._stored:
            return ""
        with self._chunks.reading(digest) as new:
            if base:
                payload = self._encoded(base, new)
                if payload is not None:
                    self._durable.put_delta(digest, base, payload)
                    return base
            self._durable.put_chunk(digest, new)
        self._stored.add(digest)
        return ""

    def _encoded(self, base: str, new: memoryview) -> bytes | None:
        try:
            with self._chunks.reading(base) as old:
                return delta.encode(old, new)
        except ChunkMissing:
            return None

    def _keep_as_anchor(self, version: Version, manifest: Manifest, anchor: Anchor | None) -> None:
        """A whole copy takes the former one's place and keeps its pin; another one gives its pin up."""
        stream = version.stream
        if anchor is not None:
            anchor.copies += 1
            catalog.unpin(self._etcd, self._keys, stream, version.number, self._holder)
            return
        old = self._anchors.pop(stream, None)
        if old is not None:
            catalog.unpin(self._etcd, self._keys, stream, old.version.number, self._holder)
        self._anchors[stream] = Anchor(version, manifest)

    def _clean(self, stream: str) -> None:
        """Drops copies that are too many, and now and then the objects that nothing refers to any more."""
        anchors = {n: self._durable.mark(stream, n).anchor for n in self._durable.numbers(stream)}
        for number in durable_to_drop(anchors, self._dcs.durable_keep_versions):
            self._etcd.delete(self._keys.durable(stream, number))
            self._durable.drop(stream, number)
        self._copied += 1
        if self._copied % _SWEEP_EVERY == 0:
            # What goes now may have been seen before; whoever needs it again must look again.
            self._stored.clear()
            self._durable.sweep()

    # -- telling -----------------------------------------------------------------------------------------------------
    def _failed(self, error: ElasticRLError) -> None:
        log.warning("cannot copy to the durable store: %s", error)
        self._failures += 1
        self._stored.clear()
        if self._failures == 1 and not isinstance(error, EtcdUnavailable):
            self._tell("dcs.durable_failed", f"versions cannot be copied to the durable store: {error}",
                       Severity.WARNING)

    def _recovered(self) -> None:
        if self._failures:
            self._failures = 0
            self._tell("dcs.durable_recovered", "versions are copied to the durable store again", Severity.INFO)

    def _tell(self, kind: str, message: str, severity: Severity) -> None:
        with contextlib.suppress(EtcdUnavailable):
            events.emit(self._etcd, self._keys, kind, "durable", message, severity=severity, node=self._node_id)


def restore(etcd: EtcdClient, keys: Keys, durable: DurableStore, stream: str, *, epoch: int) -> list[Version]:
    """Brings the durable versions of a stream back into a catalog that knows nothing of it, under their numbers; the
    newest is the head. Their chunks are fetched from the durable store when someone pulls them.

    Raises Conflict when the stream has a version already, and Fenced when the epoch is over.
    """
    versions = [durable.mark(stream, n).version.replace(nodes=[], state=VersionState.COMMITTED)
                for n in durable.numbers(stream)[-_RESTORED_MOST:]]
    if not versions:
        return []
    head = versions[-1]
    puts = [Op.put(keys.version(stream, v.number), v.encode()) for v in versions]
    marks = [Op.put(keys.durable(stream, v.number), b"{}") for v in versions]
    outcome = etcd.txn(
        [fencing.epoch_guard(keys, epoch), Compare.absent(keys.stream_next(stream)),
         Compare.absent(keys.stream_head(stream))],
        [Op.put(keys.stream_next(stream), str(head.number).encode()), Op.put(keys.stream_head(stream), head.encode()),
         *puts, *marks])
    if not outcome.succeeded:
        fencing.require_epoch(etcd, keys, epoch)
        raise Conflict(f"stream {stream} of job {keys.job} has versions already",
                       hint="only a stream that is empty can be restored")
    return versions
