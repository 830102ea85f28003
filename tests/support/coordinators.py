"""Coordinator replicas as real processes, for the tests, and the tokens that their admin API knows."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from elastic_rl import config
from elastic_rl.coordinator.api import auth, tls
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.etcd import job_settings
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Leader
from elastic_rl.host import processes
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port
from elastic_rl.net.cluster_secret import ClusterSecret
from support import forked
from support.hosts import Host
from support.waiting import wait_until

MODULE = "elastic_rl.coordinator.service"
OPERATOR, VIEWER = "an-operators-token", "a-viewers-token"
AUTH = {"Authorization": f"Bearer {OPERATOR}"}
"""Headers of a request that may do anything."""
LEASE_TTL_S = 5


def write_tokens(table: Path, **roles: str) -> None:
    """Replaces a token table, atomically and readable by its owner only; ``roles``: token's name → role. The tokens
    are OPERATOR for the name operator, VIEWER for viewer, and else the name itself."""
    known = {"operator": OPERATOR, "viewer": VIEWER}
    entries = [{"name": name, "role": role, "sha256": auth.digest(known.get(name, name))}
               for name, role in roles.items()]
    table.parent.mkdir(parents=True, exist_ok=True)
    fresh = table.with_suffix(".new")
    fresh.write_text(json.dumps({"tokens": entries}))
    fresh.chmod(0o600)
    fresh.rename(table)


class JobClient(httpx.Client):
    """A client of one replica. Paths without a leading slash are below the job's path; the empty one is the job."""

    def __init__(self, url: str, job: str, **more: Any) -> None:
        super().__init__(base_url=url, trust_env=False, **{"verify": url.startswith("https://"), **more})
        self._job = job_path(job)

    def build_request(self, method: str, url: httpx.URL | str, **more: Any) -> httpx.Request:
        path = str(url)
        if not path.startswith(("/", "http")):
            path = self._job + (f"/{path}" if path else "")
        return super().build_request(method, path, **more)


@dataclass
class Replicas:
    """Replicas of one job. ``settings``: parts of the config beyond the defaults."""

    folder: Path
    keys: Keys
    etcd_servers: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    hosts: Mapping[str, Host] = field(default_factory=dict)
    """Where replicas run that have a host of their own."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    @property
    def _tls(self) -> dict[str, Any]:
        return dict(self.settings.get("coordinator", {}))

    def _ask(self, name: str) -> httpx.Response:
        ca = self._tls.get("tls_ca", "")
        return http_client.request("GET", f"{self.urls[name]}/readyz", timeout=3.0,
                                   **({"verify": tls.trust(ca)} if ca else {}))

    def config_file(self, name: str) -> Path:
        self._tokens()
        path = self.folder / f"config-{name}.yaml"
        coordinator = {"lease_ttl_s": LEASE_TTL_S, "host_lost_s": 0.5,
                       **self.settings.get("coordinator", {}),
                       **({"host": self.hosts[name].address} if name in self.hosts else {})}
        path.write_text(yaml.safe_dump({"job": self.keys.job, "run_dir": str(self.folder), "etcd":
                                        {"call_timeout_s": 1.0, "retry_budget_s": 4.0}, **self.settings,
                                        "coordinator": coordinator}))
        return path

    @property
    def secret(self) -> Path:
        """File with the cluster's secret."""
        path = self.folder / "secret"
        if not path.exists():
            ClusterSecret.generate().save(path)
        return path

    def submit(self) -> None:
        """Writes the record of the job, with which replicas take it up."""
        cfg = config.load(self.config_file("job"))
        with self._connect() as etcd:
            job_settings.submit(etcd, ClusterKeys(cfg.job), cfg, ClusterSecret.read(self.secret))

    def spawn(self, name: str, port: int) -> subprocess.Popen[bytes]:
        """A replica's process, which may end at once: none of ``running``."""
        arguments = ["--config", str(self.config_file(name)), "--etcd", ",".join(self.etcd_servers), "--replica", name,
                     "--port", str(port), "--tokens", str(self.token_table), "--secret", str(self.secret)]
        if name not in self.hosts:
            return forked.spawn(MODULE, *arguments, log=self.log(name))
        return processes.spawn([*self.hosts[name].inside, *processes.python(MODULE, *arguments)], log=self.log(name))

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    @property
    def token_table(self) -> Path:
        return self.folder / self.keys.job / "cluster" / "tokens.json"

    @property
    def credentials(self) -> Path:
        """File with the tokens, as ``elastic-rl up`` leaves it for the command line."""
        return self.token_table.with_name("credentials.json")

    def _tokens(self) -> None:
        if not self.token_table.exists():
            write_tokens(self.token_table, operator="operator", viewer="viewer")
        self.credentials.write_text(json.dumps({"operator": OPERATOR, "viewer": VIEWER}))
        self.credentials.chmod(0o600)

    def job_url(self, name: str) -> str:
        """URL of the job on a replica."""
        return self.urls[name] + job_path(self.keys.job)

    def client(self, name: str, **more: Any) -> JobClient:
        """An operator's client of one replica."""
        return JobClient(self.urls[name], self.keys.job, **{"headers": AUTH, "timeout": 20, **more})

    def launch(self, *names: str) -> None:
        """Starts replicas and returns at once."""
        self.submit()
        for name in names:
            port = free_port()
            scheme = "https" if self._tls.get("tls_cert") else "http"
            host = self.hosts[name].address if name in self.hosts else "127.0.0.1"
            self.urls[name] = f"{scheme}://{host}:{port}"
            self.running[name] = self.spawn(name, port)

    def start(self, *names: str) -> None:
        """Starts replicas and waits until each is ready and one leads."""
        self.launch(*names)
        for name in names:
            process = self.running[name]
            wait_until(lambda n=name: self.ready(n), what=f"replica {name}",
                                 alive=lambda p=process: p.poll() is None)
        self.leader()

    def ready(self, name: str) -> bool:
        try:
            return self._ask(name).status_code == 200
        except httpx.HTTPError:
            return False

    def leader(self, *, not_: str = "") -> str:
        """Name of the replica that leads and has said so to the job."""
        with self._connect() as etcd:
            def look() -> str:
                found = readable_one(etcd.get(self.keys.leader()), Leader)
                return found.replica if found is not None and found.replica != not_ else ""

            return str(wait_until(look, what="a leader"))

    def _connect(self) -> EtcdClient:
        cfg = config.load(self.config_file("job"))
        return EtcdClient.from_config(cfg.etcd, self.etcd_servers)

    def kill(self, name: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """Signals a replica; after SIGKILL it is gone when this returns."""
        process = self.running[name]
        process.send_signal(sig)
        if sig == signal.SIGKILL:
            process.wait(60)
            assert process.returncode == -signal.SIGKILL
            del self.running[name]

    def close(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            processes.stop(process.pid)
        self.running.clear()
