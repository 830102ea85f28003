"""The SGLang router of a pool: its process, and a client of its worker list. The list is soft state, rebuilt from etcd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from elastic_rl.errors import PortTaken, RouterUnavailable
from elastic_rl.host.address import own_address
from elastic_rl.host.compute_services import ComputeService
from elastic_rl.host.processes import python
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port, host_port
from elastic_rl.net.engine_key import KEY_FILE_ENV, OTHER_KEY, EngineAccess
from elastic_rl.net.listeners import check_connections
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.waiting import wait_until

_FLAGS = {
    # /health* hangs for 20 s while an engine is paused for an update; /model_info still answers.
    "health-check-endpoint": "/model_info", "health-check-interval-secs": 1, "health-check-timeout-secs": 3,
    "health-failure-threshold": 1, "health-success-threshold": 1,
    "worker-startup-check-interval": 1, "worker-startup-timeout-secs": 30,
    "retry-max-retries": 4, "retry-initial-backoff-ms": 20, "retry-max-backoff-ms": 500,
    "log-level": "warn",
}
# The client sends batches of equal size; measured equal to cache_aware on short prompts, without its prefix tree.
_EVEN = {"policy": "round_robin"}
# By the routing key of a conversation, whose turns are long prefixes of one another; cache_aware sends all to one
# engine as long as few requests run. What has no key goes anywhere; a key that was not used for a while is forgotten.
_STICKY = {"policy": "manual", "assignment-mode": "min_load", "max-idle-secs": 900}
_LONGER_THAN_CLIENT_S = 30.0
"""The router's limit of a request beyond its client's, which ends it and knows how often it may be repeated."""
_REMOVE_AGAIN_S = 1.0
_TRIES = 3
"""Attempts of one call, when the router cannot be reached."""
_TRY_AGAIN_S = 0.2


class RouterProcess(ComputeService):
    """The router of a pool, as a service of an epoch."""

    def __init__(self, files: ServiceFiles, service: str, *, epoch: int, host: str, log: Path, request_timeout_s: float,
                 start_timeout_s: float = 30.0, sticky: bool = False, key_file: Callable[[], Path] | None = None,
                 tls: TlsFolder | None = None) -> None:
        """``service``: its name in ``files``. ``request_timeout_s``: that of its clients. ``sticky``: requests of one
        routing key go to one engine (``GenerateClient.generate``). ``key_file``: makes the file of the key that it asks
        for (``engine_key``), before each launch. ``tls``: the certificate that it serves with, whose authority its
        engines' have; None: without TLS."""
        super().__init__(files, service, epoch=epoch, log=log, new_url=lambda: (
            f"{'https' if tls else 'http'}://{host_port(host, free_port(host))}"))
        self._tls = tls
        self._policy: dict[str, Any] = _STICKY if sticky else _EVEN
        self._key_file = key_file
        self._start_timeout_s, self._request_timeout_s = start_timeout_s, request_timeout_s

    def start(self) -> None:
        """Returns when the router takes requests; it is launched unless it runs. Raises DeadlineExceeded and PortTaken,
        and what ``launch`` raises."""
        if not self.alive():
            self.launch()
        wait_until(self._live, timeout_s=self._start_timeout_s, what=f"the router (log: {self._log})",
                   alive=self.alive)

    def _command(self) -> tuple[Sequence[str], dict[str, str]]:
        url = urlsplit(self.url)
        host, port = url.hostname or "", str(url.port)
        flags = {**_FLAGS, **self._policy, "host": host, "port": port, "prometheus-host": own_address(),
                 "prometheus-port": free_port(),
                 "request-timeout-secs": ceil(self._request_timeout_s + _LONGER_THAN_CLIENT_S)}
        if self._tls is not None:
            flags |= {"tls-cert-path": self._tls.cert, "tls-key-path": self._tls.key, "ca-cert-paths": self._tls.ca}
        args = [text for key, value in flags.items() for text in (f"--{key}", str(value))]
        env = {KEY_FILE_ENV: str(self._key_file())} if self._key_file else {}
        if self._tls is not None:
            env["SSL_CERT_FILE"] = str(self._tls.ca)  # its health checks go by what the system trusts
        return python("elastic_rl.engine.sglang.launch_router", *args, "--disable-circuit-breaker"), env

    def _live(self) -> bool:
        try:
            return http_client.request("GET", f"{self.url}/liveness", timeout=1.0, hooks=[check_connections],
                                       **EngineAccess(authority=str(self._tls.ca) if self._tls else "").options
                                       ).is_success
        except httpx.HTTPError:
            return False


class RouterClient:
    """Client of a router's worker list. Every call raises RouterUnavailable when the router refuses, or another user of
    this host listens at its address, or, tried a few times, it does not answer. Every call may be repeated."""

    def __init__(self, url: str, *, access: EngineAccess = EngineAccess(), timeout_s: float = 5.0) -> None:
        """``access``: to the router and its workers. ``timeout_s``: the limit in seconds of one attempt. Raises
        ConfigError for an authority that cannot be read."""
        self._url, self._access, self._timeout_s = url.rstrip("/"), access, timeout_s
        self._options = access.options

    def add(self, worker_url: str, timeout_s: float) -> None:
        """Returns once the router sends requests to the worker. Idempotent.

        Raises DeadlineExceeded when the worker is not healthy in time.
        """
        self.request_add(worker_url)
        wait_until(lambda: self.workers().get(worker_url), timeout_s=timeout_s,
                   what=f"the router's worker {worker_url}", poll_s=0.05)

    def remove(self, worker_url: str, timeout_s: float) -> None:
        """Returns once the worker is not in the list. Idempotent. Raises DeadlineExceeded."""
        ask_at = 0.0

        def gone() -> bool:
            nonlocal ask_at
            listed = [w["id"] for w in self._list() if w["url"] == worker_url]
            if listed and time.monotonic() >= ask_at:  # again: the router queues removals, and may drop one
                ask_at = time.monotonic() + _REMOVE_AGAIN_S
                for worker_id in listed:
                    self._call("DELETE", f"/workers/{worker_id}", absent_ok=True)
            return not listed

        wait_until(gone, timeout_s=timeout_s, what=f"the removal of {worker_url} from the router")

    def request_add(self, worker_url: str) -> None:
        """Asks for what ``add`` does and returns at once: the worker is listed, and then healthy, a little later."""
        # Answers 202: queued. The router asks the worker with the key of the worker's own.
        key = self._access.key
        self._call("POST", "/workers", json={"url": worker_url, **({"api_key": key} if key else {})})

    def request_remove(self, worker_ids: Iterable[str]) -> None:
        """Asks for the removal of these ids of ``worker_ids`` and returns at once. The router may forget it."""
        for worker_id in worker_ids:
            self._call("DELETE", f"/workers/{worker_id}", absent_ok=True)

    def worker_ids(self) -> dict[str, list[str]]:
        """The ids under which each worker is listed, by URL."""
        found: dict[str, list[str]] = {}
        for worker in self._list():
            found.setdefault(worker["url"], []).append(worker["id"])
        return found

    def workers(self) -> dict[str, bool]:
        """Whether each worker of the list is healthy, by URL."""
        return {w["url"]: bool(w.get("is_healthy")) for w in self._list()}

    def _list(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return workers

    def _call(self, method: str, path: str, *, json: object = None, absent_ok: bool = False) -> dict[str, Any]:
        reply = self._request(method, path, json)
        known = reply.status_code == httpx.codes.CONFLICT or (
            absent_ok and reply.status_code == httpx.codes.NOT_FOUND)
        if not reply.is_success and not known:
            raise RouterUnavailable(f"the router refused {method} {path}: {reply.status_code} {reply.text[:200]}",
                                    hint=OTHER_KEY if reply.status_code == httpx.codes.UNAUTHORIZED else "")
        try:
            answer: dict[str, Any] = reply.json() if reply.content and reply.is_success else {}
        except ValueError as e:
            raise RouterUnavailable(f"what answers at {self._url} is not the router: {reply.text[:200]}") from e
        return answer

    def _request(self, method: str, path: str, json: object) -> httpx.Response:
        for tries_left in reversed(range(_TRIES)):
            try:
                return http_client.request(method, self._url + path, json=json, timeout=self._timeout_s,
                                           hooks=[check_connections], **self._options)
            except PortTaken as e:
                raise RouterUnavailable(e.message, hint=e.hint) from e
            except httpx.HTTPError as e:
                if not tries_left:
                    raise RouterUnavailable(f"the router at {self._url} does not answer: {type(e).__name__}",
                                            hint="the driver restarts it; see `elastic-rl logs router-POOL`") from e
            time.sleep(_TRY_AGAIN_S)
        raise AssertionError("unreachable")
