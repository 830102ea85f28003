"""Forwards a change that reached a follower to the leader."""

from __future__ import annotations

import ssl
import threading

import httpx
from fastapi import Request, Response

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.api.authentication import SESSION, Caller
from elastic_rl.coordinator.problems import Kind, Problem, no_leader
from elastic_rl.etcd.records import Leader
from elastic_rl.net import http_client
from elastic_rl.telemetry import traces

FORWARDED = "x-elastic-rl-forwarded-by"
_REQUEST_HEADERS = ("authorization", "content-type", "if-match", "idempotency-key", "accept")
_RESPONSE_HEADERS = ("content-type", "etag", "retry-after", "location", "www-authenticate", "idempotency-replayed")


class Forwarder:
    """One pooled HTTP client to the leader, whichever replica that is."""

    def __init__(self, replica: str, *, timeout_s: float, tls_ca: str = "") -> None:
        """``tls_ca``: PEM file of the authority of the replicas' certificates; empty: the system's.

        Raises ConfigError when it cannot be read.
        """
        self._replica = replica
        self._timeout = httpx.Timeout(timeout_s, connect=min(1.0, timeout_s))
        self._tls = tls.ReloadingTrust(tls_ca)
        self._lock = threading.Lock()
        self._trust: ssl.SSLContext | bool = False
        self._client: httpx.Client | None = None
        """The client whose connections trust ``_trust``."""

    def send(self, request: Request, body: bytes, leader: Leader | None) -> Response:
        """The leader's answer, unchanged.

        Raises problems: 503 when there is no leader, when it cannot be reached, or when the request was forwarded
        already (two replicas that take each other for the leader must not send it back and forth); 504 when the answer
        was lost.
        """
        if leader is None or leader.replica == self._replica:
            raise no_leader("an election is under way")
        if FORWARDED in request.headers:
            raise no_leader(f"{self._replica} does not lead, and the request came from "
                            f"{request.headers[FORWARDED]} already")
        target = httpx.URL(leader.url).copy_with(raw_path=_target(request))  # as it came, with its escapes
        try:
            answer = self._client_for(leader.url).request(request.method, target, content=body,
                                                    headers=self._headers(request))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as e:
            raise no_leader(f"the leader {leader.replica} cannot be reached: {e}") from e
        except httpx.HTTPError as e:
            raise Problem(504, Kind.OUTCOME_UNKNOWN, "The outcome of the write is unknown",
                          f"the answer of the leader {leader.replica} was lost ({type(e).__name__}); "
                          "read the resource again") from e
        kept = {k: answer.headers[k] for k in _RESPONSE_HEADERS if k in answer.headers}
        return Response(answer.content, answer.status_code, kept)

    def _headers(self, request: Request) -> dict[str, str]:
        headers = {k: request.headers[k] for k in _REQUEST_HEADERS if k in request.headers}
        caller: Caller = request.state.caller
        if caller.session:  # the cookie and the Origin were checked here, and belong to this replica's address
            headers["authorization"] = f"{SESSION} {caller.session}"
        return headers | {FORWARDED: self._replica, **traces.inject()}

    def _client_for(self, url: str) -> httpx.Client:
        """The client for a leader's URL: where that has TLS, it trusts the authority in the file as it is now."""
        trust = self._tls.for_url(url)
        with self._lock:
            if self._client is None or trust is not self._trust:  # requests in flight keep the old one until their end
                self._trust = trust
                self._client = http_client.client(timeout=self._timeout, verify=trust)
            return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _target(request: Request) -> bytes:
    """Path and query of a request."""
    query: bytes = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + (b"?" + query if query else b"")
