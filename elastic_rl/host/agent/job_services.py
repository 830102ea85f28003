"""What this host runs for each job of its cluster, for the host's agent: a DCS node for one that is queued or runs, and
a worker of its Ray while it runs on another host.

The host that a job is submitted on has its node before the job's record is written (``Cluster.admit``); the others
follow what etcd says. The node of a job that has ended runs on, since it may be the only one with some of its versions.
A job that is taken off the cluster loses its node, and its chunks stay: that a record is missing may be the fault of an
etcd that was restored from an older copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Self

from elastic_rl.errors import ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import job_settings
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import HostPhase, HostState, JobState, RayHead
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.ray_node import RayNode
from elastic_rl.host.service_files import job_of_node, job_of_ray_worker, ray_worker_service
from elastic_rl.net.cluster_secret import ClusterSecret

log = logging.getLogger(__name__)

_PASS_S = 2.0
"""Longest time between two passes; a job that has changed starts one at once."""
_PAUSE_S = 5.0
"""Pause after an error, and before another try of what could not be done."""
_JOIN_S = 5.0
_HAND_OVER_S = 10.0
"""Time from the end of a drain's until workers of Ray are ended: for engines to hand their requests over."""
_START_S, _MISSING_S = 180.0, 10.0
"""A worker that has not started everything, or has lacked a process, for so long is started again."""


class JobServices:
    """Starts and ends them from ``start`` until ``close``, in a thread of its own: etcd may be away. They run on after
    that; the agent restarts those that end as it does any service."""

    def __init__(self, cluster: Callable[[], Cluster], etcd: EtcdClient, is_registered: Callable[[], bool]) -> None:
        """``cluster``: the cluster with its present settings. ``etcd``: a client for this object, which closes it.
        ``is_registered``: whether this host has its name; another machine of that name has the services else."""
        self.waits_for = ""
        """Why a job lacks something here; empty while none does."""
        self._cluster, self._etcd = cluster, etcd
        self._keys = ClusterKeys(cluster().cfg.cluster_name)
        self._followed: dict[str, tuple[int, int]] = {}
        """What has been followed, by job: the revision at which its state was created, and the submission."""
        self._is_registered = is_registered
        self._ill: dict[str, tuple[tuple[int, str], float]] = {}
        """For each job the pid of its worker of Ray, what that lacks, and the monotonic seconds at which this was
        seen."""
        self._overdue: tuple[float, float] | None = None
        """The drain whose time is over, and the monotonic seconds at which this was seen."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-services", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._etcd.close()

    def _run(self) -> None:
        keys, name = self._keys, self._cluster().host.name
        jobs, ray = keys.job_states_prefix(), keys.ray_heads_prefix()
        with (Mirror(self._etcd, jobs, _decode) as states,
              Mirror(self._etcd, ray, lambda kv: readable_one(kv, RayHead)) as ray_heads,
              Mirror(self._etcd, keys.host_state(name), lambda kv: readable_one(kv, HostState)) as hosts):
            while not self._stopping.is_set():
                try:
                    found = {key.removeprefix(jobs): state for key, state in states.read(_PASS_S).items()}
                    heads = {key.removeprefix(ray): head for key, head in ray_heads.read(0.0).items()}
                    here = hosts.read(0.0).get(keys.host_state(name))
                    if self._is_registered():
                        problems = self._follow(found) + self._join(self._wanted(found, heads, here), found, heads)
                        self._say("; ".join(problems))
                    else:
                        self._say("what this host runs for jobs waits for it to be registered")
                except (ElasticRLError, OSError) as e:
                    self._say(f"the jobs of the cluster cannot be followed: {type(e).__name__}: {e}")
                except Exception as e:  # nobody else starts these services of this host
                    log.exception("a pass over the jobs of the cluster failed")
                    self._say(f"the jobs of the cluster cannot be followed: {type(e).__name__}: {e}")
                if self.waits_for:
                    self._stopping.wait(_PAUSE_S)

    def _say(self, waits_for: str) -> None:
        if waits_for and waits_for != self.waits_for:
            log.warning("%s", waits_for)
        self.waits_for = waits_for

    def _follow(self, states: Mapping[str, tuple[JobState, int]]) -> list[str]:
        """Starts and ends the nodes that differ from the jobs; returns what could not be done, and why. Raises
        EtcdUnavailable and OSError."""
        cluster, problems = self._cluster(), list[str]()
        served = {job for name in cluster.services.names() if (job := job_of_node(name))}
        for job, (state, created) in sorted(states.items(), key=itemgetter(0)):
            if state.phase.ended or job in served and self._followed.get(job) == (created, state.submission):
                continue
            try:
                if (found := self._etcd.get(self._keys.job(job))) is None:
                    continue
                secret, record = ClusterSecret.read(cluster.paths.secret), job_settings.read_record(found.value, job)
                if job in served and self._followed.get(job, (created, 0))[0] != created:
                    cluster.stop_serving(job, lambda: True)  # it was taken off the cluster, and is another one now
                if cluster.serve(job_settings.opened(record.settings, job, secret, cluster.cfg), record):
                    self._followed[job] = created, state.submission
                else:
                    problems.append(f"job {job} has no DCS node here: another command starts or stops the cluster")
            except EtcdUnavailable:
                raise
            except (ElasticRLError, OSError) as e:
                problems.append(f"job {job} has no DCS node here: {e}")
        for job in sorted(served - states.keys()):
            self._followed.pop(job, None)
            cluster.stop_serving(job, partial(self._is_gone, job))
        return problems

    def _wanted(self, states: Mapping[str, tuple[JobState, int]], heads: Mapping[str, RayHead], here: HostState | None
                ) -> dict[str, RayHead]:
        """The heads on other hosts that this host is to have a worker of. One that is to be emptied keeps its workers
        until the drivers have moved what is on them, or the time for that is over. One that is not ready starts none:
        it is cordoned, or what it had may still be ending."""
        cluster = self._cluster()
        name, phase = cluster.host.name, here.phase if here is not None else None
        if here is not None and (phase is HostPhase.LEFT or self._is_over(here)):
            return {}
        return {job: head for job, head in heads.items()
                if head.host != name and job in states and states[job][0].phase.live and not cluster.of_job(job).run.pid
                and (phase is HostPhase.READY or cluster.services.get(ray_worker_service(job)) is not None)
                and (here is None or not here.drain_at or head.left.get(name) != here.drain_at)}

    def _is_over(self, here: HostState) -> bool:
        """Whether the time of the drain is over, and that in which the drivers have engines hand their requests over.
        """
        if not here.drain_overdue:
            self._overdue = None
            return False
        now = time.monotonic()
        if self._overdue is None or self._overdue[0] != here.drain_at:
            self._overdue = here.drain_at, now
        return now - self._overdue[1] >= _HAND_OVER_S

    def _join(self, wanted: Mapping[str, RayHead], states: Mapping[str, tuple[JobState, int]],
              heads: Mapping[str, RayHead]) -> list[str]:
        """Starts and ends workers, so that there is one of each wanted head; returns what could not be done, and why.
        Raises EtcdUnavailable and OSError."""
        cluster, problems = self._cluster(), list[str]()
        for job, head in sorted(wanted.items()):
            try:
                if (worker := cluster.join_ray(job, head)) is not None:
                    self._examine(job, worker)
                else:
                    problems.append(f"this host is not in the Ray of job {job}: another command starts or stops the "
                                    "cluster")
            except (ElasticRLError, OSError) as e:
                problems.append(f"this host is not in the Ray of job {job}: {e}")
        joined = {job for name in cluster.services.names() if (job := job_of_ray_worker(name))}
        for job in sorted(joined - wanted.keys()):
            is_known = job in heads and job in states and states[job][0].phase.known  # else by a newer release
            if is_known or self._etcd.get(self._keys.ray_head(job)) is None or self._is_gone(job):
                self._ill.pop(job, None)
                cluster.leave_ray(job)
        return problems

    def _examine(self, job: str, worker: RayNode) -> None:
        """Has a worker started again that has not worked for long: ``ray start`` does not end with what it lacks."""
        lacks = "" if not worker.alive() else "all" if not worker.is_complete() else ", ".join(sorted(worker.missing()))
        if not lacks:
            self._ill.pop(job, None)
            return
        now, ill = time.monotonic(), (worker.pid, lacks)
        found, since = self._ill.setdefault(job, (ill, now))
        if found != ill:
            self._ill[job] = ill, now
        elif now - since >= (_START_S if lacks == "all" else _MISSING_S):
            log.warning("the worker of the Ray of job %s lacks %s: it is started again", job, lacks)
            del self._ill[job]
            self._cluster().restart_ray(job)

    def _is_gone(self, job: str) -> bool:
        """Whether no record of the job is left; the leader may not have decided about one that is there."""
        return self._etcd.get(self._keys.job(job)) is None


def _decode(kv: KeyValue) -> tuple[JobState, int] | None:
    """The state of a job, and the revision at which it was created; None for one that cannot be read."""
    state = readable_one(kv, JobState)
    return (state, kv.create_revision) if state is not None else None
