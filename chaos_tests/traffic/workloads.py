"""The traffic of scenarios by its names: what goes on on a cluster of the run's own while faults happen to its job.

``scales``, ``drains`` and ``restarts`` change what the job runs on. A scenario has them only where its faults bear
that: one that kills an engine waits for as many as the job's settings say, so ``scales`` goes no lower, and no number
of a pool may be written by a fault (``racing_requests``) that clients read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from chaos_tests.event_log import EventLog
from chaos_tests.model import models
from chaos_tests.target import Target
from chaos_tests.traffic.cluster_changes import ApiTarget
from chaos_tests.traffic.job_clients import HostSpecs, PoolSizeClients, Requests, Silences
from chaos_tests.traffic.pool_changes import POOL
from chaos_tests.traffic.registrations import Registrations, own_server
from chaos_tests.traffic.traffic import Traffic
from chaos_tests.traffic.watchers import Watcher
from elastic_rl.coordinator.api import tls
from elastic_rl.host.job_secrets import service_access

_SELDOM_S = 60.0
"""Pause between requests that take the job some time."""


class During(StrEnum):
    """How long traffic goes on."""

    RUN = "run"
    """Its clients go on from the begin of the run to its end."""
    JOB = "job"
    """It has something of its own beside the job: from the job's first step until the job is about to be stopped."""
    FAULTS = "faults"
    """It changes what the job runs on, and may leave it short of something for a moment: from the job's first step, as
    a job that has not begun is only kept from it, until the last fault is over."""


@dataclass(frozen=True)
class Workload:
    make: Callable[[Target, int, EventLog], Traffic]
    """Makes the traffic of a target, a seed and the log of the run."""
    what: str
    model: str = ""
    """The sequential model that judges what its clients do; "" where they do nothing that has one."""
    during: During = During.RUN


def _api(target: Target) -> ApiTarget:
    info = target.info
    return ApiTarget({f"replica {n}": url for n, url in enumerate(info.coordinators)}, target.cfg.job,
                     {"Authorization": f"Bearer {info.token('operator')}"}, tls.trust(info.ca_file), target.hosts)


def _engines(target: Target) -> int:
    return target.cfg.rollout.engines


def _programs(target: Target, seed: int, log: EventLog) -> Traffic:
    from chaos_tests.traffic.stream_programs import StreamPrograms  # torch: the list of scenarios needs none
    return StreamPrograms(partial(service_access, target.cfg, target.info.etcd_endpoints), log=log)


WORKLOADS: Mapping[str, Workload] = {
    "pools": Workload(lambda t, seed, log: PoolSizeClients(_api(t), seed, [_engines(t)], log=log),
                      "clients read the desired number of the pool, and write the one that is there", models.POOL),
    "silences": Workload(lambda t, seed, log: Silences(_api(t), seed, log=log),
                         "clients silence alerts that there are not, each request twice, and end the silences",
                         models.CREATED),
    "operations": Workload(lambda t, seed, log: Requests(
        _api(t), seed, f"pools/{POOL}/scale", {"desired": _engines(t)}, log=log),
        "clients begin operations that change nothing, each request twice, and follow them", models.OPERATION),
    "watches": Workload(lambda t, seed, log: Watcher(t.reader, t.keys.root, log=log),
                        "a watch of all that etcd has of the job"),
    "programs": Workload(_programs, "programs publish and pull a stream of their own on the job's checkpoint service",
                         models.STREAM, During.JOB),
    "scales": Workload(lambda t, seed, log: PoolSizeClients(
        _api(t), seed, [_engines(t), _engines(t) + 1], writes=0.05, log=log),
        "clients scale the pool out by one engine, and in again", models.POOL, During.FAULTS),
    "hosts": Workload(lambda t, seed, log: HostSpecs(_api(t), seed, log=log),
                      "clients cordon test hosts, and have them used again", models.NUMBER, During.FAULTS),
    "drains": Workload(lambda t, seed, log: Requests(
        _api(t), seed, "engines/{engine}/drain", {"replace": True}, pause_s=_SELDOM_S, log=log),
        "clients have engines replaced", models.OPERATION, During.FAULTS),
    "registers": Workload(lambda t, seed, log: Registrations(_api(t), seed, lambda: own_server(t.cfg), log=log),
                          "a client registers a server of its own as an engine, and takes it out again",
                          models.OPERATION, During.FAULTS),
    "restarts": Workload(lambda t, seed, log: Requests(
        _api(t), seed, "restarts", {"target": "driver", "reason": "chaos"}, pause_s=_SELDOM_S, log=log),
        "clients have the driver restarted", models.OPERATION, During.FAULTS),
}
