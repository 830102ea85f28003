"""The HTTP server of a coordinator replica and of a trainer rank: uvicorn, with limits on headers, on slow clients and
on connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from elastic_rl.net.http_connections import Acceptor, Connection, Limits


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers, since a replica resigns before it stops to answer, and with an ``Acceptor``
    in place of asyncio's, which has no limits."""

    def __init__(self, config: uvicorn.Config, limits: Limits, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._limits, self._handshake_timeout_s = limits, handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """``sockets``: the listening ones. Their idle connections are limited each by itself."""
        self.servers = [Acceptor(listener, self._make_protocol, self._limits, self.config.ssl,  # type: ignore[misc]
                                 self._handshake_timeout_s) for listener in sockets or []]
        self.started = True

    def _make_protocol(self, connection: Connection) -> asyncio.Protocol:
        return _Protocol(self.config, self.server_state, connection, self._handshake_timeout_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """A connection on which the headers of every request have to arrive within ``header_timeout_s``, and that
    reports its state to its ``Connection``."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, connection: Connection,
                 header_timeout_s: float) -> None:
        super().__init__(config, server_state, {"connection": connection})
        self._connection, self._header_timeout_s = connection, header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connection.made(transport)
        self._start_deadline()

    def handle_events(self) -> None:
        super().handle_events()
        in_headers = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not in_headers:
            self._cancel_deadline()
        elif self._deadline is None:
            self._start_deadline()

    def on_response_complete(self) -> None:
        self._connection.idle()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        self._cancel_deadline()
        super().connection_lost(exc)

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._header_timeout_s, self._abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort(self) -> None:
        self.transport.abort()
