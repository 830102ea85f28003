"""What a fault is, and what every fault reads and acts on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.config.groups import ACTOR
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.heartbeats import merge
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import ENDED_PHASES, Engine, EngineState, JobStatus, Leader, Member, PoolStatus
from elastic_rl.faults.undo import Undo, UndoRegistry
from elastic_rl.host import processes
from elastic_rl.host.compute_services import compute_services, router_service
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until

INJECT_TIMEOUT_S = 600.0


class InjectionEnded(ElasticRLError):
    """No further fault is to be injected: the run has ended, or an operator has aborted the injection."""


class Fault(Protocol):
    """One fault. ``inject`` returns (target, witness) once the fault was seen to happen.

    ``detected``: whether the control plane reports it; ``healed``: whether the job works as before.
    """

    name: str

    def inject(self) -> tuple[str, str]: ...

    def detected(self) -> bool: ...

    def healed(self) -> bool: ...


class FaultContext:
    """The running job: its configuration, its records in etcd, and the admin API."""

    def __init__(self, cfg: Config, etcd: EtcdClient, keys: Keys, api: AdminClient, *, undo: UndoRegistry | None = None
                 ) -> None:
        """``undo``: where what has to be undone is noted before it is done; None: in a folder of the job."""
        self.cfg, self.keys, self.api = cfg, keys, api
        self._undo = undo
        self.ended = threading.Event()
        """Set once no further fault is to be injected. A fault that waits for its moment then gives up."""
        self._etcd = etcd

    @property
    def undo(self) -> UndoRegistry:
        return self._undo or UndoRegistry(JobPaths.of(self.cfg).private / "faults")

    @property
    def etcd(self) -> EtcdClient:
        """Raises InjectionEnded: every fault reads etcd before it does anything."""
        if self.ended.is_set():
            raise InjectionEnded("the injection of faults was ended")
        return self._etcd

    def stop(self, process: psutil.Process) -> str:
        """SIGSTOP of a process, which is noted before; returns the witness that it was seen to stop."""
        self.undo.note(Undo.CONTINUE, process.pid)
        suspend(process)
        return f"pid {process.pid} was sent SIGSTOP and seen to stop"

    def service(self, name: str) -> int:
        """Process id of a service of the cluster on this host; 0 when it does not run."""
        return next((r.pid for r in ServiceFiles(ClusterPaths.of(self.cfg).services).running() if r.name == name), 0)

    def engines(self, pool: str = ROLLOUT_POOL) -> list[Engine]:
        items, _ = self.etcd.range(self.keys.engines_of_pool(pool))
        return [engine for engine, _ in readable(items, Engine) if engine.pool == pool]

    def ready(self, pool: str = ROLLOUT_POOL) -> set[str]:
        """Ids of the engines that are ready."""
        return {e.id for e in self.engines(pool) if e.state is EngineState.READY}

    def pool(self, name: str = ROLLOUT_POOL) -> PoolStatus | None:
        return readable_one(self.etcd.get(self.keys.pool_status(name)), PoolStatus)

    def router_pid(self, pool: str = ROLLOUT_POOL) -> int:
        """Process id of the router of a pool; 0 when none runs."""
        record = compute_services(JobPaths.of(self.cfg)).get(router_service(pool))
        return record.pid if record is not None and record.running else 0

    def step(self) -> int:
        """RL steps that the job has done; 0 before the RL phase."""
        status = self.status()
        return status.step if status and status.phase == "rl" else 0

    def finished(self) -> bool:
        status = self.status()
        return status is not None and status.phase in ENDED_PHASES

    def leader(self) -> Leader | None:
        return readable_one(self.etcd.get(self.keys.leader()), Leader)

    def members(self, role: str) -> list[Member]:
        return members(self.etcd, self.keys, role)

    def trainer_ranks(self) -> list[Member]:
        """The ranks of the actor. Those on this host are as they say now: agents collect heartbeats, and phases with
        them, only every few seconds."""
        beats = {file.beat.incarnation: file.beat for file in heartbeats_here(self.cfg).contents().files}
        return [merge(member, beats.get(member.incarnation)) for member in self.members(ACTOR.name)]

    def has_event(self, kind: EventKind, since: float, subject: str = "") -> bool:
        """Whether there is an event of a kind since a unix second; of one subject, or of any."""
        return any(e.kind == kind.name and e.at >= since and subject in (e.subject, "")
                   for e in events.recent(self.etcd, self.keys, limit=200))

    def processes(self) -> list[psutil.Process]:
        """The processes of the compute plane, whichever driver has started them."""
        return processes.marked(str(JobPaths.of(self.cfg).private))

    def status(self) -> JobStatus | None:
        return readable_one(self.etcd.get(self.keys.job_status()), JobStatus)


@contextlib.contextmanager
def stopped(context: FaultContext, *processes: psutil.Process) -> Iterator[None]:
    """Inside, the processes are stopped; at the end they go on, whatever happens. Raises psutil.NoSuchProcess."""
    with contextlib.ExitStack() as undone:
        for process in processes:
            undone.enter_context(context.undo.noted(Undo.CONTINUE, process.pid))
            suspend(process)
        yield


def suspend(process: psutil.Process) -> None:
    """SIGSTOP; returns once the process is seen to be stopped. How that is undone must have been noted."""
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, timeout_s=INJECT_TIMEOUT_S,
               what=f"the stop of pid {process.pid}", poll_s=0.005)


def command(process: psutil.Process) -> str:
    """The command line of a process; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill(pid: int) -> str:
    """kill -9 of one process; returns the witness that it has ended."""
    process = psutil.Process(pid)
    program, *args = process.cmdline()
    name = " ".join([Path(program).name, *args[:3]])[:80]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not runs(process), timeout_s=INJECT_TIMEOUT_S, what=f"the end of pid {pid}", poll_s=0.01)
    return f"pid {pid} ({name}) was sent SIGKILL and seen to end"
