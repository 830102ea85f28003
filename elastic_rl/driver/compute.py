"""The compute plane of one machine: Ray, the router, the trainer group, the engine pool and the roles, started,
reconciled and closed together. Every process in it is a descendant of the driver and dies with it."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import ray

from elastic_rl.coordinator.targets import JOB, TRAINER, pool_target, role_target
from elastic_rl.driver.etcd_patience import Stopped, patiently
from elastic_rl.driver.parts import PartRunner
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.driver.role_deployments import RoleDeployments, kill_replicas
from elastic_rl.driver.router_supervisor import RouterSupervisor
from elastic_rl.driver.trainer_group import TrainerGroup
from elastic_rl.engine.router import RouterProcess
from elastic_rl.errors import ComputePlaneLost, ConfigError, EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.roles.base import RoleSpec
from elastic_rl.roles.registry import ROLES

log = logging.getLogger(__name__)

# Ray schedules by the number that it is given; roles, agents and engines mostly wait, so a small machine holds them.
_LOGICAL_CPUS = 256
_OBJECT_STORE_BYTES = 80 << 20
_POLL_S = 0.2
_RAY_CHECK_S = 5.0
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
        self.router = RouterSupervisor(RouterProcess(host=ctx.host, log=ctx.config.log_dir / "router.log"),
                                       epoch=ctx.epoch)
        self.pool: EnginePool | None = None
        self.trainer: TrainerGroup | None = None
        self.roles: RoleDeployments | None = None
        self._roles: Mapping[str, RoleSpec] = {}
        self._parts = PartRunner(self._report_part)
        self._router_restarts: list[str] = []
        self._ray_checked_at = self._ray_seen_at = 0.0

    @property
    def faults(self) -> dict[str, str]:
        """The parts that fail, and why."""
        return self._parts.faults

    @property
    def waiting(self) -> dict[str, str]:
        """What parts wait for that do not fail."""
        found: dict[str, str] = {}
        if self.trainer:
            found[TRAINER] = self.trainer.waiting
        if self.roles:
            found["roles"] = self.roles.waiting
        if self.pool:
            found[pool_target(self.pool.name)] = self.pool.waiting
        return {part: text for part, text in found.items() if text and part not in self.faults}

    # -- start ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Returns when Ray runs and every part is being started. Raises Fenced, Stopped, and ConfigError when the model
        cannot be made."""
        cfg = self.ctx.config
        model = self._start_model()
        if cfg.uses_engines:
            self.router.start()  # while Ray's processes start
        self._start_ray()
        if model is not None:
            self._await_model(model)
        self.ctx = self.ctx.model_copy(update={"router_url": self.router.url if cfg.uses_engines else ""})
        context_file = cfg.cluster_dir / "context.json"
        self.ctx.save(context_file)
        self.trainer = TrainerGroup(self.ctx, self.etcd, context_file) if cfg.uses_trainer else None
        self.pool = EnginePool(self.ctx, self.etcd, unroute=self.router.unroute) if cfg.uses_engines else None
        patiently(self._take_over, pause=self._pause, waiting=lambda: self._report_phase("waiting for etcd"))
        self._roles = {name: spec for name, spec in ROLES.items()
                       if (cfg.uses_engines or not spec.samples) and (cfg.uses_trainer or not spec.trains)}
        self.roles = RoleDeployments(self.ctx, self._roles)
        with contextlib.suppress(EtcdUnavailable):  # the passes that follow do it
            self.reconcile()
        self.roles.start()  # after the first pass: the trainer and the engines take longer to start

    def _take_over(self) -> None:
        if self.pool:
            self.pool.take_over()
        for request in open_requests(self.etcd, self.ctx.keys).values():
            if request.target != JOB:  # this driver starts every part of it
                acknowledge(self.etcd, self.ctx.keys, request, self._guard)

    def _start_ray(self) -> None:
        """Starts Ray's processes. Ray gives them 30 seconds, a constant of its own, which a busy machine may exceed; so
        it is tried again, with backoff and without end. Raises Stopped."""
        cfg, budget = self.ctx.config, StartBudget()
        while True:
            shutil.rmtree(cfg.ray_dir, ignore_errors=True)  # left by a driver that was killed, or by the last try
            try:
                ray.init(address="local", namespace=cfg.job, num_cpus=_LOGICAL_CPUS, include_dashboard=False,
                         object_store_memory=_OBJECT_STORE_BYTES, _temp_dir=str(cfg.ray_dir),
                         _node_ip_address=self.ctx.host, log_to_driver=False, logging_level=logging.WARNING)
                self._parts.note("ray", "")
                self._ray_seen_at = time.monotonic()
                return
            except Exception as e:  # Ray raises this very class for the timeout
                ray.shutdown()
                budget = budget.after_failure(time.monotonic(), jitter=random.random())
                self._parts.note("ray", f"it does not start: {type(e).__name__}: {e}")
            while not budget.open(time.monotonic()):
                self._report_phase("starting Ray again")
                if self._pause(_POLL_S):
                    raise Stopped

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
        ComputePlaneLost when Ray has no node left: only another driver can build it again."""
        trainer, pool, roles = self.trainer, self.pool, self.roles
        assert roles
        self._parts.run("ray", self._check_ray)
        if time.monotonic() - self._ray_seen_at > _RAY_LOST_S:
            raise ComputePlaneLost(f"Ray has had no node for {_RAY_LOST_S:g} s", hint="see the job's folder ray/")
        requests = open_requests(self.etcd, self.ctx.keys)
        if trainer:
            self._parts.run(TRAINER, lambda: trainer.reconcile(requests.get(TRAINER)))
        if pool:
            self._parts.run(pool_target(pool.name), lambda: self.router.observe(pool.reconcile(requests)))
            self._parts.note("router", self.router.fault)
            self._parts.run("router events", self._report_router)
        self._parts.note("roles", roles.fault)
        for name in self._roles:
            if (request := requests.get(role_target(name))) is not None:
                self._parts.run(role_target(name), partial(self._restart_role, name, request))

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
            self._emit("compute.failing" if failed else "compute.working", part, f"{part}: {message}",
                       severity=Severity.WARNING if failed else Severity.INFO)

    def _report_router(self) -> None:
        self._router_restarts += self.router.restarts()
        if reasons := self._router_restarts:
            times = f"; {len(reasons)} times" if len(reasons) > 1 else ""
            self._emit("router.restarted", "router", f"the router is restarted: {reasons[-1]}{times}",
                       severity=Severity.WARNING)
            reasons.clear()

    def _emit(self, kind: str, subject: str, message: str, *, severity: Severity) -> None:
        fencing.emit(self.etcd, self.ctx.keys, self.ctx.epoch, kind, subject, message, severity=severity)

    # -- end --------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Ends everything, the roles first: a training loop that is still alive would report the end of the trainer as
        a failure. What fails to end does not keep the others from it."""
        with contextlib.ExitStack() as last:
            last.callback(shutil.rmtree, self.ctx.config.ray_dir, ignore_errors=True)
            last.callback(self.router.stop)
            if ray.is_initialized():
                last.callback(ray.shutdown)
            if self.trainer:
                last.callback(self.trainer.close)
            if self.pool:
                last.callback(self.pool.close)
            if self.trainer:
                last.callback(self.trainer.end)  # it ends while the pool does
            if self.roles:
                last.callback(self.roles.close)

