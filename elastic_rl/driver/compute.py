"""The compute plane of one machine: Ray, the router, the trainer group, the engine pool and the roles, started,
reconciled and closed together. Every process in it is a descendant of the driver and dies with it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray import serve

from elastic_rl import runtime
from elastic_rl.coordinator.targets import JOB, TRAINER, role_target
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.driver.trainer_group import TrainerGroup
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.errors import ConfigError, TrainerFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.roles.base import RoleSpec
from elastic_rl.roles.registry import ROLES

log = logging.getLogger(__name__)

# Ray schedules by the number that it is given; roles, agents and engines mostly wait, so a small machine holds them.
_LOGICAL_CPUS = 256
_OBJECT_STORE_BYTES = 80 << 20
_RAY_TRIES = 3


class ComputePlane:
    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: Callable[[str], None]) -> None:
        """``report_phase``: called with the driver's phase before something that may take long, as progress."""
        self.ctx, self.etcd, self._report_phase = ctx, etcd, report_phase
        self.router = RouterProcess(host=ctx.host, log=ctx.config.log_dir / "router.log")
        self.pool: EnginePool | None = None
        self.trainer: TrainerGroup | None = None

    def start(self) -> None:
        cfg = self.ctx.config
        model = self._start_model()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="router") as thread:  # while Ray's processes start
            router = thread.submit(self.router.start)
            self._start_ray()
            router.result()
        if model is not None:
            self._await_model(model)
        self.ctx = self.ctx.model_copy(update={"router_url": self.router.url})
        context_file = cfg.cluster_dir / "context.json"
        self.ctx.save(context_file)
        self.trainer = TrainerGroup(self.ctx, self.etcd, context_file, self._report_phase)
        self.pool = EnginePool(self.ctx, self.etcd, self._report_phase)
        self.pool.take_over()
        for request in open_requests(self.etcd, self.ctx.keys).values():
            if request.target != JOB:  # this driver starts every part of it
                acknowledge(self.etcd, self.ctx.keys, request, self._guard)
        self.reconcile()
        self._deploy_roles()

    def _start_ray(self) -> None:
        """Starts Ray's processes. Ray gives them 30 seconds, a constant of its own, which a busy machine may exceed."""
        cfg = self.ctx.config
        for tries_left in reversed(range(_RAY_TRIES)):
            shutil.rmtree(cfg.ray_dir, ignore_errors=True)  # left by a driver that was killed, or by the last try
            try:
                ray.init(address="local", namespace=cfg.job, num_cpus=_LOGICAL_CPUS, include_dashboard=False,
                         object_store_memory=_OBJECT_STORE_BYTES, _temp_dir=str(cfg.ray_dir),
                         _node_ip_address=self.ctx.host, log_to_driver=False, logging_level=logging.WARNING)
                return
            except Exception as e:  # Ray raises this very class for the timeout
                ray.shutdown()
                if not tries_left:
                    raise
                log.warning("Ray did not start, %d tries left: %s", tries_left, e)
                self._report_phase("starting Ray again")

    @property
    def _model_log(self) -> Path:
        return self.ctx.config.log_dir / "model.log"

    def _start_model(self) -> subprocess.Popen[bytes] | None:
        """Starts to make the model that the run starts from, unless the configuration names one or it is there. In a
        process of its own: importing transformers takes seconds, in which this one would miss its heartbeats."""
        if self.ctx.config.model.path or (Path(self.ctx.model_dir) / "config.json").exists():
            return None
        return processes.spawn(processes.python("elastic_rl.data.tiny_model",
                                                str(self.ctx.config.cluster_dir / "run.json")), log=self._model_log)

    def _await_model(self, model: subprocess.Popen[bytes]) -> None:
        self._report_phase("making the model")
        runtime.wait_until(lambda: model.poll() is not None, timeout_s=self.ctx.config.engine.start_timeout_s,
                           what=f"the model (log: {self._model_log})")
        if model.returncode:
            raise ConfigError(f"the model could not be made: exit code {model.returncode}",
                              hint=f"see {self._model_log}")

    def _deploy_roles(self) -> None:
        """Deploys all roles at once and returns when they run. Each has an application of its own, so that one can be
        replaced alone; Serve knows all of them before the first replica starts, so a role may look up the others."""
        serve.start(proxy_location="Disabled")  # roles are called through handles; nothing listens for HTTP
        serve.run_many([serve.RunTarget(self._deployment(spec), name=spec.name, route_prefix=None)
                        for spec in ROLES.values()])

    def _deployment(self, spec: RoleSpec) -> serve.Application:
        return serve.deployment(spec.cls).options(
            name=spec.name, num_replicas=spec.replicas, max_ongoing_requests=spec.max_ongoing_requests,
            health_check_period_s=1.0, health_check_timeout_s=10.0,
            graceful_shutdown_timeout_s=5.0, ray_actor_options={"num_cpus": spec.num_cpus}).bind(self.ctx)

    def reconcile(self) -> None:
        """One pass. Raises Fenced when a newer epoch has begun, TrainerFailed when the trainer's restarts are used up.
        """
        assert self.pool and self.trainer
        requests = open_requests(self.etcd, self.ctx.keys)
        self._keep_router()
        if (request := requests.get(TRAINER)) is not None:
            self.trainer.restart(request)
        self.trainer.reconcile()
        self.pool.reconcile(requests)
        for name in ROLES:
            if (request := requests.get(role_target(name))) is not None:
                self._restart_role(name, request)
        if self.trainer.failures > self.ctx.config.trainer.max_restarts:
            raise TrainerFailed(f"the trainer agent ended {self.trainer.failures} times",
                                hint=f"see {self.ctx.config.log_dir}/trainer.log")

    def _restart_role(self, name: str, request: RestartRequest) -> None:
        """Kills every replica of a role; Ray Serve starts new ones, and handles that others hold stay valid."""
        log.warning("restarting role %s: %s", name, request.reason)
        replicas = members(self.etcd, self.ctx.keys, name)
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith(f"SERVE_REPLICA::{name}#"):
                with contextlib.suppress(ValueError):  # the replica has ended meanwhile
                    ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        deregister(self.etcd, self.ctx.keys, replicas)
        acknowledge(self.etcd, self.ctx.keys, request, self._guard)

    @property
    def _guard(self) -> Compare:
        return fencing.epoch_guard(self.ctx.keys, self.ctx.epoch)

    def _keep_router(self) -> None:
        """Restarts a router that died on the same port, and adds the engines that etcd calls ready."""
        if self.router.alive():
            return
        fencing.emit(self.etcd, self.ctx.keys, self.ctx.epoch, "router.restarted", "router",
                     "the router ended; restarting it", severity=Severity.WARNING)
        self.router.start()
        client = RouterClient(self.router.url)
        items, _ = self.etcd.range(self.ctx.keys.engines_prefix())
        for engine, _ in readable(items, Engine):
            if engine.state is EngineState.READY:
                client.add(engine.url, timeout_s=10.0)

    def close(self) -> None:
        """Ends everything, the roles first: a training loop that is still alive would report the end of the trainer as
        a failure."""
        if ray.is_initialized():
            serve.shutdown()
        if self.pool:
            self.pool.close()
        if self.trainer:
            self.trainer.close()
        if ray.is_initialized():
            ray.shutdown()
        self.router.stop()
        shutil.rmtree(self.ctx.config.ray_dir, ignore_errors=True)
