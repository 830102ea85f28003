"""Keeps the services of a local cluster running: etcd, the coordinators, the DCS nodes.

Each pass reads the files of the services (``service_files``). A service that has ended without a command (``down``
deletes its file) is started again on its data and its port, when ``restart_policy`` says so. A pass sees that a process
has ended; whether one that runs still works is the coordinator's to find out.

No service is started beside a living one, and one that somebody else has started is adopted: ``Cluster.revive`` holds
the cluster's lock, and every service the lock of its file.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from functools import cache, partial

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.cluster_records import RunState, ServiceStatus
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.host import etcd_server
from elastic_rl.host.agent import restart_policy
from elastic_rl.host.agent.restart_policy import Phase, RestartLimits, ServiceState
from elastic_rl.host.local_cluster import AGENTS, Cluster, last_message
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.service_files import ServiceRecord, job_of_node, job_of_ray_worker, job_of_service

log = logging.getLogger(__name__)

_EVENT_BUDGET_S = 1.0
"""Time for an event; an etcd that does not answer must not delay the restart of another service."""
_EVENT_RETRY_S = 3.0
_REPORTED_AFTER_S = 3.0
"""A restart is an event once the service has run for so long."""


class ServiceSupervisor:
    """The supervision of one cluster's services. Its state is what restarts depend on and is lost with its process: the
    next supervisor adopts what runs."""

    def __init__(self, *, limits: RestartLimits = RestartLimits(),
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._states: dict[str, ServiceState] = {}
        self._faults: dict[str, str] = {}
        """Why a service could not be started, by name."""
        self._restarts: dict[str, int] = {}
        """How often this process has started a service again, by name."""
        self._unreported: dict[str, int] = {}
        """How many of a service's restarts are not in the event log yet, by name."""
        self._report_at = 0.0

    def supervise(self, cluster: Cluster, info: ClusterInfo | None, standby: str) -> dict[str, ServiceStatus]:
        """One pass: starts the standby of the agent and the services that are due. Returns how all are, by name.

        ``cluster``: with the settings that its services are started with. ``info``: its addresses; None while a command
        is starting it, when nothing is started here. ``standby``: name of the agent's other process."""
        records = [cluster.agents.get(standby) or ServiceRecord(standby),
                   *sorted(cluster.services.all(), key=lambda r: not etcd_server.is_member(r.name))]
        for name in self._states.keys() - {r.name for r in records}:  # ended by a command
            for known in (self._states, self._faults, self._restarts, self._unreported):
                known.pop(name, None)
        answers = cache(partial(_etcd_answers, cluster, info)) if info is not None else bool  # asked once, if at all
        for record in records:
            try:
                self._supervise(cluster, info, record, answers)
            except Exception:  # a defect that shows with one service must not leave the others down
                log.exception("%s cannot be supervised", record.name)
        if info is not None:
            self._report(cluster, info)
        return {r.name: self._status(cluster, r) for r in records}

    def _supervise(self, cluster: Cluster, info: ClusterInfo | None, record: ServiceRecord,
                   etcd_answers: Callable[[], bool]) -> None:
        name, now = record.name, self._clock()
        before = self._states.get(name)
        state = restart_policy.on_seen(before, record.running, now, self._limits, jitter=random.random())
        if record.running:
            self._faults.pop(name, None)
        if state.phase is Phase.ENDED and (before is None or before.phase is Phase.RUNNING):
            log.warning("%s has ended; end %d in a row", name, state.ends)
        self._states[name] = state
        if info is not None and state.due(now) and (not _needs_etcd(name) or etcd_answers()):
            self._states[name] = self._start(cluster, name, state)

    def _start(self, cluster: Cluster, name: str, state: ServiceState) -> ServiceState:
        try:
            if not cluster.revive(name):
                return state  # another command is at it, or it runs: the next pass sees
        except (ElasticRLError, OSError) as e:
            if self._faults.get(name) != str(e):
                log.error("%s cannot be started: %s", name, e)
            self._faults[name] = str(e)
            return restart_policy.on_start_failed(state, self._clock(), self._limits, jitter=random.random())
        self._faults.pop(name, None)
        self._restarts[name] = self._restarts.get(name, 0) + 1
        if name not in AGENTS:
            self._unreported[name] = self._unreported.get(name, 0) + 1
        return restart_policy.on_started(state, self._clock(), self._limits)

    def _status(self, cluster: Cluster, record: ServiceRecord) -> ServiceStatus:
        state = self._states[record.name]
        return ServiceStatus(state=RunState(state.phase.value), pid=record.pid,
                             restarts=self._restarts.get(record.name, 0), reason=self._reason(cluster, record.name))

    def _reason(self, cluster: Cluster, name: str) -> str:
        """What a service that has ended waits for; empty for one that runs."""
        now, state = self._clock(), self._states[name]
        if state.phase is not Phase.ENDED:
            return ""
        left_s = max(0.0, state.start_at - now)
        if fault := self._faults.get(name):
            return f"has ended and cannot be started: {fault}; next try in {left_s:.0f} s"
        if state.due(now) and _needs_etcd(name):
            return "has ended and is started again when etcd answers"
        again = f"is started again in {left_s:.0f} s"
        if state.ends == 1:
            return f"has ended and {again}"
        log_file = cluster.log_of(name)
        return f"has ended {state.ends} times in a row ({last_message(log_file)}; see {log_file}) and {again}"

    # -- events --------------------------------------------------------------------------------------------------------
    def _report(self, cluster: Cluster, info: ClusterInfo) -> None:
        """Writes an event for each service that was started again and has run for a while since. Several starts are one
        event: while etcd is away, and for a service that keeps ending."""
        now = self._clock()
        due = {name: count for name, count in self._unreported.items() if name in self._states
               and self._states[name].phase is Phase.RUNNING and now - self._states[name].since >= _REPORTED_AFTER_S}
        if not due or now < self._report_at:
            return
        try:
            with cluster.etcd(info, retry_budget_s=_EVENT_BUDGET_S) as etcd:
                for name, count in due.items():
                    times, ran_s = f", {count} times" if count > 1 else "", now - self._states[name].since
                    kind, subject = event_of(name, cluster.host)
                    for job in [job_of_service(name)] if job_of_service(name) else cluster.jobs:
                        events.emit(etcd, Keys(job), kind, subject, f"{name} ended and was started again{times}",
                                    severity=Severity.WARNING, restarts=count, started_at=time.time() - ran_s)
                    del self._unreported[name]
        except ElasticRLError as e:
            log.warning("the restart of %s is not in the event log yet: %s", ", ".join(due), e)
            self._report_at = self._clock() + _EVENT_RETRY_S


def _needs_etcd(name: str) -> bool:
    """Whether a service is started only while etcd answers."""
    return name not in AGENTS and not etcd_server.is_member(name)


def _etcd_answers(cluster: Cluster, info: ClusterInfo) -> bool:
    """Whether the services that need etcd to start would find it."""
    try:
        return not info.own_etcd or any(map(partial(cluster.etcd_healthy, timeout_s=1.0), info.etcd_endpoints))
    except ConfigError:  # the host's certificate is damaged; the agent, which renews it, says why it cannot
        return False


def event_of(name: str, host: LocalHost) -> tuple[EventKind, str]:
    """Kind and subject of the event that a service of this host was started again. The subject is the service's id as a
    member, or the host whose worker of Ray it is."""
    if etcd_server.is_member(name):
        return event_kinds.ETCD_RESTARTED, name
    if job_of_node(name):
        return event_kinds.DCS_RESTARTED, host.node
    if job_of_ray_worker(name):
        return event_kinds.RAY_WORKER_RESTARTED, host.name
    return event_kinds.COORDINATOR_RESTARTED, name
