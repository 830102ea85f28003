"""What the rows share: an etcd, coordinator replicas, simulated members and clients, and the end of them all."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml

from elastic_rl import config
from elastic_rl.bench.etcd import end, start_etcd
from elastic_rl.bench.options import Options
from elastic_rl.bench.workers import Worker
from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.etcd import fencing, job_settings
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host.address import own_address
from elastic_rl.host.processes import python, spawn
from elastic_rl.net.addresses import free_port
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.waiting import wait_until

TTL_S = CoordinatorConfig().lease_ttl_s
_START_S = 60.0


class Replicas:
    """Coordinator replicas of a job of its own."""

    def __init__(self, testbed: Testbed, stack: contextlib.ExitStack, settings: dict[str, Any]) -> None:
        self.testbed, self.etcd = testbed, testbed.etcd
        self.keys = Keys(f"bench-{secrets.token_hex(4)}")
        self._folder = testbed.folder / self.keys.job
        self._folder.mkdir()
        self._config = self._folder / "settings.yaml"
        self._config.write_text(yaml.safe_dump({"job": self.keys.job, "run_dir": str(self._folder), **settings}),
                                encoding="utf-8")
        self._secret, secret = self._folder / "cluster-secret", ClusterSecret.generate()
        secret.save(self._secret)
        job_settings.submit(self.etcd, ClusterKeys(self.keys.job), config.load(self._config), secret)
        self._tokens, self.token = self._folder / "tokens", auth.new_token()
        auth.write_table(self._tokens, {auth.Role.OPERATOR: self.token})
        self._stack = stack
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}

    def start(self, *names: str) -> None:
        """Starts replicas and waits until each is ready."""
        for name in names:
            port = free_port()
            self.urls[name] = f"http://{own_address()}:{port}"
            self.running[name] = process = spawn(python(
                "elastic_rl.coordinator.service", "--config", str(self._config), "--etcd", self.testbed.endpoint,
                "--replica", name, "--port", str(port), "--tokens", str(self._tokens),
                "--secret", str(self._secret)),
                log=self._folder / f"{name}.log")
            self._stack.callback(end, process)
        for name in names:
            wait_until(lambda n=name: self._ready(n), timeout_s=_START_S, what=f"replica {name}",
                       alive=lambda n=name: self.running[n].poll() is None)

    @property
    def path(self) -> str:
        """Path of the job in the API."""
        return job_path(self.keys.job)

    def client(self, name: str, *, timeout: httpx.Timeout | float) -> httpx.Client:
        """A client of a replica's API with an operator's token."""
        return httpx.Client(base_url=self.urls[name], headers={"Authorization": f"Bearer {self.token}"},
                            timeout=timeout)

    def _ready(self, name: str) -> bool:
        try:
            return httpx.get(f"{self.urls[name]}/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def leader(self) -> str:
        """Name of the replica whose leadership is announced and that is alive; waits for one."""
        from elastic_rl.coordinator.records import Leadership

        def find() -> str:
            found = self.etcd.get(self.keys.leadership())
            name = Leadership.decode(found.value).replica if found else ""
            return name if name in self.running and self.etcd.get(self.keys.leader()) else ""

        return str(wait_until(find, timeout_s=_START_S, what="a leader"))

    def signal(self, name: str, number: signal.Signals) -> None:
        self.running[name].send_signal(number)

    def end(self, name: str) -> None:
        """Kills a replica, stopped or not."""
        process = self.running.pop(name)
        process.kill()
        process.wait(10)

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.running[name].pid)


class Testbed:
    """One run of the bench. Everything it starts ends with the ``with`` block."""

    def __init__(self, options: Options, stack: contextlib.ExitStack) -> None:
        self.options, self._stack = options, stack
        self.folder = Path(tempfile.mkdtemp(prefix="erl-bench-control-"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.endpoint, self.etcd_pid = start_etcd(self.folder, stack)
        self.etcd = stack.enter_context(EtcdClient([self.endpoint], call_timeout_s=5.0))
        self._names = itertools.count(1)

    @classmethod
    @contextmanager
    def start(cls, options: Options) -> Iterator[Self]:
        with contextlib.ExitStack() as stack:
            yield cls(options, stack)

    @contextmanager
    def replicas(self, *names: str, **settings: Any) -> Iterator[Replicas]:
        with contextlib.ExitStack() as stack:
            made = Replicas(self, stack, settings)
            made.start(*names)
            yield made

    @contextmanager
    def members(self, keys: Keys, count: int, *, engines: bool = False, version: int = 0) -> Iterator[Worker]:
        """Simulated members, or ``engines`` that have a version of the policy, in a process of their own."""
        if engines:
            fencing.raise_epoch(self.etcd, keys, "bench")
        with Worker("elastic_rl.bench.control.simulated_members", self.endpoint, keys.job, str(count), str(TTL_S),
                    "engines" if engines else "members", str(version), log=self._log("members")) as worker:
            worker.call("start", timeout_s=120.0)
            yield worker

    @contextmanager
    def hosts(self, keys: Keys, hosts: int, members_per_host: int) -> Iterator[Worker]:
        """Simulated hosts with their members, in a process of their own; nobody writes heartbeats yet."""
        fencing.raise_epoch(self.etcd, keys, "bench")
        with Worker("elastic_rl.bench.control.simulated_hosts", self.endpoint, keys.job, str(hosts),
                    str(members_per_host), str(TTL_S), log=self._log("hosts")) as worker:
            worker.call("start", timeout_s=300.0)
            yield worker

    def api_clients(self, replicas: Replicas, replica: str, count: int) -> Worker:
        """Clients of a replica's API in a process of their own."""
        return Worker("elastic_rl.bench.control.api_clients", replicas.urls[replica], replicas.token, self.endpoint,
                      str(count), log=self._log("api-clients"))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._names)}.log"


def cores(processes: Sequence[psutil.Process], window_s: float) -> list[float]:
    """Cores that each process keeps busy."""
    before, began = [sum(p.cpu_times()[:2]) for p in processes], time.monotonic()
    time.sleep(window_s)
    took = time.monotonic() - began
    return [(sum(p.cpu_times()[:2]) - b) / took for p, b in zip(processes, before, strict=True)]
