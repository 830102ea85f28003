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

from elastic_rl.config import CoordinatorConfig
from elastic_rl.errors import PreflightFailed
from elastic_rl.runtime import reachable_address, require_port_free

_HEADER_BYTES = 32 * 1024
_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 3
_CONNECTIONS = 1024
"""Beyond those that work and stream: connections that rest between two requests."""
_UNTAKEN_MS = 30_000


class Server(uvicorn.Server):
    """Uvicorn without its signal handlers: a replica resigns before it stops to answer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, cfg: CoordinatorConfig) -> Server:
    class Protocol(_Protocol):
        header_timeout_s = cfg.request_timeout_s

    return Server(uvicorn.Config(
        app, http=Protocol, ws="none", log_config=None, access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S, timeout_keep_alive=_KEEP_ALIVE_S,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        limit_concurrency=_CONNECTIONS + cfg.max_requests + cfg.max_streams,
        ssl_certfile=cfg.tls_cert or None, ssl_keyfile=cfg.tls_key or None))


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, held from here on, so that nobody takes the port between the check and the use."""
    require_port_free(host, port, setting="coordinator.ports")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol said, asyncio sets TCP_NODELAY: else an answer's body waits 40 ms for the ACK of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that is there and takes nothing would keep what was sent to it in our memory for ever.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MS)
    try:
        listener.bind((host, port))
        listener.listen(256)
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
    """A connection on which a request's headers have to arrive in a bounded time, the first ones and all later ones."""

    header_timeout_s: float
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._late = self.loop.call_later(self.header_timeout_s, self._give_up)

    def handle_events(self) -> None:
        super().handle_events()
        in_headers = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if in_headers and self._late is None:
            self._late = self.loop.call_later(self.header_timeout_s, self._give_up)
        elif not in_headers:
            self._calm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def _calm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self.transport.abort()
