"""Slow and faulty links for the tests: TCP proxies whose speed is held each way, and which can stop, break and damage
what goes through them. (Not every kernel can shape traffic.)"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from elastic_rl.bench.dcs.links import Pace

_PIECE = 64 << 10
_SOCKET_BYTES = 64 << 10
"""Bytes of kernel buffers at either side: what lies in them has passed the link already."""

Tamper = Callable[[bytearray], None]
"""Changes a piece of what a server sends, in place."""


class Bucket:
    """One way of a link, shared by all of its connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._pace = Pace(bytes_per_s)
        self.nbytes = 0
        """That passed."""

    async def pay(self, nbytes: int) -> None:
        """Returns when so many bytes may have passed."""
        if wait := self._pace.pay(nbytes):
            await asyncio.sleep(wait)
        self.nbytes += nbytes


class Link:
    """The way to one server: what connects to ``port`` gets to the server's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target_port: int, bytes_per_s: float) -> None:
        self.sent, self.received = Bucket(bytes_per_s), Bucket(bytes_per_s)
        """By the server."""
        self.tamper: Callable[[], Tamper] | None = None
        """Makes what changes the server's bytes, for each new connection."""
        self._loop, self._target_port = loop, target_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._held = 0
        self._listener = _small(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.port = int(self._listener.getsockname()[1])
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(), loop)

    def pause(self) -> None:
        """From now on the server's bytes are held back; connections stay open, and new ones are accepted."""
        async def pause() -> None:
            self._flowing.clear()

        self._run(pause())

    def resume(self) -> None:
        async def resume() -> None:
            self._flowing.set()

        self._run(resume())

    def cut(self) -> None:
        """Ends all connections; new ones are accepted."""
        async def cut() -> None:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._run(cut())

    def _run(self, change: Coroutine[Any, Any, None]) -> None:
        """Runs it in the loop's thread, and returns once it is done: what is sent after that finds the link changed."""
        asyncio.run_coroutine_threadsafe(change, self._loop).result(60)

    @property
    def held(self) -> int:
        """Connections with bytes that are held back now."""
        return self._held

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._join(_small(near)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _join(self, near: socket.socket) -> None:
        far = _small(socket.socket())
        ways: list[asyncio.Task[None]] = []
        try:
            await self._loop.sock_connect(far, ("127.0.0.1", self._target_port))
            ways = [self._loop.create_task(self._pump(near, far, self.received, None, hold=False)),
                    self._loop.create_task(self._pump(far, near, self.sent, self.tamper and self.tamper(), hold=True))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the server is gone: so is the connection
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            near.close()
            far.close()

    async def _pump(self, source: socket.socket, sink: socket.socket, bucket: Bucket, tamper: Tamper | None, *,
                    hold: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(await self._loop.sock_recv(source, _PIECE)):
                if hold and not self._flowing.is_set():
                    self._held += 1
                    try:
                        await self._flowing.wait()
                    finally:
                        self._held -= 1
                if tamper is not None:
                    tamper(data)
                await bucket.pay(len(data))
                await self._loop.sock_sendall(sink, data)

    def close(self) -> None:
        self._accepting.cancel()
        self.cut()
        self._listener.close()


class Links:
    """Links of one test, on one event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._links: list[Link] = []

    def add(self, target_port: int, bytes_per_s: float) -> Link:
        """A link to a server of this host."""
        async def make() -> Link:
            return Link(self._loop, target_port, bytes_per_s)

        link = asyncio.run_coroutine_threadsafe(make(), self._loop).result(60)
        self._links.append(link)
        return link

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


def _small(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    return sock
