"""Checks that every request passes before its handler: origin, credentials, load, and the body, within limits.

Cheap checks come first: nothing is read for a client that may not ask, and nothing is parsed that is too large. A
request counts against ``max_requests`` once its caller is identified. Those without credentials have limits of their
own, and count only once their bodies are here, so that nobody without a token can use up what operators need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic_rl.coordinator import problems
from elastic_rl.coordinator.api import request_origin
from elastic_rl.coordinator.api.auth import Role
from elastic_rl.coordinator.api.authentication import SESSION, Caller
from elastic_rl.coordinator.api.context import ReplicaContext
from elastic_rl.coordinator.api.request_origin import ServedHosts
from elastic_rl.coordinator.metrics import scrape
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.errors import ElasticRLError
from elastic_rl.net.http_connections import Connection

PROBES = ("/healthz", "/readyz")
"""Answered to anyone under any name, also by an overloaded replica: they say nothing of the job."""
_GUARDED = ("/v1/", "/metrics")
"""Paths that need a token or a session."""
_SIGN_IN = ("POST", "/v1/session")
"""The one guarded request that may come without: its body may hold a link instead."""
_FOR_VIEWERS = {_SIGN_IN, ("DELETE", "/v1/session"), ("POST", "/v1/session-links")}
"""Changes that concern the caller's own session only."""
_METHODS = ("GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS")
_READS = ("GET", "HEAD", "OPTIONS")
_WITH_BODY = ("POST", "PATCH", "PUT", "DELETE")
_ANONYMOUS_BODY_BYTES = 1024
"""Largest body of a request without credentials: a link has 200 characters at most."""
_MAX_ANONYMOUS = 32
"""Requests without credentials that are in progress at once, beside those that are authenticated."""
_MAX_IDENTIFYING = 32
"""Sessions that are looked up in etcd at once; less than the threads of the pool, in which handlers run too."""


class _Limit:
    """Counts requests in progress."""

    def __init__(self, most: int) -> None:
        self._most, self._running = most, 0

    def take(self) -> None:
        """Raises a 503 problem at the limit."""
        if self._running >= self._most:
            raise Problem(503, Kind.OVERLOADED, "The replica has too much to do",
                          f"it works on {self._most} such requests already", headers={"Retry-After": "1"})
        self._running += 1

    def free(self) -> None:
        self._running -= 1


class RequestMiddleware:
    """The outermost part of the ASGI application."""

    def __init__(self, app: ASGIApp, context: ReplicaContext) -> None:
        self._app, self._context, self._cfg = app, context, context.cfg.coordinator
        self._hosts = ServedHosts.from_config(self._cfg)
        self._authenticated, self._anonymous = _Limit(self._cfg.max_requests), _Limit(_MAX_ANONYMOUS)
        self._identifying = _Limit(_MAX_IDENTIFYING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A copy: for HEAD the handler sees a GET, and the server still has to know that it leaves the body out.
        inner: Scope = {**scope, "state": {"context": self._context, "caller": None, "body": b"",
                                           "head": scope["method"] == "HEAD"}}
        response = _MeasuredResponse(inner, scope["method"], send)
        try:
            await self._admit(inner, receive, response, scope.get("state", {}).get("connection"))
        except Problem as problem:
            await problem.response(scope["path"])(scope, receive, response.send)
        except ElasticRLError as e:
            await problems.of_error(e).response(scope["path"])(scope, receive, response.send)
        finally:
            response.started()

    async def _admit(self, scope: Scope, receive: Receive, response: _MeasuredResponse,
                     connection: Connection | None) -> None:
        method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
        if path not in PROBES:
            self._hosts.check(headers)
        if path.startswith(_GUARDED):
            scope["state"]["caller"] = await self._caller(method, path, headers)
        known = scope["state"]["caller"] is not None
        if known:
            response.count(self._authenticated)
            if connection is not None:
                connection.busy()
        if b"%2f" in scope["raw_path"].lower():
            raise Problem(404, Kind.NOT_FOUND, "Not found", "a name in a path may have no slash, also not as %2F")
        if method == "HEAD":
            scope["method"] = "GET"
        if method in _WITH_BODY:
            most = self._cfg.max_body_bytes if known else min(_ANONYMOUS_BODY_BYTES, self._cfg.max_body_bytes)
            scope["state"]["body"] = body = await self._body(headers, receive, most)
            receive = _replay(body, receive)
        if not known and path not in PROBES:
            response.count(self._anonymous)
        await self._app(scope, receive, response.send)

    async def _caller(self, method: str, path: str, headers: Headers) -> Caller | None:
        """Who sends a request; None for one that signs in. Raises problems: 403 for one of another site, or that the
        caller may not make; those of Authenticator.identify."""
        authenticator = self._context.authenticator
        credentials = authenticator.credentials(headers)
        request_origin.check_origin(method, headers, cookie=credentials.cookie)
        if (method, path) == _SIGN_IN and (credentials.cookie or not credentials.scheme):
            return None
        if credentials.scheme == SESSION:
            self._identifying.take()
            try:
                caller = await run_in_threadpool(authenticator.identify, credentials)  # it reads etcd
            finally:
                self._identifying.free()
        else:
            caller = authenticator.identify(credentials)
        needed = Role.VIEWER if method in _READS or (method, path) in _FOR_VIEWERS else Role.OPERATOR
        if not caller.role.may(needed):
            raise Problem(403, Kind.FORBIDDEN, "The token may not do this",
                          f"{caller.name!r} is a {caller.role}; this needs an {needed}")
        return caller

    async def _body(self, headers: Headers, receive: Receive, limit: int) -> bytes:
        """All of a request's body, of ``limit`` bytes at most. Raises problems: 415; 413; 408 when it does not arrive
        in time; 400 when the connection ends before the body does: a handler would take what is missing for
        defaults."""
        too_large = Problem(413, Kind.BODY_TOO_LARGE, "The body is too large", f"it may have {limit} bytes at most",
                            headers={"Connection": "close"})
        announced = headers.get("content-length", "0")
        if len(announced) > 18 or int(announced) > limit:
            raise too_large
        body, more = b"", True
        try:
            async with asyncio.timeout(self._cfg.request_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Problem(400, Kind.MALFORMED, "The request is incomplete",
                                      "the connection ended before the body did; nothing was done",
                                      headers={"Connection": "close"})
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as e:
            raise Problem(408, Kind.REQUEST_TIMEOUT, "The request took too long to arrive",
                          f"its body was not there after {self._cfg.request_timeout_s:g} s",
                          headers={"Connection": "close"}) from e
        if body and not problems.is_json(headers):
            raise problems.not_json()
        return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that first gives a body that was read already."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


class _MeasuredResponse:
    """Passes a response on, and counts and times its start: a stream may go on for hours."""

    def __init__(self, scope: Scope, method: str, send: Send) -> None:
        self._scope, self._send = scope, send
        self._limit: _Limit | None = None
        self._method = method if method in _METHODS else "other"
        self._began = time.monotonic()

    def count(self, limit: _Limit) -> None:
        """Counts the request against a limit until its response starts. Raises a 503 problem at the limit."""
        limit.take()
        self._limit = limit

    def started(self) -> None:
        if self._limit is not None:
            self._limit.free()
            self._limit = None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.started()
            route = getattr(self._scope.get("route"), "path", "unknown")
            scrape.REQUESTS.labels(self._method, route, message["status"]).inc()
            scrape.REQUEST_S.labels(self._method, route).observe(time.monotonic() - self._began)
            if self._scope["path"].startswith("/v1/"):
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.setdefault("X-Content-Type-Options", "nosniff")
        await self._send(message)
