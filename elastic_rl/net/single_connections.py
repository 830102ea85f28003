"""An httpx transport for many requests at once. httpx looks at every connection of a pool for each request that begins
and ends, so that with a thousand of them in flight it does little else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx


class SingleConnections(httpx.AsyncBaseTransport):
    """Gives each request in flight a transport of one connection, the one that was used last among those that are free.
    Whoever sends bounds how many are in flight. Used from one event loop."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        """``make``: makes a transport that is used for one request at a time."""
        self._make = make
        self._all: list[httpx.AsyncBaseTransport] = []
        self._free: list[httpx.AsyncBaseTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = self._free.pop() if self._free else self._added()
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            self._free.append(transport)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return httpx.Response(response.status_code, headers=response.headers, extensions=response.extensions,
                              stream=_Body(response.stream, lambda: self._free.append(transport)))

    def _added(self) -> httpx.AsyncBaseTransport:
        self._all.append(made := self._make())
        return made

    async def aclose(self) -> None:
        for transport in self._all:
            await transport.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of a response, which gives its transport back when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, release: Callable[[], None]) -> None:
        self._body = body
        self._release: Callable[[], None] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece

    async def aclose(self) -> None:
        release, self._release = self._release, None
        try:
            await self._body.aclose()
        finally:
            if release is not None:
                release()
