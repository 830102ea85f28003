"""A node of a job's Ray on this host, head or worker, as a service: its command line, its environment, its files.

Each is one ``ray start --block``; GCS, raylet, agents and all that runs on a node are its descendants. The driver of a
run has the head and a worker on its own host (``driver.ray_service``), the agent of every other host has a worker there
(``agent.job_services``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from elastic_rl.config import Config
from elastic_rl.errors import PreflightFailed
from elastic_rl.host import leftovers, processes
from elastic_rl.host.compute_services import ComputeService
from elastic_rl.host.job_secrets import engine_tls, ray_token_file
from elastic_rl.host.machine_resources import usable_cpus, usable_memory_bytes
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.process import RAY_PRIORITY
from elastic_rl.telemetry.log_files import ray_environment

RUN_HOST = "run_host"
"""Ray's resource that the worker on the host of the driver alone has: whatever is bound to that host asks for one."""
HOST_LABEL = "host"
"""Ray's label with the name of a node's host (``label_of``)."""
_MAX_LABEL = 63
_UNBOUNDED = 1_000_000
"""The amount of ``RUN_HOST`` that a host offers: more than there are parts of a run."""
_OBJECT_STORE_BYTES = 80 << 20, 8 << 30
"""Least and most that a node's object store may have. Calls of roles pass through it: requests and their samples, of
which there are more on larger hosts. Ray accepts no less than 75 MiB."""
_OBJECT_STORE_SHARES = 1 / 64, 1 / 8
"""What it may have of the host's memory, and of what is free of its shared memory, which DCS and engines need too."""
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
# Ray reads these when it is imported. Its GCS binds every interface, so it must require a token, of this job alone.
_RAY = {**RAY_PRIORITY, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0",
        # What runs on Ray goes on without its head, however long that is away. By default it ends after a minute.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 86400),
        # A replica of a role that hangs is killed; one that moves has its time to finish calls, which may be long.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Serve's controller looks at its few replicas ten times a second by default, and asks each for its health once
        # a second: the looks in between took as much of a core as the leader.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        # A token or an address of another cluster of the user's would count instead of the job's. Whoever starts a
        # node, or connects, sets RAY_AUTH_TOKEN_PATH to the file of its epoch.
        "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None, "RAY_ADDRESS": None}


def label_of(host: str) -> str:
    """The name of a host as Ray's labels can have it."""
    return host if len(host) <= _MAX_LABEL else hashlib.blake2b(host.encode(), digest_size=20).hexdigest()


def compute_environment(cfg: Config) -> dict[str, str | None]:
    """What the environment of the compute plane's processes on this host has besides that of who starts them; None: a
    variable that they do not have."""
    paths = JobPaths.of(cfg)
    return {processes.RUN_MARK: str(paths.private), processes.OWNER_ENV: None, **_RAY, **_tls(cfg),
            **leftovers.temp_environment(paths), **ray_environment(cfg.telemetry), **cfg.device.environment()}


def _tls(cfg: Config) -> dict[str, str | None]:
    """Ray's variables for TLS between its processes, in both directions: on a host that others reach."""
    tls = engine_tls(cfg)
    files = {"CERT": "RAY_TLS_SERVER_CERT", "KEY": "RAY_TLS_SERVER_KEY", "CA": "RAY_TLS_CA_CERT"}
    if tls is None:
        return {"RAY_USE_TLS": None, **dict.fromkeys(files.values())}
    return {"RAY_USE_TLS": "1", files["CERT"]: str(tls.cert), files["KEY"]: str(tls.key), files["CA"]: str(tls.ca)}


def object_store_bytes(memory: int, shared: int) -> int:
    """Size of the object store of a host with so many bytes of memory, and of shared memory that is free. Pure."""
    of_memory, of_shared = _OBJECT_STORE_SHARES
    least, most = _OBJECT_STORE_BYTES
    return max(least, min(int(memory * of_memory), int(shared * of_shared), most))


@dataclass(frozen=True)
class RayNodeKind:
    """What a node is in its Ray."""

    programs: frozenset[str] = frozenset({"raylet"})
    """Names of the processes without which it does not work."""
    head: bool = False
    resources: tuple[str, ...] = ()
    """Resources of its own that it offers, each without a bound."""


HEAD = RayNodeKind(frozenset({"gcs_server", "raylet"}), head=True)
RUN_WORKER = RayNodeKind(resources=(RUN_HOST,))
"""The worker on the host of the driver."""
WORKER = RayNodeKind()
"""The worker on another host."""


class RayNode(ComputeService):
    """One ``ray start``; ``url`` is the address of the GCS."""

    grace_s = 1.0  # it has nothing to save

    def __init__(self, cfg: Config, epoch: int, files: ServiceFiles, service: str, kind: RayNodeKind, folder: Path, *,
                 log: Path, gcs: Callable[[], str], address: str, host: str) -> None:
        """``cfg``: the job's settings. ``service``: its name in ``files``. ``folder``: for its temporary files.
        ``gcs``: makes the address of the GCS of a node that is not adopted. ``address``: that of the node.
        ``host``: name of the host."""
        self._paths = JobPaths.of(cfg)
        super().__init__(files, service, epoch=epoch, log=log, new_url=gcs)
        self.address, self._host = address, host
        self._cfg, self._kind, self._folder = cfg, kind, folder
        self._complete = files.folder / f"{service}.complete"

    def launch(self) -> bool:
        is_new = super().launch()
        if is_new:
            self._prefer(_START_PRIORITY)
        return is_new

    def _prefer(self, nice: str) -> None:
        """Sets the priority of the node's session. Only root may raise one."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/autogroup").write_text(nice, encoding="utf-8")

    def is_complete(self) -> bool:
        """Whether all of the node has started. Ray ends a process that is connected to a node which has not, and then
        fails. It is written down for the next driver: a file in a temporary folder does not last."""
        if self._was_complete():
            return True
        if not (self._folder / _ADDRESS_FILE).exists():
            return False
        self._complete.write_text(str(self.pid), encoding="utf-8")
        if not self._kind.head:  # with the worker its priority would be that of everything on it
            self._prefer("0")
        return True

    def was_up(self) -> bool:
        """Whether a process of the node has started everything in this epoch."""
        return self._complete.exists()

    def _was_complete(self) -> bool:
        try:
            return self._complete.read_text(encoding="utf-8") == str(self.pid)
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
        return set(self._kind.programs - found)

    def stop(self) -> None:
        super().stop()
        if self._files.get(self.name) is None:
            self._complete.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self) -> tuple[Sequence[str], dict[str, str | None]]:
        program = Path(sys.executable).with_name("ray")
        if not program.exists():
            raise PreflightFailed(f"Ray's command is not beside this Python: {program}",
                                  hint="install the project with pip into this environment")
        leftovers.make_temp_folder(self._paths)
        (self._folder / _ADDRESS_FILE).unlink(missing_ok=True)
        store = _OBJECT_STORE_BYTES[0]  # nothing of the job runs on a head
        if self._kind.head:
            role = ["--head", f"--port={self.url.rpartition(':')[2]}", "--num-cpus=0", "--num-gpus=0",
                    "--include-dashboard=false", "--no-monitor", "--disable-usage-stats"]
        else:
            offered = json.dumps(dict.fromkeys(self._kind.resources, _UNBOUNDED))
            memory = usable_memory_bytes()
            store = object_store_bytes(memory, shutil.disk_usage("/dev/shm").free)
            role = [f"--address={self.url}", f"--num-cpus={usable_cpus()}",
                    f"--memory={max(0, memory - store)}", f"--resources={offered}",
                    "--min-worker-port=0", "--max-worker-port=0"]
        ports = _HEAD_PORTS if self._kind.head else _PORTS
        name = f"head@{self._host}" if self._kind.head else self._host  # a name that no host can have
        return ([str(program), "start", "--block", *role, f"--node-ip-address={self.address}",
                 f"--node-name={name}", f"--labels={HOST_LABEL}={label_of(self._host)}",
                 f"--object-store-memory={store}", f"--temp-dir={self._folder}",
                 "--include-log-monitor=false", *(f"--{port}={free_port(self.address)}" for port in ports)],
                # Ray reads the token's file when it starts, and its processes inherit the variable. A driver's
                # environment, which its nodes inherit, has the rest.
                {**(compute_environment(self._cfg) if self._kind is WORKER else {}),
                 "RAY_AUTH_TOKEN_PATH": str(ray_token_file(self._cfg, self._epoch)),
                 "RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._paths.ray_store(self._epoch))})
