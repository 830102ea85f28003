"""The HTTP server under the API: uvicorn, with limits on headers, on slow clients and on connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.api.connections import Acceptor, Connection, Limits, limits_of_process
from elastic_rl.errors import PreflightFailed
from elastic_rl.net.addresses import reachable_address, require_port_free

_HEADER_BYTES = 32 * 1024
_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 3
_UNACKNOWLEDGED_MS = 30_000
_BACKLOG = 256


class LimitedServer(uvicorn.Server):
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


def make_server(app: ASGIApp, cfg: CoordinatorConfig, limits: Limits | None = None) -> LimitedServer:
    """``limits``: of idle connections; default: as many as this process may have. The state of each request's scope has
    its ``Connection`` under "connection". Raises ConfigError when the certificate of the settings cannot be used."""
    context = tls.server_context(cfg)
    limits = limits or limits_of_process(cfg.max_requests + cfg.max_streams)
    return LimitedServer(uvicorn.Config(
        app, interface="asgi3", http=_Protocol, ws="none", log_config=None, access_log=False, lifespan="off",
        server_header=False, timeout_graceful_shutdown=_SHUTDOWN_S, timeout_keep_alive=_KEEP_ALIVE_S,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        ssl_context_factory=(lambda _config, _default: context) if context is not None else None),
        limits, cfg.request_timeout_s)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. It is held from here on, so that no other process takes the port between the check and the
    use. Raises PreflightFailed when the port cannot be bound."""
    require_port_free(host, port, setting="coordinator.ports")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol given, asyncio sets TCP_NODELAY: else an answer's body waits 40 ms for the ACK of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that is connected and reads nothing would keep what was sent to it in our memory for ever.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise PreflightFailed(f"port {port} on {host} cannot be bound (coordinator.ports): {e.strerror}",
                              hint="stop what listens there, or set another port") from e
    return listener


def advertised(cfg: CoordinatorConfig, port: int, etcd_endpoints: Sequence[str]) -> str:
    """URL under which the other replicas and the clients reach this one."""
    host = cfg.advertise_host or reachable_address(cfg.host, etcd_endpoints)
    return f"{cfg.scheme}://[{host}]:{port}" if ":" in host else f"{cfg.scheme}://{host}:{port}"


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
