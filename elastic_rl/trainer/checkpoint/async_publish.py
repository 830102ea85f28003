"""The part of a publish that runs in the background of the training: every rank has the tensors that it owns hashed and
reports its parts to rank 0; rank 0 stores, replicates and commits them, and sends the outcome to the others.

Ranks exchange JSON messages over a gloo group of their own, which no training step uses. Every wait is bounded, and a
rank that dies ends the exchange for all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.catalog.writer import Staged
from elastic_rl.dcs.publish import publisher
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import ElasticRLError, Fenced, NodeUnavailable, OutcomeUnknown, TrainerFailed
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.telemetry import traces
from elastic_rl.trainer.checkpoint.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.megatron.parallel import ParallelDims

log = logging.getLogger(__name__)

_MAX_MESSAGE = 1 << 30
"""Bytes."""
_MARGIN_S = 30.0
_FAILING_S = 30.0
"""A publish that is dropped is repeated, and who looks after the job need not know: that it was dropped may be one sign
of a node that has died. That none was committed for so long after it they have to know."""


@dataclass(frozen=True)
class InFlightPublish:
    """A publish that rank 0 has begun and not yet committed."""

    staged: Mapping[str, Staged]
    """Stream → its version."""
    parts: Mapping[str, tuple[str, ...]]
    """Stream → names of its parts, the same on every rank."""
    step: int
    trace: Mapping[str, str] = field(default_factory=dict)
    """Trace context of the publish."""


class AsyncPublisher:
    """Completes publishes in a thread of each rank, one at a time. All ranks make the same calls in the same order."""

    def __init__(self, par: ParallelDims, cfg: DcsConfig, etcd: EtcdClient, keys: Keys,
                 publishers: Mapping[str, Publisher], on_dropped: Callable[[], None], subject: str) -> None:
        """``publishers``: by stream, on rank 0. ``subject``: the subject of the event about a publish that was dropped.
        ``on_dropped`` is called there after each publish that failed."""
        self._par, self._cfg, self._etcd, self._keys = par, cfg, etcd, keys
        self._publishers, self._on_dropped, self._subject = publishers, on_dropped, subject
        self._timeout_s = cfg.publish_timeout_s + cfg.io_timeout_s + _MARGIN_S
        self.group = (dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
                      if par.world > 1 else None)
        """The group of all ranks, None for one rank. While no publish is in flight, the caller may use it too."""
        self._pool = ThreadPoolExecutor(1, "publish")
        self._running: Future[bool] | None = None
        self._lock = threading.Lock()
        self._dropped: tuple[str, ...] = ()
        self._failing_since: float | None = None
        """Monotonic time of the first publish that was dropped since one was committed. On rank 0, in the thread."""

    def submit(self, writer: OwnedTensorWriter, publish: InFlightPublish | None) -> None:
        """Starts to complete a publish whose tensors are all in the arena. ``publish``: on rank 0, else None."""
        self._running = self._pool.submit(self._complete, writer, publish,
                                          time.monotonic() + self._cfg.publish_timeout_s)

    def join(self) -> bool:
        """Waits for the publish in flight. True if there was one and it was committed. Raises Fenced, and TrainerFailed
        for a lost rank."""
        running, self._running = self._running, None
        if running is None:
            return False
        try:
            return running.result(self._timeout_s)
        except FutureTimeout:
            raise TrainerFailed(f"a publish was not complete after {self._timeout_s:g} s") from None

    def poll(self) -> bool:
        """The result of ``join`` if it need not wait, else false."""
        return self._running is not None and self._running.done() and self.join()

    def take_dropped(self) -> tuple[str, ...]:
        """Streams of the last publish if it was dropped; returned once. On rank 0."""
        with self._lock:
            dropped, self._dropped = self._dropped, ()
            return dropped

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    # -- in the thread -----------------------------------------------------------------------------------------------
    def _complete(self, writer: OwnedTensorWriter, publish: InFlightPublish | None, deadline: float) -> bool:
        committed = False
        try:
            message = writer.seal(deadline)
            if publish is None:
                self._send(message, 0)
                committed = bool(self._receive(0)["committed"])
            else:
                with traces.span("trainer.commit", parent=traces.extract(publish.trace), step=publish.step):
                    committed = self._lead(message, publish, deadline)
            return committed
        except RuntimeError as e:  # a gloo peer is gone
            raise TrainerFailed(f"a rank was lost during a publish: {e}") from e
        finally:
            writer.end(committed)

    def _lead(self, own: dict[str, Any], publish: InFlightPublish, deadline: float) -> bool:
        """Rank 0's side; whether the versions are committed. Raises Fenced, RuntimeError for a lost rank."""
        committed = False
        failed: ElasticRLError | None = None
        try:
            messages = [own, *(self._receive(rank) for rank in range(1, self._par.world))]
            self._commit(messages, publish, deadline)
            committed, self._failing_since = True, None
        except Fenced:
            raise
        except ElasticRLError as e:
            failed = e
        finally:  # first, since what follows may wait for etcd, and the others wait for this
            for rank in range(1, self._par.world):
                self._send({"committed": committed}, rank)
        if failed is not None:
            for stream, staged in publish.staged.items():
                if isinstance(failed, OutcomeUnknown):
                    self._publishers[stream].drop_lease()
                else:
                    self._publishers[stream].abort(staged)
            self._drop(publish, failed)
        return committed

    def _commit(self, messages: list[dict[str, Any]], publish: InFlightPublish, deadline: float) -> None:
        for rank, message in enumerate(messages):
            if "error" in message:
                raise NodeUnavailable(f"rank {rank} could not store its tensors: {message['error']}")
        stored = []
        for stream, staged in publish.staged.items():
            parts = [Part.from_json(m["parts"][name]) for m in messages for name in publish.parts[stream]
                     if name in m["parts"]]
            stored.append(self._publishers[stream].store(staged, parts, hold=True, deadline=deadline))
        for one, version in zip(stored, publisher.commit(stored), strict=True):
            log.info("published %s %d (step %d)", version.stream, version.number, publish.step)
            one.publisher.release_holds(one, version)

    def _drop(self, publish: InFlightPublish, error: ElasticRLError) -> None:
        names = " and ".join(f"{stream} version {s.version.number}" for stream, s in publish.staged.items())
        log.warning("%s dropped: %s", names, error)
        epoch, now = max(s.version.epoch for s in publish.staged.values()), time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        kind, failing_s = event_kinds.VERSION_DROPPED, now - self._failing_since
        message = f"{names} was dropped: {error}"
        if failing_s >= _FAILING_S:
            kind, message = event_kinds.VERSION_FAILING, f"no version was committed for {failing_s:.0f} s: {message}"
        with contextlib.suppress(ElasticRLError):  # the log has it too
            fencing.emit(self._etcd, self._keys, epoch, kind, self._subject, message,
                         severity=Severity.WARNING, step=publish.step,
                         **{stream: s.version.number for stream, s in publish.staged.items()})
        with self._lock:
            self._dropped = tuple(publish.staged)
        self._on_dropped()

    # -- messages ----------------------------------------------------------------------------------------------------
    def _send(self, value: dict[str, Any], rank: int) -> None:
        raw = json.dumps(value, separators=(",", ":")).encode()
        dist.send(torch.tensor([len(raw)]), dst=rank, group=self.group)
        dist.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), dst=rank, group=self.group)

    def _receive(self, rank: int) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=rank, group=self.group)
        if not 0 < (nbytes := int(size)) <= _MAX_MESSAGE:
            raise RuntimeError(f"rank {rank} announced a message of {nbytes} bytes")
        body = torch.empty(nbytes, dtype=torch.uint8)
        dist.recv(body, src=rank, group=self.group)
        return dict(json.loads(body.numpy().tobytes()))
