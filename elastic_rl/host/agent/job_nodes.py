"""A DCS node on this host for each job of its cluster that is queued or runs, for the host's agent.

The host that a job is submitted on has its node before the job's record is written (``Cluster.admit``); the others
follow what etcd says. The node of a job that has ended runs on, since it may be the only one with some of its versions.
A job that is taken off the cluster loses its node, and its chunks stay: that a record is missing may be the fault of an
etcd that was restored from an older copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Self

from elastic_rl.errors import ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import job_settings
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import JobState
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.service_files import job_of_node
from elastic_rl.net.cluster_secret import ClusterSecret

log = logging.getLogger(__name__)

_PASS_S = 2.0
"""Longest time between two passes; a job that has changed starts one at once."""
_PAUSE_S = 5.0
"""Pause after an error, and before another try of what could not be done."""
_JOIN_S = 5.0


class JobNodes:
    """Starts and ends the nodes from ``start`` until ``close``, in a thread of its own: etcd may be away. The nodes run
    on after that; the agent restarts those that end as it does any service."""

    def __init__(self, cluster: Callable[[], Cluster], etcd: EtcdClient, is_registered: Callable[[], bool]) -> None:
        """``cluster``: the cluster with its present settings. ``etcd``: a client for this object, which closes it.
        ``is_registered``: whether this host has its name; another machine of that name has the nodes else."""
        self.waits_for = ""
        """Why a job has no node here; empty while each has one."""
        self._cluster, self._etcd = cluster, etcd
        self._keys = ClusterKeys(cluster().cfg.cluster_name)
        self._followed: dict[str, tuple[int, int]] = {}
        """What has been followed, by job: the revision at which its state was created, and the submission."""
        self._is_registered = is_registered
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-nodes", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._etcd.close()

    def _run(self) -> None:
        prefix = self._keys.job_states_prefix()
        with Mirror(self._etcd, prefix, _decode) as states:
            while not self._stopping.is_set():
                try:
                    found = {key.removeprefix(prefix): state for key, state in states.read(_PASS_S).items()}
                    self._say("; ".join(self._follow(found)) if self._is_registered() else
                              "the DCS nodes of jobs wait for this host to be registered")
                except (ElasticRLError, OSError) as e:
                    self._say(f"the jobs of the cluster cannot be followed: {type(e).__name__}: {e}")
                except Exception as e:  # nobody else starts the nodes of this host
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
        served = {job for record in cluster.services.all() if (job := job_of_node(record.name))}
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

    def _is_gone(self, job: str) -> bool:
        """Whether no record of the job is left; the leader may not have decided about one that is there."""
        return self._etcd.get(self._keys.job(job)) is None


def _decode(kv: KeyValue) -> tuple[JobState, int] | None:
    """The state of a job, and the revision at which it was created; None for one that cannot be read."""
    state = readable_one(kv, JobState)
    return (state, kv.create_revision) if state is not None else None
