"""What a fault is, and what every fault reads and acts on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import psutil

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.config.groups import ACTOR
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.heartbeats import merge
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import (
    ENDED_PHASES,
    Engine,
    EngineState,
    Event,
    JobStatus,
    Leader,
    Member,
    PoolSpec,
    PoolStatus,
)
from elastic_rl.faults.undo import Undo, UndoRegistry, id_of_job
from elastic_rl.host import processes
from elastic_rl.host.compute_services import compute_services, router_service
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.runtime.patience import patiently
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until

INJECT_TIMEOUT_S = 600.0
_AHEAD_S = 5.0
"""Seconds by which the clocks of hosts may differ."""
AWAY_PAUSES_S = (1.0, 1.0)
"""First and longest pause between two readings while etcd does not answer."""
T = TypeVar("T")
SENT_SIGKILL = "was sent SIGKILL"
ENDED_BY_SIGTERM = "was sent SIGTERM and seen to end"
EXITED_WITH_0 = "exited with code 0"
"""Words of a witness, one for each process that has ended by a fault. Checkers (``chaos_tests.validate.attribution``)
count them, also in logs of earlier releases."""


class InjectionEnded(ElasticRLError):
    """No further fault is to be injected: the run has ended, or an operator has aborted the injection."""


class VictimTaken(ElasticRLError):
    """The process that was to be struck has ended, or another fault has ended it: it proves nothing of this one, which
    has struck nothing yet and is begun again."""


class ForeignProcess(VictimTaken):
    """The process whose number a record has is none of the job or its cluster: the record is stale, or of another
    machine, or somebody else has written it. Nothing has happened."""


class RuleBroken(ElasticRLError):
    """A fault has found that the product does not keep a rule."""

    breaks = ""
    """Its number in docs/architecture.md."""


class Fault(ABC):
    """One fault. What it does to the run it does within ``FaultContext.striking``."""

    name = ""
    state = ""
    """The state that it strikes its victim in; "": any."""
    said = ""
    """What the job's status said that it waits for."""
    may_go_unnoticed = False
    """Whether the run may survive it without a word."""

    @abstractmethod
    def inject(self) -> tuple[str, str]:
        """Returns (target, witness) once the fault was seen to happen; "" for a witness: nothing has happened. Raises
        EtcdUnavailable and VictimTaken where it is to be begun again, which it is unless it has struck (``striking``);
        InjectionEnded; and RuleBroken, which breaks the rule that it names. After any other error it has not happened.
        """

    @abstractmethod
    def detected(self) -> bool:
        """Whether somebody reports it, or has acted on it. Called many times a second. Raises EtcdUnavailable, the time
        of which does not count."""

    @abstractmethod
    def healed(self) -> bool:
        """Whether the job works as before. It is called, and raises, as ``detected``."""

    def give_up(self) -> None:  # noqa: B027 -- most last no longer than ``inject``
        """Ends it where it is not waited for any more."""


class WrappedFault(Fault):
    """A fault that is another one, with something done around it."""

    def __init__(self, fault: Fault) -> None:
        self.name, self.state, self.may_go_unnoticed = fault.name, fault.state, fault.may_go_unnoticed
        self._fault = fault

    @property
    def said(self) -> str:  # type: ignore[override]
        return self._fault.said

    def inject(self) -> tuple[str, str]:
        return self._fault.inject()

    def detected(self) -> bool:
        return self._fault.detected()

    def healed(self) -> bool:
        return self._fault.healed()

    def give_up(self) -> None:
        self._fault.give_up()


class FaultContext:
    """The running job: its configuration, its records in etcd, and the admin API."""

    def __init__(self, cfg: Config, etcd: EtcdClient, keys: Keys, api: AdminClient, *, undo: UndoRegistry | None = None
                 ) -> None:
        """``undo``: where what has to be undone is noted before it is done; None: in a folder of the job."""
        self.cfg, self.keys, self.api = cfg, keys, api
        self._undo = undo
        self.ended = threading.Event()
        """Set, by ``end``, once no further fault is to be injected. One that waits for its moment then gives up."""
        self._etcd = etcd
        self._taken = set[psutil.Process]()
        """Processes that a fault has ended."""
        self._gate, self._strikes = threading.RLock(), threading.local()

    @property
    def undo(self) -> UndoRegistry:
        return self._undo or UndoRegistry(JobPaths.of(self.cfg).private / "faults")

    @property
    def etcd(self) -> EtcdClient:
        """Raises InjectionEnded: a fault that waits for what etcd says gives up."""
        self.require_going_on()
        return self._etcd

    # -- strikes ------------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """No further fault strikes: when this returns, each has, or never will."""
        with self._gate:
            self.ended.set()

    def require_going_on(self) -> None:
        """Raises InjectionEnded."""
        if self.ended.is_set():
            raise InjectionEnded("the injection of faults was ended")

    @contextlib.contextmanager
    def striking(self, what: str = "", look: Callable[[], object] = lambda: None) -> Iterator[None]:
        """In the block, which is over in a moment and holds a lock that an abort takes, something is done to the run.
        Waiting for its effect comes after the block. ``what``: for people, of what cannot be taken back; "" for what is
        not yet the fault. ``look``: a last look at the victim, between which and the block nothing else strikes; what
        it raises keeps this from striking. Raises InjectionEnded, before the block, once none is to be."""
        with self._gate:
            self.require_going_on()
            look()
            if what:
                self.struck.append((time.time(), what))
            yield

    @property
    def struck(self) -> list[tuple[float, str]]:
        """What the fault that this thread injects has done so far, each with its unix second. A fault that has struck
        must not be begun again."""
        if not hasattr(self._strikes, "of_thread"):
            self._strikes.of_thread = []
        found: list[tuple[float, str]] = self._strikes.of_thread
        return found

    def answered(self, read: Callable[[], T]) -> T:
        """The result of a reading, or of a write that may be repeated, as soon as etcd answers it: for a fault that has
        struck. Raises InjectionEnded."""
        def pause(seconds: float) -> None:
            self.ended.wait(seconds)
            self.require_going_on()

        return patiently(read, away=EtcdUnavailable, pauses_s=AWAY_PAUSES_S, pause=pause, waiting=lambda _: None)

    def owns(self, process: psutil.Process) -> bool:
        """Whether a process is one of this user's that the job or its cluster has started, by the marks in its
        environment. One that has written its title over its environment is as its nearest ancestor that has not. Raises
        psutil.Error."""
        if process.uids().real != os.geteuid():
            return False
        environment = next(filter(None, (one.environ() for one in (process, *process.parents()))), dict[str, str]())
        return (environment.get(processes.RUN_MARK) == str(JobPaths.of(self.cfg).private)
                or environment.get(processes.OWNER_ENV) == str(ClusterPaths.of(self.cfg).folder))

    def require_own(self, process: psutil.Process) -> None:
        """Requires that a process whose number somebody has written down may be struck. Raises ForeignProcess for one
        that is none of the job or its cluster, and VictimTaken for one that has ended."""
        with contextlib.suppress(psutil.Error):
            if self.owns(process):
                return
        if not runs(process):
            raise VictimTaken(f"pid {process.pid} has ended")
        raise ForeignProcess(f"pid {process.pid} is no process of the job {self.cfg.job} or its cluster")

    def take(self, process: psutil.Process) -> None:
        """Notes that a fault is about to end a process. Raises VictimTaken for one that has ended, or that another
        fault has taken, and ForeignProcess."""
        self.require_own(process)
        self._take(process)

    def _take(self, process: psutil.Process) -> None:
        with self._gate:
            if process in self._taken or not runs(process):
                raise VictimTaken(f"pid {process.pid} has ended, or another fault ends it")
            self._taken.add(process)

    def kill(self, pid: int, look: Callable[[], object] = lambda: None) -> str:
        """kill -9 of one process; returns the witness that it has ended. ``look``: as of ``striking``. Raises as
        ``take``."""
        def take() -> None:
            look()
            self._take(process)

        try:
            process = psutil.Process(pid)
            self.require_own(process)
            return kill(pid, self.striking(f"pid {pid} {SENT_SIGKILL}", take))
        except psutil.NoSuchProcess as e:
            raise VictimTaken(f"pid {pid} has ended") from e

    def stop(self, process: psutil.Process) -> str:
        """SIGSTOP of a process, which is noted before; returns the witness that it was seen to stop. Raises
        VictimTaken and ForeignProcess."""
        self.require_own(process)
        self.undo.note(Undo.CONTINUE, process.pid)
        suspend(process, self.striking(f"pid {process.pid} was sent SIGSTOP"))
        return f"pid {process.pid} was sent SIGSTOP and seen to stop"

    # -- the job ------------------------------------------------------------------------------------------------------
    def service(self, name: str) -> int:
        """Process id of a service of the cluster on this host; 0 when it does not run. Raises InjectionEnded."""
        self.require_going_on()
        return next((r.pid for r in ServiceFiles(ClusterPaths.of(self.cfg).services).running() if r.name == name), 0)

    def engines(self, pool: str = ROLLOUT_POOL) -> list[Engine]:
        items, _ = self.etcd.range(self.keys.engines_of_pool(pool))
        return [engine for engine, _ in readable(items, Engine) if engine.pool == pool]

    def ready(self, pool: str = ROLLOUT_POOL) -> set[str]:
        """Ids of the engines that are ready."""
        return {e.id for e in self.engines(pool) if e.state is EngineState.READY}

    def pool(self, name: str = ROLLOUT_POOL) -> PoolStatus | None:
        return readable_one(self.etcd.get(self.keys.pool_status(name)), PoolStatus)

    def desired(self, pool: str = ROLLOUT_POOL) -> int:
        """Engines that the pool is to have now, whatever its settings said when the job began."""
        spec = readable_one(self.etcd.get(self.keys.pool_spec(pool)), PoolSpec)
        return spec.desired if spec is not None else self.cfg.pool_settings("")[pool].engines

    def resized(self, desired: int, *during: int, pool: str = ROLLOUT_POOL) -> AbstractContextManager[None]:
        """The block gives a pool the sizes ``during``. At its end, whatever happens, a pool that has one of them gets
        back ``desired``, the one from before; another size is somebody else's, and stays."""
        id_file = JobPaths.of(self.cfg).job_id.resolve()
        return self.undo.noted(Undo.RESIZE, info=str(ClusterPaths.of(self.cfg).info.resolve()), job=self.cfg.job,
                               pool=pool, desired=desired, during=[*during], id_file=str(id_file),
                               id_of_job=id_of_job(id_file))

    def router_pid(self, pool: str = ROLLOUT_POOL) -> int:
        """Process id of the router of a pool; 0 when none runs. Raises InjectionEnded."""
        self.require_going_on()
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
        return any(e.kind == kind.name and subject in (e.subject, "") for e in self.events_since(since))

    def events_since(self, since: float) -> Iterator[Event]:
        """The events since a unix second. One that is later than now is of a writer whose clock was ahead."""
        found = events.back_to(self.etcd, self.keys, lambda event: event.at < since)
        return (e for e in found if since <= e.at <= time.time() + _AHEAD_S)

    def processes(self) -> list[psutil.Process]:
        """The processes of the compute plane, whichever driver has started them."""
        return processes.marked(str(JobPaths.of(self.cfg).private))

    def status(self) -> JobStatus | None:
        return readable_one(self.etcd.get(self.keys.job_status()), JobStatus)


@contextlib.contextmanager
def stopped(context: FaultContext, *processes: psutil.Process, look: Callable[[], object] = lambda: None
            ) -> Iterator[None]:
    """Inside, the processes are stopped; at the end they go on, whatever happens. ``look``: as of
    ``FaultContext.striking``, before each. Raises VictimTaken, ForeignProcess and psutil.NoSuchProcess."""
    with contextlib.ExitStack() as undone:
        for process in processes:
            context.require_own(process)
            undone.enter_context(context.undo.noted(Undo.CONTINUE, process.pid))
            suspend(process, context.striking(f"pid {process.pid} was sent SIGSTOP", look))
        yield


def suspend(process: psutil.Process, striking: AbstractContextManager[None]) -> None:
    """SIGSTOP; returns once the process is seen to be stopped. How that is undone must have been noted."""
    with striking:
        process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, timeout_s=INJECT_TIMEOUT_S,
               what=f"the stop of pid {process.pid}", poll_s=0.005)


def command(process: psutil.Process) -> str:
    """The command line of a process; "" of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill(pid: int, striking: AbstractContextManager[None] | None = None) -> str:
    """kill -9 of one process, within ``striking``; returns the witness that it has ended."""
    process = psutil.Process(pid)
    program, *args = process.cmdline() or [process.name()]  # one that is just being started has no command line
    name = " ".join([Path(program).name, *args[:3]])[:80]
    with striking or contextlib.nullcontext():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not runs(process), timeout_s=INJECT_TIMEOUT_S, what=f"the end of pid {pid}", poll_s=0.01)
    return f"pid {pid} ({name}) {SENT_SIGKILL} and seen to end"
