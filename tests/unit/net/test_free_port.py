"""Free ports: different ones each time, none that is taken, and none that an outgoing connection could take."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import pytest

from elastic_rl.net import addresses
from elastic_rl.net.addresses import free_port


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket on the first of the only two ports that can be given."""
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        monkeypatch.setattr(addresses, "_PORTS", (taken.getsockname()[1], other.getsockname()[1]))
        monkeypatch.setattr(addresses, "_given_ports", deque(maxlen=2))
        other.close()
        yield taken


def test_ports_are_different_and_below_those_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 30_000 for port in ports)


def test_port_that_is_taken_or_was_given_before_is_not_given(taken: socket.socket) -> None:
    first, second = addresses._PORTS
    assert free_port() == second
    assert free_port() not in (first, second), "there is none left, so the kernel gives one"


def test_port_given_to_another_process_is_not_given_before_it_binds() -> None:
    program = ("import sys\nfrom elastic_rl.net import addresses\naddresses._PORTS = (int(sys.argv[1]),)\n"
               "print(addresses.free_port(), flush=True)\nsys.stdin.read()")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", program, str(port)], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)

    with start() as first, start() as second:
        assert first.stdout is not None and second.stdout is not None
        given = {int(first.stdout.readline()), int(second.stdout.readline())}
        assert port in given and len(given) == 2
        first.kill()
        second.kill()
    with start() as third:
        assert third.stdout is not None and int(third.stdout.readline()) == port, "a claim ends with its process"
        third.kill()


def test_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError):
        free_port("192.0.2.1")
