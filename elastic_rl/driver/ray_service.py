"""Ray of one epoch: the head and the worker, two services that outlive the driver which has started them, and that the
next one adopts and connects to.

Each is one ``ray start --block``; GCS, raylet, agents and all that runs on a node are its descendants. The head has no
CPUs, and the GCS's tables are on disk, so that everything on the worker goes on while the head is restarted
(docs/decisions/0017-ray-head-restarts.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import ray

from elastic_rl.driver.service_supervisor import ServiceSupervisor
from elastic_rl.errors import EngineFailed, PreflightFailed
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import ray_address, ray_head_address
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER, ComputeService, compute_services, ray_epoch
from elastic_rl.host.job_secrets import ray_token_file
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.files import private_folder

_LOGICAL_CPUS = 256
"""Ray schedules by the number that it is given; roles, agents and engines mostly wait, so a small machine can run
them."""
_OBJECT_STORE_BYTES = 80 << 20
_ALL_INTERFACES = "0.0.0.0"
_PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
"""Ports that have a constant default, which all nodes of a machine would want."""
_HEAD_PORTS = (*_PORTS, "ray-client-server-port")
_ADDRESS_FILE = "ray_current_cluster"
"""Name of the file in a node's temporary folder that ``ray start`` writes once it has started everything. With it there
another start of a head beside a worker is refused."""
_START_PRIORITY = "-10"
"""Niceness of a node's session while it starts. A raylet ends when its agents, which import for seconds, do not listen
within 15 seconds, a constant of Ray's; and the kernel shares the CPU between sessions first, of which there are many.
"""
_INTERVAL_S = 0.5
_START_TIMEOUT_S = 180.0
"""A start of a node that neither ends nor is complete is given up after so long."""
_LOOK_EVERY_S = 5.0
_MISSING_S = 10.0
"""A node whose processes have been missing for so long is restarted."""
_LOST_S = 900.0
"""A head that has not worked on its store for so long is given up, with all that is on Ray: its store may be damaged.
"""


class RayNode(ComputeService):
    """One ``ray start``; ``url`` is the address of the GCS."""

    grace_s = 1.0  # it has nothing to save

    def __init__(self, ctx: RunContext, service: str, folder: Path, *, gcs: Callable[[], str], address: str,
                 programs: Sequence[str]) -> None:
        """``folder``: for its temporary files. ``gcs``: makes the address of the GCS of a node that is not adopted.
        ``address``: that of the node. ``programs``: names of the processes without which the node does not work."""
        paths = JobPaths.of(ctx.config)
        super().__init__(compute_services(paths), service, epoch=ctx.epoch, log=paths.log(service), new_url=gcs)
        self.address = address
        self._ctx, self._paths, self._folder, self._programs = ctx, paths, folder, frozenset(programs)
        self._complete = paths.compute_services / f"{service}.complete"

    def launch(self) -> bool:
        is_new = super().launch()
        if is_new:
            self._prefer(_START_PRIORITY)
        return is_new

    def _prefer(self, nice: str) -> None:
        """Sets the priority of the node's session. Only root may raise one."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/autogroup").write_text(nice)

    def is_complete(self) -> bool:
        """Whether all of the node has started. Ray ends a process that is connected to a node which has not, and then
        fails. It is written down for the next driver: a file in a temporary folder does not last."""
        if self._was_complete():
            return True
        if not (self._folder / _ADDRESS_FILE).exists():
            return False
        self._complete.write_text(str(self.pid))
        if self.name != RAY_HEAD:  # with the worker its priority would be that of everything on it
            self._prefer("0")
        return True

    def was_up(self) -> bool:
        """Whether a process of the node has started everything in this epoch."""
        return self._complete.exists()

    def _was_complete(self) -> bool:
        try:
            return self._complete.read_text() == str(self.pid)
        except FileNotFoundError:
            return False

    def missing(self) -> set[str]:
        """Names of the processes that the node lacks, or that are stopped (SIGSTOP). ``ray start`` does not end with
        these, nor with one that was told to end."""
        try:
            found = {child.name() for child in psutil.Process(self.pid).children()
                     if child.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)}
        except psutil.Error:
            return set()  # that it has ended is for others to see
        return set(self._programs - found)

    def stop(self) -> None:
        super().stop()
        if self._files.get(self.name) is None:
            self._complete.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self) -> tuple[Sequence[str], dict[str, str]]:
        program = Path(sys.executable).with_name("ray")
        if not program.exists():
            raise PreflightFailed(f"Ray's command is not beside this Python: {program}",
                                  hint="install the project with pip into this environment")
        private_folder(self._folder.parent)
        (self._folder / _ADDRESS_FILE).unlink(missing_ok=True)
        if self.name == RAY_HEAD:
            role = ["--head", f"--port={self.url.rpartition(':')[2]}", "--num-cpus=0", "--num-gpus=0",
                    "--include-dashboard=false", "--no-monitor", "--disable-usage-stats"]
        else:
            role = [f"--address={self.url}", f"--num-cpus={_LOGICAL_CPUS}", "--min-worker-port=0",
                    "--max-worker-port=0"]
        ports = _HEAD_PORTS if self.name == RAY_HEAD else _PORTS
        return ([str(program), "start", "--block", *role, f"--node-ip-address={self.address}",
                 f"--object-store-memory={_OBJECT_STORE_BYTES}", f"--temp-dir={self._folder}",
                 "--include-log-monitor=false",
                 *(f"--{name}={free_port(self.address)}" for name in ports)],
                # Ray reads the token's file when it starts, and its processes inherit the variable.
                {"RAY_AUTH_TOKEN_PATH": str(ray_token_file(self._ctx.config, self._ctx.epoch)),
                 "RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._paths.ray_store(self._ctx.epoch))})


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
        at = ray_head_address(ctx.host)
        # All of Ray's ports are open on all interfaces, whatever its address is.
        self._head = RayNode(ctx, RAY_HEAD, self._paths.ray_head, gcs=lambda: f"{at}:{free_port(_ALL_INTERFACES)}",
                             address=at, programs=("gcs_server", "raylet"))
        self._worker = RayNode(ctx, RAY_WORKER, self._paths.ray_worker, gcs=lambda: self._head.url,
                               address=ray_address(ctx.host), programs=("raylet",))
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
            ray.init(address=self._worker.url, namespace=self._ctx.job, _node_ip_address=self._worker.address,
                     log_to_driver=False, logging_level=logging.WARNING)
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
