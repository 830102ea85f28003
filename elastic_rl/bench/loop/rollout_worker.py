"""A process with a Ray cluster, that deploys the rollout role and asks it as the actor does: a worker of
``rollout_rate``."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from elastic_rl import config
from elastic_rl.bench.etcd import start_etcd
from elastic_rl.bench.loop.scripted_engine import SAMPLES, VERSION
from elastic_rl.bench.workers import serve as serve_worker
from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.data.samples import Prompt
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import GenerateFault, PromptRequest
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.roles.registry import ROLES
from elastic_rl.roles.role_clients import RoleClients
from elastic_rl.roles.rollout import RolloutRole
from elastic_rl.runtime.process import RAY_PRIORITY
from elastic_rl.runtime.waiting import wait_until

_GROUPS_PER_REQUEST = 16
_IN_FLIGHT = 8
"""Requests in flight for each replica."""
_START_S, _END_S = 120.0, 20.0
_STORE_BYTES = 512 << 20


class _Job:
    """The parts of a job that the role needs: etcd with a committed version, Ray, and Serve."""

    def __init__(self, folder: Path, engine: str, stack: contextlib.ExitStack) -> None:
        cfg = config.parse({"job": f"bench-{secrets.token_hex(3)}", "run_dir": str(folder)})
        path = ClusterPaths.of(cfg).secret
        path.parent.mkdir(parents=True, exist_ok=True)
        ClusterSecret.generate().save(path)
        endpoint, _ = start_etcd(folder, stack)
        keys = Keys(cfg.job)
        ctx = RunContext(config=cfg, etcd_endpoints=[endpoint], job=cfg.job, epoch=1, model_dir=str(folder),
                         host=own_address(), router_urls={ROLLOUT_POOL: engine})
        self.etcd = stack.enter_context(contextlib.closing(ctx.connect()))
        epoch = fencing.raise_epoch(self.etcd, keys, "bench").number
        self.etcd.put(keys.stream_head(Stream.POLICY), Version(
            stream=Stream.POLICY, number=VERSION, state=VersionState.COMMITTED, epoch=epoch).encode())
        self.ctx = ctx.model_copy(update={"epoch": epoch})
        self.term = fencing.begin_term(self.etcd, keys, epoch, "bench")
        self._start_ray(stack)

    def _start_ray(self, stack: contextlib.ExitStack) -> None:
        import ray
        from ray import serve

        os.environ |= RAY_PRIORITY  # as in a job
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False,
                 object_store_memory=_STORE_BYTES)
        stack.callback(ray.shutdown)
        serve.start(proxy_location="Disabled")
        stack.callback(serve.shutdown)

    def rate(self, replicas: int, requests: int, tokens: int) -> dict[str, float]:
        """See ``rollout_rate.Rate``. ``requests``: of all replicas; ``tokens``: of a response."""
        from ray import serve

        spec = ROLES["rollout"].of(self.ctx.config)
        serve.run(serve.deployment(RolloutRole).options(
            name=spec.name, num_replicas=replicas, max_ongoing_requests=spec.max_ongoing_requests,
            graceful_shutdown_timeout_s=_END_S, ray_actor_options={"num_cpus": spec.settings.cpus}).bind(self.ctx),
            name=spec.name, route_prefix=None)
        try:
            found = wait_until(lambda: found if len(found := members(self.etcd, self.ctx.keys, spec.name)) == replicas
                               else None, timeout_s=_START_S, what=f"{replicas} replicas of the rollout role")
            clients = RoleClients({spec.name: serve.get_app_handle(spec.name)}, self.ctx.config, lambda role: True,
                                  lambda: self.term)
            processes = [psutil.Process(member.info["pid"]) for member in found]
            with ThreadPoolExecutor(_IN_FLIGHT * replicas) as threads:
                def ask(count: int) -> int:
                    return sum(threads.map(lambda _: _ask(clients, tokens), range(count)))

                ask(_IN_FLIGHT * replicas)  # connections, imports
                began, own, cpu_s = time.perf_counter(), time.process_time(), _cpu_s(processes)
                brought = ask(requests)
                return {"tokens": brought, "seconds": time.perf_counter() - began,
                        "replica_cpu_s": _cpu_s(processes) - cpu_s, "caller_cpu_s": time.process_time() - own}
        finally:
            serve.delete(spec.name)
            wait_until(lambda: not members(self.etcd, self.ctx.keys, spec.name), timeout_s=_START_S,
                       what="the end of the replicas")


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for process in processes for times in [process.cpu_times()])


def _ask(clients: RoleClients, tokens: int) -> int:
    """The number of tokens that one request brought. Raises ElasticRLError."""
    asked = [PromptRequest(i, Prompt((5, 6, 7)), Sampling(tokens), SAMPLES) for i in range(_GROUPS_PER_REQUEST)]
    brought = 0
    for answers in clients.generate(asked, VERSION):
        for _, samples in answers:
            if isinstance(samples, GenerateFault):
                raise ElasticRLError(f"a group was not generated: {samples.why}")
            brought += sum(segment.size for sample in samples for segment in sample.segments)
    return brought


def main() -> None:
    with contextlib.ExitStack() as stack:
        jobs: list[_Job] = []

        def start(folder: str, engine: str) -> None:
            jobs.append(_Job(Path(folder), engine, stack))

        def rate(**asked: Any) -> Mapping[str, float]:
            return jobs[0].rate(**asked)

        serve_worker({"start": start, "rate": rate, "close": stack.close})


if __name__ == "__main__":
    main()
