"""Ray as a host agent runs it: a head and workers, each of which is one process that is killed and restarted alone."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.host import processes
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.process import RAY_PRIORITY, start_process
from support.waiting import PATIENCE_S, wait_until

_MARK = "ELASTIC_RL_RAY_PROBE"
_TRIES = 5
_STARTED = "Ray runtime started."
HEAD, WORKER = "127.0.0.2", "127.0.0.3"
"""``ray start`` and ``ray.init`` replace 127.0.0.1 by the machine's address, other addresses of loopback they keep.
Each node has one of its own, since a driver finds the raylet that it connects to by the address."""

_WITH_PRIORITY = ["bash", "-c", 'echo -15 >/proc/self/autogroup 2>&-; exec "$0" "$@"'] if os.geteuid() == 0 else []
"""Gives a service more of the CPU than other sessions have: a raylet ends when its agents, which import for seconds, do
not listen within 15 seconds."""
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Names of the agents of a raylet. When it has ended they wait for the GCS, to report it, and keep their ports."""
Timing = Callable[[str, float], None]
_AGENT_PORTS = ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port",
                "metrics-export-port")


class RayService:
    """One ``ray start --block``: GCS, raylet, agents and Ray's workers are its descendants."""

    def __init__(self, cluster: RayCluster, name: str, arguments: Sequence[str], inside: Sequence[str] = ()) -> None:
        self._cluster, self._name, self._temp = cluster, name, cluster.folder / name
        self._make_folder = [*inside, "mkdir", "--parents", str(cluster.folder)]
        ray = str(Path(sys.executable).with_name("ray"))
        self._command = [*inside, *_WITH_PRIORITY, ray, "start", "--block", *arguments]
        self._starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the node is registered. Ray gives its raylet 30 seconds for it, and a raylet its agents 15, both
        constants of its own, which a busy machine exceeds; so a start that fails is repeated, as a host agent does."""
        for left in reversed(range(_TRIES)):
            error = self.start_once()
            if not error:
                return
            assert left, error

    def start_once(self, *, fresh: bool = True) -> str:
        """The output of a start that has failed, or nothing. ``fresh``: without the note of the address of the cluster
        in the temporary folder, for which ``ray start --head`` beside a worker of the cluster is refused."""
        if fresh:
            (self._temp / "ray_current_cluster").unlink(missing_ok=True)
        self.end_group()
        self._starts += 1
        subprocess.run(self._make_folder, check=True)  # a host with its own /tmp has none
        log = self._cluster.folder / f"{self._name}-{self._starts}.log"
        with log.open("wb") as out:
            process = self.process = start_process(self._command, env=self._cluster.env, stdin=subprocess.DEVNULL,
                                                   stdout=out, stderr=subprocess.STDOUT)
        wait_until(lambda: process.poll() is not None or _STARTED in log.read_text(), what=f"start of {self._name}")
        return log.read_text() if process.poll() is not None else ""

    def processes(self) -> list[psutil.Process]:
        return [process for found in self.family().values() for process in found]

    def family(self) -> dict[str, list[psutil.Process]]:
        """All processes of it by name."""
        assert self.process
        found: dict[str, list[psutil.Process]] = {}
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            found.setdefault(_name(process), []).append(process)
        return found

    def kill(self) -> list[psutil.Process]:
        """Kill -9 of all processes of it, as the loss of its host or a kill of its control group does. Returns them."""
        family = self.processes()
        for process in family:
            _kill(process)
        psutil.wait_procs(family, timeout=30)
        self.wait()
        return family

    def wait(self) -> int:
        assert self.process
        return self.process.wait(PATIENCE_S)

    def left(self) -> set[str]:
        """Names of the processes that its end has left. All that it starts stays in its process group, but for the
        workers of a raylet, which end with the raylet."""
        return {_name(process) for process in psutil.process_iter() if self._in_group(process)}

    def end_group(self) -> None:
        """Ends what its end has left, as a host agent has to do before it starts it again."""
        if self.process is not None:
            assert self.process.poll() is not None
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _in_group(self, process: psutil.Process) -> bool:
        try:
            return self.process is not None and os.getpgid(process.pid) == self.process.pid
        except ProcessLookupError:
            return False


class Driver:
    """A driver in a process of its own, which calls functions of ``support.ray_probe``; it connects to the raylet with
    the address ``node``."""

    def __init__(self, cluster: RayCluster, node: str, inside: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "support.ray_probe", cluster.address, node], env=cluster.env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def call(self, function: str, *arguments: Any) -> Any:
        """What the function returns. Raises AssertionError with the driver's output when it fails or does not end."""
        assert self.process.stdin and self.process.stdout
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps([function, *arguments]) + "\n")
            self.process.stdin.flush()
            output = []
            for line in self.process.stdout:
                if line.startswith('{"outcome": '):
                    return json.loads(line)["outcome"]
                output.append(line)
            raise AssertionError("".join(output)[-3000:])
        finally:
            watchdog.cancel()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class RayCluster:
    """A head without CPUs, and the folder, token and environment that head, workers and drivers share."""

    def __init__(self, head: str = HEAD, inside: Sequence[str] = (), **env: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rp", dir="/tmp"))  # sockets below it have at most 107 characters
        self._drivers: list[Driver] = []
        self._mark = secrets.token_hex(8)
        self.address = f"{head}:{free_port()}"
        self.env = {**os.environ, **RAY_PRIORITY, _MARK: self._mark, "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_gcs_storage": "rocksdb",
                    "RAY_gcs_storage_path": str(self.folder / "gcs"), "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
        self.head = self._service("head", head, "--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=0",
                                  "--include-dashboard=false", "--disable-usage-stats",
                                 f"--ray-client-server-port={free_port()}", inside=inside)

    def worker(self, name: str = "worker", address: str = WORKER, inside: Sequence[str] = ()) -> RayService:
        return self._service(name, address, f"--address={self.address}", "--num-cpus=8", inside=inside)

    def _service(self, name: str, address: str, *arguments: str, inside: Sequence[str] = ()) -> RayService:
        ports = [f"--{port}={free_port()}" for port in _AGENT_PORTS]
        return RayService(self, name, [*arguments, *ports, f"--node-ip-address={address}", f"--node-name={name}",
                                       f"--temp-dir={self.folder / name}", "--object-store-memory=80000000"], inside)

    def driver(self, node: str, inside: Sequence[str] = ()) -> Driver:
        self._drivers.append(Driver(self, node, inside))
        return self._drivers[-1]

    def end_drivers(self) -> None:
        while self._drivers:
            self._drivers.pop().kill()

    def close(self) -> None:
        self.end_drivers()
        processes.sweep(self._mark, _MARK)
        shutil.rmtree(self.folder)


@contextmanager
def ray_cluster(**kwargs: Any) -> Iterator[RayCluster]:
    cluster = RayCluster(**kwargs)
    try:
        yield cluster
    finally:
        cluster.close()


def _name(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
        if len(words) > 1 and "python" in Path(words[0]).name:
            return Path(next((w for w in words[1:] if not w.startswith("-")), "python")).name
        return Path((words or [process.name()])[0].split()[0]).name
    except psutil.Error:
        return "?"


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
