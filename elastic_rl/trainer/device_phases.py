"""A trainer group that shares devices with engines: it has device memory in its phases only (``etcd.device_phase``).

A group that forms waits for the trainer's phase before it makes its model. The actor then says when the memory is to be
given up (``offload``) and taken again (``onload``): it alone knows when no command is on its way. All ranks move their
memory; rank 0 writes that the group may have any before, and that it has none after.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.device_claims import DeviceClaims
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.trainer.broadcast import broadcast_numbers
from elastic_rl.trainer.megatron.parallel import ParallelDims

log = logging.getLogger(__name__)

_LOOK_S = 0.2


class TrainerGroupPhases:
    """The phases of one formation of the group on the devices, on each of its ranks."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: ParallelDims, group: str) -> None:
        """``group``: the formation, as rank 0 has it."""
        self._claims = DeviceClaims(etcd, ctx.keys, ROLLOUT_POOL, epoch=ctx.epoch)
        self._par, self._group = par, group
        self._pause = threading.Event()  # never set

    def await_first(self, report: Callable[[str], None]) -> None:
        """Returns on every rank once the group may take device memory. ``report``: called again and again with the
        phase, a sign of life. Raises Fenced."""
        while True:
            why = self.take() if self._par.rank == 0 else ""
            # Within each look, not once at the end: a collective would not wait for so long.
            if not broadcast_numbers([int(bool(why))], self._par)[0]:
                return
            report("waiting for the devices")
            self._pause.wait(_LOOK_S)

    def take(self) -> str:
        """Writes on rank 0 that the group may have memory; "" once it may, else what is missing. Raises Fenced."""
        try:
            return self._claims.take_for_trainer(self._group)
        except EtcdUnavailable as e:
            return f"etcd: {e}"

    def give_up(self) -> str:
        """Writes on rank 0 that the group has no memory any more; "" once that is written, else what is missing.
        Raises Fenced."""
        try:
            self._claims.give_up_for_trainer(self._group)
        except EtcdUnavailable as e:
            return f"etcd: {e}"
        return ""

    def pause(self) -> None:
        """Waits between two attempts."""
        self._pause.wait(_LOOK_S)
