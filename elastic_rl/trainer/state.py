"""A trainer's exchange with the checkpoint service: publishes ``policy`` and ``trainer_state``, restores the latter.

The training waits for the gather and the copy into the arena; the rest happens behind its back (``behind.py``). The
number of a version is known when its publish begins. A publish that is dropped is done again under a new number, with
what the weights are then, until one is committed.
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
from elastic_rl.dcs import catalog
from elastic_rl.dcs.catalog import Staged
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.publish.part_writer import LocalArena
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, ElasticRLError, TrainerFailed, VersionNotFound
from elastic_rl.etcd import events
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
_RETRY_S, _MAX_RETRY_S, _RETRIES = 0.2, 10.0, 10


@dataclass(frozen=True)
class Published:
    """Numbers of the versions under way, 0 for a stream that was not published."""

    policy: int
    state: int
    gather_s: float
    copy_s: float
    stall_s: float
    """All that the training waited for: an earlier publish that was still under way, the gather, and the copy."""
    waited_s: float
    """Of it, for the earlier publish."""


class Checkpoints:
    """All ranks call the same methods in the same order."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: ParallelDims, policy: Policy, adam: Adam,
                 incarnation: str, on_dropped: Callable[[], None] = lambda: None) -> None:
        """``on_dropped`` is called on rank 0, in another thread, when ``owed`` has something new to say."""
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
        self._hub = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        self._arena, self._to_host = LocalArena(self._hub), HostCopier(par.device)
        self._behind = AsyncPublisher(par, dcs, etcd, keys, self._publishers, on_dropped)
        self._owed: set[str] = set()
        self._failures = 0
        self._retry_at = 0.0
        self.policy_version = 0
        """Of the last publish that was begun."""
        self.state_version = 0

    # -- publishing --------------------------------------------------------------------------------------------------
    def publish(self, progress: Progress, *, policy: bool = True, state: bool = False) -> Published:
        """The present weights as the next version of ``policy``, and everything as that of ``trainer_state``.

        Returns as soon as every byte is copied out of the live parameters; both versions become visible together
        later, or neither does. Raises Fenced when the epoch is over, TrainerFailed when a rank was lost, and
        EtcdUnavailable when no number can be had.
        """
        start = time.perf_counter()
        if self._behind.join():
            self._failures = 0
        waited = time.perf_counter() - start
        # On rank 0 alone: each of the others would begin a trace of its own.
        with traces.span("trainer.publish", step=progress.step) if self.par.rank == 0 else nullcontext():
            return self._publish(progress, policy, state, start, waited)

    def _publish(self, progress: Progress, policy: bool, state: bool, start: float, waited: float) -> Published:
        begun = self._begin(progress, policy, state) if self.par.rank == 0 else None
        numbers = [begun.staged[s].version.number if s in begun.staged else 0
                   for s in (Stream.POLICY, Stream.TRAINER_STATE)] if begun is not None else [0, 0]
        policy_number, state_number = broadcast_numbers(numbers, self.par)
        gathering = time.perf_counter()
        share = OwnedTensorWriter(self._hub, self._arena, self._cfg)
        for order, name, tensor in self._to_host(snapshot.weights(self.policy, self._cfg.bucket_bytes)):
            share.add(_WEIGHTS, name, tensor, order)
        if state_number:
            for order, name, tensor in self._to_host(
                    snapshot.extras(self.policy, self.adam, self._cfg.bucket_bytes)):
                share.add(_EXTRAS, name, tensor, order)
        end = time.perf_counter()
        self._behind.submit(share, begun)
        self.policy_version = policy_number or self.policy_version
        self.state_version = state_number or self.state_version
        return Published(policy_number, state_number, gather_s=end - gathering - share.copy_s, copy_s=share.copy_s,
                         stall_s=end - start, waited_s=waited)

    def _begin(self, progress: Progress, policy: bool, state: bool) -> InFlightPublish:
        """Takes numbers for what is asked for, and for what earlier publishes still owe."""
        self._note_outcome()
        wanted = self._owed | ({Stream.POLICY} if policy else set()) | ({Stream.TRAINER_STATE} if state else set())
        self._owed = set()
        staged: dict[str, Staged] = {}
        number = self.policy_version
        if Stream.POLICY in wanted:
            staged[Stream.POLICY] = self._publishers[Stream.POLICY].begin({
                "step": progress.step, "phase": progress.phase, "incarnation": self.incarnation})
            number = staged[Stream.POLICY].version.number
        if Stream.TRAINER_STATE in wanted:
            meta: dict[str, Any] = {**progress.replace(updates=self.adam.updates).meta(), "policy_version": number}
            staged[Stream.TRAINER_STATE] = self._publishers[Stream.TRAINER_STATE].begin(meta)
        return InFlightPublish(staged, {stream: _PARTS[stream] for stream in staged}, progress.step, traces.inject())

    def _note_outcome(self) -> None:
        dropped = self._behind.take_dropped()
        if dropped:
            self._owed |= set(dropped)
            self._failures += 1
            pause = min(_MAX_RETRY_S, _RETRY_S * 2 ** self._failures)
            self._retry_at = time.monotonic() + random.uniform(pause / 2, pause)

    def owed(self) -> bool:
        """On rank 0, between steps: whether a dropped publish is to be done again now. Waits for nothing.

        Raises Fenced, and TrainerFailed when a rank was lost or too many publishes failed one after the other.
        """
        if self._behind.check():
            self._failures = 0
        self._note_outcome()
        if self._failures > _RETRIES:
            raise TrainerFailed(f"{self._failures} publishes failed one after the other",
                                hint="the events of kind version.dropped say why")
        return bool(self._owed) and time.monotonic() >= self._retry_at

    def finish(self) -> None:
        """Waits for the publish under way."""
        self._behind.join()
        self._behind.close()

    # -- restoring ---------------------------------------------------------------------------------------------------
    def restore(self) -> Progress | None:
        """Takes up the newest ``trainer_state`` that can be had, the same one on every rank; None when there is none.

        Raises the error of the newest one when none can be had.
        """
        found = self._newest() if self.par.rank == 0 else None
        number = broadcast_numbers([found.version.number if found is not None else 0], self.par)[0]
        if not number:
            return None
        with found or self._puller.pull(Stream.TRAINER_STATE, number) as pulled:
            progress = Progress.of(pulled.version.meta)
            snapshot.restore(self.policy, self.adam, dict(pulled.tensors()), updates=progress.updates)
            pulled.confirm()
            self.policy_version = int(pulled.version.meta.get("policy_version", 0))
        self.state_version = number
        log.info("restored trainer_state %d: %s step %d", number, progress.phase, progress.step)
        return progress

    def _newest(self) -> Pulled | None:
        """The newest state whose every chunk is still somewhere: with one copy, a node that died took what it had not
        saved yet. Going back some steps beats not going on."""
        committed = [v for v in catalog.list_versions(self._etcd, self._keys, Stream.TRAINER_STATE)
                     if v.state is VersionState.COMMITTED]
        first: ElasticRLError | None = None
        for version in reversed(committed):
            try:
                pulled = self._puller.pull(Stream.TRAINER_STATE, version.number)
            except (ChunkMissing, ChunkCorrupt, VersionNotFound) as e:
                first = first or e
                continue
            if first is not None:
                events.emit(self._etcd, self._keys, "trainer.state_lost", Stream.TRAINER_STATE, severity=Severity.ERROR,
                            message=f"the newest state cannot be had, going on from {version.number}: {first.message}")
            return pulled
        if first is not None:
            raise first
        return None
