"""What the fleet is compared with: hosts that get a file over plain TCP through the same links (``links``).

``each``: the source sends the whole to every host at once, as a file server or one broadcast of point-to-point copies
does. ``chain``: every host receives from the one before and passes each piece on at once, as a ring broadcast does; it
ends with the first host that fails. Nothing is verified, and nothing is stored. One process simulates all hosts.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic_rl.bench.workers import WorkerFailed, serve
from elastic_rl.dcs import protocol

_PIECE = 256 << 10
_TIMEOUT_S = 600.0


class Hosts:
    """Each host listens at the port of its link. Host 0 is the source."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._names: list[str] = []
        self._listeners: list[socket.socket] = []
        self._links: list[int] = []

    def listen(self, names: list[str]) -> dict[str, list[int]]:
        """Ports of the hosts of these names; the links lead to them."""
        self._names = names
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in names]
        return {"ports": [s.getsockname()[1] for s in self._listeners]}

    def connect(self, links: list[int]) -> None:
        """Ports of the links, by which the hosts reach one another."""
        self._links = links

    def each(self) -> dict[str, float]:
        """Seconds until every host has all bytes."""
        return self._run(lambda i: 0)

    def chain(self) -> dict[str, float]:
        """The same where each host gets the bytes from the one before."""
        return self._run(lambda i: i - 1)

    def _run(self, source_of: Callable[[int], int]) -> dict[str, float]:
        hosts = range(1, len(self._names))
        receivers = {i: [j for j in hosts if source_of(j) == i] for i in range(len(self._names))}
        upstream: dict[int, socket.socket] = {}
        downstream: dict[int, list[socket.socket]] = {i: [] for i in receivers}

        def accept(i: int) -> None:
            for _ in receivers[i]:
                sock, _ = self._listeners[i].accept()
                sock.settimeout(_TIMEOUT_S)
                protocol.receive(sock)
                downstream[i].append(sock)

        def receive(i: int) -> None:
            """Passes each piece on to the receivers of this host."""
            buffer, left = memoryview(bytearray(_PIECE)), self._nbytes
            while left:
                n = upstream[i].recv_into(buffer[:min(left, _PIECE)])
                if not n:
                    raise WorkerFailed(f"host {i} got {self._nbytes - left} of {self._nbytes} bytes")
                for sock in downstream[i]:
                    sock.sendall(buffer[:n])
                left -= n

        def send(sock: socket.socket) -> None:
            piece, left = memoryview(bytearray(_PIECE)), self._nbytes
            while left:
                n = min(left, _PIECE)
                sock.sendall(piece[:n])
                left -= n

        with contextlib.ExitStack() as stack, ThreadPoolExecutor(3 * len(self._names)) as pool:
            accepted = [pool.submit(accept, i) for i in receivers if receivers[i]]
            for i in hosts:
                sock = upstream[i] = stack.enter_context(socket.create_connection(
                    ("127.0.0.1", self._links[source_of(i)]), timeout=_TIMEOUT_S))
                protocol.send(sock, {"op": "hello", "id": self._names[i]})
            for done in accepted:
                done.result(_TIMEOUT_S)
            for socks in downstream.values():
                for sock in socks:
                    stack.enter_context(sock)
            start = time.monotonic()
            work = [*(pool.submit(receive, i) for i in hosts), *(pool.submit(send, s) for s in downstream[0])]
            for future in work:
                future.result(_TIMEOUT_S)
            return {"seconds": time.monotonic() - start}


if __name__ == "__main__":
    made = Hosts(int(sys.argv[1]))
    serve({"listen": made.listen, "connect": made.connect, "each": made.each, "chain": made.chain})
