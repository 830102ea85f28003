"""Free ports: different ones each time, none that is taken, and none that an outgoing connection could take."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator

import pytest

from elastic_rl import runtime


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket on the first of the only two ports that can be given."""
    with socket.socket() as taken:
        port = runtime.free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(runtime, "_PORTS", (port, runtime.free_port()))
        monkeypatch.setattr(runtime, "_given_ports", deque(maxlen=2))
        yield taken


def test_ports_are_different_and_below_those_of_outgoing_connections() -> None:
    ports = [runtime.free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 30_000 for port in ports)


def test_port_that_is_taken_or_was_given_before_is_not_given(taken: socket.socket) -> None:
    first, second = runtime._PORTS
    assert runtime.free_port() == second
    assert runtime.free_port() not in (first, second), "there is none left, so the kernel gives one"


def test_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError):
        runtime.free_port("192.0.2.1")
