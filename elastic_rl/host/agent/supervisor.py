"""Keeps the services of a local cluster running: etcd, the coordinators, the DCS node.

Each pass looks at the files of the services (``service_files``). A service that has ended without a command (``down``
deletes its file) is started again on its data and its port, when ``restart_policy`` says so. A pass sees that a process
has ended; whether one that runs still works is the coordinator's to find out.

No service is started beside a living one, and one that somebody else has started is adopted: ``Cluster.revive`` holds
the cluster's lock, and every service the lock of its file.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from functools import partial

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import RunState, ServiceStatus
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.host import etcd_server
from elastic_rl.host.agent import restart_policy
from elastic_rl.host.agent.restart_policy import Phase, RestartLimits, ServiceState
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.service_files import ServiceRecord

log = logging.getLogger(__name__)

_EVENT_BUDGET_S = 1.0
"""Time for an event; an etcd that does not answer must not delay the restart of another service."""
_EVENT_RETRY_S = 3.0


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
        """Those of them that are not in the event log yet."""
        self._report_at = 0.0

    def tick(self, cluster: Cluster, info: ClusterInfo) -> dict[str, ServiceStatus]:
        """One pass over the services of a cluster, which starts those that are due. Returns how they are, by name.

        ``cluster``: with the settings that its services are started with. ``info``: its addresses."""
        records = sorted(cluster.services.all(), key=lambda r: r.name != etcd_server.SERVICE)
        for name in self._states.keys() - {r.name for r in records}:  # `down` has ended it
            del self._states[name]
        for record in records:
            self._look(cluster, info, record)
        self._report(cluster, info)
        return self._describe(records)

    def _look(self, cluster: Cluster, info: ClusterInfo, record: ServiceRecord) -> None:
        name, now = record.name, self._clock()
        before = self._states.get(name)
        if record.running:
            state = (restart_policy.on_running(before, now, self._limits) if before is not None
                     else ServiceState.running(now, self._limits))
            self._faults.pop(name, None)
        elif before is None:
            state = ServiceState.ended(now, self._limits)
        else:
            state = restart_policy.on_ended(before, now, self._limits, jitter=random.random())
        if state.phase is Phase.ENDED and (before is None or before.phase is Phase.RUNNING):
            log.warning("%s has ended; end %d in a row", name, state.ends)
        self._states[name] = state
        if state.due(now) and (name == etcd_server.SERVICE or _etcd_answers(info)):
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
        self._unreported[name] = self._unreported.get(name, 0) + 1
        return restart_policy.on_started(state, self._clock(), self._limits)

    def _describe(self, records: Iterable[ServiceRecord]) -> dict[str, ServiceStatus]:
        return {r.name: ServiceStatus(state=RunState(self._states[r.name].phase.value), pid=r.pid,
                                      restarts=self._restarts.get(r.name, 0), reason=self._reason(r.name))
                for r in records}

    def _reason(self, name: str) -> str:
        """What a service that has ended waits for; empty for one that runs."""
        now, state = self._clock(), self._states[name]
        if state.phase is not Phase.ENDED:
            return ""
        left_s = max(0.0, state.start_at - now)
        if fault := self._faults.get(name):
            return f"has ended and cannot be started: {fault}; next try in {left_s:.0f} s"
        if state.due(now) and name != etcd_server.SERVICE:
            return "has ended and is started again when etcd answers"
        return f"has ended and is started again in {left_s:.0f} s"

    # -- events --------------------------------------------------------------------------------------------------------
    def _report(self, cluster: Cluster, info: ClusterInfo) -> None:
        """Writes an event for each service that was started again; several starts are one event while etcd is away."""
        if not self._unreported or self._clock() < self._report_at:
            return
        try:
            with EtcdClient.from_config(cluster.cfg.etcd, info.etcd_endpoints, retry_budget_s=_EVENT_BUDGET_S) as etcd:
                for name, count in list(self._unreported.items()):
                    times = f", {count} times" if count > 1 else ""
                    kind, subject = event_of(name)
                    events.emit(etcd, Keys(info.job), kind, subject,
                                f"{name} ended and was started again on its data{times}",
                                severity=Severity.WARNING, restarts=count)
                    del self._unreported[name]
        except ElasticRLError as e:
            log.warning("the restart of %s is not in the event log yet: %s", ", ".join(self._unreported), e)
            self._report_at = self._clock() + _EVENT_RETRY_S


def _etcd_answers(info: ClusterInfo) -> bool:
    """Whether the services that need etcd to start would find it."""
    return not info.own_etcd or any(map(partial(etcd_server.healthy, timeout_s=1.0), info.etcd_endpoints))


def event_of(name: str) -> tuple[EventKind, str]:
    """Kind and subject of the event that a service was started again. The subject is the service's id as a member."""
    if name == etcd_server.SERVICE:
        return event_kinds.ETCD_RESTARTED, name
    if name.startswith("dcs-"):
        return event_kinds.DCS_RESTARTED, name.removeprefix("dcs-")
    return event_kinds.COORDINATOR_RESTARTED, name
