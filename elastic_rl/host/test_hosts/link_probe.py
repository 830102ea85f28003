"""What the network between two test hosts does now, measured with sockets of this process on both hosts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_rl.errors import PreflightFailed
from elastic_rl.host.test_hosts.isolated_hosts import IsolatedHosts

_CLONE_NEWNET = 0x40000000
_NUMBER = struct.Struct("!Id")
_PAYLOAD_BYTES = 1000
_PAUSE_S = 0.002
_CONNECT_S = 5.0
_SILENCE_S = 1.0
"""A datagram that is not there so long after the last one that was is lost."""


@dataclass(frozen=True)
class Arrivals:
    """What arrived of the datagrams that one host sent to another."""

    sent: int
    arrived: int
    delay_s: float
    """Median time on the way; 0 when nothing arrived."""
    bytes_per_s: float
    """At which they arrived; 0 when at most one did."""

    def __str__(self) -> str:
        late = f" after {1e3 * self.delay_s:.1f} ms" if self.arrived else ""
        return f"{self.arrived} of {self.sent} datagrams arrived{late}"


def arrivals(hosts: IsolatedHosts, sender: str, receiver: str, *, count: int = 20, pause_s: float = _PAUSE_S,
             payload_bytes: int = _PAYLOAD_BYTES) -> Arrivals:
    """Sends datagrams from one host to another. Needs no program on either. Raises PreflightFailed for a host that is
    off."""
    with contextlib.closing(_socket_on(hosts, receiver)) as to, contextlib.closing(_socket_on(hosts, sender)) as by:
        to.bind((hosts.address(receiver), 0))
        to.settimeout(_SILENCE_S)
        address, arrived = to.getsockname(), list[tuple[float, float]]()

        def receive() -> None:
            with contextlib.suppress(TimeoutError):
                while len(arrived) < count:
                    _, sent_at = _NUMBER.unpack_from(to.recv(payload_bytes + _NUMBER.size))
                    arrived.append((time.monotonic(), sent_at))

        with ThreadPoolExecutor(1) as receiving:
            done = receiving.submit(receive)
            for number in range(count):
                with contextlib.suppress(OSError):  # without a link nothing can be sent
                    by.sendto(_NUMBER.pack(number, time.monotonic()) + bytes(payload_bytes), address)
                time.sleep(pause_s)
            done.result()
    took = arrived[-1][0] - arrived[0][0] if len(arrived) > 1 else 0.0
    return Arrivals(count, len(arrived), statistics.median(at - sent for at, sent in arrived) if arrived else 0.0,
                    (len(arrived) - 1) * payload_bytes / took if took else 0.0)


@contextlib.contextmanager
def silent_connection(hosts: IsolatedHosts, by: str, to: str, port: int) -> Iterator[Callable[[], bool]]:
    """Connects one host to a port of another. Yields what says whether the connection is still open, with nothing said
    on it. Raises PreflightFailed where it cannot be made."""
    with contextlib.closing(_socket_on(hosts, by, socket.SOCK_STREAM)) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect((hosts.address(to), port))
        except OSError as e:
            raise PreflightFailed(f"{by} cannot connect to port {port} of {to}: {e}") from e

        def is_silent() -> bool:
            connection.settimeout(_SILENCE_S)
            try:
                connection.recv(1)
            except TimeoutError:
                return True
            except OSError:
                return False
            return False

        yield is_silent


def _socket_on(hosts: IsolatedHosts, name: str, kind: socket.SocketKind = socket.SOCK_DGRAM) -> socket.socket:
    """A socket of this process in the network of a host."""
    if (init := hosts.init(name)) is None:
        raise PreflightFailed(f"host {name} is off")
    with ThreadPoolExecutor(1) as threads, _namespace(init.pid) as space:  # a thread of its own enters it, and ends
        return threads.submit(_made_in, space, kind).result()


def _made_in(space: int, kind: socket.SocketKind) -> socket.socket:
    if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET):
        raise PreflightFailed(f"the network of a test host cannot be entered: {os.strerror(ctypes.get_errno())}")
    return socket.socket(socket.AF_INET, kind)


@contextlib.contextmanager
def _namespace(pid: int) -> Iterator[int]:
    file = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
