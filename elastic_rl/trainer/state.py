"""Publishes the streams ``policy`` and ``trainer_state`` to the checkpoint service, and restores the latter.

The training waits for the gather and the copy into the arena; the rest runs in the background (``async_publish.py``).
The number of a version is known when its publish begins. A publish that is dropped is repeated under a new number, with
the weights of that time, until one is committed.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from elastic_rl.config import Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.catalog.writer import Staged
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.publish.part_writer import LocalArena
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, ElasticRLError, TrainerFailed, VersionNotFound
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.records import Severity, VersionState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.telemetry import traces
from elastic_rl.trainer import snapshot
from elastic_rl.trainer.async_publish import AsyncPublisher, InFlightPublish
from elastic_rl.trainer.broadcast import broadcast_numbers
from elastic_rl.trainer.host_copy import HostCopier
from elastic_rl.trainer.model import Policy
from elastic_rl.trainer.optimizer import Adam
from elastic_rl.trainer.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.parallel import ParallelDims
from elastic_rl.trainer.progress import Progress

log = logging.getLogger(__name__)

_WEIGHTS, _EXTRAS = "weights", "extras"
_PARTS: dict[str, tuple[str, ...]] = {Stream.POLICY: (_WEIGHTS,), Stream.TRAINER_STATE: (_WEIGHTS, _EXTRAS)}
"""Both streams refer to the same chunks of the weights."""
_BACKOFF_S, _MAX_BACKOFF_S, _MAX_FAILURES = 0.2, 10.0, 10


@dataclass(frozen=True)
class Published:
    """Numbers of the versions in flight, 0 for a stream that was not published."""

    policy: int
    state: int
    gather_s: float
    copy_s: float
    stall_s: float
    """How long the training waited: for an earlier publish that was still in flight, the gather, and the copy."""
    waited_s: float
    """The part of it for the earlier publish."""


class Checkpoints:
    """Publishes and restores the state of a group. All ranks make the same calls in the same order."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: ParallelDims, policy: Policy, adam: Adam,
                 incarnation: str, on_dropped: Callable[[], None] = lambda: None) -> None:
        """``on_dropped`` is called on rank 0, in another thread, when a publish was dropped: see ``must_republish``."""
        self.par, self.policy, self.adam, self.incarnation = par, policy, adam, incarnation
        self._cfg, keys = ctx.config.dcs, ctx.keys
        dcs, security = self._cfg, Security.from_config(self._cfg, ctx.config.cluster_dir / TOKEN_FILE)
        self._publishers: dict[str, Publisher] = {stream: Publisher(
            etcd, keys, stream, epoch=ctx.epoch, owner=f"trainer-{incarnation}", chunk_bytes=dcs.chunk_bytes,
            replicas=dcs.replicas, digest=dcs.digest, staging_ttl_s=dcs.staging_ttl_s,
            io_timeout_s=dcs.io_timeout_s, security=security) for stream in Stream if par.rank == 0}
        self._etcd, self._keys = etcd, keys
        self._puller = Puller(etcd, keys, f"trainer-{par.rank}-{incarnation}", io_timeout_s=dcs.io_timeout_s,
                              security=security)
        self._dcs = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        self._arena, self._to_host = LocalArena(self._dcs), HostCopier(par.device)
        self._background = AsyncPublisher(par, dcs, etcd, keys, self._publishers, on_dropped)
        self._epoch = ctx.epoch
        self._dropped: set[str] = set()
        """Streams whose last publish was dropped."""
        self._failures = 0
        self._retry_at = 0.0
        self.policy_version = 0
        """Number of the last publish that was begun."""
        self.state_version = 0

    # -- publishing --------------------------------------------------------------------------------------------------
    def publish(self, progress: Progress, *, policy: bool = True, state: bool = False) -> Published:
        """Publishes the current weights as the next version of ``policy``, and the whole state as that of
        ``trainer_state``.

        Returns as soon as every byte is copied out of the live parameters; both versions become visible together
        later, or neither does. Raises Fenced when the epoch is over, TrainerFailed when a rank was lost, and
        EtcdUnavailable when etcd gives no number.
        """
        start = time.perf_counter()
        if self._background.join():
            self._failures = 0
        waited = time.perf_counter() - start
        # On rank 0 only: each of the others would begin a trace of its own.
        with traces.span("trainer.publish", step=progress.step) if self.par.rank == 0 else nullcontext():
            return self._publish(progress, policy, state, start, waited)

    def _publish(self, progress: Progress, policy: bool, state: bool, start: float, waited: float) -> Published:
        publish = self._begin(progress, policy, state) if self.par.rank == 0 else None
        numbers = [publish.staged[s].version.number if s in publish.staged else 0
                   for s in (Stream.POLICY, Stream.TRAINER_STATE)] if publish is not None else [0, 0]
        policy_number, state_number = broadcast_numbers(numbers, self.par)
        gathering = time.perf_counter()
        writer = OwnedTensorWriter(self._dcs, self._arena, self._cfg)
        for order, name, tensor in self._to_host(snapshot.weights(self.policy, self._cfg.bucket_bytes)):
            writer.add(_WEIGHTS, name, tensor, order)
        if state_number:
            for order, name, tensor in self._to_host(
                    snapshot.extras(self.policy, self.adam, self._cfg.bucket_bytes)):
                writer.add(_EXTRAS, name, tensor, order)
        end = time.perf_counter()
        self._background.submit(writer, publish)
        self.policy_version = policy_number or self.policy_version
        self.state_version = state_number or self.state_version
        return Published(policy_number, state_number, gather_s=end - gathering - writer.copy_s, copy_s=writer.copy_s,
                         stall_s=end - start, waited_s=waited)

    def _begin(self, progress: Progress, policy: bool, state: bool) -> InFlightPublish:
        """Takes numbers for the requested streams, and for those whose last publish was dropped."""
        self._collect_dropped()
        streams = self._dropped | ({Stream.POLICY} if policy else set()) | ({Stream.TRAINER_STATE} if state else set())
        self._dropped = set()
        staged: dict[str, Staged] = {}
        number = self.policy_version
        if Stream.POLICY in streams:
            staged[Stream.POLICY] = self._publishers[Stream.POLICY].begin({
                "step": progress.step, "phase": progress.phase, "incarnation": self.incarnation})
            number = staged[Stream.POLICY].version.number
        if Stream.TRAINER_STATE in streams:
            meta: dict[str, Any] = {**progress.replace(updates=self.adam.updates).to_json(), "policy_version": number}
            staged[Stream.TRAINER_STATE] = self._publishers[Stream.TRAINER_STATE].begin(meta)
        return InFlightPublish(staged, {stream: _PARTS[stream] for stream in staged}, progress.step, traces.inject())

    def _collect_dropped(self) -> None:
        dropped = self._background.take_dropped()
        if dropped:
            self._dropped |= set(dropped)
            self._failures += 1
            backoff_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** self._failures)
            self._retry_at = time.monotonic() + random.uniform(backoff_s / 2, backoff_s)

    def must_republish(self) -> bool:
        """On rank 0, between steps: whether a dropped publish is to be repeated now. Does not wait.

        Raises Fenced, and TrainerFailed when a rank was lost or too many publishes failed one after the other.
        """
        if self._background.poll():
            self._failures = 0
        self._collect_dropped()
        if self._failures > _MAX_FAILURES:
            raise TrainerFailed(f"{self._failures} publishes failed one after the other",
                                hint="the events of kind version.dropped say why")
        return bool(self._dropped) and time.monotonic() >= self._retry_at

    def finish(self) -> None:
        """Waits for the publish in flight."""
        self._background.join()
        self._background.close()

    # -- restoring ---------------------------------------------------------------------------------------------------
    def restore(self) -> Progress | None:
        """Restores the newest ``trainer_state`` whose chunks are available, the same one on every rank; returns None
        when there is no state.

        Raises the error of the newest one when none is available.
        """
        found = self._newest() if self.par.rank == 0 else None
        number = broadcast_numbers([found.version.number if found is not None else 0], self.par)[0]
        if not number:
            return None
        with found or self._puller.pull(Stream.TRAINER_STATE, number) as pulled:
            progress = Progress.from_json(pulled.version.meta)
            snapshot.restore(self.policy, self.adam, dict(pulled.tensors()), updates=progress.updates)
            pulled.confirm()
            self.policy_version = int(pulled.version.meta.get("policy_version", 0))
        self.state_version = number
        log.info("restored trainer_state %d: %s step %d", number, progress.phase, progress.step)
        return progress

    def _newest(self) -> Pulled | None:
        """The newest state whose chunks are all available: with one replica, a node that died took the chunks with it
        that were not on its disk yet. Going back some steps is better than no recovery."""
        committed = [v for v in reads.list_versions(self._etcd, self._keys, Stream.TRAINER_STATE)
                     if v.state is VersionState.COMMITTED]
        first: ElasticRLError | None = None
        for version in reversed(committed):
            try:
                pulled = self._puller.pull(Stream.TRAINER_STATE, version.number)
            except (ChunkMissing, ChunkCorrupt, VersionNotFound) as e:
                first = first or e
                continue
            if first is not None:
                fencing.emit(self._etcd, self._keys, self._epoch, "trainer.state_lost", Stream.TRAINER_STATE,
                             f"the newest state is not available, resuming from version {version.number}: "
                             f"{first.message}", severity=Severity.ERROR)
            return pulled
        if first is not None:
            raise first
        return None
