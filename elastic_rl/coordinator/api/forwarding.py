"""Hands a write that reached a follower on to the leader."""

from __future__ import annotations

import httpx
from fastapi import Request, Response

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.problems import Kind, Problem, no_leader
from elastic_rl.etcd.records import Leader
from elastic_rl.telemetry import traces

FORWARDED = "x-elastic-rl-forwarded-by"
_PASSED_ON = ("authorization", "content-type", "if-match", "idempotency-key", "accept")
_PASSED_BACK = ("content-type", "etag", "retry-after", "location", "www-authenticate", "idempotency-replayed")


def _target(request: Request) -> bytes:
    """Path and query of a request."""
    query: bytes = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + (b"?" + query if query else b"")


class Forwarder:
    """One pooled HTTP client to whoever leads."""

    def __init__(self, replica: str, *, timeout_s: float, tls_ca: str = "") -> None:
        """``tls_ca``: PEM file of the authority of the replicas' certificates; empty: the system's.

        Raises ConfigError when it cannot be read.
        """
        self._replica = replica
        self._client = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=min(1.0, timeout_s)), trust_env=False,
                                    verify=tls.trust(tls_ca))

    def send(self, request: Request, body: bytes, leader: Leader | None) -> Response:
        """The leader's answer as it is.

        Raises problems: 503 when nobody leads, when the leader cannot be reached, or when the request was forwarded
        already (two replicas that take each other for the leader must not play ball); 504 when the answer was lost.
        """
        if leader is None or leader.replica == self._replica:
            raise no_leader("an election is under way")
        if FORWARDED in request.headers:
            raise no_leader(f"{self._replica} does not lead, and the request came from "
                            f"{request.headers[FORWARDED]} already")
        headers = {k: request.headers[k] for k in _PASSED_ON if k in request.headers}
        headers |= {FORWARDED: self._replica, **traces.inject()}
        target = httpx.URL(leader.url).copy_with(raw_path=_target(request))  # as it came, with its escapes
        try:
            answer = self._client.request(request.method, target, content=body, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as e:
            raise no_leader(f"the leader {leader.replica} cannot be reached: {e}") from e
        except httpx.HTTPError as e:
            raise Problem(504, Kind.OUTCOME_UNKNOWN, "The outcome of the write is unknown",
                          f"the answer of the leader {leader.replica} was lost ({type(e).__name__}); "
                          "read the resource again") from e
        kept = {k: answer.headers[k] for k in _PASSED_BACK if k in answer.headers}
        return Response(answer.content, answer.status_code, kept)

    def close(self) -> None:
        self._client.close()
