"""Keeps one torch-elastic agent running: a Ray actor in a placement group that owns the agent's process, and outlives
the driver that has started it."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from enum import StrEnum
from pathlib import Path

from elastic_rl.driver.placement import (
    PlacedActor,
    Placer,
    driver_writer,
    ended,
    room_needed,
    stop_all,
    uses_cuda,
)
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.host.leftovers import remove_files
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import StoppedProcesses

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


class TrainerHost:
    """Body of the Ray actor. The agent is a child of the actor's process and dies with it."""

    def __init__(self, context_file: str, log_file: str, gpus: str = "") -> None:
        """``gpus``: as ``CUDA_VISIBLE_DEVICES`` has them; empty: those that Ray gives this actor."""
        self._env = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        self._command = processes.python("elastic_rl.trainer.group.agent", "--context", context_file)
        self._log = Path(log_file)
        self._stop = threading.Event()
        self._stopped_limit_s = RunContext.load(context_file).config.coordinator.lease_ttl_s

    def run(self) -> int:
        """Blocks until the agent ends; returns its exit code. An agent that is stopped (SIGSTOP) for longer than a
        member's lease can neither end nor restart its ranks, so it is killed, and they die with it."""
        agent = processes.spawn(self._command, log=self._log, env=self._env)
        watched = StoppedProcesses(self._stopped_limit_s)
        while agent.poll() is None and not self._stop.wait(0.1):
            if watched.lost(time.monotonic(), [agent.pid] if processes.is_stopped(agent.pid) else []):
                log.warning("the trainer agent %d is stopped: it is killed", agent.pid)
                agent.kill()
        processes.stop(agent.pid)
        return agent.wait(timeout=30.0)

    def stop(self) -> None:
        self._stop.set()


class GroupState(StrEnum):
    """Where the group is. A group that has ended waits for its next start; nothing else follows the end."""

    ENDED = "ended"
    PLACING = "placing"
    """Ray looks for room for it."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was told to end, for a request."""


class TrainerGroup:
    """Starts the agent, and restarts it with backoff, without end, when it ends or when that is requested."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, context_file: Path, body: type = TrainerHost,
                 shared: SharedGpus | None = None) -> None:
        """``ctx``: the context of the group's processes, saved in ``context_file``. ``body``: class of the Ray
        actor. ``shared``: the GPUs that it shares with engines."""
        self._shared = shared
        self.ctx, self.etcd, self.context_file, self._body = ctx, etcd, context_file, body
        self.name, self._kind = ctx.group.name, f"trainer-hosts/{ctx.group.name}"
        self._placer, self._writer = Placer.of(ctx, etcd), driver_writer(ctx, etcd)
        self._placed: PlacedActor | None = None
        self._started_at = 0.0
        self._request: RestartRequest | None = None
        """The request that is being carried out."""
        self._budget = StartBudget()
        self._unreported = ""
        """How the agent ended, until the event about it is written."""

    @property
    def state(self) -> GroupState:
        if self._placed is None:
            return GroupState.ENDED
        if self._placed.stopping:
            return GroupState.STOPPING
        return GroupState.RUNNING if self._placed.is_placed() else GroupState.PLACING

    @property
    def waiting(self) -> str:
        """What the group waits for; empty when it runs."""
        match self.state:
            case GroupState.PLACING if self._placed and self._placed.lacks_room():
                return f"no room in the cluster: {room_needed([self._placed])}; add a machine or scale in"
            case GroupState.STOPPING:
                return "its agent is being stopped"
            case GroupState.ENDED if self._shared is not None and self._shared.waiting:
                return self._shared.waiting
            case GroupState.ENDED:
                return f"the next start, after {self._budget.count} that failed" if self._budget.count else ""
            case _:
                return ""

    def take_over(self) -> None:
        """Adopts the agent of this epoch, if it runs. Raises RayError."""
        self._placed = next(iter(self._placer.adopt(self._kind)), None)
        if self._placed is None:  # it may have been killed while no driver ran
            remove_files(JobPaths.of(self.ctx.config).file_tag(self.name))

    def reconcile(self, request: RestartRequest | None = None) -> None:
        """One pass, which does not wait for the group; ``request``: an open request to restart it. Raises Fenced when
        the agent has ended because the epoch is over (nothing failed then), and EtcdUnavailable."""
        self._report()
        if request is not None and self._request is None:
            self._request = request
            log.warning("restarting the group %s: %s", self.name, request.reason)
        if self._request is not None and self._placed is not None and not self._placed.stopping:
            self._placed.end(grace_s=_STOP_TIMEOUT_S)
        if self._placed is not None:
            self._placed.enforce()
            if not ended([self._placed]):
                return
            if self._request is None:
                self._on_end(self._placed)
        if self._request is not None:
            self._carried_out(self._request)
        if self._placed is None and self._budget.open(time.monotonic()):
            self._start()

    def _on_end(self, placed: PlacedActor) -> None:
        """The agent has ended, and nobody asked it to."""
        self._writer.require()  # the files to be removed may be those of an agent that a newer driver has started
        code, crash = placed.outcome()
        self._remove(placed)
        self._budget = self._budget.after_failure(time.monotonic(), jitter=random.random())
        self._unreported = crash or f"exit code {code}"
        log.warning("the agent of the group %s ended: %s", self.name, self._unreported)
        self._report()

    def _report(self) -> None:
        if not self._unreported:
            return
        wait_s = max(0.0, self._budget.not_before - time.monotonic())
        self._writer.emit(event_kinds.TRAINER_GROUP_EVENTS[self.name].agent_ended,
                     self.name, f"the agent of the group {self.name} ended ({self._unreported}); the next one starts "
                     f"in {wait_s:.0f} s", severity=Severity.ERROR)
        self._unreported = ""

    def _carried_out(self, request: RestartRequest) -> None:
        """The agent that a request was about has ended, or there was none."""
        self._writer.require()  # ranks and files may be those of an agent that a newer driver has started
        self._deregister()
        if self._placed is not None:  # first: the next driver would take what has ended for a fault
            self._remove(self._placed)
        acknowledge(self.etcd, self.ctx.keys, request, *self._writer.guards)
        self._request, self._budget = None, StartBudget()

    def _remove(self, placed: PlacedActor) -> None:
        """Removes the actor, if it has not been, and the files that a killed agent leaves."""
        placed.remove()
        self._placed = None
        remove_files(JobPaths.of(self.ctx.config).file_tag(self.name))

    def _start(self) -> None:
        cfg = self.ctx.config
        world = cfg.trainer.ranks
        shared = ",".join(self._shared.gpus()) if self._shared is not None else ""
        if self._shared is not None and not shared:
            return  # a later pass starts it
        try:
            self._placed = self._placer.place(
                self._kind, secrets.token_hex(3), self._body, str(self.context_file),
                str(JobPaths.of(cfg).log(self.name).resolve()), *((shared,) if shared else ()), cpus=float(world),
                gpus=world if uses_cuda(cfg.device) and not shared else 0)
        except (Fenced, EtcdUnavailable):
            raise
        except Exception:  # reported by the caller
            self._budget = self._budget.after_failure(time.monotonic(), jitter=random.random())
            raise

    def _deregister(self) -> None:
        """Deregisters the ranks, so that their end does not count as a death. The agent has done it, unless it hung."""
        deregister(self.etcd, self.ctx.keys, [m for m in members(self.etcd, self.ctx.keys, self.name)
                                            if m.epoch == self.ctx.epoch])

    def end(self) -> None:
        """Asks the agent to end, for ``close``, which waits for it."""
        if self._placed is not None:
            self._placed.end(grace_s=_STOP_TIMEOUT_S)

    def close(self) -> None:
        """Ends the agent and its ranks, for the end of the compute plane."""
        if self._placed is None:
            return
        stop_all([self._placed], timeout_s=_STOP_TIMEOUT_S)
        self._remove(self._placed)
        with contextlib.suppress(EtcdUnavailable):
            self._deregister()
