"""Keeps the history of a job's records where it outlives the actor: its tail in etcd, its sealed segments in the stream
``run_log``, and a copy of all in the job's folder.

The tail goes along with the writes of the job's status (``JobStatusWriter``), under the actor's term. The rest is done
by a thread, for which nothing waits: it seals closed segments and continues the copy. What fails is tried again, with
backoff, and ends nothing. Only the thread's own term publishes, which its token ensures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.manifest import TensorEntry
from elastic_rl.dcs.publish.growing_stream import GrowingStream, NewTensor, StreamHead
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, ElasticRLError, Fenced
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import RunLogHead
from elastic_rl.pipeline.records.history import History
from elastic_rl.pipeline.records.local_copy import LocalCopy
from elastic_rl.pipeline.records.segments import (
    END_KEY,
    HISTORY_KEY,
    Segment,
    segment_name,
    segments_of,
    within,
)
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

_RETRY_S = (0.5, 60.0)
"""Pauses after a failure, at first and at most."""
_LOCK_POLL_S = 5.0
"""Interval at which the lock of the copy is tried while another process has it, and the copy is looked at."""
_CLOSE_S = 3.0
"""Longest wait, at the end of the actor, for what etcd has to be in the copy."""
_GIVE_UP_S = 600.0
"""How long chunks of sealed segments must have been missing, on every node that answers, before they are given up."""


class SealedSegments:
    """The sealed part of the history in the stream. For one thread. Methods raise as ``GrowingStream``."""

    def __init__(self, stream: GrowingStream, history: History) -> None:
        self._stream, self._history = stream, history
        self._segments: list[Segment] = []

    def segments(self) -> list[Segment]:
        """The segments from 0 to where the history is sealed."""
        if not self._segments or self._segments[-1].end != self._history.sealed:
            self._segments = self.of(self.head())
        return self._segments

    def head(self) -> StreamHead | None:
        """The newest version, if it is of this history."""
        head = self._stream.head()
        return head if head is not None and self._is_of_history(head) else None

    def before_head(self) -> StreamHead | None:
        """The newest version before that whose manifest can be had, if it is of this history."""
        return next(filter(self._is_of_history, self._stream.before_head()), None)

    def _is_of_history(self, head: StreamHead) -> bool:
        return head.version.meta.get(HISTORY_KEY) == self._history.identity

    def of(self, head: StreamHead | None) -> list[Segment]:
        return segments_of(head.manifest.tensors if head is not None else (), self._history.sealed)

    def read(self, segment: Segment) -> bytes:
        if segment.entry is None:
            raise ChunkMissing("a gap has no bytes")
        return self._stream.read(segment.entry)

    def forget(self) -> None:
        """The stream has changed."""
        self._segments = []


class Spool(threading.Thread):
    """The thread. ``close`` ends it."""

    def __init__(self, etcd: EtcdClient, keys: Keys, history: History, stream: GrowingStream, *, most_bytes: int,
                 path: Path, lock: Path, further: Mapping[str, Callable[[], bool]] = MappingProxyType({})) -> None:
        """``most_bytes``: what a version of the stream may have; older records become a gap of it. ``path``: of the
        copy; ``lock``: see ``LocalCopy``. ``further``: what the thread does besides, as soon as it can be done: by what
        is wrong when it cannot, a function that returns whether there is more to do."""
        super().__init__(name="run-log", daemon=True)
        self._etcd, self._keys, self._history, self._stream = etcd, keys, history, stream
        self._sealed = SealedSegments(stream, history)
        self._copy = LocalCopy(path, lock, history, self._sealed)
        self._most_bytes, self._further = most_bytes, further
        self._missing_since = float("inf")
        """Monotonic time since which chunks of sealed segments cannot be had."""
        self._given_up = False
        """Whether some are given up in this attempt to publish."""
        self._news = threading.Event()
        self._stopping = False
        history.on_commit = self._news.set

    def run(self) -> None:
        begin = [_Duty(failure, call) for failure, call in self._further.items()]
        publish = _Duty("the records of the run cannot be published", self.seal)
        copy = _Duty("the file with the records of the run cannot be written", self._copy.step)
        try:
            while not self._stopping:
                self._news.clear()
                if self._stopping:
                    break
                begin = [duty for duty in begin if duty.attempt() or not duty.is_done]
                if not any([publish.attempt(), copy.attempt()]):
                    self._news.wait(min(_LOCK_POLL_S, publish.left_s(), copy.left_s()))
            end = time.monotonic() + _CLOSE_S
            while time.monotonic() < end and copy.attempt():
                pass
        except Fenced as e:
            log.info("the records of the run are another actor's now: %s", e)
        finally:
            self._copy.close()
            self._stream.close()

    def close(self) -> None:
        """Ends the thread, once the copy has what etcd has; does not wait long for that."""
        self._stopping = True
        self._news.set()
        if self.is_alive():
            self.join(timeout=_CLOSE_S)

    # -- sealing -----------------------------------------------------------------------------------------------------
    def seal(self) -> bool:
        """Publishes the closed segments; whether it did. Raises Fenced, and ElasticRLError where that cannot be done
        now."""
        closed, history = self._history.closed(), self._history
        if not closed:
            return False
        kv = self._etcd.get(self._keys.run_log_head())
        if kv is not None and (sealed := reads.decode(RunLogHead, kv).sealed) > history.sealed:
            self._stream.require()
            history.seal(sealed)  # by a commit of this term whose answer was lost
            self._sealed.forget()
            return True
        self._given_up = False
        head = self._head()
        old = self._to_keep(head)
        if not self._given_up:  # else what is given up stays so until a version without it is published
            self._missing_since = float("inf")
        fresh = [Segment(s.start, s.end, TensorEntry(segment_name(s.start, s.end), "uint8", (len(s.data),), ()))
                 for s in closed]
        data = {f.name: s.data for f, s in zip(fresh, closed, strict=True)}
        segments = within([*old, *fresh], self._most_bytes)
        self._stream.publish(
            head, [NewTensor(s.name, data.get(s.name, b"")) if s.entry is None or s.name in data else s.entry
                   for s in segments],
            meta={HISTORY_KEY: history.identity, END_KEY: closed[-1].end},
            also=[Op.put(self._keys.run_log_head(), RunLogHead(id=history.identity, sealed=closed[-1].end).encode()),
                  *(Op.delete_prefix(self._keys.run_log_segment_prefix(s.start)) for s in closed)])
        history.seal(closed[-1].end)
        self._sealed.forget()
        self._missing_since = float("inf")
        return True

    def _head(self) -> StreamHead | None:
        """The version to continue. Where the manifest of the newest one is given up, it is one before that; without
        one, the stream begins again, with a gap."""
        try:
            return self._sealed.head()
        except (ChunkMissing, ChunkCorrupt) as e:
            if not self._gives_up():
                raise
            head = self._sealed.before_head()
            log.error("the records from offset %d to %d are lost: %s",
                      head.version.meta[END_KEY] if head is not None else 0, self._history.sealed, e)
            return head

    def _to_keep(self, head: StreamHead | None) -> list[Segment]:
        """The sealed segments, all with their chunks on this host's node. One that cannot be had is published from the
        copy in the job's folder; or it is a gap from now on, where it is given up."""
        segments = self._sealed.of(head)
        if head is None:
            return segments
        lacking = self._stream.lacking(head, [s.entry for s in segments if s.entry is not None])
        return [s if s.entry is None or s.entry.name not in lacking or self._brought(head, s, s.entry)
                else Segment(s.start, s.end, None) for s in segments]

    def _brought(self, head: StreamHead, segment: Segment, entry: TensorEntry) -> bool:
        """Has this host's node get a segment; False where it is given up."""
        if (data := self._copy.intact(segment)) is not None:
            self._stream.restore(entry, data)
            return True
        try:
            self._stream.bring(head, entry)
            return True
        except (ChunkMissing, ChunkCorrupt) as e:
            if not self._gives_up():
                raise
            log.error("the records from offset %d to %d are lost: %s", segment.start, segment.end, e)
            return False

    def _gives_up(self) -> bool:
        """Whether chunks that no node has are given up: new records are left out because of them, and have been missing
        for a while. Until then a node that is away may come back with them."""
        now = time.monotonic()
        self._missing_since = min(self._missing_since, now)
        gives_up = self._history.full and now - self._missing_since >= _GIVE_UP_S
        self._given_up |= gives_up
        return gives_up


class _Duty:
    """Something that is done again and again. A failure is logged, and a pause follows."""

    def __init__(self, failure: str, call: Callable[[], bool]) -> None:
        """``call``: does a part; returns whether there is more."""
        self._failure, self._call, self._backoff = failure, call, RetryBackoff(*_RETRY_S)
        self.is_done = False
        """Whether it has been done once."""

    def attempt(self) -> bool:
        """Whether there is more that can be done now. Raises Fenced."""
        if not self._backoff.is_due(time.monotonic()):
            return False
        try:
            more = self._call()
        except Fenced:
            raise
        except (ElasticRLError, OSError) as e:
            log.warning("%s, which is tried again: %s", self._failure, e)
        except Exception:  # the run goes on without
            log.exception("%s, which is tried again", self._failure)
        else:
            if not more:  # a part that can be done again and again, before one that fails, is no success
                self._backoff.reset()
                self.is_done = True
            return more
        self._backoff.failed(time.monotonic())
        return False

    def left_s(self) -> float:
        """Seconds until the next attempt after a failure; infinite without one."""
        return self._backoff.left_s(time.monotonic()) or float("inf")
