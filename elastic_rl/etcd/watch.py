"""A watch that survives the member it was opened on: every change once, in order, or a typed error."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import grpc

from elastic_rl.errors import Compacted, ConfigError, ElasticRLError, EtcdDenied, EtcdUnavailable
from elastic_rl.etcd.call_errors import AttemptFailed, refusal
from elastic_rl.etcd.channels import PAUSES_S, WATCH, Channels
from elastic_rl.etcd.liveness import StreamLife
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.transaction import KeyValue, range_end
from elastic_rl.runtime.backoff import backoff_s

_MAX_BUFFERED_EVENTS, _MAX_BUFFERED_ANSWERS = 100_000, 1_000
"""Bounds on what is buffered for a slow reader; beyond them the stream is closed and opened again later."""


@dataclass(frozen=True)
class WatchEvent:
    """One change. ``kv`` of a delete has the key and the revision of the deletion."""

    type: Literal["put", "delete"]
    kv: KeyValue


class Watch:
    """Iterator over the changes under a prefix. Read by one thread; ``close`` may be called by any.

    Raises Compacted, for good, when changes that it has not delivered were compacted: list the range again and open a
    new watch. Raises EtcdDenied when etcd does not permit this client to watch here.
    """

    def __init__(self, channels: Channels, prefix: str, start_revision: int) -> None:
        self._channels = channels
        self._prefix = prefix
        self._next = start_revision
        self._member = channels.current
        self._denied = False
        """Whether the last answer was that we may not watch."""
        self._answered_at = time.monotonic()
        self._stopping = threading.Event()
        self._answers: queue.Queue[Any] = queue.Queue()
        """The answers of the stream that is open."""
        self._events: queue.Queue[WatchEvent | ElasticRLError | None] = queue.Queue()
        self._error: ElasticRLError | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{prefix}", daemon=True)
        self._thread.start()

    # -- the reader ----------------------------------------------------------------------------------------------------
    def get(self, timeout_s: float) -> WatchEvent | None:
        """The next change, or None when none came in time or the watch was closed. Raises Compacted and EtcdDenied."""
        if self._error is not None:
            raise self._error
        try:
            item = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, ElasticRLError):
            self._error = item
            raise item
        return item

    def __iter__(self) -> Iterator[WatchEvent]:
        while not (self._stopping.is_set() and self._events.empty()):
            if (event := self.get(0.5)) is not None:
                yield event

    @property
    def closed(self) -> bool:
        return self._stopping.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since etcd last answered on this watch. While it serves, that is a few seconds at most: ``STREAM_S``
        and ``ANSWER_S`` of ``liveness``."""
        return time.monotonic() - self._answered_at

    def close(self) -> None:
        self._stopping.set()
        self._events.put(None)  # wakes a reader
        with contextlib.suppress(queue.Full):
            self._answers.put_nowait(None)  # wakes the thread; where it is full, the thread does not wait
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the connection ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set() and not self._channels.closed.is_set():
            before = self._next
            try:
                self._watch_member()
            except (Compacted, EtcdDenied, ConfigError) as e:
                self._events.put(e)
                return
            except EtcdUnavailable:  # the client was closed
                break
            except AttemptFailed:
                pass
            failures = 1 if self._next > before else failures + 1
            self._member = self._channels.after(self._member)
            self._stopping.wait(backoff_s(failures, *PAUSES_S))
        self._stopping.set()
        self._events.put(None)

    def _watch_member(self) -> None:
        """Watches on one member until that fails or goes silent, or this watch is closed."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(pb.WatchRequest(create_request=pb.WatchCreateRequest(
            key=self._prefix.encode() or b"\0", range_end=range_end(self._prefix), start_revision=self._next)))
        # The stream has a thread of its own: on a stopped member the read blocks for ever, and so does gRPC's sender,
        # so that neither side of the stream can notice the silence.
        call = self._channels.stream(WATCH, iter(requests.get, None), self._member)
        answers = self._answers = queue.Queue[Any](maxsize=_MAX_BUFFERED_ANSWERS)
        life = StreamLife(self._channels.life(self._member), time.monotonic())
        reader = threading.Thread(target=_read, args=(call, answers, life), name="watch-read", daemon=True)
        reader.start()
        try:
            self._supervise(requests, answers, life, reader)
        finally:
            requests.put(None)
            call.cancel()

    def _supervise(self, requests: queue.SimpleQueue[Any], answers: queue.Queue[Any], life: StreamLife,
                   reader: threading.Thread) -> None:
        while not self._stopping.is_set() and not self._channels.closed.is_set():
            try:
                answer = answers.get(timeout=life.due_s(time.monotonic()))
            except queue.Empty:
                now = time.monotonic()
                if life.is_over(now) or not reader.is_alive():  # it cannot say its end in a queue that was full
                    return
                if life.asks(now):
                    requests.put(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
                continue
            if answer is None:
                return
            self._answered_at = time.monotonic()
            if not self._deliver(answer):
                return
            while self._events.qsize() > _MAX_BUFFERED_EVENTS and not self._stopping.wait(0.05):
                pass  # a slow reader: let the stream fill; if it overflows, it is opened again at _next

    def _deliver(self, answer: Any) -> bool:
        if answer.compact_revision:
            raise Compacted(f"revisions of {self._prefix} before {answer.compact_revision} are no longer kept; "
                            f"the watch was at {self._next}", hint="list the range again and watch from there")
        if answer.canceled:
            # Older members also answer this when they no longer know our auth token.
            if "permission denied" in answer.cancel_reason or "auth" in answer.cancel_reason:
                if self._denied:
                    raise refusal(grpc.StatusCode.PERMISSION_DENIED, f"watch {self._prefix}: {answer.cancel_reason}")
                self._denied = True
                self._channels.sign_out()
            return False
        self._denied = False
        # A progress answer's revision must not move _next: etcd before 3.4.25 may send it ahead of earlier events.
        for event in answer.events:
            kind: Literal["put", "delete"] = "put" if event.type == pb.Event.PUT else "delete"
            self._events.put(WatchEvent(kind, KeyValue.from_message(event.kv)))
        if answer.events:
            self._next = max(self._next, answer.events[-1].kv.mod_revision + 1)
        return True


def _read(call: Any, answers: queue.Queue[Any], life: StreamLife) -> None:
    with contextlib.suppress(grpc.RpcError, queue.Full):
        for answer in call:
            life.answered(time.monotonic())
            answers.put_nowait(answer)
    with contextlib.suppress(queue.Full):
        answers.put_nowait(None)
