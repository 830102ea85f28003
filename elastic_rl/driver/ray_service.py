"""Ray of one epoch: the head and the worker, two services that outlive the driver which has started them, and that the
next one adopts and connects to.

The head has no CPUs, and the GCS's tables are on disk, so that everything on the worker goes on while the head is
restarted (docs/decisions/0017-ray-head-restarts.md). Other hosts have a worker each, which their agents keep running.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable

import ray

from elastic_rl.driver.service_supervisor import ServiceSupervisor
from elastic_rl.errors import EngineFailed
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import ray_node
from elastic_rl.host.address import host_name, ray_address
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER, compute_services, ray_epoch
from elastic_rl.host.job_secrets import ray_token_file
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.ray_node import RayNode
from elastic_rl.net.addresses import free_port, host_port

_ALL_INTERFACES = "0.0.0.0"
_INTERVAL_S = 0.5
_START_TIMEOUT_S = 180.0
"""A start of a node that neither ends nor is complete is given up after so long."""
_LOOK_EVERY_S = 5.0
_MISSING_S = 10.0
"""A node whose processes have been missing for so long is restarted."""
_LOST_S = 900.0
"""A head that has not worked on its store for so long is given up, with all that is on Ray: its store may be damaged.
"""


class RayNodeSupervisor(ServiceSupervisor):
    """A node works while ``ray start`` and the processes of it run that Ray cannot do without."""

    def __init__(self, node: RayNode, head: RayNodeSupervisor | None = None,
                 require: Callable[[], None] = lambda: None) -> None:
        """``head``: is up before the node is started; None for the head. ``require``: as of ``ServiceSupervisor``."""
        super().__init__(node, interval_s=_INTERVAL_S, start_timeout_s=_START_TIMEOUT_S, frozen_s=_MISSING_S,
                         require=require)
        self._node, self._head, self._examined_at = node, head, float("-inf")

    def _launch(self, now: float) -> None:
        if self._head is None or self._head.is_up:
            super()._launch(now)

    def _check(self) -> None:
        if not self._node.is_complete():
            raise EngineFailed("it has not started everything")
        if time.monotonic() - self._examined_at < _LOOK_EVERY_S:
            return
        if missing := self._node.missing():
            raise EngineFailed(f"{', '.join(sorted(missing))} does not run")
        self._examined_at = time.monotonic()


class RayService:
    """The Ray of an epoch. Each driver of the epoch may call the methods, one driver at a time."""

    def __init__(self, ctx: RunContext, require: Callable[[], None] = lambda: None) -> None:
        """``ctx``: the context of a driver, with its epoch. ``require``: raises Fenced once a newer driver has begun.
        """
        self._ctx, self._paths = ctx, JobPaths.of(ctx.config)
        at, files = ray_address(ctx.host), compute_services(self._paths)
        host = host_name(ctx.config)
        # All of Ray's ports are open on all interfaces, whatever its address is.
        self._head = RayNode(ctx.config, ctx.epoch, files, RAY_HEAD, ray_node.HEAD, self._paths.ray_head,
                             log=self._paths.log(RAY_HEAD), address=at, host=host,
                             gcs=lambda: host_port(at, free_port(_ALL_INTERFACES)))
        self._worker = RayNode(ctx.config, ctx.epoch, files, RAY_WORKER, ray_node.RUN_WORKER, self._paths.ray_worker,
                               log=self._paths.log(RAY_WORKER), address=at, host=host,
                               gcs=lambda: self._head.url)
        head = RayNodeSupervisor(self._head, None, require)
        self._supervisors = {RAY_HEAD: head, RAY_WORKER: RayNodeSupervisor(self._worker, head, require)}
        self._connected_to = 0
        """Pid of the worker that this process is connected to."""

    def start(self, *, adopts: bool) -> None:
        """Starts Ray, after it has ended what is left of an earlier epoch; returns before Ray can be connected to, and
        keeps both nodes running from then on. ``adopts``: another driver has started it in this epoch, so what runs is
        adopted, and what has ended is started again. Raises Fenced."""
        if not adopts:
            for node in (self._head, self._worker):
                node.stop()
            self._remove_stores()
        for supervisor in self._supervisors.values():
            supervisor.start()

    @property
    def address(self) -> str:
        """``host:port`` of the GCS; final once ``start`` has returned."""
        return self._head.url

    @property
    def is_up(self) -> bool:
        """Whether both nodes have started everything. A call of Ray's may wait for as long as they have not."""
        return all(supervisor.is_up for supervisor in self._supervisors.values())

    @property
    def faults(self) -> dict[str, str]:
        """Why each node does not work; empty for one that does, and during its first start."""
        return {name: supervisor.fault and f"{supervisor.fault}: see {self._paths.log(name)}"
                for name, supervisor in self._supervisors.items()}

    @property
    def is_lost(self) -> bool:
        """Whether the head does not come up on its store. One that has not been up yet has nothing on it to lose."""
        head = self._supervisors[RAY_HEAD]
        return not head.is_up and head.failing_s >= _LOST_S and self._head.was_up()

    def connect(self) -> None:
        """Connects this process, whose handler of SIGTERM stays, to the worker. Raises what Ray raises where that
        fails."""
        node = self._worker.pid
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(ray_token_file(self._ctx.config, self._ctx.epoch))
        on_stop = signal.getsignal(signal.SIGTERM)
        try:
            # The head has the same address, and another folder.
            ray.init(address=self._worker.url, namespace=self._ctx.job, _node_ip_address=self._worker.address,
                     _temp_dir=str(self._paths.ray_worker), log_to_driver=False, logging_level=logging.WARNING)
        except BaseException:
            ray.shutdown()
            raise
        finally:
            # Ray puts a handler of Python's in its place, and another of its library's, which ends the process at once.
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, on_stop)
        self._connected_to = node

    @property
    def is_cut_off(self) -> bool:
        """Whether the worker that this process is connected to has ended. Ray ends such a process, but only when a call
        needs the worker; other calls work, or wait."""
        return self._worker.pid != self._connected_to or not self._worker.alive()

    def leave(self) -> None:
        """Ends what this process does for Ray, and nothing of Ray."""
        for supervisor in self._supervisors.values():
            supervisor.leave()

    def end(self) -> None:
        """Ends the Ray of this epoch, or of an earlier one, with everything that runs on it, and removes its files. The
        Ray of a later epoch is left alone."""
        with contextlib.ExitStack() as last:
            last.callback(self._remove_stores)
            # The head ends first: this process may end with the worker, and a head that is left would be adopted.
            for supervisor in reversed(self._supervisors.values()):
                last.callback(supervisor.stop)

    def _remove_stores(self) -> None:
        for epoch, folder in self._paths.ray_stores().items():
            if epoch < self._ctx.epoch or epoch == self._ctx.epoch != ray_epoch(self._paths):
                shutil.rmtree(folder, ignore_errors=True)
