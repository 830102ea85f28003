"""The HTTP server of a coordinator replica, of a trainer rank and of a host's logs: uvicorn, with limits on headers, on
bodies that nobody reads, on slow clients and on connections. What is no HTTP is answered as a problem (RFC 9457).

``make_server`` is the one place that makes such a server, so no server of the project is without these limits; those of
SGLang have them from ``engine.sglang.request_bounds``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from elastic_rl.net.http_connections import Acceptor, Connection, Limits
from elastic_rl.net.request_bounds import HEADER_BYTES, REQUEST_LOG, UnreadBody, header_size, refusal

_UNACKNOWLEDGED_MS = 30_000
_DATE_S = 1.0
"""How often the ``Date`` of answers is renewed."""


def listening_socket(host: str, port: int, *, backlog: int, reuses_address: bool = False) -> socket.socket:
    """A socket that listens at an IP address, for an ``HttpServer``. ``reuses_address``: also while connections of an
    earlier server of the port are ending. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol given, asyncio sets TCP_NODELAY: else an answer's body waits 40 ms for the ACK of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if reuses_address:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A client that is connected and reads nothing would keep what was sent to it in our memory for ever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def make_server(app: Any, context: ssl.SSLContext | None, limits: Limits, *, request_timeout_s: float,
                keep_alive_s: int, shutdown_s: int | None = None) -> HttpServer:
    """A server of an ASGI application with all limits of this module. ``context``: to serve with TLS, else None.
    ``limits``, ``request_timeout_s``: see ``HttpServer``. ``keep_alive_s``: after so long without a request a
    connection is closed. ``shutdown_s``: what requests in progress have when it stops; None: all the time they need.
    The state of each request's scope has its ``Connection`` under "connection"."""
    return HttpServer(uvicorn.Config(
        app, interface="asgi3", ws="none", log_config=None, access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=shutdown_s, timeout_keep_alive=keep_alive_s,
        ssl_context_factory=None if context is None else lambda *_: context), limits, request_timeout_s)


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers, since a replica resigns before it stops to answer, and with an ``Acceptor``
    in place of asyncio's, which has no limits."""

    def __init__(self, config: uvicorn.Config, limits: Limits, request_timeout_s: float) -> None:
        """``request_timeout_s``: within which a TLS handshake must end, and the headers of a request, and the rest of a
        body that nobody reads, must have arrived."""
        self._should_exit = False
        self._exits: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        super().__init__(config)
        self._limits, self._request_timeout_s = limits, request_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """``sockets``: the listening ones. Their idle connections are limited each by itself."""
        self.servers = [Acceptor(listener, self._make_protocol, self._limits, self.config.ssl,  # type: ignore[misc]
                                 self._request_timeout_s) for listener in sockets or []]
        self.started = True

    @property  # type: ignore[override]
    def should_exit(self) -> bool:
        """Whether the server is to end. Any thread may set it."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and (exits := self._exits) is not None:
            loop, event = exits
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(event.set)

    async def main_loop(self) -> None:
        """Waits for ``should_exit``; uvicorn's own looks at it ten times a second, and an idle server at nothing else.
        """
        event = asyncio.Event()
        self._exits = asyncio.get_running_loop(), event
        while not await self.on_tick(0):  # 0: a tick at which the date is renewed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), _DATE_S)

    def _make_protocol(self, connection: Connection) -> asyncio.Protocol:
        return _Protocol(self.config, self.server_state, connection, self._request_timeout_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Parser(h11.Connection):
    """The parser of a connection. ``begins`` is called at each request, and ``takes``, with its size, at each piece of
    its body; where that is False, the connection has been closed, and the rest of what was read is left."""

    def __init__(self, begins: Callable[[], None], takes: Callable[[int], bool]) -> None:
        super().__init__(h11.SERVER, HEADER_BYTES)  # which bounds headers that are not complete
        self._begins, self._takes = begins, takes
        self.refusal: h11.RemoteProtocolError | None = None
        """Why what the client sent is no request."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request) and header_size(event.method, event.target, event.headers) > HEADER_BYTES:
                raise h11.RemoteProtocolError("the headers are too large", error_status_hint=431)
        except h11.RemoteProtocolError as e:
            self.refusal = e
            raise
        if isinstance(event, h11.Request):
            self._begins()
        elif isinstance(event, h11.Data) and not self._takes(len(event.data)):
            return h11.NEED_DATA
        return event


class _Protocol(H11Protocol):
    """A connection on which the headers of every request, and the rest of a body that nobody reads, have to arrive
    within ``request_timeout_s``, and that reports its state to its ``Connection``."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, connection: Connection,
                 request_timeout_s: float) -> None:
        super().__init__(config, server_state, {"connection": connection})
        self.logger = REQUEST_LOG
        self.conn = self._parser = _Parser(self._begin, self._take)
        self._connection, self._request_timeout_s = connection, request_timeout_s
        self._unread = UnreadBody()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connection.made(transport)
        self._start_deadline()

    def handle_events(self) -> None:
        super().handle_events()
        self._update_deadline()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP with a problem, where an answer can still begin. The application must not go on to
        answer its request on this connection: each such request of a stranger would leave a traceback in the log."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = self._parser.refusal
            self.transport.write(refusal(error.error_status_hint if error is not None else 400, str(error or "")))
            self.transport.close()
        else:
            self._abort()

    def on_response_complete(self) -> None:
        self._connection.idle()
        super().on_response_complete()
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        self._cancel_deadline()
        super().connection_lost(exc)

    def _begin(self) -> None:
        self._connection.begin()
        self._unread = UnreadBody()

    def _take(self, size: int) -> bool:
        if self._connection.authenticated or self._unread.take(size):
            return True
        self._abort()
        return False

    def _awaits_client(self) -> bool:
        """Whether nobody but the client can go on: the headers of a request are incomplete, or the body of one that was
        answered without credentials."""
        if self.conn.their_state is h11.IDLE:
            return bool(self.conn.trailing_data[0])
        return (self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
                and not self._connection.authenticated)

    def _update_deadline(self) -> None:
        if self.transport.is_closing() or not self._awaits_client():
            self._cancel_deadline()
        elif self._deadline is None:
            self._start_deadline()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._request_timeout_s, self._abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort(self) -> None:
        self.transport.abort()
