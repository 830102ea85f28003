"""Clients without credentials that send the body of a request without an end."""

from __future__ import annotations

import contextlib
import socket

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
