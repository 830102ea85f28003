"""Copying committed versions to the durable store, in the background, by all nodes together.

One node leads: it chooses the newest version of a stream that is not durable yet as the *task*, for all nodes, and pins
it; streams follow each other in rotation (``copy_order.py``). Each node copies the parts that it wrote
(``catalog/replica_sets.py``), and puts a key in etcd for each that is complete. When all are, the leader writes the
commit mark. Versions that are superseded before they were chosen are skipped.

Chunks are stored whole, or as deltas against the *anchor*, the last version of the stream that was copied whole. The
leader pins that one too, so that the nodes have its chunks at hand.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from elastic_rl.config import DcsConfig
from elastic_rl.config.groups import ACTOR
from elastic_rl.dcs.catalog import pairs, pins, reads, references
from elastic_rl.dcs.catalog.reads import decode
from elastic_rl.dcs.catalog.retention import durable_to_drop
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.durable.copy_order import Copies, Copyable, CopyOrder
from elastic_rl.dcs.durable.store import CommitMark, DurableStore, PartMark
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import ChunkMissing, Conflict, ElasticRLError, EtcdUnavailable, NodeUnavailable, VersionNotFound
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, KeptLease, Op
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity, UploadTask, Version, VersionState
from elastic_rl.runtime.backoff import backoff_s

log = logging.getLogger(__name__)

_POLL_S = 1.0
_RETRY_S = (1.0, 60.0)
"""First and longest pause after a failure; doubled each time, with jitter."""
_LEASE_S = 15
_TAKEOVER_S = 300.0
"""A part that its first node has not copied by then is copied by the next one that holds it, which need not wait when
the first one is gone."""
_STALL_S = 2 * _TAKEOVER_S
"""A task of which no part is completed for so long is given up."""
_SWEEP_EVERY = 16
"""Versions between two searches for objects that no version needs."""


class Chunks(Protocol):
    """What the uploader needs of a node's chunk table."""

    def reading(self, digest: str) -> AbstractContextManager[memoryview]:
        """The chunk's bytes. Raises ChunkMissing."""
        ...


@dataclass
class Anchor:
    """The version of a stream that was copied whole last."""

    number: int
    deltas: int = 0
    """Versions that were copied as deltas against it since."""


@dataclass
class _Work:
    """This node's share of a task."""

    task: UploadTask
    revision: int
    """Mod revision of the task."""
    version: Version
    nodes_of_parts: list[list[str]]
    since: float
    manifest: Manifest | None = None
    bases: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    """Chunks that are whole in the store, as far as this node knows."""
    done: set[int] = field(default_factory=set)
    """Parts that are complete, by whomever."""
    progress: tuple[int, float] = (0, 0.0)
    """Number of parts that, on the leader, were complete at the last look, and when it changed."""


class Uploader(threading.Thread):
    """The copying thread of one node."""

    def __init__(self, etcd: EtcdClient, keys: Keys, dcs: DcsConfig, chunks: Chunks, node_id: str,
                 durable: DurableStore, *, poll_s: float = _POLL_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name="uploader", daemon=True)
        self._etcd, self._keys, self._dcs, self._chunks = etcd, keys, dcs, chunks
        self._node_id, self._durable, self._poll_s, self._clock = node_id, durable, poll_s, clock
        self._lease: KeptLease | None = None
        self._leading = 0  # mod revision of the task while this node leads; 0 while it does not
        self._anchors: dict[str, Anchor] = {}
        self._order = CopyOrder(dcs.durable_streams, pairs.PAIRED)
        self._work: _Work | None = None
        self._last: dict[str, tuple[int, set[str]]] = {}
        """Stream → the last version of which this node copied parts, and their chunks that are whole in the store."""
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
                pause = self._failed(e)
            except Exception as e:  # whatever it was: without this thread nothing becomes durable any more
                log.exception("the uploader failed")
                pause = self._failed(NodeUnavailable(f"the uploader failed: {e!r}"))

    def step(self) -> list[Version]:
        """Does what is due; the versions that this node, as leader, has made durable. Raises what prevents it."""
        done = []
        while (work := self._read_task()) is not None:
            self._copy_parts(work)
            if not self._leading or not self._complete(work):
                break
            self._finish(work)
            done.append(work.version)
        return done

    def close(self) -> None:
        """Ends the thread; another node leads from then on."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=self._dcs.io_timeout_s)
        with contextlib.suppress(EtcdUnavailable):
            self._step_down()

    # -- the task ----------------------------------------------------------------------------------------------------
    def _read_task(self) -> _Work | None:
        """This node's share of the present task; None while there is nothing to copy."""
        kv = self._etcd.get(self._keys.uploader())
        if kv is None:
            self._claim()
        elif kv.mod_revision != self._leading:
            if self._leading:
                self._step_down()
            task = decode(UploadTask, kv)
            return self._join(task, kv.mod_revision) if task.stream else None
        elif self._lease is None or not self._lease.alive:
            self._step_down()
        if not self._leading:
            return None
        if self._work is None or self._work.revision != self._leading:
            self._work = self._choose()
        return self._work

    def _join(self, task: UploadTask, revision: int) -> _Work | None:
        """The share of a task that another node has chosen."""
        if self._work is None or self._work.revision != revision:
            version = reads.get_version(self._etcd, self._keys, task.stream, task.number)
            self._work = self._share(task, revision, version) if version is not None else None
        return self._work

    def _share(self, task: UploadTask, revision: int, version: Version) -> _Work:
        now = self._clock()
        work = _Work(task, revision, version, self._parts(version), now, progress=(0, now))
        for stream, (number, whole) in self._last.items():
            if self._etcd.get(self._keys.durable(stream, number)) is not None:  # so no sweep removes its objects
                work.known |= whole
        return work

    def _parts(self, version: Version) -> list[list[str]]:
        return reads.read_replica_sets(self._etcd, self._keys, version.stream, version.number).replica_sets.parts

    def _claim(self) -> None:
        """Leads, if no other node does."""
        self._step_down()
        self._lease = self._etcd.keepalive(_LEASE_S)
        key = self._keys.uploader()
        done = self._etcd.txn([Compare.absent(key)],
                              [Op.put(key, UploadTask(node=self._node_id).encode(), self._lease.id)])
        if done.succeeded:
            self._leading = done.revision
        else:
            self._step_down()

    def _step_down(self) -> None:
        """Leads no more; every pin ends with the lease."""
        self._leading, self._work = 0, None
        self._anchors.clear()
        self._order.forget()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _guard(self) -> Compare:
        return Compare.mod(self._keys.uploader(), "==", self._leading)

    def _choose(self) -> _Work | None:
        """The leader's next task."""
        for chosen in self._order.candidates(self._read_stream):
            copies = [*self._reference_to_copy(*chosen[0]), *chosen]
            versions = [self._pinned(stream, number) for stream, number in copies]
            if (version := versions[0]) is None or None in versions:
                self._give_up(copies)
                continue
            self._order.begin(copies)
            stream, anchor = version.stream, self._anchors.get(version.stream)
            is_delta = anchor is not None and anchor.deltas + 2 <= self._dcs.durable_full_every
            task = UploadTask(node=self._node_id, stream=stream, number=version.number,
                              anchor=anchor.number if anchor is not None and is_delta else version.number)
            self._put_task(task)
            return self._share(task, self._leading, version)
        return None

    def _reference_to_copy(self, stream: str, number: int) -> Copies:
        """The policy that a version cannot be used without, if it is not in the store yet."""
        version = reads.get_version(self._etcd, self._keys, stream, number)
        reference = references.reference_of(version) if version is not None else 0
        if not reference or self._etcd.get(self._keys.durable(ACTOR.weights, reference)) is not None:
            return []
        found = reads.get_version(self._etcd, self._keys, ACTOR.weights, reference)
        return [(ACTOR.weights, reference)] if found is not None and found.state is VersionState.COMMITTED else []

    def _read_stream(self, stream: str) -> Copyable:
        versions = reads.list_versions(self._etcd, self._keys, stream)
        return Copyable([v.number for v in versions if v.state is VersionState.COMMITTED], pairs.names_of(versions),
                        reads.newest_number(self._etcd, self._keys.durable_prefix(stream)))

    def _pinned(self, stream: str, number: int) -> Version | None:
        """The version, pinned; None if it was released meanwhile, or where its parts are is not known."""
        assert self._lease is not None
        try:
            version = pins.pin(self._etcd, self._keys, stream, number, self._holder, self._lease.id)
        except VersionNotFound:
            return None
        return version if self._parts(version) else None

    def _give_up(self, copies: Copies) -> None:
        self._order.give_up(copies)
        for stream, number in copies:
            self._unpin(stream, number)

    def _put_task(self, task: UploadTask, *also: Op) -> None:
        assert self._lease is not None
        done = self._etcd.txn([self._guard()], [Op.put(self._keys.uploader(), task.encode(), self._lease.id),
                                                Op.delete_prefix(self._keys.durable_parts_prefix()), *also])
        if not done.succeeded:
            self._step_down()
            raise Conflict(f"another node leads the copying for job {self._keys.job} now")
        self._leading = done.revision

    # -- copying -----------------------------------------------------------------------------------------------------
    def _copy_parts(self, work: _Work) -> None:
        for part, nodes in enumerate(work.nodes_of_parts):
            if self._stopping.is_set():
                return
            if self._node_id in nodes and part not in work.done and self._is_due(work, part, nodes):
                self._copy_part(work, part)

    def _is_due(self, work: _Work, part: int, nodes: list[str]) -> bool:
        """Whether this node should copy a part that it holds: its first node at once, the others where that fails."""
        before = nodes[:nodes.index(self._node_id)]
        if not before:
            return True
        if self._etcd.get(self._keys.durable_part(part)) is not None:
            work.done.add(part)
            return False
        return (self._clock() - work.since > len(before) * _TAKEOVER_S
                or all(self._etcd.get(self._keys.dcs_node(n)) is None for n in before))

    def _copy_part(self, work: _Work, part: int) -> None:
        stream, number = work.task.stream, work.task.number
        if work.manifest is None:
            work.manifest = self._manifest(work.version)
            work.bases = self._bases(work)
        digests = [*([work.version.manifest] if part == 0 else []), *work.manifest.part_digests()[part]]
        objects = {d: self._put(d, work) for d in digests}
        self._durable.commit_part(stream, number, part, PartMark(objects))
        if self._etcd.txn([Compare.mod(self._keys.uploader(), "==", work.revision)],
                          [Op.put(self._keys.durable_part(part), b"{}")]).succeeded:
            work.done.add(part)
            if not self._leading:
                self._failures = 0
        whole = self._last.get(stream, (0, set()))
        known = whole[1] if whole[0] == number else set()
        self._last[stream] = (number, known | {d for d, base in objects.items() if not base})

    def _manifest(self, version: Version) -> Manifest:
        with self._chunks.reading(version.manifest) as data:
            return Manifest.decode(data)

    def _bases(self, work: _Work) -> dict[str, str]:
        """Chunk → the chunk of the anchor to make a delta against."""
        task = work.task
        anchor = (reads.get_version(self._etcd, self._keys, task.stream, task.anchor)
                  if task.anchor != task.number else None)
        if anchor is None or work.manifest is None:
            return {}
        try:
            return delta.bases(self._manifest(anchor), work.manifest)
        except ChunkMissing:  # this node got its part after the anchor was published
            return {}

    def _put(self, digest: str, work: _Work) -> str:
        """Stores a chunk; the base of the delta that it was stored as, empty for a whole one."""
        if digest in work.known:
            return ""
        base = work.bases.get(digest, "")
        with self._chunks.reading(digest) as new:
            if base and (payload := self._encoded(base, new)) is not None:
                self._durable.put_delta(digest, base, payload)
                return base
            self._durable.put_chunk(digest, new)
        work.known.add(digest)
        return ""

    def _encoded(self, base: str, new: memoryview) -> bytes | None:
        try:
            with self._chunks.reading(base) as old:
                return delta.encode(old, new)
        except ChunkMissing:
            return None

    # -- the leader's end of a task ----------------------------------------------------------------------------------
    def _complete(self, work: _Work) -> bool:
        """Whether all parts are in the store. Raises NodeUnavailable when none was completed for long."""
        parts, done = len(work.nodes_of_parts), self._etcd.count(self._keys.durable_parts_prefix())
        if done >= parts:
            return True
        before, since = work.progress
        now = self._clock()
        if done != before:
            work.progress = (done, now)
        elif now - since > _STALL_S:
            raise NodeUnavailable(f"{parts - done} of {parts} parts of {work.task.stream} version {work.task.number} "
                                  f"were not copied for {_STALL_S:g} s",
                                  hint="the logs of the nodes that hold them say why")
        return False

    def _finish(self, work: _Work) -> None:
        task, version = work.task, work.version
        self._durable.commit(CommitMark(version, task.anchor, len(work.nodes_of_parts)))
        self._put_task(UploadTask(node=self._node_id), Op.put(self._keys.durable(task.stream, task.number), b"{}"))
        log.info("%s version %d is durable after %.3f s", task.stream, task.number, self._clock() - work.since)
        self._report_recovery()
        anchor = self._anchors.get(task.stream)
        is_whole = task.anchor == task.number
        if is_whole and (anchor is None or anchor.number < task.number):  # not an old reference: deltas would be large
            self._anchors[task.stream] = Anchor(task.number)
            if anchor is not None:
                self._unpin(task.stream, anchor.number)
        else:
            if anchor is not None and not is_whole:
                anchor.deltas += 1
            self._unpin(task.stream, task.number)
        self._clean(task.stream)

    @property
    def _holder(self) -> str:
        return f"durable-{self._node_id}"

    def _unpin(self, stream: str, number: int) -> None:
        pins.unpin(self._etcd, self._keys, stream, number, self._holder)

    def _clean(self, stream: str) -> None:
        """Drops versions over ``dcs.durable_keep_versions``, and now and then the objects that no version needs."""
        marks = {s: {n: self._durable.mark(s, n) for n in self._durable.numbers(s)}
                 for s in {*self._order.with_stream(stream), ACTOR.weights, ACTOR.state}}
        versions = {s: [m.version for m in of.values()] for s, of in marks.items()}
        paired, needed = pairs.in_newest_pairs(versions, pairs.PAIRED), references.needed(versions)
        for name in self._order.with_stream(stream):
            of = marks[name]
            for number in durable_to_drop({n: m.anchor for n, m in of.items()}, self._dcs.durable_keep_versions,
                                          {paired.get(name, 0), *needed.get(name, ())}):
                if self._etcd.txn([self._guard()], [Op.delete(self._keys.durable(name, number))]).succeeded:
                    self._durable.drop(name, number)
        self._copied += 1
        if self._copied % _SWEEP_EVERY == 0:
            self._durable.sweep(still_leads=self._still_leads)

    def _still_leads(self) -> bool:
        kv = self._etcd.get(self._keys.uploader())
        return kv is not None and kv.mod_revision == self._leading

    # -- failures ----------------------------------------------------------------------------------------------------
    def _failed(self, error: ElasticRLError) -> float:
        """Handles a failure; how long to pause. A leader reports it and steps down, so that another node can try."""
        log.warning("cannot copy to the durable store: %s", error)
        self._failures += 1
        with contextlib.suppress(EtcdUnavailable):
            if self._leading and not isinstance(error, EtcdUnavailable):
                self._report(event_kinds.DCS_DURABLE_FAILED, f"versions cannot be copied to the durable store: {error}",
                             Severity.WARNING, Compare.absent(self._keys.durable_failing()),
                             Op.put(self._keys.durable_failing(), b"{}"))
            self._step_down()
        return backoff_s(self._failures, *_RETRY_S)

    def _report_recovery(self) -> None:
        """Reports that versions are copied again, if a failure was reported, be it by another node."""
        self._failures = 0
        if self._etcd.get(self._keys.durable_failing()) is not None:
            self._report(event_kinds.DCS_DURABLE_RECOVERED, "versions are copied to the durable store again",
                         Severity.INFO, Compare.exists(self._keys.durable_failing()),
                         Op.delete(self._keys.durable_failing()))

    def _report(self, kind: EventKind, message: str, severity: Severity, condition: Compare, also: Op) -> None:
        """An event of the leader, under its claim."""
        event = events.build(kind, "durable", message, severity=severity, node=self._node_id)
        self._etcd.txn([self._guard(), condition], [events.put_op(self._keys, event), also])
