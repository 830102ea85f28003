"""The part of a publish that runs behind the training's back: every rank has its share hashed and tells rank 0 what it
wrote; rank 0 stores, replicates and commits, and tells the others how it went.

Ranks talk over a gloo group of their own, which no training step uses, in messages of JSON. Every wait is bounded, and
a rank that dies ends the exchange for all of them.
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
from elastic_rl.dcs.catalog import Staged
from elastic_rl.dcs.publish import publisher
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import ElasticRLError, Fenced, NodeUnavailable, OutcomeUnknown, TrainerFailed
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.telemetry import traces
from elastic_rl.trainer.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.parallel import ParallelDims

log = logging.getLogger(__name__)

_MAX_MESSAGE = 1 << 30
_MARGIN_S = 30.0


@dataclass(frozen=True)
class InFlightPublish:
    """A publish under way, as rank 0 began it."""

    staged: Mapping[str, Staged]
    """Stream → its version."""
    parts: Mapping[str, tuple[str, ...]]
    """Stream → names of the parts that it is made of, of every rank."""
    step: int
    trace: Mapping[str, str] = field(default_factory=dict)
    """Carrier of the publish's trace."""


class AsyncPublisher:
    """Ends publishes in a thread of each rank, one at a time. All ranks call ``submit`` and ``join`` alike."""

    def __init__(self, par: ParallelDims, cfg: DcsConfig, etcd: EtcdClient, keys: Keys,
                 publishers: Mapping[str, Publisher], on_dropped: Callable[[], None]) -> None:
        """``publishers``: by stream, on rank 0. ``on_dropped`` is called there after each publish that failed."""
        self._par, self._cfg, self._etcd, self._keys = par, cfg, etcd, keys
        self._publishers, self._on_dropped = publishers, on_dropped
        self._limit_s = cfg.publish_timeout_s + cfg.io_timeout_s + _MARGIN_S
        self._group = (dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit_s))
                       if par.world > 1 else None)
        self._pool = ThreadPoolExecutor(1, "publish")
        self._running: Future[bool] | None = None
        self._lock = threading.Lock()
        self._dropped: tuple[str, ...] = ()

    def submit(self, share: OwnedTensorWriter, begun: InFlightPublish | None) -> None:
        """Ends a publish whose tensors all lie in the arena. ``begun`` on rank 0."""
        self._running = self._pool.submit(self._end, share, begun, time.monotonic() + self._cfg.publish_timeout_s)

    def join(self) -> bool:
        """Waits for the publish under way; whether there was one and it was committed. Raises Fenced, and TrainerFailed
        for a lost rank."""
        running, self._running = self._running, None
        if running is None:
            return False
        try:
            return running.result(self._limit_s)
        except FutureTimeout:
            raise TrainerFailed("a publish hangs behind the training's back") from None

    def check(self) -> bool:
        """What ``join`` would say by now, if it need not wait."""
        return self._running is not None and self._running.done() and self.join()

    def take_dropped(self) -> tuple[str, ...]:
        """Streams of the last publish if it was dropped, once. On rank 0."""
        with self._lock:
            dropped, self._dropped = self._dropped, ()
            return dropped

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    # -- in the thread -----------------------------------------------------------------------------------------------
    def _end(self, share: OwnedTensorWriter, begun: InFlightPublish | None, deadline: float) -> bool:
        committed = False
        try:
            message = share.seal(deadline)
            if begun is None:
                self._send(message, 0)
                committed = bool(self._receive(0)["committed"])
            else:
                with traces.span("trainer.commit", parent=traces.extract(begun.trace), step=begun.step):
                    committed = self._lead(message, begun, deadline)
            return committed
        except RuntimeError as e:  # a gloo peer is gone
            raise TrainerFailed(f"a rank was lost in the middle of a publish: {e}") from e
        finally:
            share.end(committed)

    def _lead(self, own: dict[str, Any], begun: InFlightPublish, deadline: float) -> bool:
        """Rank 0's side; whether the versions are committed. Raises Fenced, RuntimeError for a lost rank."""
        committed = False
        try:
            messages = [own, *(self._receive(rank) for rank in range(1, self._par.world))]
            self._commit(messages, begun, deadline)
            committed = True
        except Fenced:
            raise
        except OutcomeUnknown as e:
            for stream in begun.staged:
                self._publishers[stream].drop_lease()
            self._drop(begun, e)
        except ElasticRLError as e:
            for stream, staged in begun.staged.items():
                self._publishers[stream].abort(staged)
            self._drop(begun, e)
        finally:
            for rank in range(1, self._par.world):
                self._send({"committed": committed}, rank)
        return committed

    def _commit(self, messages: list[dict[str, Any]], begun: InFlightPublish, deadline: float) -> None:
        for rank, message in enumerate(messages):
            if "error" in message:
                raise NodeUnavailable(f"rank {rank} could not store its share: {message['error']}")
        stored = []
        for stream, staged in begun.staged.items():
            wanted = [Part.from_json(m["parts"][name])
                      for m in messages for name in begun.parts[stream] if name in m["parts"]]
            stored.append(self._publishers[stream].store(staged, wanted, hold=True, deadline=deadline))
        for one, version in zip(stored, publisher.commit(stored), strict=True):
            log.info("published %s %d (step %d)", version.stream, version.number, begun.step)
            one.publisher.release_holds(one, version)

    def _drop(self, begun: InFlightPublish, why: ElasticRLError) -> None:
        what = " and ".join(f"{stream} version {s.version.number}" for stream, s in begun.staged.items())
        log.warning("%s dropped: %s", what, why)
        with contextlib.suppress(ElasticRLError):  # the log has it; the event is for people who look elsewhere
            events.emit(self._etcd, self._keys, "version.dropped", "trainer", f"{what} was dropped: {why}",
                        severity=Severity.WARNING, step=begun.step,
                        **{stream: s.version.number for stream, s in begun.staged.items()})
        with self._lock:
            self._dropped = tuple(begun.staged)
        self._on_dropped()

    # -- messages ----------------------------------------------------------------------------------------------------
    def _send(self, value: dict[str, Any], rank: int) -> None:
        raw = json.dumps(value, separators=(",", ":")).encode()
        dist.send(torch.tensor([len(raw)]), dst=rank, group=self._group)
        dist.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), dst=rank, group=self._group)

    def _receive(self, rank: int) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=rank, group=self._group)
        if not 0 < (nbytes := int(size)) <= _MAX_MESSAGE:
            raise RuntimeError(f"rank {rank} announces a message of {nbytes} bytes")
        body = torch.empty(nbytes, dtype=torch.uint8)
        dist.recv(body, src=rank, group=self._group)
        return dict(json.loads(body.numpy().tobytes()))
