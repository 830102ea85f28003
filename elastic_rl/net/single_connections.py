"""An httpx transport for many requests at once. httpx looks at every connection of a pool for each request that begins
and ends, so that with a thousand of them in flight it does little else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

_IDLE_S = 5.0
"""After so long without a request a connection is closed, as httpx does, which looks at its own pool's only."""


class SingleConnections(httpx.AsyncBaseTransport):
    """Gives each request in flight a transport of one connection, the one that was used last among those that are free.
    Those that are free for long are closed as others become free. Whoever sends bounds how many are in flight. Used
    from one event loop."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport], now: Callable[[], float] = time.monotonic) -> None:
        """``make``: makes a transport that is used for one request at a time. ``now``: seconds of a clock."""
        self._make, self._now = make, now
        self._all: set[httpx.AsyncBaseTransport] = set()
        self._free: deque[tuple[float, httpx.AsyncBaseTransport]] = deque()
        """Connections that are free, each with the time when it became so; the one that was used last is the last."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = self._free.pop()[1] if self._free else self._added()
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await self._release(transport)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, lambda: self._release(transport))
        return response

    def _added(self) -> httpx.AsyncBaseTransport:
        self._all.add(made := self._make())
        return made

    async def _release(self, transport: httpx.AsyncBaseTransport) -> None:
        self._free.append((self._now(), transport))
        while self._free[0][0] < self._now() - _IDLE_S:
            _, idle = self._free.popleft()
            self._all.discard(idle)
            await idle.aclose()

    async def aclose(self) -> None:
        for transport in self._all:
            await transport.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of a response, which gives its transport back when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, release: Callable[[], Awaitable[None]]) -> None:
        self._body = body
        self._release: Callable[[], Awaitable[None]] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece

    async def aclose(self) -> None:
        release, self._release = self._release, None
        try:
            await self._body.aclose()
        finally:
            if release is not None:
                await release()
