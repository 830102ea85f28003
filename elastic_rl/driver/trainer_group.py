"""Keeps one torch-elastic agent running: a Ray actor in a placement group that owns the agent's process."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ray
from ray.exceptions import RayError

from elastic_rl.coordinator.membership.registry import TRAINER
from elastic_rl.driver.placement import PlacedActor, uses_cuda
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0

class TrainerHost:
    """Body of the Ray actor. The agent is a child of the actor's process and dies with it."""

    def __init__(self, context_file: str, log_file: str) -> None:
        self._command = processes.python("elastic_rl.trainer.agent", "--context", context_file)
        self._log = Path(log_file)
        self._stop = threading.Event()

    def run(self) -> int:
        """Blocks until the agent ends; returns its exit code."""
        agent = processes.spawn(self._command, log=self._log)
        while agent.poll() is None and not self._stop.wait(0.1):
            pass
        processes.stop(agent.pid)
        return agent.wait(timeout=30.0)

    def stop(self) -> None:
        self._stop.set()


class TrainerGroup:
    """Starts the agent, and restarts it with backoff when it ends."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, context_file: Path,
                 report_phase: Callable[[str], None]) -> None:
        self.ctx, self.etcd, self.context_file, self._report_phase = ctx, etcd, context_file, report_phase
        self._placed: PlacedActor | None = None
        self._done: ray.ObjectRef | None = None
        self._budget = StartBudget()

    def reconcile(self) -> None:
        """One pass. Raises Fenced when the agent has ended because the epoch is over: nothing failed then."""
        if self._placed is None:
            if self._budget.open(time.monotonic()):
                self._start()
            return
        ended, _ = ray.wait([self._done], timeout=0)
        if not ended:
            return
        try:
            outcome = f"exit code {ray.get(self._done, timeout=5.0)}"
        except RayError as e:
            outcome = str(e).splitlines()[0]
        self._placed.remove()
        self._placed = None
        self._budget = self._budget.after_failure(time.monotonic())
        log.warning("the trainer agent ended: %s", outcome)
        fencing.emit(self.etcd, self.ctx.keys, self.ctx.epoch, "trainer.agent_ended", "trainer",
                     f"the trainer agent ended ({outcome}); start {self._budget.failures + 1} follows",
                     severity=Severity.ERROR)

    @property
    def failures(self) -> int:
        """Times that the agent has ended without a request."""
        return self._budget.failures

    def restart(self, request: RestartRequest) -> None:
        """Ends the agent and its ranks, also when they hang, and starts them again."""
        log.warning("restarting the trainer group: %s", request.reason)
        self.close()
        self._budget = StartBudget()
        acknowledge(self.etcd, self.ctx.keys, request, fencing.epoch_guard(self.ctx.keys, self.ctx.epoch))
        self._start()

    def _start(self) -> None:
        cfg = self.ctx.config
        world = cfg.trainer.ranks
        self._report_phase(PlacedActor.WAITING)
        self._placed = PlacedActor("trainer", TrainerHost, str(self.context_file),
                                   str((cfg.log_dir / "trainer.log").resolve()),
                                   cpus=float(world), gpus=world if uses_cuda(cfg) else 0,
                                   timeout_s=cfg.trainer.start_timeout_s)
        self._done = self._placed.actor.run.remote()

    def close(self) -> None:
        """Ends the agent and its ranks, and deregisters the ranks, so that their end does not count as a death."""
        if self._placed is None:
            return
        self._placed.actor.stop.remote()
        ray.wait([self._done], timeout=_STOP_TIMEOUT_S)
        self._placed.remove()
        ray.wait([self._done], timeout=_STOP_TIMEOUT_S)  # at once, but for an actor that had to be killed
        self._placed = None
        with contextlib.suppress(EtcdUnavailable):
            # The agent has done it, unless it hung.
            deregister(self.etcd, self.ctx.keys, [m for m in members(self.etcd, self.ctx.keys, TRAINER)
                                                if m.epoch == self.ctx.epoch])
