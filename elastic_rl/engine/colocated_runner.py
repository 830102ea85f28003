"""Runs an engine that shares devices with the trainer: it has device memory in its phases only (``etcd.device_phase``).

When a phase of the trainer begins, the engine leaves the router, lets its requests finish, stops the probes of its
health, which would read memory that is not there, releases the memory and says so. In the next phase of the engines it
takes memory, loads the head version as any other, and is routed again. So the version protocol is the one of every
engine: what is loaded is recorded before the first byte changes, and verified before a request comes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.errors import Conflict, EngineFailed, EtcdUnavailable
from elastic_rl.etcd import device_phase
from elastic_rl.etcd.client import Compare
from elastic_rl.etcd.device_phase import SeenPhase, Side
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import EngineState
from elastic_rl.etcd.run_context import RunContext

log = logging.getLogger(__name__)

_TICK_S = 0.1
_ABORT_TIMEOUT_S = 10.0
"""Time for requests to end that were aborted."""


class ColocatedRunner(EngineRunner):
    """An ``EngineRunner`` that follows the phases of its job."""

    def __init__(self, ctx: RunContext, engine_id: str, pool: str = ROLLOUT_POOL, gpus: str = "") -> None:
        super().__init__(ctx, engine_id, pool, gpus=gpus)
        # Watched: a call in each tick of thousands of engines would be most of what etcd does. An outdated reading
        # does no harm: memory is taken in a transaction that compares the phase.
        self._phases = Mirror(self._etcd, ctx.keys.device_phase(), lambda kv: kv)
        self._quiet = contextlib.ExitStack()
        """Entered from before a release until the engine is to be routed again: no probe of its health."""

    def _before_launch(self) -> None:
        """A server takes memory as soon as it starts."""
        self._lifecycle = self._lifecycle.released()
        self._write_soon()
        if not self._await_phase():
            raise EngineFailed("it is to leave the pool")

    def _lost_weights(self) -> bool:
        if self._seen_phase().side is not Side.TRAINER:
            if not self._server.memory.lacks_cache:
                self._quiet.close()  # of a release that was not begun, for want of etcd
            return False
        if not self._server.memory.lacks_cache:  # else it is quiet already: the phase ended while it loaded a version
            self._quiet.enter_context(self._monitor.quiet())
        self._release()
        if self._await_phase():
            self._server.memory.resume_weights()
        return True

    def _before_routing(self) -> None:
        if self._server.memory.lacks_cache:
            self._server.memory.resume_cache()
        self._quiet.close()

    def _end_server(self) -> None:
        super()._end_server()
        self._phases.close()

    def _seen_phase(self) -> SeenPhase:
        """Raises EtcdUnavailable."""
        return SeenPhase.of(self._phases.read(0.0).get(self._ctx.keys.device_phase()), self._ctx.epoch)

    def _release(self) -> None:
        """Gives the memory up. Raises EngineFailed, Fenced and, with nothing released, EtcdUnavailable."""
        if self._lifecycle.state is EngineState.READY:
            self._lifecycle = self._lifecycle.unrouted()
            self._write()  # before the router forgets it: the driver adds an engine that a record calls ready
        self._unroute()
        self._end_requests()
        if self._leaving:
            return
        self._member.progress(self._lifecycle.newest, "releasing memory")
        self._server.memory.release()
        self._lifecycle = self._lifecycle.released()
        self._holds_device, self._checksum = False, ""
        self._write_soon()

    def _end_requests(self) -> None:
        """Waits for the requests in flight, within a limit, and ends those that are left: nobody waits for them, since
        an actor begins a phase of the trainer with all samples that it needs. Raises EngineFailed."""
        if self._await_idle(self._cfg.drain_timeout_s, lambda: self._leaving):
            return
        log.warning("engine %s ends requests that are in flight at the end of its phase", self._id)
        self._server.abort_requests()
        if not self._await_idle(_ABORT_TIMEOUT_S, lambda: self._leaving):
            raise EngineFailed("requests that were aborted do not end")

    def _await_phase(self) -> bool:
        """Waits, without memory, until the engine may take it; false when it is to leave. Raises EngineFailed and
        Fenced."""
        launched = self._lifecycle.launched
        while not self._leaving:
            self._member.progress(self._lifecycle.newest, "waiting for the trainer's phase to end")
            if launched and not self._server.alive():
                raise EngineFailed(self._server.failure)
            self._alive_at = time.time()
            try:
                self._check_record()
                guards = device_phase.take_for_engine(self._ctx.keys, self._seen_phase())
                if guards is not None and self._take(guards):
                    return True
            except EtcdUnavailable as e:
                log.warning("engine %s: %s", self._id, e)
            self._stop.wait(_TICK_S)
        return False

    def _take(self, guards: Sequence[Compare]) -> bool:
        """Records that the server may have memory; false when it may not: the phase is over, or the engine is to leave.
        """
        resumed, self._holds_device = self._lifecycle.resumed(), True
        taken = False
        try:
            taken = self._write(resumed, guards)
        except Conflict:
            pass
        finally:
            self._holds_device = taken  # a write that was not heard of is corrected by the next one
        if taken:
            self._lifecycle = resumed
        return taken
