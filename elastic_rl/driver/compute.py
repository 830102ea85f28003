"""The compute plane of one machine: Ray, the trainer groups, the engine pools with their routers, and the roles,
started, reconciled and closed together.

All of it outlives the driver. A driver that begins an epoch starts it; the next driver of the same epoch adopts it as
it is. It is ended by the driver that closes it, with the run (``host.leftovers``), and before the next epoch begins."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.coordinator.targets import JOB, pool_target, role_target, router_target
from elastic_rl.driver.etcd_patience import Stopped, patiently
from elastic_rl.driver.hosts_of_ray import HostsOfRay, RayHosts
from elastic_rl.driver.parts import PartRunner
from elastic_rl.driver.placement import Placer, driver_writer, uses_cuda
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.pool_removal import remove_pools_except
from elastic_rl.driver.ray_service import RayService
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.driver.role_deployments import RoleDeployments, kill_replicas
from elastic_rl.driver.router_supervisor import RouterSupervisor
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.driver.trainer_group import GroupState, TrainerGroup
from elastic_rl.engine.router import RouterProcess
from elastic_rl.errors import (
    ComputePlaneLost,
    ConfigError,
    ElasticRLError,
    EtcdUnavailable,
    Fenced,
    RayNodeLost,
    SharedDevicesLost,
)
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.cluster_records import RayHead
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.host.address import host_name
from elastic_rl.host.compute_services import RAY_HEAD, compute_services, router_service
from elastic_rl.host.job_secrets import engine_access, engine_key_file, engine_tls
from elastic_rl.host.paths import JobPaths
from elastic_rl.plugins.user_code import plain
from elastic_rl.roles.registry import ROLES
from elastic_rl.roles.spec import RoleSpec
from elastic_rl.runtime.waiting import ProgressLimit
from elastic_rl.runtime.words import counted

log = logging.getLogger(__name__)

_POLL_S = 0.2
_RAY_CONNECT_S = 180.0
"""A Ray that has started everything and cannot be connected to is given up after so long."""
_HOSTS_JOIN_S = 60.0
"""Longest time, at the begin of an epoch, for which engines wait for other hosts: else all would be on the first."""
_SAY_EVERY_S = 2.0
"""Every agent reads what is written about Ray's head, so that is done so often at most."""
_FOREIGN_S = 30.0
"""Foreign workers of a router are an event at most so often."""


class ComputePlane:
    """Starts the parts and reconciles them. No pass waits for a part, and a fault of one stays its own: ``faults`` and
    ``waiting`` say what is wrong, and the next passes try again without end."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: Callable[[str], None],
                 pause: Callable[[float], bool], *, adopts: bool) -> None:
        """``ctx``: with the epoch and the generation of this driver. ``report_phase``: called with the driver's phase
        before something that may take long, as progress. ``pause(seconds)``: waits, and returns whether the driver is
        to stop. ``adopts``: whether another driver has begun the epoch: what runs is adopted."""
        self._adopts = adopts
        self.ctx, self.etcd, self._report_phase, self._pause = ctx, etcd, report_phase, pause
        self._paths = JobPaths.of(ctx.config)
        self.routers = {name: RouterSupervisor(RouterProcess(
            compute_services(self._paths), router_service(name), epoch=ctx.epoch, host=ctx.host,
            log=self._paths.log(router_service(name)), key_file=partial(engine_key_file, ctx.config),
            request_timeout_s=pool.engine.request_timeout_s,
            sticky=name == ROLLOUT_POOL and ctx.config.rollout.plays_episodes, tls=engine_tls(ctx.config)),
            epoch=ctx.epoch, access=engine_access(ctx.config), require=self._require)
            for name, pool in ctx.config.pool_settings(ctx.model_dir).items()}
        self.pools: dict[str, EnginePool] = {}
        self.trainers: dict[str, TrainerGroup] = {}
        """The trainer groups, by name."""
        self._shared: SharedGpus | None = None
        self.roles: RoleDeployments | None = None
        self._roles: Mapping[str, RoleSpec] = {}
        self._parts = PartRunner(self._report_part)
        self._waiting: dict[str, str] = {}
        """What parts waited for in the last pass."""
        self._router_restarts: dict[str, list[str]] = {name: [] for name in self.routers}
        self._foreign_at: dict[str, float] = {}
        """When it was last reported of a pool's router that it had a foreign worker, in monotonic seconds."""
        self._ray = RayService(ctx, self._require)
        self._host_name = host_name(ctx.config)
        self._hosts, self._seen_hosts = HostsOfRay(
            etcd, ClusterKeys(ctx.config.cluster_name), reads_labels=ctx.config.selects_hosts), RayHosts()
        self._hosts_until = 0.0
        """Monotonic seconds until which engines wait for hosts to join."""
        self._left: dict[str, float] | None = None
        """``RayHead.left`` as written last; None before that."""
        self._said_at = float("-inf")
        self._writer, self._placer = driver_writer(ctx, etcd), Placer.of(ctx, etcd)

    @property
    def faults(self) -> dict[str, str]:
        """The parts that fail, and why."""
        return self._parts.faults

    @property
    def waiting(self) -> dict[str, str]:
        """What parts waited for in the last pass that do not fail."""
        return {part: text for part, text in self._waiting.items() if part not in self.faults}

    def _find_waiting(self) -> dict[str, str]:
        found = {name: group.waiting for name, group in self.trainers.items()}
        if self.roles:
            found["roles"] = self.roles.waiting
        for pool in self.pools.values():
            found[pool_target(pool.name)] = pool.waiting
        if missing := self._seen_hosts.missing:
            found["hosts"] = (f"engines and ranks wait for {counted(len(missing), 'host')} to join Ray, such as "
                              f"{missing[0]}, for {_HOSTS_JOIN_S:.0f} s at most")
        return {part: text for part, text in found.items() if text}

    # -- start ------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Returns when Ray runs and every part was adopted or is being started. Raises Fenced, Stopped, ConfigError
        when the model cannot be made, and ComputePlaneLost when Ray runs and cannot be adopted."""
        cfg = self.ctx.config
        model = self._start_model()
        for router in self.routers.values():
            router.start()  # while Ray's processes start
        self._connect_ray()
        if model is not None:
            self._await_model(model)
        self.ctx = self.ctx.model_copy(update={
            "router_urls": {name: router.url for name, router in self.routers.items()}})
        self._hosts.counts_gpus = cfg.ranks_may_spread and uses_cuda(cfg.device)
        self._shared = SharedGpus.of(self.ctx, self.etcd) if cfg.colocated and uses_cuda(cfg.device) else None
        for group in cfg.trainer_groups:
            own = self.ctx.of_group(group)
            self.trainers[group.name] = TrainerGroup(own, self.etcd,
                                                     shared=self._shared if own.config.colocated else None)
        self.pools = {name: EnginePool(self.ctx, self.etcd, name, unroute=router.unroute, has_left=router.has_left,
                                       shared=self._shared if self.ctx.pool(name).colocated else None)
                      for name, router in self.routers.items()}
        self._report_phase("adopting" if self._adopts else "starting")
        patiently(self._take_over, pause=self._pause, waiting=lambda: self._report_phase("waiting for etcd"))
        self._roles = {name: spec.of(cfg) for name, spec in ROLES.items() if spec.is_wanted(cfg)}
        self.roles = RoleDeployments(self.ctx, self._roles, self._require, lambda: self._seen_hosts,
                                     run_host=self._host_name)
        self._hosts_until = 0.0 if self._adopts else time.monotonic() + _HOSTS_JOIN_S
        with contextlib.suppress(EtcdUnavailable):  # the passes that follow do it
            self.reconcile()
        self.roles.start()  # after the first pass: the trainer and the engines take longer to start

    def _take_over(self) -> None:
        if self._adopts:
            self._placer.remove_unused_groups()
        remove_pools_except(self.etcd, self.ctx.keys, self._writer, self.pools)
        for group in self.trainers.values():
            group.take_over()
        for pool in self.pools.values():
            pool.take_over()
        for request in open_requests(self.etcd, self.ctx.keys).values():
            if request.target != JOB and not self._adopts:  # this driver starts every part of it
                acknowledge(self.etcd, self.ctx.keys, request, *self._writer.guards)

    def _connect_ray(self) -> None:
        """Connects to Ray, whose nodes are kept running from now on. Ray gives its processes 30 seconds to start, a
        constant of its own, which a busy machine may exceed; so a start is repeated, with backoff and without end.
        Raises Stopped, Fenced, and ComputePlaneLost where Ray cannot be used: the next driver begins with an epoch and
        a Ray of its own."""
        self._require()
        self._ray.start(adopts=self._adopts)
        silence = ProgressLimit(_RAY_CONNECT_S)
        while True:
            self._note_ray()
            if not self._ray.is_up:
                self._await_ray("starting Ray")
                silence = ProgressLimit(_RAY_CONNECT_S)
                continue
            self._report_phase("connecting to Ray")
            try:
                self._ray.connect()
                self._parts.note("ray", "")
                return
            except (ElasticRLError, OSError) as e:  # of this host or its files, and not of Ray
                self._parts.note("ray", f"it cannot be connected to: {_text(e)}")
                silence = ProgressLimit(_RAY_CONNECT_S)
            except Exception as e:  # Ray raises what its failure happens to be; it may only be busy
                silence.update({})
                log.warning("Ray cannot be connected to yet: %s", _text(e))
                if silence.expired:
                    raise ComputePlaneLost(f"Ray cannot be connected to: {_text(e)}",
                                           hint="the next driver starts another one") from e
            self._await_ray("connecting to Ray")

    def _say_that_ray_is_gone(self) -> None:
        """Has the other hosts end their workers; those of a job that has ended do so, too, and the next epoch's
        replace them."""
        with contextlib.suppress(EtcdUnavailable, Fenced):
            self._writer.write(Op.delete(self._ray_head))

    @property
    def _ray_head(self) -> str:
        return ClusterKeys(self.ctx.config.cluster_name).ray_head(self.ctx.job)

    def _note_ray(self) -> None:
        """Notes the faults of Ray's nodes. Raises ComputePlaneLost when the head is lost."""
        for node, fault in self._ray.faults.items():
            self._parts.note(node, fault)
        if self._ray.is_lost:
            raise ComputePlaneLost(f"Ray's head does not start again: see {self._paths.log(RAY_HEAD)}",
                                   hint="the next driver starts another one")

    def _await_ray(self, phase: str) -> None:
        """Reports the phase, and waits for a moment. Raises Stopped, and Fenced: the supervisors of a driver that was
        replaced start nothing, so it would wait for ever."""
        self._report_phase(phase)
        if self._pause(_POLL_S):
            raise Stopped
        self._require()

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
        ComputePlaneLost when Ray is lost, and SharedDevicesLost when GPUs are that trainer and engines share: only
        another driver can build it again. Raises RayNodeLost when only another driver can go on with this Ray."""
        roles = self.roles
        assert roles
        self._writer.require()  # first: one that was suspended must not judge by what it remembers
        self._note_ray()
        if self._ray.is_cut_off:
            raise RayNodeLost("the worker of Ray has ended, and what ran on it", hint="the next driver takes over")
        for name, router in self.routers.items():
            self._parts.note(router_target(name), router.fault)
            self._parts.run(f"events of {router_target(name)}", partial(self._report_router, name))
        if not self._ray.is_up:  # what runs goes on meanwhile; a call of Ray's would wait for its head
            return
        requests = open_requests(self.etcd, self.ctx.keys)
        self._parts.run("hosts", self._look_at_hosts)
        if self._shared is not None:
            self._parts.run("shared GPUs", partial(self._shared.reconcile, self._seen_hosts, holds=self._joining()))
            if self._shared.lost:
                raise SharedDevicesLost("trainer and engines cannot go on with the GPUs that they share: "
                                        f"{self._shared.lost}", hint="the next driver looks for hosts again")
        for name, group in self.trainers.items():
            self._parts.run(name, partial(group.reconcile, requests.get(name), self._seen_hosts, holds=self._joining(),
                                          changed_at=max(g.changed_at for g in self.trainers.values())))
        for name, pool in self.pools.items():
            self._parts.run(pool_target(name), partial(self._reconcile_pool, name, pool, requests))
        self._parts.run("Ray's head", self._say_where_ray_is)
        self._parts.note("roles", roles.fault)
        for name in self._roles:
            if (request := requests.get(role_target(name))) is not None:
                self._parts.run(role_target(name), partial(self._restart_role, name, request))
        self._waiting = self._find_waiting()

    def _reconcile_pool(self, name: str, pool: EnginePool, requests: Mapping[str, RestartRequest]) -> None:
        forms = any(group.state in (GroupState.ENDED, GroupState.PLACING) for group in self.trainers.values())
        takes_room = self._shared is None or (self._shared.may_spread and bool(self._shared.waiting))
        self.routers[name].observe(pool.reconcile(
            requests, self._seen_hosts, holds=bool(self._seen_hosts.missing),
            yields=forms and takes_room and uses_cuda(self.ctx.config.device)))

    def _look_at_hosts(self) -> None:
        joining = self._joining()
        self._seen_hosts = replace(self._seen_hosts, missing=())  # nobody waits for what cannot be read
        self._seen_hosts = self._hosts.read(joining=joining)
        if joining and not self._seen_hosts.late:
            self._hosts_until = 0.0

    def _joining(self) -> bool:
        """Whether hosts may still be joining Ray for which somebody waits."""
        return time.monotonic() < self._hosts_until and any(part.may_spread for part in self._on_hosts)

    @property
    def _on_hosts(self) -> list[EnginePool | TrainerGroup | SharedGpus]:
        """The parts that may be on several hosts."""
        return [*self.pools.values(), *self.trainers.values(), *filter(None, [self._shared])]

    def _say_where_ray_is(self) -> None:
        """Has the other hosts of the cluster join this Ray, but for those that are to be emptied and have nothing of
        the run any more."""
        used = {node for part in self._on_hosts for node in part.nodes} | (self.roles.nodes if self.roles else set())
        hosts = self._seen_hosts
        left = {name: hosts.drains[name] for node, name in sorted(hosts.leaving.items()) if node not in used}
        if left != self._left and time.monotonic() - self._said_at >= _SAY_EVERY_S:
            head = RayHead(host=self._host_name, address=self._ray.address, epoch=self.ctx.epoch, left=left)
            self._writer.write(Op.put(self._ray_head, head.encode()))
            self._left, self._said_at = left, time.monotonic()

    def _restart_role(self, name: str, request: RestartRequest) -> None:
        log.warning("restarting role %s: %s", name, request.reason)
        replicas = members(self.etcd, self.ctx.keys, name)
        self._writer.require()  # Ray would kill them for an older driver, too
        kill_replicas(name)
        deregister(self.etcd, self.ctx.keys, replicas)
        acknowledge(self.etcd, self.ctx.keys, request, *self._writer.guards)

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
        self._writer.emit(kind, subject, message, severity=severity)

    # -- end --------------------------------------------------------------------------------------------------------
    def leave(self) -> None:
        """Ends what this process does for it, and nothing of it: the next driver adopts it."""
        with contextlib.ExitStack() as last:
            if ray.is_initialized() and self._ray.is_up and not self._ray.is_cut_off:  # else it would wait for a node
                last.callback(self._disconnect)
            last.callback(self._ray.leave)
            last.callback(self._hosts.close)
            for router in self.routers.values():
                last.callback(router.leave)
            if self.roles:
                last.callback(self.roles.leave)

    def _disconnect(self) -> None:
        """Disconnects this process from Ray, once no thread of it uses Ray any more. Where one is still in a call, the
        process ends connected (``driver.__main__``): that call would end it in the middle of what is left to do."""
        if self.roles and self.roles.is_calling:
            log.warning("a call of Serve's does not end: this process ends without disconnecting from Ray")
        else:
            ray.shutdown()

    def _require(self) -> None:
        """Raises Fenced once a newer driver has begun. None begins while etcd is away, and what runs is kept running
        then."""
        with contextlib.suppress(EtcdUnavailable):
            if (newest := fencing.current_driver(self.etcd, self.ctx.keys)) > self.ctx.generation:
                raise Fenced(f"driver {self.ctx.generation} has been replaced by driver {newest}")

    def close(self, *, lost: str = "") -> None:
        """Ends everything, the roles first: a training loop that is still alive would report the end of the trainer as
        a failure. What fails to end does not keep the others from it. Where Ray does not work nothing on it is asked to
        end, and Ray may end this process with its worker. ``lost``: it ends because it cannot go on, which is an event.
        Raises Fenced, with nothing ended, when a newer driver has begun: what runs is that one's."""
        self._require()
        if lost:
            with contextlib.suppress(EtcdUnavailable):
                self._emit(event_kinds.RUN_GLOBAL_RESTART, self.ctx.job, f"global restart: {lost}",
                           severity=Severity.ERROR)
        with contextlib.ExitStack() as last:
            last.callback(self._say_that_ray_is_gone)
            last.callback(self._ray.end)
            for router in self.routers.values():
                last.callback(router.stop)
            if lost or not self._ray.is_up:
                if self.roles:
                    last.callback(self.roles.leave)
                return
            if ray.is_initialized():
                last.callback(self._disconnect)
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


def _text(error: Exception) -> str:
    """An error for a person, with what to do where it says so."""
    return str(error) if isinstance(error, ElasticRLError) else f"{type(error).__name__}: {error}"
