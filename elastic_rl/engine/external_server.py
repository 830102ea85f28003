"""An SGLang server that somebody else runs and that takes part: asked over HTTP, never started and never ended."""

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
from elastic_rl.engine.server import Prepared, Server
from elastic_rl.errors import DeadlineExceeded, EngineFailed
from elastic_rl.runtime import wait_until

_PROBE_S = 20.0
"""Longest wait for the first answer."""
_LOOK_S = 1.0
_LOOK_TIMEOUT_S = 2.0
_FAILURES = 3
"""Looks in a row without an answer, after which the server counts as dead."""


class AttachedServer(Server):
    """Its version is what tells that it is still the same: a server that was started anew has the weights of its
    folder, and does not name the version that it was given."""

    def __init__(self, url: str, model_dir: str, *, cfg: EngineConfig) -> None:
        # Nobody told its schedulers a secret: they are asked in vain, and weights are loaded in the pause.
        super().__init__(cfg, secret=stager.new_secret(), log_hint="its own log says why; it is run by somebody else")
        self._url, self._model_dir = url.rstrip("/"), model_dir
        self._ranks, self._dtype = 1, ""
        self._given: int | None = None
        """Version that it has to name; None before the first, and while it changes."""
        self._failures, self._next_look, self._lost = 0, 0.0, ""

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
        # Not that of our own: nobody knows with which arguments it was started.
        return f"{self._dtype}/tp{self._ranks}/{self._url}"

    def start(self, keep_waiting: Callable[[], bool] = lambda: True) -> None:
        """Finds out whether it can take part. Raises EngineFailed, which says what is missing."""
        host = urlsplit(self._url).hostname or ""
        if not is_here(host):
            raise EngineFailed(f"{host} is not an address of {socket.gethostname()}: a server reads weights from the "
                               "shared memory of its host, so it has to be where its engine runs")
        try:
            wait_until(lambda: self._look() is not None, timeout_s=_PROBE_S, what=f"an answer of {self._url}",
                       alive=keep_waiting)
        except DeadlineExceeded as e:
            raise EngineFailed(f"no SGLang server answers at {self._url}/model_info", hint=e.hint) from e
        wanted = json.loads((Path(self._model_dir) / "config.json").read_text()).get("architectures")
        unfit = why_unfit(self._call("GET", "/model_info"), info := self._call("GET", "/server_info"), wanted)
        if unfit:
            raise EngineFailed(f"{self._url} cannot take part: {unfit}")
        self._ranks, self._dtype = int(info.get("tp_size") or 1), str(info.get("dtype", ""))

    def alive(self) -> bool:
        """Whether it answers with the version that it was given; it may miss a few looks, of which there is one a
        second."""
        now = time.monotonic()
        if now >= self._next_look and self._failures < _FAILURES:
            self._next_look = now + _LOOK_S
            found = self._look()
            version = to_version(found.get("weight_version")) if found else 0
            if found is None:
                self._failures += 1
                self._lost = f"{self._url} no longer answers"
            elif self._given is not None and version != self._given:
                self._failures = _FAILURES
                self._lost = (f"{self._url} names version {version} and was given {self._given}: it was started anew, "
                              "or somebody else changed its weights")
            else:
                self._failures = 0
        return self._failures < _FAILURES

    @property
    def lost(self) -> str:
        return self._lost

    def apply(self, prepared: Prepared, version: int) -> None:
        """As of ``Server``. One that fails is left paused: its weights may be half of two versions."""
        self._given = None
        super().apply(prepared, version)
        self._given = version

    def stop(self) -> None:
        """Leaves it as it is."""

    def _look(self) -> dict[str, Any] | None:
        try:
            reply = self._http.get(f"{self._url}/model_info", timeout=_LOOK_TIMEOUT_S)
            found = reply.json() if reply.is_success else None
        except (httpx.HTTPError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def why_unfit(model: dict[str, Any], server: dict[str, Any], architectures: object) -> str:
    """What keeps a server from taking part, as far as its answers to /model_info and /server_info tell; or nothing."""
    if architectures and model.get("architectures") != architectures:
        return f"its model is a {model.get('architectures')}, not a {architectures}"
    if LOADER not in (server.get("custom_weight_loader") or ()):
        return f"it was started without --custom-weight-loader {LOADER}"
    for name in ("dp_size", "pp_size", "nnodes"):
        if int(server.get(name) or 1) != 1:
            return f"it was started with {name}={server[name]}; only tensor parallelism on one host is supported"
    return ""


def is_here(host: str) -> bool:
    """Whether an address or a name means this host."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    mine = {a.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for a in addresses}
    return bool(found) and all(address in mine or address.startswith("127.") for address in found)
