"""Keeps the services of a local cluster running while a run uses them: etcd, the coordinators, the DCS node.

A thread of the process that runs the job looks at the records of the services; one that has ended without a command
(``down`` deletes its record) is started again on its data and its port, when ``restart_policy`` says so. It sees that a
process has ended; whether one that runs still works is the coordinator's to find out.

It never starts a service beside a living one: ``Cluster.revive`` holds the cluster's lock, so a start by ``up`` is
adopted, and only services that were recorded in this boot of this machine are supervised.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

from elastic_rl.config import Config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.host import cluster_settings, etcd_server, processes, restart_policy
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.processes import PidRecord
from elastic_rl.host.restart_policy import Phase, RestartLimits, ServiceState

log = logging.getLogger(__name__)

ETCD = "etcd-0"
_TICK_S = 0.5
_EVENT_BUDGET_S = 1.0
"""Time for an event; an etcd that does not answer must not delay the restart of another service."""
_EVENT_RETRY_S = 3.0
_JOIN_S = 20.0
"""Longest wait for a start that is under way; it ends before ``down`` is called."""


@dataclass
class _Restarts:
    """Restarts of one service that are not in the event log yet."""

    count: int = 0
    pid: int = 0


class ServiceSupervisor:
    """A context manager: supervises within the block. ``waiting`` may be called from any thread at any time."""

    def __init__(self, cluster: Cluster, info: ClusterInfo, *, limits: RestartLimits = RestartLimits(),
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``cluster``: with the settings that its services were started with."""
        self._cluster, self._info, self._limits, self._clock = cluster, info, limits, clock
        self._states: dict[str, ServiceState] = {}
        self._faults: dict[str, str] = {}
        """Why a service could not be started, by name."""
        self._unreported: dict[str, _Restarts] = {}
        self._report_at = 0.0
        self._waiting: Mapping[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="service-supervisor", daemon=True)

    @classmethod
    def of_run(cls, cfg: Config, info: ClusterInfo) -> ServiceSupervisor:
        """The supervisor of the cluster that a run of this machine uses. Raises ConfigError for damaged settings of the
        cluster."""
        stored = cluster_settings.on_top(cfg.cluster_dir, {"job": cfg.job, "run_dir": str(cfg.run_dir)})
        return cls(Cluster(stored, say=log.warning), info)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def waiting(self) -> Mapping[str, str]:
        """The services that do not run now: name → what the service waits for. Never blocks."""
        return self._waiting

    # -- in the thread -----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            try:
                self.tick()
            except Exception as e:  # the services are worth more than this pass; the next one looks again
                log.exception("supervision of the services: %s", e)

    def tick(self) -> None:
        """One pass over the services; starts those that are due."""
        boot = processes.boot_id()
        records = sorted((r for r in self._cluster.book.all() if r.boot == boot), key=lambda r: r.name != ETCD)
        for name in self._states.keys() - {r.name for r in records}:  # `down` has ended it
            del self._states[name]
        for record in records:
            if self._stopping.is_set():
                return
            self._look(record)
        self._waiting = dict(self._describe(records))
        self._report()

    def _look(self, record: PidRecord) -> None:
        name, now = record.name, self._clock()
        before = self._states.get(name)
        if record.alive():
            state = (restart_policy.on_running(before, now, self._limits) if before is not None
                     else ServiceState.running(now, self._limits))
            self._faults.pop(name, None)
        elif before is None:
            state = ServiceState.ended(now, self._limits)
        else:
            state = restart_policy.on_ended(before, now, self._limits, jitter=random.random())
        if state.phase is Phase.ENDED and (before is None or before.phase is Phase.RUNNING):
            log.warning("%s (pid %d) has ended; end %d in a row", name, record.pid, state.ends)
        self._states[name] = state
        if state.due(now) and (name == ETCD or self._etcd_answers()):
            self._states[name] = self._start(record, state)

    def _start(self, record: PidRecord, state: ServiceState) -> ServiceState:
        name = record.name
        try:
            if not self._cluster.revive(name):
                return state  # another command is at it, or it runs: the next pass sees
        except (ElasticRLError, OSError) as e:
            if self._faults.get(name) != str(e):
                log.error("%s cannot be started: %s", name, e)
            self._faults[name] = str(e)
            return restart_policy.on_start_failed(state, self._clock(), self._limits, jitter=random.random())
        self._faults.pop(name, None)
        restarts = self._unreported.setdefault(name, _Restarts())
        restarts.count, restarts.pid = restarts.count + 1, record.pid
        return restart_policy.on_started(state, self._clock(), self._limits)

    def _etcd_answers(self) -> bool:
        """Whether the services that need etcd to start would find it."""
        if not self._info.own_etcd:
            return True
        return any(map(partial(etcd_server.healthy, timeout_s=1.0), self._info.etcd_endpoints))

    def _describe(self, records: Iterable[PidRecord]) -> Iterator[tuple[str, str]]:
        now = self._clock()
        for name in (r.name for r in records):
            state = self._states[name]
            if state.phase is not Phase.ENDED:
                continue
            if fault := self._faults.get(name):
                what = f"cannot be started: {fault}; next try in {max(0.0, state.start_at - now):.0f} s"
            elif state.due(now) and name != ETCD:
                what = "is started again when etcd answers"
            else:
                what = f"is started again in {max(0.0, state.start_at - now):.0f} s"
            yield name, f"has ended and {what}"

    # -- events --------------------------------------------------------------------------------------------------------
    def _report(self) -> None:
        """Writes an event for each service that was started again; several starts are one event while etcd is away."""
        if not self._unreported or self._clock() < self._report_at:
            return
        try:
            with EtcdClient.from_config(self._cluster.cfg.etcd, self._info.etcd_endpoints,
                                        retry_budget_s=_EVENT_BUDGET_S) as etcd:
                for name, restarts in list(self._unreported.items()):
                    times = f", {restarts.count} times" if restarts.count > 1 else ""
                    kind, subject = event_of(name)
                    events.emit(etcd, Keys(self._info.job), kind, subject,
                                f"{name} (last pid {restarts.pid}) ended and was started again on its data{times}",
                                severity=Severity.WARNING, restarts=restarts.count)
                    del self._unreported[name]
        except ElasticRLError as e:
            log.warning("the restart of %s is not in the event log yet: %s", ", ".join(self._unreported), e)
            self._report_at = self._clock() + _EVENT_RETRY_S


def event_of(name: str) -> tuple[EventKind, str]:
    """Kind and subject of the event that a service was started again. The subject is the service's id as a member."""
    if name == ETCD:
        return event_kinds.ETCD_RESTARTED, name
    if name.startswith("dcs-"):
        return event_kinds.DCS_RESTARTED, name.removeprefix("dcs-")
    return event_kinds.COORDINATOR_RESTARTED, name
