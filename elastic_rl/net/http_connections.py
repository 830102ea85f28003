"""Connections of the HTTP server: accepts them, and closes idle ones where there are too many.

Any host that reaches the port can open connections. A connection is *busy* while an authenticated request of it is in
progress, and *idle* otherwise: in its TLS handshake, before and between requests, and during a request without
credentials. Idle ones are limited in all and for each address; at a limit the oldest is closed for the next, so that a
client that sends its request at once is served however many silent ones there are.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

_RESERVED_DESCRIPTORS = 128
"""Descriptors kept for etcd, log files and the like."""
_ACCEPT_BATCH = 64
"""Connections accepted in one iteration of the event loop."""
_ACCEPT_RETRY_S = 0.2
_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Limits:
    """Bounds of the idle connections."""

    idle: int = 1024
    idle_per_address: int = 256


class IdleConnections:
    """The idle connections, oldest first. Pure; not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._addresses: dict[int, str] = {}
        self._by_address: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, conn: int, address: str) -> list[int]:
        """A connection is idle from now on. Returns those that are to be closed for it; they are removed."""
        evicted = []
        if len(self._by_address.get(address, ())) >= self._limits.idle_per_address:
            evicted.append(self._oldest(address))
        elif len(self) >= self._limits.idle:
            evicted.append(self._oldest(max(self._by_address, key=lambda a: len(self._by_address[a]))))
        for old in evicted:
            self.remove(old)
        self._addresses[conn] = address
        self._by_address.setdefault(address, {})[conn] = None
        return evicted

    def remove(self, conn: int) -> None:
        """A connection is busy from now on, or closed."""
        if (address := self._addresses.pop(conn, None)) is not None:
            del self._by_address[address][conn]
            if not self._by_address[address]:
                del self._by_address[address]

    def _oldest(self, address: str) -> int:
        return next(iter(self._by_address[address]))


class Connection:
    """A connection that was accepted. Its protocol calls ``made``, ``begin``, ``idle`` and ``lost``, and the
    authentication of a request calls ``busy``. For the thread of the event loop."""

    def __init__(self, acceptor: Acceptor, number: int, sock: socket.socket, address: str) -> None:
        self._acceptor, self._number, self._sock, self._address = acceptor, number, sock, address
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._busy = False
        self.authenticated = False
        """Whether the request in progress, or the last one, is authenticated."""

    def open(self, opening: asyncio.Task[None]) -> None:
        """``opening`` ends once the protocol has its transport, or fails."""
        self._opening = opening
        opening.add_done_callback(self._opened)
        self._enter()

    def made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def begin(self) -> None:
        """The headers of a request are here."""
        self.authenticated = False

    def busy(self) -> None:
        """A request has authenticated: the connection is not closed for others until the response is complete."""
        self._busy = self.authenticated = True
        self._acceptor.leave(self._number)

    def idle(self) -> None:
        """A response is complete."""
        if self._busy:
            self._busy = False
            self._enter()

    def lost(self) -> None:
        """The transport is closed."""
        self._acceptor.leave(self._number)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def _enter(self) -> None:
        self._acceptor.enter(self._number, self._address, self)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            return
        if not opening.cancelled() and not isinstance(error := opening.exception(), OSError):
            log.error("connection from %s failed", self._address, exc_info=error)
        self.lost()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._sock.close()  # a task that was cancelled before it began has not closed it


class Acceptor:
    """Accepts the connections of one listening socket, and keeps idle ones within limits. It has the methods that
    uvicorn calls of an ``asyncio.Server``."""

    def __init__(self, listener: socket.socket, make_protocol: Callable[[Connection], asyncio.Protocol],
                 limits: Limits, context: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        self._listener, self._make_protocol = listener, make_protocol
        self._context, self._timeout_s = context, handshake_timeout_s if context is not None else None
        self._idle = IdleConnections(limits)
        self._connections: dict[int, Connection] = {}  # the idle ones
        self._opening: set[asyncio.Task[None]] = set()
        self._accepted = 0
        self._failed = 0
        self._logged_at: float | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stops to accept, and ends unfinished handshakes."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        for opening in self._opening:
            opening.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)

    def enter(self, number: int, address: str, connection: Connection) -> None:
        """The connection is idle from now on."""
        for evicted in self._idle.add(number, address):
            log.debug("an idle connection is closed for one from %s", address)
            self._connections.pop(evicted).abort()
        self._connections[number] = connection

    def leave(self, number: int) -> None:
        """The connection is busy from now on, or closed."""
        self._idle.remove(number)
        self._connections.pop(number, None)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:  # no descriptors or no memory
                self._report(e)
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
                return
            sock.setblocking(False)
            self._accepted += 1
            connection = Connection(self, self._accepted, sock, str(address[0]))
            opening = self._loop.create_task(self._open(connection, sock))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            connection.open(opening)

    async def _open(self, connection: Connection, sock: socket.socket) -> None:
        await self._loop.connect_accepted_socket(lambda: self._make_protocol(connection), sock, ssl=self._context,
                                                 ssl_handshake_timeout=self._timeout_s,
                                                 ssl_shutdown_timeout=self._timeout_s)

    def _report(self, error: OSError) -> None:
        self._failed += 1
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= _LOG_INTERVAL_S:
            log.error("connections cannot be accepted (%d failures since the last report): %s", self._failed, error)
            self._logged_at, self._failed = now, 0


def limits_of_process(max_busy: int) -> Limits:
    """The default limits, or fewer where this process may not have that many descriptors beside ``max_busy`` busy
    connections. Raises the soft limit of descriptors to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return Limits()
    idle = max(16, min(Limits.idle, hard - max_busy - _RESERVED_DESCRIPTORS))
    return Limits(idle, min(Limits.idle_per_address, max(8, idle // 4)))
