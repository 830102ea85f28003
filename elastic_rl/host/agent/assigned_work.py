"""What the cluster assigns to this host: its registration, and the singletons that run here."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.cluster_records import HostStatus, RunState, ServiceStatus, job_of_driver
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.host import leftovers, processes
from elastic_rl.host.agent.host_facts import host_record, kept_incarnation
from elastic_rl.host.agent.host_session import HostSession
from elastic_rl.host.agent.preemption_watch import PreemptionWatch
from elastic_rl.host.agent.singletons import CommandOf, Singletons
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.preemption import NoticeSource
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.host.service_files import ServiceFiles, job_of_ray_worker

log = logging.getLogger(__name__)

_JOIN_S = 5.0


class AssignedWork:
    """Carries out the assignments of this host from ``start`` until ``close``, in a thread of its own: the starts of
    other services may take long, and the end of a lease must be noticed within ``HostTimes.agent_pass_s``."""

    def __init__(self, session: HostSession, singletons: Singletons, services: ServiceFiles, times: HostTimes,
                 preemption: PreemptionWatch | None = None) -> None:
        """``services``: the other services of this host. ``preemption``: of a host whose provider may take it back."""
        self._session, self._singletons, self._services, self._times = session, singletons, services, times
        self._preemption = preemption
        self._fault = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="assigned-work", daemon=True)

    @classmethod
    def of_cluster(cls, cluster: Cluster, info: ClusterInfo, log_port: int = 0, command_of: CommandOf | None = None,
                   times: HostTimes = HostTimes()) -> Self:
        """The work that a cluster assigns to this host: by default the runs of its jobs. ``log_port``: where the host's
        logs are served; 0: nowhere. Raises ConfigError and OSError."""
        host = host_record(cluster.host, kept_incarnation(cluster.paths.incarnation), log_port=log_port,
                           run_dir=os.fsencode(cluster.cfg.run_dir).decode(errors="replace"))
        singletons = Singletons(host.id, host.incarnation, cluster.singletons, cluster.log_of,
                                command_of or partial(_run_command, cluster), times,
                                on_released=partial(_end_compute_plane, cluster), env={OWNER_ENV: str(cluster.dir)})
        etcd = cluster.etcd(info, retry_budget_s=times.lease_ttl_s / 3)
        source = cluster.host.preemption_notice
        return cls(HostSession(etcd, ClusterKeys(cluster.cfg.cluster_name), host, times), singletons, cluster.services,
                   times, PreemptionWatch(NoticeSource(source)) if source else None)

    def start(self) -> Self:
        self._session.start()
        if self._preemption is not None:
            self._preemption.start()
        self._thread.start()
        return self

    @property
    def waits_for(self) -> str:
        """Why this host takes no work; empty if it does."""
        return self._fault or self._session.waits_for

    @property
    def registration(self) -> int:
        """Revision of this host's registration under its name; 0 while it has none."""
        return self._session.view().registration

    @property
    def registered(self) -> bool:
        """Whether this host is registered under its name."""
        return bool(self.registration)

    @property
    def replaced(self) -> bool:
        """Whether an agent of this host that was started later does the work. This one must end."""
        return self._session.replaced.is_set()

    def close(self) -> None:
        """Ends the thread. The singletons run on, and the host stays registered until its lease ends: the next agent
        adopts both."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._singletons.close()
        if self._preemption is not None:
            self._preemption.close()
        self._session.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._times.agent_pass_s / 2) and not self.replaced:
            try:
                status = self._with_workers(self._singletons.look(self._session.view()))
                self._session.report(self._preemption.added_to(status) if self._preemption is not None else status)
                self._fault = ""
            except Exception as e:  # the next look may find what it needs; nobody else ends what is over
                if self._fault != (fault := f"its singletons cannot be looked after: {type(e).__name__}: {e}"):
                    log.exception("a look at the singletons of this host failed")
                self._fault = fault

    def _with_workers(self, status: HostStatus) -> HostStatus:
        """The report with this host's workers of Ray: they are no singletons, and a host that is to be emptied has
        something as long as one runs."""
        workers = {name: ServiceStatus(state=RunState.RUNNING, pid=record.pid, generation=record.generation)
                   for name in filter(job_of_ray_worker, self._services.names())
                   if (record := self._services.get(name)) is not None and record.running}
        return status.replace(services={**status.services, **workers}) if workers else status


def _end_compute_plane(cluster: Cluster, name: str) -> None:
    """Ends what a job's driver has started, which outlives a driver that is only restarted."""
    if job := job_of_driver(name):
        leftovers.sweep(JobPaths.of(cluster.of_job(job).cfg))


def _run_command(cluster: Cluster, name: str, arguments: Mapping[str, Any], generation: int) -> list[str]:
    """The command line of a job's run. Raises ElasticRLError for what this release cannot run, and while the cluster is
    taken down, when none must be started."""
    if not (job := job_of_driver(name)):
        raise ElasticRLError(f"this release does not know the singleton {name}", hint="use the leader's release here")
    if not cluster.paths.info.exists():
        raise ElasticRLError("the cluster is being taken down")
    return processes.python("elastic_rl.run_launcher", f"--job={job}", *cluster.location,
                            f"--submission={arguments['submission']}", f"--generation={generation}")
