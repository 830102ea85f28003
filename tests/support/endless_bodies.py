"""Clients without credentials that send requests without an end, and what is no request."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from elastic_rl.errors import DeadlineExceeded
from support.waiting import wait_until

_MOST_BYTES = 16 << 20
"""Several times what the socket's buffers hold: a server that takes so much takes everything."""


def closes_endless_chunks(address: tuple[str, int], path: str, *, chunk: bytes = b"1\r\nx\r\n") -> bool:
    """Whether the server ends a connection on which one chunk follows the other."""
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        many = chunk * (1 + (1 << 16) // len(chunk))
        try:
            for _ in range(_MOST_BYTES // len(many)):
                sock.sendall(many)
        except OSError:
            return True
    return False


def closes_endless_headers(address: tuple[str, int], *, piece: bytes = b"x-a: b\r\n") -> bool:
    """Whether the server ends a connection on which one header follows the other."""
    with socket.create_connection(address, timeout=60) as sock:
        many = piece * (1 + (1 << 14) // len(piece))
        try:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            for _ in range(_MOST_BYTES // len(many)):
                sock.sendall(many)
        except OSError:
            return True
    return False


def problem_of(address: tuple[str, int], request: bytes) -> dict[str, Any]:
    """The problem (RFC 9457) with which the server answers, on a connection that it then ends."""
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(request)
        raw = b""
        with contextlib.suppress(ConnectionResetError):  # it has not read all
            while piece := sock.recv(65536):
                raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    status, lines = head.split()[1], head.lower().split(b"\r\n")
    assert b"content-type: application/problem+json" in lines and b"connection: close" in lines, head
    problem: dict[str, Any] = json.loads(body)
    assert problem["status"] == int(status) and problem["title"] and problem["detail"]
    return problem


NOT_HTTP = [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n bad\x00: y\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"]
_START = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
LARGE_HEADERS = {
    "one": _START + b"A: " + b"b" * 33_000 + b"\r\n\r\n", "many": _START + b"a: b\r\n" * 6000 + b"\r\n",
    "path": b"GET /" + b"a" * 33_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "unfinished": _START + b"A: " + b"b" * 300_000}


def closes_slow_body(address: tuple[str, int], path: str, *, timeout_s: float = 20.0) -> bool:
    """Whether the server ends a connection on which it has answered, and a byte of a huge body follows the other."""
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 ")
        sock.settimeout(0.02)

        def ended() -> bool:
            try:
                sock.sendall(b"x")
                return sock.recv(4096) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        with contextlib.suppress(DeadlineExceeded):
            wait_until(ended, timeout_s=timeout_s, what="the end of the connection", poll_s=0.01)
            return True
    return False
