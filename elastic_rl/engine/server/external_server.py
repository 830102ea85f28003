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
from elastic_rl.engine.client import to_version
from elastic_rl.engine.server.sglang_server import OTHER_KEY_HINT, EngineServer, StagedUpdate
from elastic_rl.engine.sglang import stager
from elastic_rl.engine.sglang.loader import LOADER
from elastic_rl.errors import DeadlineExceeded, EngineFailed
from elastic_rl.host.process_activity import ActivityMeter, listening
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.plugins.user_code import describe
from elastic_rl.runtime.waiting import wait_until

_START_TIMEOUT_S = 20.0
"""Longest wait for the first answer."""
_VERSION_INTERVAL_S = 1.0
"""Time between two looks at the version that the server reports."""
_PROBE_TIMEOUT_S = 2.0
_MAX_REFUSED = 3
"""Refused connections, one after the other, after which the server counts as dead. One that is slow to answer does
not."""


class ExternalServer(EngineServer):
    """Recognises a restart of the server by its version: a restarted server has the weights of its folder, and does not
    report the version that was applied to it."""

    _pause_of_drain = "retract"  # what it has in flight may be others', who do not know the finish reason abort

    def __init__(self, url: str, model_dir: str, *, cfg: EngineConfig, updates: bool = True,
                 access: EngineAccess = EngineAccess()) -> None:
        """``updates``: whether it is to get versions; if not, it serves the weights that it was started with.
        ``access``: the key of the job, which a server that asks for none takes too, and the cluster's authority."""
        # Its schedulers have no stagers, since they lack the secret: weights are loaded in the pause.
        super().__init__(cfg, secret=stager.new_secret(), access=access,
                         log_hint="see the log of the server, which someone else runs")
        self._url, self._model_dir = url.rstrip("/"), model_dir
        self._updates, self._authority = updates, access.authority
        self._ranks, self._dtype = 1, ""
        self._applied: int | None = None
        """Version that the server has to report; None before the first update, and during one."""
        self._refused, self._no_answer = 0, ""
        self._probe_at = 0.0

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
                               "shared memory of its host, so its engine runs there",
                               hint="register it with `--via HOST`, the host of the cluster that it is on")
        if self._url.startswith("https:") and not self._authority:
            raise EngineFailed(f"{self._url} cannot be checked: this cluster is on loopback and has no authority",
                               hint="register it as http://, or make the cluster with `elastic-rl up --address`")
        try:
            wait_until(lambda: self._model_info() is not None, timeout_s=_START_TIMEOUT_S,
                       what=f"an answer of {self._url}", alive=wait_while)
        except DeadlineExceeded as e:
            raise EngineFailed(f"no SGLang server answers at {self._url}/model_info ({self._no_answer})", hint=e.hint
                               ) from e
        try:
            config = json.loads((Path(self._model_dir) / "config.json").read_text(encoding="utf-8"))
            architectures = config.get("architectures")
        except (OSError, ValueError, AttributeError) as e:
            raise EngineFailed(f"{self._model_dir}/config.json cannot be read: {describe(e)}") from e
        info = self._call("GET", "/server_info")
        model = self._call("GET", "/model_info")
        reason = incompatibility(model, info, architectures, updates=self._updates) or self._foreign(model)
        if reason:
            raise EngineFailed(f"{self._url} cannot join the pool: {reason}")
        self._ranks, self._dtype = int(info.get("tp_size") or 1), str(info.get("dtype", ""))
        # Where they are not visible, time in which they have no CPU counts as waiting.
        self._meter = ActivityMeter(listening(urlsplit(self._url).port or 80))

    def _foreign(self, info: dict[str, Any]) -> str:
        """Why these are no weights of the pool, where they never change; else "". A server says where it read its
        weights, and not which they are."""
        path = str(info.get("model_path") or "")
        if self._updates or not path or Path(path).resolve() == Path(self._model_dir).resolve():
            return ""
        return f"it serves {path}, not {self._model_dir}"

    def alive(self) -> bool:
        return not self._condemned

    @property
    def probe_interval_s(self) -> float:
        return min(_VERSION_INTERVAL_S, super().probe_interval_s)

    def probe(self) -> bool | None:
        """Probes as ``EngineServer.probe`` does, as often as its setting says; at each call, condemns a server that is
        gone, or no longer reports the version that was applied to it."""
        applied = self._applied
        info = self._model_info()
        if info is None:
            if self._refused >= _MAX_REFUSED:
                self.condemn(f"{self._url} no longer answers")
            return False
        if foreign := self._foreign(info):
            self.condemn(f"{self._url} has other weights than its pool: {foreign}")
            return False
        version = to_version(info.get("weight_version"))
        if applied is not None and applied == self._applied and version != applied:
            self.condemn(f"{self._url} reports version {version} and not {applied}, which was applied to it: it was "
                         "restarted, or someone else changed its weights")
            return False
        if time.monotonic() < self._probe_at:
            return None
        alive = super().probe()
        self._probe_at = time.monotonic() + (self._cfg.probe_interval_s if alive else 0.0)
        return alive

    def apply(self, update: StagedUpdate, version: int) -> None:
        """Applies a version as ``EngineServer.apply`` does. A failed update leaves the server paused: its weights may
        be torn."""
        self._applied = None
        super().apply(update, version)
        self._applied = version

    def stop(self) -> bool:
        """Does nothing: the server is not ours."""
        return True

    def _model_info(self) -> dict[str, Any] | None:
        try:
            reply = self._probe.http.get(f"{self._url}/model_info", timeout=_PROBE_TIMEOUT_S)
            info = reply.json() if reply.is_success else None
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as e:
            self._refused += 1
            self._no_answer = describe(e)  # such as a certificate of another authority
            return None
        except (httpx.HTTPError, ValueError) as e:
            self._no_answer = describe(e)
            return None
        self._refused, self._no_answer = 0, f"it answers {reply.status_code}, and nothing that tells its model"
        if reply.status_code == httpx.codes.UNAUTHORIZED:
            self._no_answer += f"; {OTHER_KEY_HINT}"
        return info if isinstance(info, dict) else None


def incompatibility(model: dict[str, Any], server: dict[str, Any], architectures: object, *, updates: bool) -> str:
    """Why a server cannot join a pool, by its answers to /model_info and /server_info; empty when it can. ``updates``:
    whether the pool changes weights."""
    if architectures and model.get("architectures") != architectures:
        return f"its model is a {model.get('architectures')}, not a {architectures}"
    if not updates:
        return ""
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
