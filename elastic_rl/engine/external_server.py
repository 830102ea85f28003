"""An SGLang server that someone else runs: called over HTTP, never started and never ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from elastic_rl.config import EngineConfig
from elastic_rl.engine import stager
from elastic_rl.engine.client import to_version
from elastic_rl.engine.loader import LOADER
from elastic_rl.engine.server import Server, StagedUpdate
from elastic_rl.errors import DeadlineExceeded, EngineFailed
from elastic_rl.runtime import wait_until

_START_TIMEOUT_S = 20.0
"""Longest wait for the first answer."""
_PROBE_INTERVAL_S = 1.0
_PROBE_TIMEOUT_S = 2.0
_MAX_FAILURES = 3
"""Probes without an answer, one after the other, after which the server counts as dead."""


class ExternalServer(Server):
    """Recognises a restart of the server by its version: a restarted server has the weights of its folder, and does not
    report the version that was applied to it."""

    def __init__(self, url: str, model_dir: str, *, cfg: EngineConfig) -> None:
        # Its schedulers have no stagers, since they lack the secret: weights are loaded in the pause.
        super().__init__(cfg, secret=stager.new_secret(), log_hint="see the log of the server, which someone else runs")
        self._url, self._model_dir = url.rstrip("/"), model_dir
        self._ranks, self._dtype = 1, ""
        self._applied: int | None = None
        """Version that the server has to report; None before the first update, and during one."""
        self._failures, self._next_probe, self._failure = 0, 0.0, ""

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        return 0

    @property
    def tensor_parallel(self) -> int:
        return self._ranks

    @property
    def layout(self) -> str:
        # Contains the URL, so it equals no other engine's: the arguments of the server are unknown.
        return f"{self._dtype}/tp{self._ranks}/{self._url}"

    def start(self, wait_while: Callable[[], bool] = lambda: True) -> None:
        """Checks that the server can join the pool. Raises EngineFailed, which says what is missing."""
        host = urlsplit(self._url).hostname or ""
        if not is_local_address(host):
            raise EngineFailed(f"{host} is not an address of {socket.gethostname()}: a server reads weights from the "
                               "shared memory of its host, so it must run on the host of its engine")
        try:
            wait_until(lambda: self._probe() is not None, timeout_s=_START_TIMEOUT_S, what=f"an answer of {self._url}",
                       alive=wait_while)
        except DeadlineExceeded as e:
            raise EngineFailed(f"no SGLang server answers at {self._url}/model_info", hint=e.hint) from e
        architectures = json.loads((Path(self._model_dir) / "config.json").read_text()).get("architectures")
        info = self._call("GET", "/server_info")
        reason = incompatibility(self._call("GET", "/model_info"), info, architectures)
        if reason:
            raise EngineFailed(f"{self._url} cannot join the pool: {reason}")
        self._ranks, self._dtype = int(info.get("tp_size") or 1), str(info.get("dtype", ""))

    def alive(self) -> bool:
        """Whether the server reports the version that was applied to it. Probes it at most once a second, and tolerates
        a few probes without an answer."""
        now = time.monotonic()
        if now >= self._next_probe and self._failures < _MAX_FAILURES:
            self._next_probe = now + _PROBE_INTERVAL_S
            info = self._probe()
            version = to_version(info.get("weight_version")) if info else 0
            if info is None:
                self._failures += 1
                self._failure = f"{self._url} no longer answers"
            elif self._applied is not None and version != self._applied:
                self._failures = _MAX_FAILURES
                self._failure = (f"{self._url} reports version {version} and not {self._applied}, which was applied to "
                                 "it: it was restarted, or someone else changed its weights")
            else:
                self._failures = 0
        return self._failures < _MAX_FAILURES

    @property
    def failure(self) -> str:
        return self._failure

    def apply(self, update: StagedUpdate, version: int) -> None:
        """As ``Server.apply``. A failed update leaves the server paused: its weights may be torn."""
        self._applied = None
        super().apply(update, version)
        self._applied = version

    def stop(self) -> None:
        """Does nothing: the server is not ours."""

    def _probe(self) -> dict[str, Any] | None:
        try:
            reply = self._http.get(f"{self._url}/model_info", timeout=_PROBE_TIMEOUT_S)
            info = reply.json() if reply.is_success else None
        except (httpx.HTTPError, ValueError):
            return None
        return info if isinstance(info, dict) else None


def incompatibility(model: dict[str, Any], server: dict[str, Any], architectures: object) -> str:
    """Why a server cannot join a pool, by its answers to /model_info and /server_info; empty when it can."""
    if architectures and model.get("architectures") != architectures:
        return f"its model is a {model.get('architectures')}, not a {architectures}"
    if LOADER not in (server.get("custom_weight_loader") or ()):
        return f"it was started without --custom-weight-loader {LOADER}"
    for name in ("dp_size", "pp_size", "nnodes"):
        if int(server.get(name) or 1) != 1:
            return f"it was started with {name}={server[name]}; only tensor parallelism on one host is supported"
    return ""


def is_local_address(host: str) -> bool:
    """Whether every address of a host name belongs to this host."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    mine = {a.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for a in addresses}
    return bool(found) and all(address in mine or address.startswith("127.") for address in found)
