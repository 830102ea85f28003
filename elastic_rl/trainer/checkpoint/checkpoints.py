"""Publishes the two streams of a group, its weights and its state (``policy`` and ``trainer_state``, ``critic`` and
``critic_state``), to the checkpoint service, and restores the latter.

Every rank writes the tensors that it owns, and reads its own part of each tensor; no rank ever has the whole state.

The training waits for the gather and the copy into the arena; the rest runs in the background (``async_publish.py``).
The number of a version is known when its publish begins. A publish that is dropped is repeated under a new number, with
the weights of that time, until one is committed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_rl.config.groups import ACTOR
from elastic_rl.data.branch import Branch
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.catalog.pairs import META_KEY
from elastic_rl.dcs.catalog.references import REFERENCE_KEY
from elastic_rl.dcs.catalog.writer import Staged
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.part_writer import LocalArena
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import ElasticRLError, EtcdUnavailable, LeaseLost
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.records import Severity, Version, VersionState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.telemetry import traces
from elastic_rl.trainer.broadcast import broadcast_numbers
from elastic_rl.trainer.checkpoint import snapshot, state_reader
from elastic_rl.trainer.checkpoint.async_publish import AsyncPublisher, InFlightPublish
from elastic_rl.trainer.checkpoint.host_copy import HostCopier, Named
from elastic_rl.trainer.checkpoint.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.checkpoint.rounds import Job, Rounds, Unavailable, while_away
from elastic_rl.trainer.checkpoint.snapshot import StateLoader
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.reference import Reference

log = logging.getLogger(__name__)

_WEIGHTS, _EXTRAS, _REFERENCE = "weights", "extras", "reference"
_STATE_PARTS = (_WEIGHTS, _EXTRAS, _REFERENCE)
"""Both streams refer to the same chunks of the weights. Those of the reference policy are the same in every state until
it is renewed, and are stored once."""
_RETRY_S = (0.2, 4.0)
_UNAVAILABLE_PAUSE_S = 5.0


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
                 incarnation: str, on_dropped: Callable[[], None] = lambda: None,
                 on_restore: Callable[[str, str], None] = lambda phase, detail: None,
                 reference: Reference | None = None) -> None:
        """``on_dropped`` is called on rank 0, in another thread, when a publish was dropped: see ``republish_in_s``.
        ``on_restore`` is called on every rank, in another thread, about every second of a restore: a sign of life. Its
        arguments are the phase (restoring, loading, or waiting for etcd or a node) and a detail for people.
        ``reference``: the reference policy, in a run that has one."""
        self.par, self.policy, self.adam, self.incarnation = par, policy, adam, incarnation
        self._group, self._has_pair = ctx.group, ctx.config.uses_critic
        self._names_reference = ctx.config.uses_reference_group and ctx.group is ACTOR
        self._reference = reference
        self._cfg, keys = ctx.config.dcs, ctx.keys
        dcs, security, self._writer = self._cfg, dcs_security(ctx.config), ctx.writer_of_group(etcd)
        self._publishers: dict[str, Publisher] = {stream: Publisher(
            etcd, keys, stream, epoch=ctx.epoch, owner=f"{ctx.group.name}-{incarnation}", chunk_bytes=dcs.chunk_bytes,
            replicas=dcs.replicas, digest=dcs.digest, staging_ttl_s=dcs.staging_ttl_s,
            io_timeout_s=dcs.io_timeout_s, security=security, token=self._writer)
            for stream in (ctx.group.weights, ctx.group.state) if par.rank == 0}
        self._etcd, self._keys = etcd, keys
        self._puller = Puller(etcd, keys, f"{ctx.group.name}-{par.rank}-{incarnation}", io_timeout_s=dcs.io_timeout_s,
                              security=security)
        self._dcs = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        self._arena, self._to_host = LocalArena(self._dcs), HostCopier(par.device)
        self._background = AsyncPublisher(par, dcs, etcd, keys, self._publishers, on_dropped, ctx.group.name)
        self._rounds = Rounds(par, self._background.group, round_timeout_s=ctx.config.trainer.collective_timeout_s)
        self._report = on_restore
        self._epoch = ctx.epoch
        self._begun: InFlightPublish | None = None
        self._pause = threading.Event()  # never set
        self._dropped: set[str] = set()
        """Streams whose last publish was dropped."""
        self._retry = RetryBackoff(*_RETRY_S)
        self.policy_version = 0
        """Number of the last publish that was begun."""
        self.weights_version = 0
        """Number of the first publish of the weights as they are now: those of one step may get several."""
        self._published_step = -1
        """The step of those weights; -1 before they are published."""
        self.branch = Branch()
        self.state_version = 0

    # -- publishing --------------------------------------------------------------------------------------------------
    def begin(self, progress: Progress, *, policy: bool, state: bool) -> list[int]:
        """Rank 0, with no other rank waiting for it, takes the numbers of the next publish, 0 for a stream that it
        does not have. Pass them to ``publish`` on every rank. Streams whose last publish was dropped are included.

        Raises Fenced when the epoch is over, and other ElasticRLError when there is no number now: call it again later.
        """
        with traces.span("trainer.publish", step=progress.step):
            try:
                return self._begin(progress, policy, state)
            except LeaseLost:
                for publisher in self._publishers.values():
                    publisher.drop_lease()  # the next call gets a new one
                raise

    def _begin(self, progress: Progress, policy: bool, state: bool) -> list[int]:
        self._collect_dropped()
        weights_of, state_of = self._group.weights, self._group.state
        streams = self._dropped | ({weights_of} if policy else set()) | ({state_of} if state else set())
        staged: dict[str, Staged] = {}
        number = self.policy_version
        if weights_of in streams:
            staged[weights_of] = self._publishers[weights_of].begin({
                "step": progress.step, "phase": progress.phase, "incarnation": self.incarnation,
                **({REFERENCE_KEY: progress.reference_version} if progress.reference_version else {})})
            number = staged[weights_of].version.number
        if state_of in streams:
            if self._names_reference and progress.phase == "rl" and not progress.reference_version:
                progress = progress.replace(reference_version=number)
            meta: dict[str, Any] = {**progress.replace(updates=self.adam.updates).to_json(), "policy_version": number,
                                    "branch": self.branch.published(number).to_json(),
                                    **({META_KEY: progress.pair} if self._has_pair else {})}
            try:
                staged[state_of] = self._publishers[state_of].begin(meta)
            except ElasticRLError:
                if weights_of in staged:
                    self._publishers[weights_of].abort(staged[weights_of])
                raise
        self._dropped = set()
        self._begun = InFlightPublish(staged, {
            stream: _STATE_PARTS if stream == state_of else (_WEIGHTS,) for stream in staged}, progress.step,
                                      traces.inject())
        return [staged[s].version.number if s in staged else 0 for s in (weights_of, state_of)]

    def publish(self, numbers: Sequence[int], step: int, on_gather: Callable[[], None], *, has_reference: bool = False
                ) -> Published:
        """Copies the streams that ``begin`` took ``numbers`` for into the arena. A collective of the group.
        ``on_gather``: called, once no earlier publish is in flight, when the gather begins and with each of its
        tensors: Megatron's groups would wait for a lost rank for a day. ``has_reference``: whether the progress that
        ``begin`` got has a reference policy.

        Returns as soon as every byte is copied out of the live parameters; both versions become visible together
        later, or neither does. Raises Fenced when the epoch is over, and TrainerFailed when a rank was lost.
        """
        start = time.perf_counter()
        if self._background.join():
            self._retry.reset()
        waited = time.perf_counter() - start
        policy_number, state_number = numbers
        begun, self._begun = self._begun, None
        # On rank 0 only: each of the others would begin a trace of its own.
        with (traces.span("trainer.gather", parent=traces.extract(begun.trace), step=step) if begun is not None
              else nullcontext()):
            gathering = time.perf_counter()
            writer = OwnedTensorWriter(self._dcs, self._arena, self._cfg)

            def add(part: str, tensors: Iterable[Named]) -> None:
                on_gather()
                for order, name, tensor in self._to_host(tensors):
                    writer.add(part, name, tensor, order)
                    on_gather()

            add(_WEIGHTS, snapshot.weights(self.policy, self._cfg.bucket_bytes))
            if state_number:
                for section in snapshot.extras(self.policy, self.adam, self._cfg.bucket_bytes):
                    add(_EXTRAS, section)
                if self._reference is not None and has_reference:
                    with self._reference.in_place():  # around the copies, which read the parameters until they end
                        add(_REFERENCE, snapshot.reference(self.policy, self._cfg.bucket_bytes))
            end = time.perf_counter()
            self._background.submit(writer, begun)
        self.policy_version = policy_number or self.policy_version
        self.branch = self.branch.published(policy_number)
        if policy_number and step != self._published_step:
            self.weights_version, self._published_step = policy_number, step
        self.state_version = state_number or self.state_version
        return Published(policy_number, state_number, gather_s=end - gathering - writer.copy_s, copy_s=writer.copy_s,
                         stall_s=end - start, waited_s=waited)

    def join(self) -> bool:
        """Waits for the publish in flight, on every rank; whether there was one and it was committed. Raises Fenced,
        and TrainerFailed for a lost rank."""
        return self._background.join()

    def _collect_dropped(self) -> None:
        dropped = self._background.take_dropped()
        if dropped:
            self._dropped |= set(dropped)
            self._retry.failed(time.monotonic())

    def republish_in_s(self) -> float:
        """Seconds, on rank 0 and between steps, until a dropped publish is to be repeated; inf where there is none.
        Does not wait.

        Raises Fenced, and TrainerFailed when a rank was lost.
        """
        if self._background.poll():
            self._retry.reset()
        self._collect_dropped()
        return self._retry.left_s(time.monotonic()) if self._dropped else math.inf

    def finish(self) -> None:
        """Waits for the publish in flight."""
        self._background.join()
        self._background.close()

    # -- restoring ---------------------------------------------------------------------------------------------------
    def restore(self) -> Progress | None:
        """Restores the newest ``trainer_state`` that every rank can have, the same one on all of them; returns None
        when there is no state.

        Each rank reads its own part, for as long as that takes: while etcd or this host's node is away it waits. When
        one rank finds chunks missing or corrupt, all of them try the next older version: with one replica, a node that
        died took the chunks with it that were not on its disk yet, and going back some steps is better than no
        recovery. When none is available it says so, waits and looks again: nodes may come back. Raises TrainerFailed
        when a rank was lost.
        """
        while True:
            progress, unavailable = self._try_restore()
            if not unavailable:
                return progress
            log.error("no version of %s is available; the newest is not: %s; start the DCS nodes that have its chunks, "
                      "or restore the durable store", self._group.state, unavailable)
            self._report("waiting for the trainer's state", unavailable)
            self._pause.wait(_UNAVAILABLE_PAUSE_S)

    def _try_restore(self) -> tuple[Progress | None, str]:
        """What was restored; or why the newest version is not available, when none is."""
        committed = self._rounds.run(
            lambda job: while_away(job, self._committed, self._waits) if self.par.rank == 0 else [])
        newest = ""
        while True:
            number = broadcast_numbers([committed.pop() if committed else 0], self.par)[0]
            if not number:
                break
            try:
                loader, version = self._read_together(number)
            except Unavailable as e:
                log.warning("%s %d is not available: %s", self._group.state, number, e)
                newest = newest or str(e)  # not the error, which keeps what the attempt has loaded
                continue
            return self._restored(loader, version, newest), ""
        return None, newest

    def load(self, number: int) -> Progress | None:
        """Restores this version of the state on every rank, between two publishes; None when it is not available: then
        the weights are torn, and another state must be restored. Raises TrainerFailed when a rank was lost."""
        try:
            loader, version = self._read_together(number)
        except Unavailable as e:
            log.warning("%s %d is not available: %s", self._group.state, number, e)
            return None
        return self._restored(loader, version, "")

    def load_initial(self, model_dir: Path | str) -> None:
        """Initialises the weights from an HF folder. Each rank reads its own part, for as long as that takes. Raises
        ConfigError, and TrainerFailed when a rank was lost."""
        self._rounds.run(lambda _: self.policy.load_folder(model_dir, lambda: self._report("loading", str(model_dir))))
        self.branch, self._published_step = Branch(), -1

    def _restored(self, loader: StateLoader, version: Version, newest: str) -> Progress:
        progress = Progress.from_json(version.meta)
        if self._reference is None:
            progress = progress.replace(reference=None)  # this run has none, and would not save it
        loader.apply(progress.updates, has_reference=progress.reference is not None)
        self.policy_version = int(version.meta.get("policy_version", 0))
        self.branch = Branch.from_json(version.meta.get("branch") or (0, 0)).restored(self.policy_version)
        self._published_step = -1
        self.state_version = version.number
        if newest and self.par.rank == 0:
            with suppress(EtcdUnavailable):  # the log has it too
                kind = event_kinds.TRAINER_GROUP_EVENTS[self._group.name].state_lost
                self._writer.emit(kind, self._group.state, "the newest state is not available, resuming from version "
                                  f"{version.number}: {newest}", severity=Severity.ERROR)
        log.info("restored %s %d: %s step %d", self._group.state, version.number, progress.phase, progress.step)
        return progress

    def _waits(self, error: ElasticRLError) -> None:
        self._report("waiting", error.message)

    def _committed(self) -> list[int]:
        """Numbers of the committed states, oldest first."""
        return [v.number for v in reads.list_versions(self._etcd, self._keys, self._group.state)
                if v.state is VersionState.COMMITTED]

    def _read_together(self, number: int) -> tuple[StateLoader, Version]:
        """This rank's part of a state, once every rank has its own. Raises Unavailable."""
        return self._rounds.run(lambda job: while_away(job, lambda: self._read(number, job), self._waits))

    def _read(self, number: int, job: Job[Any]) -> tuple[StateLoader, Version]:
        """Reads this rank's part of a state, in the thread of a job."""
        loader = StateLoader(self.policy, self.adam, self._reference)
        version = state_reader.read(
            self._puller, self._group.state, number, loader, bucket_bytes=self._cfg.bucket_bytes, check=job.check,
            on_progress=lambda done, total: self._report(
                "restoring", f"{self._group.state} {number}: {done >> 20} of {total >> 20} MiB are on this host"))
        return loader, version
