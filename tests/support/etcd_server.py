"""Real etcd servers for the tests: one member, or three that can be killed, stopped and continued one by one."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.config import EtcdConfig
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.host.processes import spawn
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port
from support.certificates import Identity
from support.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]


def binary() -> str:
    """The etcd to test with: ELASTIC_RL_ETCD, the environment's own, or the one on PATH."""
    own = _ROOT / ".venv/etcd/usr/bin/etcd"
    found = os.environ.get("ELASTIC_RL_ETCD") or (str(own) if own.exists() else shutil.which("etcd"))
    assert found, "no etcd: run `bash ops/setup.sh`, or set ELASTIC_RL_ETCD"
    return found


class EtcdServers:
    """An etcd cluster, on loopback by default, in ``folder``. Its processes die with this one."""

    def __init__(self, folder: Path, members: int, flags: Sequence[str] = (), *, host: str = "127.0.0.1",
                 tls: Identity | None = None, gateway: bool = False) -> None:
        """``flags``: further flags of etcd. ``tls``: the members' certificate. ``gateway``: serve etcd's HTTP gateway,
        which ``ask`` needs and our client does not."""
        self.folder, self._host, self._tls = folder, host, tls
        self._flags = [*flags, f"--enable-grpc-gateway={str(gateway).lower()}"]
        self._client = [free_port(host) for _ in range(members)]
        self._peer = [free_port() for _ in range(members)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.settings: dict[str, Any] = {}
        """Settings of the ``etcd`` section that a client needs here, besides the endpoints."""

    @property
    def endpoints(self) -> list[str]:
        return [f"{self._host}:{port}" for port in self._client]

    def config(self, **settings: Any) -> EtcdConfig:
        """Settings with which a client gets access, replaced by the given ones."""
        return EtcdConfig.model_validate({"endpoints": self.endpoints, "call_timeout_s": 2.0, "retry_budget_s": 20.0,
                                          **self.settings, **settings})

    def connect(self, **settings: Any) -> EtcdClient:
        return EtcdClient.from_config(self.config(**settings), self.endpoints)

    def connect_at(self, i: int, **settings: Any) -> EtcdClient:
        """A client that starts with the given member, so that a fault of the member hits it."""
        while True:
            etcd = self.connect(**settings)
            if etcd.endpoint == self.endpoints[i]:
                return etcd
            etcd.close()

    def data(self, i: int) -> Path:
        """The folder of a member's data."""
        return self.folder / f"m{i}"

    def start(self) -> EtcdServers:
        self.processes = [self._launch(i) for i in range(len(self._client))]
        return self.wait()

    def _launch(self, i: int) -> subprocess.Popen[bytes]:
        peers = [f"http://127.0.0.1:{port}" for port in self._peer]
        client = f"{'https' if self._tls else 'http'}://{self._host}:{self._client[i]}"
        tls = ["--cert-file", str(self._tls.cert), "--key-file", str(self._tls.key)] if self._tls else []
        return spawn([
            binary(), "--name", f"m{i}", "--data-dir", str(self.data(i)), "--log-level", "warn",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peers[i], "--initial-advertise-peer-urls", peers[i],
            "--initial-cluster", ",".join(f"m{k}={url}" for k, url in enumerate(peers)),
            "--heartbeat-interval", "100", "--election-timeout", "1000", *tls, *self._flags,
        ], log=self.folder / f"m{i}.log")

    def wait(self) -> EtcdServers:
        """Until every member answers and knows a leader."""
        with self.connect() as etcd:
            wait_until(lambda: all(not s.error for s in etcd.statuses()), what="etcd",
                       alive=lambda: all(p.poll() is None for p in self.processes))
            etcd.get("/elastic_rl/")
        return self

    def leader(self, *, besides: int | None = None) -> int:
        """Index of the leading member, by its own status; ``besides``: a member that is left out."""
        with self.connect() as etcd:
            return wait_until(lambda: [i for i, s in enumerate(etcd.statuses()) if s.is_leader and i != besides],
                              what="an etcd leader")[0]

    def ask(self, path: str, body: dict[str, Any], *, token: str = "", verify: ssl.SSLContext | bool = True) -> Any:
        """A call of etcd's HTTP gateway, for what our client does not offer. Needs ``gateway``."""
        url = f"{'https' if self._tls else 'http'}://{self.endpoints[0]}/v3/{path}"
        answer = http_client.request("POST", url, json=body, headers={"Authorization": token} if token else {},
                                     timeout=10, verify=verify)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        return answer.json()

    def kill(self, i: int) -> None:
        self.processes[i].kill()
        self.processes[i].wait(60)

    def restart(self, i: int) -> None:
        """Starts a killed member again on its data."""
        self.processes[i] = self._launch(i)
        self.wait()

    def stop(self, i: int) -> None:
        """SIGSTOP; returns when the kernel has stopped it."""
        process = self.processes[i]
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, what="SIGSTOP")

    def cont(self, i: int) -> None:
        self.processes[i].send_signal(signal.SIGCONT)

    def renew(self, tls: Identity, flags: Sequence[str]) -> None:
        """Certificate and flags of members that are started from now on."""
        self._tls, self._flags = tls, [*flags, self._flags[-1]]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60)
