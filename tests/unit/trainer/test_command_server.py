"""The trainer's HTTP server refuses requests that are incomplete or come from a web page."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from elastic_rl.trainer.server import CommandServer, StepQueue


@pytest.fixture
def queue() -> StepQueue:
    return StepQueue(5)


@pytest.fixture
def server(queue: StepQueue) -> Iterator[CommandServer]:
    made = CommandServer(queue, "127.0.0.1").start()
    yield made
    made.close()


def send(server: CommandServer, *headers: str, body: bytes = b"{}", host: str = "", method: str = "POST /sft") -> int:
    """Sends a request, ends this side of the connection, and returns the answer's status."""
    address = server.url.removeprefix("http://")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20) as sock:
        head = [f"{method} HTTP/1.1", f"Host: {host or address}", *headers]
        sock.sendall("\r\n".join([*head, "", ""]).encode() + body)
        sock.shutdown(socket.SHUT_WR)
        return int(sock.recv(4096).split()[1])


def test_complete_request_is_carried_out(server: CommandServer, queue: StepQueue) -> None:
    assert send(server, "Content-Length: 2") == 202 and queue.sft_requested.is_set()
    assert send(server, method="GET /status", body=b"") == 200
    assert send(server, "Content-Length: 2", host="localhost:1") == 202


def test_request_cut_off_in_its_body_is_refused(server: CommandServer, queue: StepQueue) -> None:
    assert send(server, "Content-Length: 20") == 400
    assert not queue.sft_requested.is_set()


@pytest.mark.parametrize("header", ["Origin: http://evil.example", "Origin: null", "Sec-Fetch-Site: cross-site",
                                    "Sec-Fetch-Site: same-origin"])
def test_request_of_a_web_page_is_refused(server: CommandServer, queue: StepQueue, header: str) -> None:
    assert send(server, "Content-Length: 2", header) == 403
    assert not queue.sft_requested.is_set()
    assert send(server, header, method="GET /status", body=b"") == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "x@127.0.0.1", "[::1"])
def test_request_for_another_host_name_is_refused(server: CommandServer, queue: StepQueue, host: str) -> None:
    assert send(server, "Content-Length: 2", host=host) == 403
    assert not queue.sft_requested.is_set()
