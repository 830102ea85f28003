"""What the machine allows: copying in memory, TCP over loopback between two processes, writing to disk."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from elastic_rl.bench.dcs.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import gbps, seconds
from elastic_rl.bench.workers import Worker, serve

_PIECE = 4 << 20
_STREAMS = (1, 2, 4)


def measure(testbed: Testbed) -> Iterator[Row]:
    nbytes, samples = testbed.nbytes, testbed.samples
    disk, _ = testbed.temporary()
    yield Row.of("limit-memcpy", "limit: copy in memory", memcpy_gbps(nbytes, samples), "GB/s", op=">=")
    yield Row.of("limit-tcp", "limit: TCP over loopback", tcp_gbps(testbed, nbytes), "GB/s", op=">=")
    yield Row.of("limit-disk", "limit: write to disk and fsync", disk_gbps(disk, nbytes, samples), "GB/s", op=">=")


def memcpy_gbps(nbytes: int, samples: int) -> list[float]:
    """Speed of copying between two buffers whose pages are there already."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return gbps(nbytes, seconds(lambda: target.copy_(source), samples))


def disk_gbps(folder: Path, nbytes: int, samples: int) -> list[float]:
    """One file, written in large pieces and flushed to the device."""
    data = memoryview(os.urandom(_PIECE))

    def write() -> None:
        with (folder / "limit").open("wb", buffering=0) as file:
            for _ in range(max(nbytes // _PIECE, 1)):
                file.write(data)
            os.fsync(file.fileno())

    return gbps(max(nbytes // _PIECE, 1) * _PIECE, seconds(write, samples))


def tcp_gbps(testbed: Testbed, nbytes: int) -> list[float]:
    """Samples with the number of streams that is fastest. Both ends have all the bytes in memory that was touched
    before, as a version is, so this is the speed of the link for such bytes and not that of a cache."""
    best: list[float] = []
    for streams in _STREAMS:
        with (Worker(__name__, log=testbed.folder / "tcp-send.log") as sender,
              Worker(__name__, log=testbed.folder / "tcp-receive.log") as receiver):
            for end in (sender, receiver):
                end.call("prepare", nbytes=nbytes, streams=streams)
            found = []
            for _ in range(testbed.samples + 1):
                port = int(receiver.call("listen")["port"])
                receiver.send("receive")
                sender.call("send", port=port)
                found.append(nbytes / float(receiver.answer(120.0)["seconds"]) / 1e9)
            best = max(best, found[1:], key=lambda values: median(values or [0.0]))
    return best


class _Peer:
    """Either end of the raw connections, each stream in a thread of its own."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._parts: list[memoryview] = []

    def prepare(self, nbytes: int, streams: int) -> None:
        memory = memoryview(bytearray(b"x") * nbytes)
        each = -(-nbytes // streams)
        self._parts = [memory[i * each:(i + 1) * each] for i in range(streams)]

    def listen(self) -> dict[str, int]:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return {"port": self._listener.getsockname()[1]}

    def receive(self) -> dict[str, float]:
        assert self._listener is not None
        with self._listener as listener:
            accepted = [listener.accept()[0] for _ in self._parts]
        start = time.monotonic()
        self._all(_fill, accepted)
        return {"seconds": time.monotonic() - start}

    def send(self, port: int) -> None:
        self._all(_pour, [socket.create_connection(("127.0.0.1", port)) for _ in self._parts])

    def _all(self, job: Callable[[socket.socket, memoryview], None], sockets: list[socket.socket]) -> None:
        with ThreadPoolExecutor(len(sockets)) as pool:
            list(pool.map(job, sockets, self._parts))


def _pour(sock: socket.socket, data: memoryview) -> None:
    with sock:
        sock.sendall(data)


def _fill(sock: socket.socket, target: memoryview) -> None:
    with sock:
        while len(target):
            n = sock.recv_into(target)
            if not n:
                raise ConnectionResetError("the sender ended early")
            target = target[n:]


if __name__ == "__main__":
    peer = _Peer()
    serve({"prepare": peer.prepare, "listen": peer.listen, "receive": peer.receive, "send": peer.send})
