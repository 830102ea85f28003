"""A trainer's exchange with the checkpoint service: publishes ``policy``, saves and restores ``trainer_state``."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from elastic_rl.context import RunContext
from elastic_rl.coordinator.store import Store
from elastic_rl.dcs.publisher import Publisher
from elastic_rl.dcs.puller import Puller
from elastic_rl.telemetry import traces
from elastic_rl.trainer import snapshot
from elastic_rl.trainer.channel import share_numbers
from elastic_rl.trainer.model import Policy
from elastic_rl.trainer.optimizer import Adam
from elastic_rl.trainer.parallel import Parallel
from elastic_rl.trainer.progress import Progress

log = logging.getLogger(__name__)

POLICY, STATE = "policy", "trainer_state"


@dataclass(frozen=True)
class Published:
    """``version`` is 0 on ranks that do not publish."""

    version: int
    gather_s: float
    stall_s: float
    """Gather, copy to the host and commit."""


class Checkpoints:
    """All ranks call the same methods in the same order; rank 0 alone talks to etcd and the node when publishing."""

    def __init__(self, ctx: RunContext, store: Store, par: Parallel, policy: Policy, adam: Adam,
                 incarnation: str) -> None:
        self.par, self.policy, self.adam, self.incarnation = par, policy, adam, incarnation
        dcs, keys = ctx.config.dcs, ctx.keys
        self._publishers = {stream: Publisher(
            store, keys, stream, epoch=ctx.epoch, owner=f"trainer-{incarnation}", chunk_bytes=dcs.chunk_bytes,
            staging_ttl_s=dcs.staging_ttl_s, io_timeout_s=dcs.io_timeout_s) for stream in (POLICY, STATE)
            if par.rank == 0}
        self._puller = Puller(store, keys, f"trainer-{par.rank}-{incarnation}", pin_ttl_s=dcs.pin_ttl_s,
                              io_timeout_s=dcs.io_timeout_s)
        self.policy_version = 0
        self.state_version = 0

    def publish_policy(self, progress: Progress) -> Published:
        """Every HF tensor of the weights as the next version of ``policy``. Raises Fenced when the epoch is over."""
        start = time.perf_counter()
        tensors: list[tuple[str, torch.Tensor]] = []
        if self.par.dp_rank == 0:
            for name, tensor in self.policy.to_hf():
                if self.par.rank == 0:
                    tensors.append((name, tensor.cpu()))
        gathered = time.perf_counter()
        if self.par.rank == 0:
            with traces.span("trainer.publish", step=progress.step):
                # The trace goes with the version, so that an engine's sync is seen as the publish's consequence.
                version = self._publishers[POLICY].publish(tensors, meta={
                    "step": progress.step, "phase": progress.phase, "incarnation": self.incarnation,
                    "trace": traces.inject()})
            self.policy_version = version.number
            log.info("published policy %d (%s step %d): gathered in %.3f s, committed in %.3f s", version.number,
                     progress.phase, progress.step, gathered - start, time.perf_counter() - gathered)
        return Published(self.policy_version, gathered - start, time.perf_counter() - start)

    def save_state(self, progress: Progress) -> int:
        """Weights, moments, random states and progress as the next version of ``trainer_state``; its number."""
        if self.par.dp_rank == 0:
            tensors = snapshot.capture(self.policy, self.adam)
            if self.par.rank == 0:
                meta = {**progress.but(updates=self.adam.updates).meta(), "policy_version": self.policy_version}
                self.state_version = self._publishers[STATE].publish(tensors.items(), meta=meta).number
                log.info("saved trainer_state %d: %s step %d", self.state_version, progress.phase, progress.step)
        return self.state_version

    def restore(self) -> Progress | None:
        """Takes up the newest ``trainer_state``, the same one on every rank; None when there is none."""
        head = self._puller.head(STATE) if self.par.rank == 0 else None
        number = share_numbers([head.number if head is not None else 0], self.par)[0]
        if not number:
            return None
        with self._puller.pull(STATE, number) as pulled:
            progress = Progress.of(pulled.version.meta)
            snapshot.restore(self.policy, self.adam, dict(pulled.tensors()), updates=progress.updates)
            self.policy_version = int(pulled.version.meta.get("policy_version", 0))
        self.state_version = number
        log.info("restored trainer_state %d: %s step %d", number, progress.phase, progress.step)
        return progress
