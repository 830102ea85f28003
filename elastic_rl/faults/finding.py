"""Where the processes of a job are, for the faults that strike them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import psutil

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, command
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER, compute_services
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until

ETCD = "etcd-0"
"""The service of the first member of etcd, the only one on one host."""
_PROGRAMS: Mapping[str, str] = {RAY_HEAD: "gcs_server", RAY_WORKER: "raylet"}
"""The process with which each of the two Rays of a host is lost."""


def await_service(context: FaultContext, name: str) -> int:
    """Pid of a service of the cluster on this host, once it runs. Raises DeadlineExceeded and InjectionEnded."""
    return wait_until(lambda: context.service(name), timeout_s=INJECT_TIMEOUT_S, what=f"the service {name}")


def engines_of_pool(context: FaultContext, state: EngineState = EngineState.READY, pool: str = ROLLOUT_POOL
                    ) -> list[Engine]:
    """Engines of the pool's own in a state, with their servers' processes, the oldest first. Raises EtcdUnavailable."""
    found = [e for e in context.engines(pool) if e.state is state and not e.external and e.pid]
    return sorted(found, key=lambda e: e.started_at)


def schedulers_of(pid: int) -> list[int]:
    """The processes of an engine's server that have its weights, one for each rank of tensor parallelism; none of one
    that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)
                if "sglang::scheduler" in command(child) and runs(child)]
    return []


def trainer_agents(ranks: Iterable[int]) -> list[int]:
    """The agents that have started these ranks."""
    found = dict[int, None]()
    for pid in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {parent.pid: None for parent in psutil.Process(pid).parents()
                      if "elastic_rl.trainer.group.agent" in command(parent)}
    return [*found]


def ray_process(context: FaultContext, service: str) -> int:
    """Pid of the GCS of Ray's head, or of the raylet of its worker, by the name of the service; 0 where there is none
    now."""
    record = compute_services(JobPaths.of(context.cfg)).get(service)
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(record.pid).children() if record is not None and record.pid else []:
            if child.name() == _PROGRAMS[service] and runs(child):
                return child.pid
    return 0
