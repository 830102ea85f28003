"""The processes of the cluster's singletons on this host: started, adopted, restarted and ended as ``duties`` says.

Each singleton has one service file, which its process holds locked. So a second process of it cannot be started on this
host, whatever its generation, and an agent that is restarted finds what runs, with its generation. A singleton that
has done its work says so in its file (``service_files.report_completed``). An exit code is seen by the agent that
started the process and by no later one, so 0 means nothing: what ends without having said so is started again.

What a process leaves behind is ended before its singleton is started again: Ray's dashboard agent keeps a port, and a
process of an older driver would write beside the new one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.etcd.cluster_records import HostStatus, RunState, ServiceStatus
from elastic_rl.host import processes
from elastic_rl.host.agent import duties, restart_policy
from elastic_rl.host.agent.duties import Adopt, LocalSingleton, Start, Stop, Wait
from elastic_rl.host.agent.host_session import HostView
from elastic_rl.host.agent.restart_policy import Phase, RestartLimits, ServiceState
from elastic_rl.host.service_files import SERVICE_FILE_ENV, ServiceFiles, ServiceRecord
from elastic_rl.runtime.clock import boottime_s

log = logging.getLogger(__name__)

CommandOf = Callable[[str, Mapping[str, Any], int], list[str]]
"""Makes the command line of a singleton from its name, its arguments and the generation of its assignment, which all
that it writes must carry."""
_MAX_ENDED_AT_ONCE = 32


class Singletons:
    """For one thread. Its state is what restarts depend on and is lost with its process, which the singletons outlive.
    """

    def __init__(self, host_id: str, incarnation: str, files: ServiceFiles, log_of: Callable[[str], Path],
                 command_of: CommandOf, times: HostTimes, *, on_released: Callable[[str], None] = lambda name: None,
                 env: Mapping[str, str] | None = None, limits: RestartLimits = RestartLimits(),
                 clock: Callable[[], float] = boottime_s) -> None:
        """``files``: of singletons only. ``log_of``: the log of a service by the name of its file. ``on_released``:
        ends what a singleton has started to outlive it, by its name, when this host is not to run it any more: whoever
        does then begins again. ``env``: for each singleton. ``clock``: that of the host's lease."""
        self._host_id, self._incarnation, self._files = host_id, incarnation, files
        self._log_of, self._command_of, self._env = log_of, command_of, dict(env or {})
        self._on_released = on_released
        self._times, self._limits, self._clock = times, limits, clock
        self._states: dict[tuple[str, int], ServiceState] = {}
        self._stopped: set[tuple[str, int]] = set()
        """Generations that this object has ended, which is no failure of theirs."""
        self._faults: dict[tuple[str, int], str] = {}
        """Why a generation could not be started, by name and generation."""
        self._adopted: dict[str, int] = {}
        """Pid of each process that this object has started or adopted, by name."""
        self._ending: dict[tuple[str, bool], Future[None]] = {}
        """Processes that are being ended with what they have started, by name and whether it is released."""
        self._end_faults: dict[str, str] = {}
        """Why what a singleton has left could not be ended, by name, as it was logged last."""
        self._left_nothing: set[tuple[str, bool]] = set()
        """Singletons that do not run and of which nothing is left; and whether that is so after their release."""
        self._released: set[str] = set()
        """Singletons that no host is to run, or another one, and of which this host has run an older generation."""
        self._executor = ThreadPoolExecutor(_MAX_ENDED_AT_ONCE, thread_name_prefix="end-singleton")

    def look(self, view: HostView) -> HostStatus:
        """One pass: does what there is to be done now, and returns how the host is. It does not wait for a process that
        it ends, so that none can keep another one from its end. Raises OSError."""
        now, records = self._clock(), self._records()
        self._released = {name for name, record in records.items() if (order := view.known.orders.get(name)) is not None
                          and order.assignment.host != self._host_id and order.generation > record.generation}
        for record in records.values():
            self._note(record, now)
        not_before = {key: state.start_at for key, state in self._states.items() if state.phase is Phase.ENDED}
        waits: dict[str, str] = {}
        started = False
        for action in duties.duties(self._host_id, self._incarnation, now, view.lease, view.known,
                                    self._here(records), not_before, self._times):
            match action:
                case Stop(name, generation, reason):
                    self._stop(records[name], generation, reason)
                case Adopt(name, generation):
                    self._adopt(records[name], generation)
                case Start(name) if not view.lease.allows_start(self._clock(), self._times):
                    waits[name] = "waits for the host's lease"
                case Start(name) if started and self._clock() - now >= self._times.agent_pass_s:
                    waits[name] = "is started in the next pass"  # by the lease and the assignments of then
                case Start(name, generation, arguments):
                    started = True
                    self._start(name, generation, arguments)
                case Wait(name, reason):
                    waits[name] = reason
        records = self._forget_older(self._records(), view)
        return HostStatus(registration=view.registration, observed_revision=view.known.revision,
                          services=self._services(records, view, waits),
                          not_ready=duties.why_not_ready(view.lease, view.known, self._here(records)))

    def close(self) -> None:
        """Returns when the processes have ended that are being ended. All others run on."""
        self._executor.shutdown()

    # -- what there is -------------------------------------------------------------------------------------------------
    def _records(self) -> dict[str, ServiceRecord]:
        return {unquote(record.name): record for record in self._files.all()}

    def _here(self, records: Mapping[str, ServiceRecord]) -> list[LocalSingleton]:
        return [LocalSingleton(name, record.generation, alive=self._is_alive(name, record),
                               adopted=self._adopted.get(name) == record.pid, completed=record.completed)
                for name, record in records.items()]

    def _is_alive(self, name: str, record: ServiceRecord) -> bool:
        """Whether something of a singleton may run, or is being ended, so that no other may be started yet."""
        return (record.running or self._end_of(name) not in self._left_nothing
                or any(not end.done() for (ending, _), end in self._ending.items() if ending == name))

    def _note(self, record: ServiceRecord, now: float) -> None:
        """Takes notice of whether a process runs, and has what one that has ended left behind ended."""
        name = unquote(record.name)
        key = name, record.generation
        if record.running:
            self._forget_end(name)
            self._states[key] = self._seen(key, record, now)
            self._faults.pop(key, None)
            return
        if key in self._stopped:
            self._states.pop(key, None)
        elif not record.completed:
            self._states[key] = self._seen(key, record, now)
        if self._end_of(name) not in self._left_nothing and self._ended(name):
            self._left_nothing.add(self._end_of(name))

    def _seen(self, key: tuple[str, int], record: ServiceRecord, now: float) -> ServiceState:
        return restart_policy.on_seen(self._states.get(key), record.running, now, self._limits, jitter=random.random())

    def _ended(self, name: str) -> bool:
        """Whether nothing is left of a singleton whose process has ended; begins to end it where that is not known."""
        ending = self._ending.get(self._end_of(name))
        if ending is not None and not ending.done():
            return False
        if ending is not None and (error := ending.exception()) is None:
            del self._ending[self._end_of(name)]
            return True
        if ending is not None and self._end_faults.get(name) != str(error):
            log.warning("what %s has left cannot be ended, which is tried again: %s", name, error)
            self._end_faults[name] = str(error)
        self._end(name, 0)
        return False

    # -- what is done about it -----------------------------------------------------------------------------------------
    def _start(self, name: str, generation: int, arguments: Mapping[str, Any]) -> None:
        key, file_name, now = (name, generation), quote(name, safe=""), self._clock()
        state = self._states.get(key)
        try:
            pid = self._files.start(file_name, self._command_of(name, arguments, generation),
                                    log=self._log_of(file_name), env=self._env, generation=generation,
                                    lock_s=self._times.agent_pass_s)
        except Exception as e:  # a defect of one singleton's command must not leave the others down
            if self._faults.get(key) != str(e):
                log.exception("%s of generation %d cannot be started", name, generation)
            self._faults[key] = str(e)
            self._states[key] = restart_policy.on_start_failed(
                state or ServiceState.running(now, self._limits), now, self._limits, jitter=random.random())
            return
        log.info("started %s of generation %d (pid %d)", name, generation, pid)
        self._adopted[name] = pid
        self._forget_end(name)
        self._stopped.discard(key)
        self._states[key] = (restart_policy.on_started(state, now, self._limits) if state is not None
                             else ServiceState.running(now, self._limits))

    def _adopt(self, record: ServiceRecord, generation: int) -> None:
        if record.running:
            log.info("adopted %s of generation %d (pid %d)", unquote(record.name), generation, record.pid)
            self._adopted[unquote(record.name)] = record.pid

    def _stop(self, record: ServiceRecord, generation: int, reason: str) -> None:
        name = unquote(record.name)
        ending = self._ending.get(self._end_of(name))
        if record.running and (ending is None or ending.done()):
            log.warning("ending %s of generation %d (pid %d): %s", name, generation, record.pid, reason)
            self._stopped.add((name, generation))
            self._end(name, record.pid)

    def _end(self, name: str, pid: int) -> None:
        """Begins to end a process and all that was started by it. ``pid`` 0: the process itself has ended."""
        self._ending[self._end_of(name)] = self._executor.submit(
            self._end_all, quote(name, safe=""), pid, name in self._released)

    def _end_of(self, name: str) -> tuple[str, bool]:
        return name, name in self._released

    def _forget_end(self, name: str) -> None:
        self._left_nothing -= {(name, False), (name, True)}

    def _end_all(self, file_name: str, pid: int, released: bool) -> None:
        grace_s = self._times.stop_s / 2  # what ignores SIGTERM has ended within stop_s
        if pid:  # Not its descendants: what is its own has its mark, and a run may have started the host agent.
            processes.stop(pid, grace_s=grace_s, descendants=False)
        self._files.end_leftovers(file_name)
        processes.sweep(self._files.mark(file_name), SERVICE_FILE_ENV, grace_s=grace_s)
        if released:
            self._on_released(unquote(file_name))

    def _forget_older(self, records: dict[str, ServiceRecord], view: HostView) -> dict[str, ServiceRecord]:
        """Forgets what has ended and is followed by a later generation; returns the others."""
        def over(name: str, generation: int) -> bool:
            order = view.known.orders.get(name)
            return order is not None and order.generation > generation
        kept = {}
        for name, record in records.items():
            if self._is_alive(name, record) or not over(name, record.generation):
                kept[name] = record
            else:
                self._files.forget(record.name)
                self._forget_end(name)
                self._adopted.pop(name, None)
        here = {(name, record.generation) for name, record in kept.items()}
        self._states = {key: state for key, state in self._states.items() if key in here or not over(*key)}
        self._stopped &= here
        self._faults = {key: fault for key, fault in self._faults.items() if key in here or not over(*key)}
        return kept

    # -- how it is -----------------------------------------------------------------------------------------------------
    def _services(self, records: Mapping[str, ServiceRecord], view: HostView, waits: Mapping[str, str]
                  ) -> dict[str, ServiceStatus]:
        to_run = {name: order.generation for name, order in view.known.orders.items()
                  if order.assignment.host == self._host_id}
        services = {}
        for name in sorted({*records, *to_run}):
            record = records.get(name) or ServiceRecord(name)
            generation = record.generation if record.running or name not in to_run else to_run[name]
            waits_for = waits.get(name, "is about to be started" if name in to_run else "")
            services[name] = self._status(name, generation, record, waits_for)
        return services

    def _status(self, name: str, generation: int, record: ServiceRecord, waits_for: str) -> ServiceStatus:
        """``waits_for``: what a process of this generation waits for where it does not run."""
        state = self._states.get((name, generation))
        run_state, reason = RunState.ENDED, self._reason((name, generation), state, waits_for)
        if record.running or record.completed and record.generation == generation:
            run_state, reason = RunState.RUNNING if record.running else RunState.COMPLETED, ""
        restarts = max(0, state.ends - (state.phase is Phase.ENDED)) if state is not None else 0
        return ServiceStatus(state=run_state, pid=record.pid, generation=generation, restarts=restarts, reason=reason)

    def _reason(self, key: tuple[str, int], state: ServiceState | None, waits_for: str) -> str:
        """Why a singleton does not run. Nothing that counts down, since each change is written."""
        if fault := self._faults.get(key):
            return f"cannot be started: {fault}"
        if state is None or state.ends <= 1:
            return waits_for
        log_file = self._log_of(quote(key[0], safe=""))
        # Not what its log says: that is for the owner of this host alone.
        return f"has ended {state.ends} times in a row (see {log_file}); {waits_for}"
