"""Keeps one torch-elastic agent alive: a Ray actor in a placement group that owns the agent's process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import ray
from ray.exceptions import RayError

from elastic_rl.driver.placement import PlacedActor, uses_cuda
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.records import RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes

log = logging.getLogger(__name__)


class TrainerHost:
    """Body of the Ray actor. The agent is this process's child and dies with it."""

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
    """Starts the agent and starts it again when it ended, until the restart budget is spent."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, context_file: Path, sign: Callable[[str], None]) -> None:
        self.ctx, self.etcd, self.context_file, self._sign = ctx, etcd, context_file, sign
        self._placed: PlacedActor | None = None
        self._done: ray.ObjectRef | None = None
        self._budget = StartBudget()

    def reconcile(self) -> None:
        if self._placed is None:
            if self._budget.open(time.time()):
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
        self._budget = self._budget.after_failure(time.time())
        log.warning("the trainer agent ended: %s", outcome)
        events.emit(self.etcd, self.ctx.keys, "trainer.agent_ended", "trainer", severity=Severity.ERROR, message=
                    f"the trainer agent ended ({outcome}); start {self._budget.failures + 1} follows")

    @property
    def failures(self) -> int:
        return self._budget.failures

    def restart(self, wish: RestartRequest) -> None:
        """Ends the agent and its ranks, hung or not, and starts them again."""
        log.warning("starting the trainer group anew: %s", wish.reason)
        self.close()
        self._budget = StartBudget()
        acknowledge(self.etcd, self.ctx.keys, wish, fencing.epoch_guard(self.ctx.keys, self.ctx.epoch))
        self._start()

    def _start(self) -> None:
        cfg = self.ctx.config
        world = cfg.trainer.ranks
        self._sign(PlacedActor.WAITING)
        self._placed = PlacedActor("trainer", TrainerHost, str(self.context_file),
                              str((cfg.cluster_dir / "logs" / "trainer.log").resolve()),
                              cpus=float(world), gpus=world if uses_cuda(cfg) else 0,
                              timeout_s=cfg.trainer.start_timeout_s)
        self._done = self._placed.actor.run.remote()

    def close(self) -> None:
        if self._placed is not None:
            self._placed.actor.stop.remote()
            ray.wait([self._done], timeout=10.0)
            self._placed.remove()
            self._placed = None
