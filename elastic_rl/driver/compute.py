"""The compute plane of one machine: Ray, the trainer groups, the engine pools with their routers, and the roles,
started, reconciled and closed together. Every process in it is a descendant of the driver and dies with it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import ray

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.coordinator.targets import JOB, pool_target, role_target, router_target
from elastic_rl.driver.etcd_patience import Stopped, patiently
from elastic_rl.driver.parts import PartRunner
from elastic_rl.driver.placement import uses_cuda
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.pool_removal import remove_pools_except
from elastic_rl.driver.ray_start import end_ray
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.driver.role_deployments import RoleDeployments, kill_replicas
from elastic_rl.driver.router_supervisor import RouterSupervisor
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.driver.trainer_group import TrainerGroup
from elastic_rl.engine.router import RouterProcess
from elastic_rl.errors import ComputePlaneLost, ConfigError, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.host.job_secrets import engine_key, engine_key_file, ray_token_file
from elastic_rl.host.paths import JobPaths
from elastic_rl.plugins.user_code import plain
from elastic_rl.roles.base import RoleSpec
from elastic_rl.roles.registry import ROLES
from elastic_rl.runtime.files import private_folder

log = logging.getLogger(__name__)

# Ray schedules by the number that it is given; roles, agents and engines mostly wait, so a small machine holds them.
_LOGICAL_CPUS = 256
_OBJECT_STORE_BYTES = 80 << 20
_POLL_S = 0.2
_RAY_CHECK_S = 5.0
_FOREIGN_S = 30.0
"""Foreign workers of a router are an event at most so often."""
_RAY_LOST_S = 30.0
"""Time without any node after which Ray counts as lost. Ray itself takes a while to see that one is gone."""


class ComputePlane:
    """Starts the parts and reconciles them. No pass waits for a part, and a fault of one stays its own: ``faults`` and
    ``waiting`` say what is wrong, and the next passes try again without end."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: Callable[[str], None],
                 pause: Callable[[float], bool]) -> None:
        """``report_phase``: called with the driver's phase before something that may take long, as progress.
        ``pause(seconds)``: waits, and returns whether the driver is to stop."""
        self.ctx, self.etcd, self._report_phase, self._pause = ctx, etcd, report_phase, pause
        self._paths, key = JobPaths.of(ctx.config), engine_key(ctx.config)
        self.routers = {name: RouterSupervisor(RouterProcess(
            host=ctx.host, log=self._paths.log(f"router-{name}"), key_file=partial(engine_key_file, ctx.config),
            request_timeout_s=pool.engine.request_timeout_s,
            sticky=name == ROLLOUT_POOL and ctx.config.rollout.plays_episodes), epoch=ctx.epoch, key=key)
            for name, pool in ctx.config.pool_settings(ctx.model_dir).items()}
        self.pools: dict[str, EnginePool] = {}
        self.trainers: dict[str, TrainerGroup] = {}
        """The trainer groups, by name."""
        self._shared: SharedGpus | None = None
        self.roles: RoleDeployments | None = None
        self._roles: Mapping[str, RoleSpec] = {}
        self._parts = PartRunner(self._report_part)
        self._router_restarts: dict[str, list[str]] = {name: [] for name in self.routers}
        self._foreign_at: dict[str, float] = {}
        """When it was last reported of a pool's router that it had a foreign worker, in monotonic seconds."""
        self._ray_checked_at = self._ray_seen_at = 0.0

    @property
    def faults(self) -> dict[str, str]:
        """The parts that fail, and why."""
        return self._parts.faults

    @property
    def waiting(self) -> dict[str, str]:
        """What parts wait for that do not fail."""
        found = {name: group.waiting for name, group in self.trainers.items()}
        if self.roles:
            found["roles"] = self.roles.waiting
        for pool in self.pools.values():
            found[pool_target(pool.name)] = pool.waiting
        return {part: text for part, text in found.items() if text and part not in self.faults}

    # -- start ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Returns when Ray runs and every part is being started. Raises Fenced, Stopped, and ConfigError when the model
        cannot be made."""
        cfg = self.ctx.config
        model = self._start_model()
        for router in self.routers.values():
            router.start()  # while Ray's processes start
        self._start_ray()
        if model is not None:
            self._await_model(model)
        self.ctx = self.ctx.model_copy(update={
            "router_urls": {name: router.url for name, router in self.routers.items()}})
        self._shared = SharedGpus(cfg.trainer.ranks) if cfg.colocated and uses_cuda(cfg.device) else None
        for group in cfg.trainer_groups:
            own = self.ctx.of_group(group)
            self.trainers[group.name] = TrainerGroup(own, self.etcd, own.save(
                self._paths.context(group.name)), shared=self._shared if own.config.colocated else None)
        self.pools = {name: EnginePool(self.ctx, self.etcd, name, unroute=router.unroute, shared=self._shared
                                       if self.ctx.pool(name).colocated else None)
                      for name, router in self.routers.items()}
        patiently(self._take_over, pause=self._pause, waiting=lambda: self._report_phase("waiting for etcd"))
        self._roles = {name: spec for name, spec in ROLES.items() if spec.cls.is_wanted(cfg)}
        self.roles = RoleDeployments(self.ctx, self._roles)
        with contextlib.suppress(EtcdUnavailable):  # the passes that follow do it
            self.reconcile()
        self.roles.start()  # after the first pass: the trainer and the engines take longer to start

    def _take_over(self) -> None:
        remove_pools_except(self.etcd, self.ctx.keys, self.ctx.epoch, self.pools)
        for pool in self.pools.values():
            pool.take_over()
        for request in open_requests(self.etcd, self.ctx.keys).values():
            if request.target != JOB:  # this driver starts every part of it
                acknowledge(self.etcd, self.ctx.keys, request, self._guard)

    def _start_ray(self) -> None:
        """Starts Ray's processes. Ray gives them 30 seconds, a constant of its own, which a busy machine may exceed; so
        it is tried again, with backoff and without end. Raises Stopped."""
        cfg, budget, ray_dir = self.ctx.config, StartBudget(), self._paths.ray
        while True:
            shutil.rmtree(ray_dir, ignore_errors=True)  # left by a driver that was killed, or by the last try
            try:
                private_folder(ray_dir.parent)
                # Ray reads it when it starts, and its processes inherit it.
                os.environ["RAY_AUTH_TOKEN_PATH"] = str(ray_token_file(cfg, self.ctx.epoch))
                ray.init(address="local", namespace=cfg.job, num_cpus=_LOGICAL_CPUS, include_dashboard=False,
                         object_store_memory=_OBJECT_STORE_BYTES, _temp_dir=str(ray_dir),
                         _node_ip_address=self.ctx.host, log_to_driver=False, logging_level=logging.WARNING)
                self._parts.note("ray", "")
                self._ray_seen_at = time.monotonic()
                return
            except Exception as e:  # Ray raises this very class for the timeout
                end_ray()
                budget = budget.after_failure(time.monotonic(), jitter=random.random())
                why = str(e) if isinstance(e, ElasticRLError) else f"{type(e).__name__}: {e}"  # with what to do
                self._parts.note("ray", f"it does not start: {why}")
            while not budget.open(time.monotonic()):
                self._report_phase("starting Ray again")
                if self._pause(_POLL_S):
                    raise Stopped

    @property
    def _model_log(self) -> Path:
        return self._paths.log("model")

    def _start_model(self) -> subprocess.Popen[bytes] | None:
        """Starts to make the model that the run starts from, unless the configuration names one or it is there. In a
        process of its own: importing transformers takes seconds, in which this one would miss its heartbeats."""
        if self.ctx.config.model.path or (Path(self.ctx.model_dir) / "config.json").exists():
            return None
        return processes.spawn(processes.python("elastic_rl.data.tiny_model",
                                                str(self._paths.context())), log=self._model_log)

    def _await_model(self, model: subprocess.Popen[bytes]) -> None:
        """Waits for the model, however slow the machine is. Raises ConfigError and Stopped."""
        self._report_phase("making the model")
        while model.poll() is None:
            if self._pause(_POLL_S):
                raise Stopped
        if model.returncode:
            raise ConfigError(f"the model could not be made: exit code {model.returncode}",
                              hint=f"see {self._model_log}")

    # -- reconcile --------------------------------------------------------------------------------------------------
    def reconcile(self) -> None:
        """One pass. Raises Fenced when a newer epoch has begun, EtcdUnavailable when etcd does not answer, and
        ComputePlaneLost when Ray has no node left, or has given away the GPUs in use: only another driver can build it
        again."""
        roles = self.roles
        assert roles
        self._parts.run("ray", self._check_ray)
        if time.monotonic() - self._ray_seen_at > _RAY_LOST_S:
            raise ComputePlaneLost(f"Ray has had no node for {_RAY_LOST_S:g} s", hint="see the job's folder ray/")
        requests = open_requests(self.etcd, self.ctx.keys)
        if self._shared is not None:
            self._parts.run("shared GPUs", self._shared.reconcile)
            if self._shared.moved:
                raise ComputePlaneLost(f"trainer and engines use GPUs that are not held any more: {self._shared.moved}")
        for name, group in self.trainers.items():
            self._parts.run(name, partial(group.reconcile, requests.get(name)))
        for name, pool in self.pools.items():
            self._parts.run(pool_target(name), partial(self._reconcile_pool, name, pool, requests))
            self._parts.note(router_target(name), self.routers[name].fault)
            self._parts.run(f"events of {router_target(name)}", partial(self._report_router, name))
        self._parts.note("roles", roles.fault)
        for name in self._roles:
            if (request := requests.get(role_target(name))) is not None:
                self._parts.run(role_target(name), partial(self._restart_role, name, request))

    def _reconcile_pool(self, name: str, pool: EnginePool, requests: Mapping[str, RestartRequest]) -> None:
        self.routers[name].observe(pool.reconcile(requests))

    def _check_ray(self) -> None:
        now = time.monotonic()
        if now - self._ray_checked_at < _RAY_CHECK_S:
            return
        self._ray_checked_at = now
        if not any(node["Alive"] for node in ray.nodes()):
            raise ComputePlaneLost("Ray has no node", hint="its processes have ended")
        self._ray_seen_at = now

    def _restart_role(self, name: str, request: RestartRequest) -> None:
        log.warning("restarting role %s: %s", name, request.reason)
        replicas = members(self.etcd, self.ctx.keys, name)
        kill_replicas(name)
        deregister(self.etcd, self.ctx.keys, replicas)
        acknowledge(self.etcd, self.ctx.keys, request, self._guard)

    @property
    def _guard(self) -> Compare:
        return fencing.epoch_guard(self.ctx.keys, self.ctx.epoch)

    # -- reports ----------------------------------------------------------------------------------------------------
    def _report_part(self, part: str, message: str, failed: bool) -> None:
        """An event for people; the leader makes the alert from ``faults``, so that it lasts as long as the fault."""
        with contextlib.suppress(EtcdUnavailable):
            self._emit(event_kinds.COMPUTE_FAILING if failed else event_kinds.COMPUTE_WORKING, part,
                       f"{part}: {message}", severity=Severity.WARNING if failed else Severity.INFO)

    def _report_router(self, name: str) -> None:
        reasons = self._router_restarts[name]
        reasons += self.routers[name].restarts()
        if reasons:
            times = f"; {len(reasons)} times" if len(reasons) > 1 else ""
            self._emit(event_kinds.ROUTER_RESTARTED, router_target(name),
                       f"the router of pool {name} is restarted: {reasons[-1]}{times}", severity=Severity.WARNING)
            reasons.clear()
        urls, now = self.routers[name].foreign(), time.monotonic()
        if urls and now - self._foreign_at.get(name, float("-inf")) >= _FOREIGN_S:
            self._emit(event_kinds.ROUTER_FOREIGN_WORKER, router_target(name), f"the router of pool {name} listed "
                       f"{', '.join(plain(url, 100) for url in urls[-4:])}, which is no engine of the job and may have "
                       "answered requests; it was taken out", severity=Severity.WARNING)
            self._foreign_at[name] = now

    def _emit(self, kind: EventKind, subject: str, message: str, *, severity: Severity) -> None:
        fencing.emit(self.etcd, self.ctx.keys, self.ctx.epoch, kind, subject, message, severity=severity)

    # -- end --------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Ends everything, the roles first: a training loop that is still alive would report the end of the trainer as
        a failure. What fails to end does not keep the others from it."""
        with contextlib.ExitStack() as last:
            last.callback(shutil.rmtree, self._paths.ray, ignore_errors=True)
            for router in self.routers.values():
                last.callback(router.stop)
            if ray.is_initialized():
                last.callback(ray.shutdown)
            if self._shared:
                last.callback(self._shared.close)
            for group in self.trainers.values():
                last.callback(group.close)
            for pool in self.pools.values():
                last.callback(pool.close)
            for end in (*(pool.end for pool in self.pools.values()), *(group.end for group in self.trainers.values())):
                last.callback(end)  # they end at the same time
            if self.roles:
                last.callback(self.roles.close)

