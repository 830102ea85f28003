"""The transport with a connection for each request in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.net.single_connections import SingleConnections


class _Connection(httpx.AsyncBaseTransport):
    """Answers with its number; what is asked of it while it has a request is an error."""

    def __init__(self, number: int) -> None:
        self.number, self.is_busy, self.closed = number, False, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert not self.is_busy and not self.closed
        self.is_busy = True
        await asyncio.sleep(0)
        if request.url.path == "/refused":
            self.is_busy = False
            raise httpx.ConnectError("refused")
        return httpx.Response(200, stream=_Answer(self))

    async def aclose(self) -> None:
        self.closed = True


class _Answer(httpx.AsyncByteStream):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(0)
        yield str(self._connection.number).encode()

    async def aclose(self) -> None:
        self._connection.is_busy = False


@settings(max_examples=seeds(40), deadline=None)
@given(st.lists(st.lists(st.sampled_from(["/read", "/refused", "/left", "/cancelled"]), min_size=1, max_size=6),
                max_size=6))
def test_requests_share_no_connection_and_use_those_that_are_free(rounds: list[list[str]]) -> None:
    made: list[_Connection] = []

    def make() -> _Connection:
        made.append(_Connection(len(made)))
        return made[-1]

    async def ask(client: httpx.AsyncClient, path: str) -> None:
        if path == "/refused":
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://router{path}")
        elif path == "/left":
            async with client.stream("GET", f"http://router{path}"):
                await asyncio.sleep(0)
        elif path == "/cancelled":
            asked = asyncio.ensure_future(client.get(f"http://router{path}"))
            await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        else:
            assert (await client.get(f"http://router{path}")).content.isdigit()

    async def run() -> None:
        transport = SingleConnections(make)
        async with httpx.AsyncClient(transport=transport) as client:
            for paths in rounds:
                await asyncio.gather(*(ask(client, path) for path in paths))
                for connection in made:
                    connection.is_busy = False  # of a request that was cancelled before its answer
                assert len(transport._free) == len(made) <= max(map(len, rounds))
                assert len({free for _, free in transport._free}) == len(made)
        assert all(connection.closed for connection in made)

    asyncio.run(run())


def test_connections_that_a_burst_has_left_are_closed_as_others_become_free() -> None:
    made: list[_Connection] = []
    clock = [0.0]

    def make() -> _Connection:
        made.append(_Connection(len(made)))
        return made[-1]

    async def run() -> None:
        transport = SingleConnections(make, lambda: clock[0])
        async with httpx.AsyncClient(transport=transport) as client:
            await asyncio.gather(*(client.get("http://router/read") for _ in range(9)))
            clock[0] = 4.0
            await client.get("http://router/read")
            assert len(made) == 9 and not any(connection.closed for connection in made)
            clock[0] = 8.0
            await client.get("http://router/read")
            assert [connection.closed for connection in made].count(False) == 1, "the one that is in use"
            assert len(transport._all) == len(transport._free) == 1

    asyncio.run(run())
