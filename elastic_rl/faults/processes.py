"""Faults of single processes: any part of a job or its cluster, struck in any way, also only while it is in a state."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import psutil

from elastic_rl.config.groups import ACTOR
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.faults import clock, ptrace
from elastic_rl.faults.context import (
    ENDED_BY_SIGTERM,
    EXITED_WITH_0,
    INJECT_TIMEOUT_S,
    FaultContext,
    ForeignProcess,
    VictimTaken,
    stopped,
    suspend,
)
from elastic_rl.faults.finding import ETCD, engines_of_pool, ray_process, schedulers_of, trainer_agents
from elastic_rl.faults.kinds import RecoversWithSteps
from elastic_rl.faults.states import VictimState, provoked
from elastic_rl.faults.undo import Undo
from elastic_rl.host import file_lock
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.service_files import ServiceFiles, node_service
from elastic_rl.runtime.process import runs, start_child
from elastic_rl.runtime.waiting import wait_until

_END_S = 60.0
"""Longest time in which a process is seen to end after SIGTERM. One that goes on for longer drains, and may."""
_FIND_GIL_S = 60.0
_CLOCK_S = 3600


class Way(StrEnum):
    """How a process is struck. The value is the last part of a fault's name."""

    KILLED = "killed"
    """SIGKILL."""
    TERMINATED = "terminated"
    """SIGTERM, as a node's drain or a person sends it."""
    EXITED = "exited"
    """It exits with code 0 in the middle of its work, as a library may have it do."""
    PAUSED = "paused"
    """SIGSTOP, and SIGCONT after a while. By then another process may have its place: it comes back as a zombie."""
    GIL_HELD = "gil_held"
    """The thread that has the GIL does not go on for a while: Python code waits, native threads and the kernel answer.
    """
    CLOCK_SET_BACK = "clock_set_back"
    """Its wall clock is an hour behind for a while."""
    CLOCK_SET_AHEAD = "clock_set_ahead"
    """Its wall clock is an hour ahead for a while."""

    @property
    def ends(self) -> bool:
        """Whether the process ends by it."""
        return self in (Way.KILLED, Way.TERMINATED, Way.EXITED)


@dataclass(frozen=True)
class ProcessKind:
    """A kind of process of a job or its cluster."""

    name: str
    pids: Callable[[FaultContext], Sequence[int]]
    """Its processes on this host that work now, the one to be struck first."""
    component: str
    """What its events are named after."""
    rejoins: bool = False
    """Whether the process may stay, in another role, when another one has taken its place."""


def _engines(context: FaultContext) -> list[int]:
    return [e.pid for e in engines_of_pool(context)]


def _schedulers(context: FaultContext) -> list[int]:
    return [scheduler for pid in _engines(context) for scheduler in schedulers_of(pid)]


def _members(role: str) -> Callable[[FaultContext], list[int]]:
    return lambda context: [m.pid for m in context.members(role) if _alive(m.pid)]


def _ranks(context: FaultContext) -> list[int]:
    return [m.pid for m in sorted(context.trainer_ranks(), key=lambda m: m.id, reverse=True) if _alive(m.pid)]


def _trainer_agents(context: FaultContext) -> list[int]:
    return trainer_agents(_ranks(context))


def _coordinators(context: FaultContext) -> list[int]:
    """The one that leads first; none while none does."""
    leader = context.leader()
    return [leader.pid, *_followers(context)] if leader is not None and _alive(leader.pid) else []


def _followers(context: FaultContext) -> list[int]:
    leader, services = context.leader(), ServiceFiles(ClusterPaths.of(context.cfg).services)
    leading = leader.pid if leader is not None else 0
    return [r.pid for r in services.running() if r.name.startswith("coordinator-") and r.pid != leading]


def _service(name: Callable[[FaultContext], str]) -> Callable[[FaultContext], list[int]]:
    return lambda context: [pid] if (pid := context.service(name(context))) else []


def _router(context: FaultContext) -> list[int]:
    pid = context.router_pid()
    return [pid] if pid else []


def _host_agent(context: FaultContext) -> list[int]:
    """The active one of the two."""
    return file_lock.holders(ClusterPaths.of(context.cfg).active_agent_lock)


def _run(context: FaultContext) -> list[int]:
    """The process of the job's run. Struck from inside of it, as with ``train --faults``, nobody would see what
    follows."""
    name = quote(driver_of(context.cfg.job), safe="")
    return [r.pid for r in ServiceFiles(ClusterPaths.of(context.cfg).singletons).running()
            if r.name == name and r.pid != os.getpid()]


def _of_ray(service: str) -> Callable[[FaultContext], list[int]]:
    return lambda context: [pid] if (pid := ray_process(context, service)) else []


PROCESS_KINDS: Mapping[str, ProcessKind] = {kind.name: kind for kind in (
    ProcessKind("engine", _engines, "engine"),
    ProcessKind("scheduler", _schedulers, "engine"),
    ProcessKind("engine_runner", _members("engine"), "engine"),
    ProcessKind("trainer_rank", _ranks, ACTOR.name),
    ProcessKind("trainer_agent", _trainer_agents, ACTOR.name),
    ProcessKind("actor", _members("actor"), "actor"),
    ProcessKind("rollout", _members("rollout"), "rollout"),
    ProcessKind("advantages", _members("advantages"), "advantages"),
    ProcessKind("driver", _members("driver"), "driver"),
    ProcessKind("run", _run, "run"),
    ProcessKind("coordinator", _coordinators, "leader", rejoins=True),
    ProcessKind("coordinator_follower", _followers, "coordinator", rejoins=True),
    ProcessKind("dcs", _service(lambda context: node_service(context.cfg.job)), "dcs"),
    ProcessKind("router", _router, "router"),
    ProcessKind("gcs", _of_ray(RAY_HEAD), "compute"),
    ProcessKind("raylet", _of_ray(RAY_WORKER), "compute"),
    ProcessKind("host_agent", _host_agent, "host", rejoins=True),
    ProcessKind("etcd", _service(lambda _context: ETCD), "etcd"),
)}
"""The processes that can be struck, by the name of their kind."""


class Struck(RecoversWithSteps):
    """One process of a part is struck. What a user sees is what docs/operating/failures.md says of the part; after a
    pause, the process that was stopped goes on, or has ended where another one has its place.

    With a ``state``, a process is struck only in it: it is stopped while it seems to be in that state, and let go again
    where it is not any more once it does nothing. What was seen of it then is ``observed``."""

    def __init__(self, context: FaultContext, kind: str, way: Way, *, state: VictimState | None = None,
                 seconds: float = 0.0) -> None:
        """``seconds``: for how long it is stopped, its GIL held, or its clock wrong. Raises ValueError for what cannot
        be combined."""
        super().__init__(context)
        if way.ends != (seconds == 0.0) or (state is not None and way not in (Way.KILLED, Way.PAUSED)):
            raise ValueError(f"{kind} cannot be {way} for {seconds:g} s in the state {state.name if state else 'any'}")
        self.kind, self.way, self.struck_in, self.seconds = PROCESS_KINDS[kind], way, state, seconds
        self.name = "_".join(filter(None, (kind, way.value, state.name if state else "")))
        self.observed, self.may_go_unnoticed = "", not way.ends  # one that goes on may have been missed by nobody
        self._victim: psutil.Process | None = None
        self._before = 0

    def inject(self) -> tuple[str, str]:
        """Raises ConfigError where the way is not possible on this machine, with nothing done."""
        if self.struck_in is not None:
            return self._inject_in_state(self.struck_in)
        [pid, *others] = wait_until(lambda: self.kind.pids(self.context), timeout_s=INJECT_TIMEOUT_S,
                                    what=f"a process of {self.kind.name}")
        return self._target(pid, len(others) + 1), self._strike(psutil.Process(pid))

    def _target(self, pid: int, number: int) -> str:
        self._victim, self._before, self.at = psutil.Process(pid), number, time.time()
        return f"{self.kind.name} (pid {pid})"

    def _strike(self, victim: psutil.Process) -> str:
        """Raises VictimTaken and ForeignProcess."""
        pid = victim.pid
        self.context.require_own(victim)
        if self.way is Way.KILLED:
            return self.context.kill(pid)
        if self.way is Way.EXITED:
            ptrace.exit_process(pid, striking=self.context.striking(
                f"pid {pid} was made to exit", lambda: self.context.take(victim)))
            wait_until(lambda: not runs(victim), timeout_s=INJECT_TIMEOUT_S, what=f"the end of pid {pid}", poll_s=0.01)
            return f"pid {pid} {EXITED_WITH_0} in the middle of its work"
        if self.way.ends:
            self.context.take(victim)
        if self.way is Way.PAUSED:
            with stopped(self.context, victim):
                self.context.ended.wait(self.seconds)
                ended = "" if runs(victim) else ", or until it was ended"
            return f"pid {pid} was stopped for {self.seconds:g} s{ended}"
        if self.way in (Way.CLOCK_SET_BACK, Way.CLOCK_SET_AHEAD):
            return self._set_clock(pid, -_CLOCK_S if self.way is Way.CLOCK_SET_BACK else _CLOCK_S)
        if self.way is Way.GIL_HELD:
            return ptrace.hold_gil(pid, self.seconds, find_s=_FIND_GIL_S, wait=self._hold, pause=self._pause)
        with self.context.striking(f"pid {pid} was sent SIGTERM"):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not runs(victim), timeout_s=_END_S, what=f"the end of pid {pid}", poll_s=0.02)
        return f"pid {pid} {ENDED_BY_SIGTERM}"

    def _set_clock(self, pid: int, by_s: int) -> str:
        with self.context.undo.noted(Undo.RESET_CLOCK, pid):
            witness = clock.set_by(pid, by_s, self.context.striking(f"the wall clock of pid {pid} was set"))
            self.context.ended.wait(self.seconds)
            with contextlib.suppress(ProcessLookupError):  # one that has ended has not gone on with it
                if clock.offset_of(pid) == by_s:
                    return f"{witness} for {self.seconds:g} s"
        return ""

    def _hold(self, seconds: float) -> None:
        with self.context.striking("the thread that had the GIL was stopped"):
            pass  # ptrace has stopped it; it goes on at once where none is to strike any more
        self.context.ended.wait(seconds)

    def _pause(self, seconds: float) -> None:
        self.context.ended.wait(seconds)
        self.context.require_going_on()

    def _inject_in_state(self, state: VictimState) -> tuple[str, str]:
        noted = dict[int, dict[str, Any]]()
        working = len(self.kind.pids(self.context))
        try:
            pid, provoked_by = provoked(state, self.context, lambda: self._stopped_in(state, noted))
            target = self._target(pid, working)
            if self.way is Way.KILLED:
                witness = self.context.kill(pid)
            else:
                with self.context.striking(f"pid {pid} was sent SIGSTOP"):
                    pass  # it is stopped since it was caught; it goes on at once where none is to strike any more
                self.context.ended.wait(self.seconds)
                witness = f"pid {pid} was stopped for {self.seconds:g} s"
        finally:
            for entry in noted.values():
                self.context.undo.undo(entry)
        return target, "; ".join(filter(None, (provoked_by, witness, f"it was {self.observed} when it was stopped")))

    def _stopped_in(self, state: VictimState, noted: dict[int, dict[str, Any]]) -> int:
        """Pid of a process that does nothing any more since a moment in which it was in the state; 0: not yet, or not
        known, since etcd does not answer."""
        try:
            return self._stopped_if_seen(state, noted)
        except EtcdUnavailable:
            for entry in noted.values():
                self.context.undo.undo(entry)
            noted.clear()
            return 0

    def _stopped_if_seen(self, state: VictimState, noted: dict[int, dict[str, Any]]) -> int:
        found = (state.pids or self.kind.pids)(self.context)
        pid = next((pid for pid in found if _alive(pid) and state.seen(self.context, pid)), 0)
        if not pid:
            return 0
        try:
            held = [psutil.Process(one) for one in state.holds(pid)]
            for process in held:
                self.context.require_own(process)
                if process.pid not in noted:
                    noted[process.pid] = self.context.undo.note(Undo.CONTINUE, process.pid)
                suspend(process, self.context.striking())
            self.observed = state.seen(self.context, pid)
            if self.observed:
                return pid
            for process in held:  # it had passed meanwhile
                process.resume()
        except ForeignProcess:
            raise
        except (psutil.NoSuchProcess, VictimTaken):
            pass  # it has ended meanwhile
        return 0

    def detected(self) -> bool:
        """There is an event of the part's fault, or another process in its place."""
        signs = self.context.events_since(self.at)
        return any(e.kind.partition(".")[0] == self.kind.component and (kind := event_kinds.find(e.kind)) is not None
                   and bool(kind.begins or kind.counted or kind.alert) for e in signs) or (
                       self.way.ends and self.is_back())

    def is_back(self) -> bool:
        """As many processes as before work. One that was stopped is among them, or has ended."""
        assert self._victim is not None
        pids, victim = self.kind.pids(self.context), self._victim.pid if runs(self._victim) else 0
        if self.way.ends:
            return victim == 0 and len(pids) >= self._before and self._victim.pid not in pids
        return len(pids) >= self._before and (not victim or victim in pids or self.kind.rejoins)


class BusyCores(RecoversWithSteps):
    """Other processes take the cores of this machine for a while, at normal priority. Everything is slow, and nothing
    of that is a fault (I14): no part is restarted for it, and the run goes on."""

    name, may_go_unnoticed = "busy_cores", True

    def __init__(self, context: FaultContext, seconds: float, processes: int = 0) -> None:
        """``processes``: how many there are; 0: two for each core."""
        super().__init__(context)
        self.seconds, self.number = seconds, processes or 2 * (os.cpu_count() or 1)

    def inject(self) -> tuple[str, str]:
        self.at = time.time()
        with contextlib.ExitStack() as started:
            spinning = []
            with self.context.striking("processes that use the cores were started"):
                for _ in range(self.number):  # the kernel ends them with this process
                    spinning.append(start_child([sys.executable, "-c", "while True: pass"]))
                    started.enter_context(self.context.undo.noted(Undo.END, spinning[-1].pid))
            self.context.ended.wait(self.seconds)
            used_s = sum(sum(psutil.Process(p.pid).cpu_times()[:2]) for p in spinning)
        for process in spinning:
            process.wait()
        return "this machine", f"{self.number} processes used {used_s:.1f} s of the cores in {self.seconds:g} s"

    def detected(self) -> bool:
        return False  # there is nothing to detect

    def is_back(self) -> bool:
        return True


def _alive(pid: int) -> bool:
    try:
        return pid > 0 and runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
