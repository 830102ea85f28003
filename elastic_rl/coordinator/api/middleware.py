"""What every request passes before its handler: room for it, its token, and its body, within limits.

The order is that of cheapness: nothing is read for a client that may not ask, and nothing is parsed that is too large.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api.auth import Role, Token
from elastic_rl.coordinator.api.context import Context
from elastic_rl.coordinator.metrics import scrape
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.errors import ConfigError

PROBES = ("/healthz", "/readyz")
_GUARDED = ("/v1/", "/metrics")
_METHODS = ("GET", "HEAD", "POST", "PATCH", "PUT", "DELETE", "OPTIONS")
_WITH_BODY = ("POST", "PATCH", "PUT", "DELETE")
_JSON = "application/json"


class RequestMiddleware:
    """The outermost part of the ASGI application."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app, self._context, self._cfg = app, context, context.cfg.coordinator
        self._required = auth.tokens_required(self._cfg)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A copy: for HEAD the handler sees a GET, and the server still has to know that it leaves the body out.
        inner: Scope = {**scope, "state": {"token": None, "body": b"", "head": scope["method"] == "HEAD"}}
        answer = _Answer(inner, scope["method"], send)
        counted = scope["path"] not in PROBES
        self._running += counted
        answer.on_start = self._finished if counted else lambda: None
        try:
            if counted and self._running > self._cfg.max_requests:
                raise Problem(503, Kind.OVERLOADED, "The replica has too much to do",
                              f"it works on {self._cfg.max_requests} requests already", headers={"Retry-After": "1"})
            await self._let_in(inner, receive, answer.send)
        except Problem as problem:
            await problem.response(scope["path"])(scope, receive, answer.send)
        finally:
            answer.started()

    def _finished(self) -> None:
        self._running -= 1

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, headers = scope["method"], Headers(scope=scope)
        if scope["path"].startswith(_GUARDED):
            scope["state"]["token"] = self._token(headers, Role.VIEWER if method in ("GET", "HEAD", "OPTIONS")
                                                  else Role.OPERATOR)
        if method == "HEAD":
            scope["method"] = "GET"
        if method in _WITH_BODY:
            body = await self._body(headers, receive)
            if body and not _is_json(headers.get("content-type", "")):
                raise Problem(415, Kind.UNSUPPORTED_MEDIA_TYPE, "Unsupported media type",
                              f"send the body as Content-Type: {_JSON}")
            scope["state"]["body"] = body
            receive = _replay(body, receive)
        await self._app(scope, receive, send)

    def _token(self, headers: Headers, needed: Role) -> Token | None:
        """The token of a request. Raises 401 and 403 problems, and 503 when the table cannot be read."""
        given = headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        if not given:
            if not self._required:
                return None
            raise Problem(401, Kind.UNAUTHORIZED, "A token is required", "send Authorization: Bearer <token>",
                          headers={"WWW-Authenticate": "Bearer"})
        try:
            found = self._context.tokens.find(token.strip()) if scheme.lower() == "bearer" else None
        except ConfigError as e:
            raise Problem(503, Kind.TOKEN_TABLE, "The token table cannot be read", e.message) from e
        if found is None:
            raise Problem(401, Kind.UNKNOWN_TOKEN, "The token is not known", "it is misspelt, or was withdrawn",
                          headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})
        if not found.role.may(needed):
            raise Problem(403, Kind.FORBIDDEN, "The token may not do this",
                          f"token {found.name!r} is a {found.role}; this needs an {needed}")
        return found

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """All of a request's body. Raises problems: 413, and 408 when it does not arrive in time."""
        most = self._cfg.max_body_bytes
        too_large = Problem(413, Kind.BODY_TOO_LARGE, "The body is too large", f"it may have {most} bytes at most",
                            headers={"Connection": "close"})
        announced = headers.get("content-length", "0")
        if len(announced) > 18 or int(announced) > most:
            raise too_large
        body = b""
        try:
            async with asyncio.timeout(self._cfg.request_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large
        except TimeoutError as e:
            raise Problem(408, Kind.REQUEST_TIMEOUT, "The request took too long to arrive",
                          f"its body was not there after {self._cfg.request_timeout_s:g} s",
                          headers={"Connection": "close"}) from e
        return body


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _JSON


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read already, then what comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


class _Answer:
    """Passes an answer on, and measures when it begins: a stream may go on for hours."""

    def __init__(self, scope: Scope, method: str, send: Send) -> None:
        self._scope, self._send = scope, send
        self._method = method if method in _METHODS else "other"
        self._began = time.monotonic()
        self._started = False
        self.on_start = lambda: None

    def started(self) -> None:
        if not self._started:
            self._started = True
            self.on_start()

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
