"""Slow links: a proxy for all traffic between nodes, with a limited speed each way for every node.

A node registers the address of its link instead of its own (``dcs.advertise_port``), so its callers connect to the
proxy; the first message names the calling node. Bytes from node a to node b count against a's speed out and b's speed
in, and are counted at both.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.bench.workers import serve

_PIECE = 64 << 10
_SOCKET_BYTES = 128 << 10
"""Size of the kernel's buffers on either side; bytes in them are counted already."""
_BURST_S = 0.02
_PREAMBLE = struct.Struct(">4sIQ")  # of dcs.protocol
_LONGEST_HELLO = 64 << 10


@dataclass
class Pace:
    """One way of a link. ``pay`` says how long to wait before so many bytes have passed. Pure but for its clock."""

    bytes_per_s: float
    clock: Callable[[], float] = time.monotonic
    sent: int = 0
    _free_at: float = 0.0

    def pay(self, nbytes: int) -> float:
        """Seconds until these bytes are through; a link that idled has saved up a burst of ``_BURST_S``, no more."""
        now = self.clock()
        self._free_at = max(self._free_at, now - _BURST_S) + nbytes / self.bytes_per_s
        self.sent += nbytes
        return max(self._free_at - now, 0.0)


@dataclass
class Link:
    """A node's link: where it really listens, and both ways."""

    port: int
    out: Pace
    into: Pace


@dataclass
class Links:
    """All links; runs on one event loop in a thread."""

    bytes_per_s: float
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _links: dict[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        threading.Thread(target=self.loop.run_forever, name="links", daemon=True).start()

    def add(self, node: str, port: int) -> int:
        """A link to the node that listens at ``port`` of this host; the link's own port."""
        self._links[node] = Link(port, Pace(self.bytes_per_s), Pace(self.bytes_per_s))
        listener = _listen()
        asyncio.run_coroutine_threadsafe(self._accept(node, listener), self.loop)
        return int(listener.getsockname()[1])

    def counts(self) -> dict[str, dict[str, int]]:
        """Bytes that each node sent and received."""
        return {name: {"out": link.out.sent, "into": link.into.sent} for name, link in self._links.items()}

    async def _accept(self, node: str, listener: socket.socket) -> None:
        with listener:
            while True:
                inner, _ = await self.loop.sock_accept(listener)
                self.loop.create_task(self._join(node, _small(inner)))

    async def _join(self, node: str, near: socket.socket) -> None:
        """``near``: the caller's link. The node's answers pay at the node's way out and the caller's way in."""
        link = self._links[node]
        far = _small(socket.socket())
        far.setblocking(False)
        try:
            await self.loop.sock_connect(far, ("127.0.0.1", link.port))
            first, caller = await self._first_message(near)
            other = self._links.get(caller)
            await self.loop.sock_sendall(far, first)
            async with asyncio.TaskGroup() as both:  # the end of one way with an error is the end of the other
                both.create_task(self._pump(near, far, [link.into, *([other.out] if other else [])]))
                both.create_task(self._pump(far, near, [link.out, *([other.into] if other else [])]))
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side went away: the other learns of it now
        finally:
            near.close()
            far.close()

    async def _first_message(self, near: socket.socket) -> tuple[bytes, str]:
        """The caller's hello as it came, and the id of the calling node in it; empty for clients that are none."""
        raw = await self._exactly(near, _PREAMBLE.size)
        _, nheader, _ = _PREAMBLE.unpack(raw)
        text = await self._exactly(near, min(nheader, _LONGEST_HELLO))
        hello: dict[str, Any] = json.loads(text)
        return raw + text, str(hello.get("id") or "")

    async def _exactly(self, sock: socket.socket, nbytes: int) -> bytes:
        out = b""
        while len(out) < nbytes:
            data = await self.loop.sock_recv(sock, nbytes - len(out))
            if not data:
                raise asyncio.IncompleteReadError(out, nbytes)
            out += data
        return out

    async def _pump(self, source: socket.socket, sink: socket.socket, paces: list[Pace]) -> None:
        buffer = memoryview(bytearray(_PIECE))
        while n := await self.loop.sock_recv_into(source, buffer):
            if wait := max(pace.pay(n) for pace in paces):
                await asyncio.sleep(wait)
            await self.loop.sock_sendall(sink, buffer[:n])
        sink.shutdown(socket.SHUT_WR)


def _small(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    return sock


def _listen() -> socket.socket:
    listener = _small(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    return listener


if __name__ == "__main__":
    links = Links(float(sys.argv[1]))
    serve({"add": lambda node, port: {"port": links.add(node, port)}, "counts": links.counts})
