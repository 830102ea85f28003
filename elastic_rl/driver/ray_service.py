"""Ray of one epoch: a service that outlives the driver that has started it, and that the next one connects to.

One ``ray start --block`` is the whole of it; GCS, raylet, agents and all that runs on Ray are its descendants.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import ray

from elastic_rl.errors import PreflightFailed
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.host.address import ray_address
from elastic_rl.host.compute_services import RAY, compute_services, ray_epoch
from elastic_rl.host.job_secrets import ray_token_file
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.service_files import SERVICE_FILE_ENV
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.files import private_folder

_LOGICAL_CPUS = 256
"""Ray schedules by the number that it is given; roles, agents and engines mostly wait, so a small machine can run
them."""
_OBJECT_STORE_BYTES = 80 << 20
_PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port",
          "ray-client-server-port")
"""Ports that have a constant default, which two Rays of one host would both want."""
_ADDRESS_FILE = "ray_current_cluster"
"""Name of the file in Ray's temporary folder that ``ray start`` writes once it has started everything."""
_END_GRACE_S = 1.0
"""Time for Ray to end in order. It has nothing to save."""


class RayService:
    """The Ray of an epoch. Each driver of the epoch may call the methods, one driver at a time."""

    def __init__(self, ctx: RunContext) -> None:
        """``ctx``: the context of a driver, with its epoch."""
        self._ctx, self._paths = ctx, JobPaths.of(ctx.config)
        self._files = compute_services(self._paths)
        self._host = ray_address(ctx.host)

    @property
    def runs(self) -> bool:
        """Whether the Ray of this epoch runs, or is starting."""
        return ray_epoch(self._paths) == self._ctx.epoch

    def start(self) -> None:
        """Starts it, after it has ended what is left of another one, and returns before Ray can be connected to. Raises
        PreflightFailed, ConfigError and OSError."""
        self.end()
        program = Path(sys.executable).with_name("ray")
        if not program.exists():
            raise PreflightFailed(f"Ray's command is not beside this Python: {program}",
                                  hint="install the project with pip into this environment")
        private_folder(self._paths.ray.parent)
        port = free_port(self._host)
        ports = [f"--{name}={free_port(self._host)}" for name in _PORTS]
        # Ray reads the token's file when it starts, and its processes inherit the variable.
        self._files.start(
            RAY, [str(program), "start", "--block", "--head", f"--port={port}", f"--node-ip-address={self._host}",
                      f"--num-cpus={_LOGICAL_CPUS}", f"--object-store-memory={_OBJECT_STORE_BYTES}",
                      f"--temp-dir={self._paths.ray}", "--include-dashboard=false", "--disable-usage-stats",
                      "--min-worker-port=0", "--max-worker-port=0", *ports],
            log=self._paths.log(RAY), url=f"{self._host}:{port}", generation=self._ctx.epoch,
            env={"RAY_AUTH_TOKEN_PATH": str(ray_token_file(self._ctx.config, self._ctx.epoch))})

    def is_up(self) -> bool:
        """Whether all of it has started. Ray ends a process that is connected to one that has not, and then fails."""
        return (self._paths.ray / _ADDRESS_FILE).exists()

    def connect(self) -> None:
        """Connects this process. Raises what Ray raises where that fails. Ray ends a process that is connected when the
        raylet ends, or the GCS for a minute."""
        record = self._files.get(RAY)
        url = record.url if record is not None else ""
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(ray_token_file(self._ctx.config, self._ctx.epoch))
        try:
            ray.init(address=url, namespace=self._ctx.job, _node_ip_address=self._host, log_to_driver=False,
                     logging_level=logging.WARNING)
        except BaseException:
            ray.shutdown()
            raise

    def end(self, *, forget: bool = True) -> None:
        """Ends it, or that of an earlier epoch, with everything that runs on it, and removes its files; one of a later
        epoch is left alone. ``forget``: else the service's file still tells that its epoch had a Ray."""
        record = self._files.get(RAY)
        if record is not None and record.generation > self._ctx.epoch:
            return
        if record is not None and record.pid:
            processes.stop(record.pid, grace_s=_END_GRACE_S)
        # Its agents outlive it, and keep their ports; what is on Ray may have other parents.
        processes.sweep(self._files.mark(RAY), SERVICE_FILE_ENV)
        if forget:
            self._files.forget(RAY)
        shutil.rmtree(self._paths.ray, ignore_errors=True)
