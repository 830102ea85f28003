"""The wire protocol between nodes and their clients: a fixed preamble, a JSON header, and raw bytes, over TCP.

Sizes are checked against limits before anything is allocated. Errors are sent by name and raised as the same type on
the other side.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

import orjson

from elastic_rl import errors
from elastic_rl.errors import ElasticRLError, NodeUnavailable

_PREAMBLE = struct.Struct(">4sIQ")  # magic, header bytes, payload bytes
MAGIC = b"eRL1"
"""What every message begins with."""
MAX_HEADER = 32 << 20
"""Bytes; room for the digests of half a million chunks."""
MAX_PAYLOAD = 4 << 30
"""Bytes; one chunk or one manifest."""
MAX_DIGESTS = 50_000
"""Digests in one request; longer lists are sent in several."""
MAX_COUNT = (1 << 63) - 1
_UNSENT_BYTES = 256 << 10
_PIECE = 8 << 20
"""Bytes that are sent with one call: TLS takes 2 GiB at most, and the timeout is for each call."""

_ERRORS: dict[str, type[ElasticRLError]] = {
    cls.__name__: cls for cls in (
        errors.AccessDenied, errors.ArenaFull, errors.CatalogMismatch, errors.ChunkCorrupt, errors.ChunkMissing,
        errors.ConfigError, errors.Conflict, errors.DeadlineExceeded, errors.DiskFull, errors.NodeUnavailable,
        errors.RecordUnreadable, errors.StagingFailed, errors.VersionNotFound, errors.LeaseLost, errors.EtcdDenied,
        errors.EtcdFull, errors.EtcdUnavailable)}


def count(value: object) -> int:
    """A number of bytes, chunks or commits that the other side has sent. Raises ValueError for what is none, such as
    1e308: kept, it would be the highest number that was ever seen, for good."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{str(value)[:40]} is no number from 0 to {MAX_COUNT}")
    return value


class ProtocolError(ElasticRLError):
    """The peer does not speak this protocol; the connection cannot be used any more."""


class Closed(Exception):
    """The peer closed the connection between two messages."""


Receiver = Callable[[dict[str, Any], int], memoryview]
"""Given a header and the payload's size, the memory to receive it in; may raise ProtocolError."""


def configure(sock: socket.socket, *, io_timeout_s: float) -> None:
    """Sets low latency and timeouts; a peer whose host vanished is noticed in about ten seconds.

    The kernel keeps little unsent data: a send that returns is done but for what is in flight, so a node's load says
    what its link still has to carry.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.settimeout(io_timeout_s)


def wait_readable(sock: socket.socket, timeout_s: float) -> bool:
    """Whether there is something to read, or the end of the connection, within the time. Raises OSError when the
    socket is closed. Unlike ``select.select`` it takes descriptors of any number."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poll = select.poll()
    try:
        poll.register(sock, select.POLLIN)
    except ValueError as e:
        raise OSError("the socket is closed") from e
    events = poll.poll(timeout_s * 1000)
    if any(event & select.POLLNVAL for _, event in events):
        raise OSError("the socket is closed")
    return bool(events)


def send(sock: socket.socket, header: dict[str, Any], payload: memoryview | bytes = b"") -> None:
    """Sends one message without copying the payload. Raises OSError, also for a timeout: a peer must take each
    ``_PIECE`` of it within one."""
    text = orjson.dumps(header)
    if len(text) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise ProtocolError(f"a message of {len(text)} + {len(payload)} bytes is too large")
    sock.sendall(_PREAMBLE.pack(MAGIC, len(text), len(payload)) + text)
    rest = memoryview(payload)
    while len(rest):
        sock.sendall(rest[:_PIECE])
        rest = rest[_PIECE:]


def receive(sock: socket.socket, into: Receiver | None = None, *, max_header: int = MAX_HEADER,
            max_payload: int = MAX_PAYLOAD) -> tuple[dict[str, Any], memoryview]:
    """Receives one message; ``into`` decides where the payload is stored (default: new memory).

    Raises Closed, ProtocolError, and OSError, also for a timeout.
    """
    preamble = bytearray(_PREAMBLE.size)
    first = sock.recv_into(preamble)
    if not first:
        raise Closed
    _fill(sock, memoryview(preamble)[first:])
    magic, header_bytes, payload_bytes = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise ProtocolError(f"not a message of this protocol: {bytes(preamble)!r}")
    if header_bytes > max_header or payload_bytes > max_payload:
        raise ProtocolError(f"a message of {header_bytes} + {payload_bytes} bytes is too large here")
    text = bytearray(header_bytes)
    _fill(sock, memoryview(text))
    try:
        header = orjson.loads(text)
    except ValueError as e:
        raise ProtocolError(f"a message's header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise ProtocolError("a message's header is not a JSON object")
    if not payload_bytes:
        return header, memoryview(b"")
    target = into(header, payload_bytes) if into else memoryview(bytearray(payload_bytes))
    _fill(sock, target)
    return header, target


def _fill(sock: socket.socket, target: memoryview) -> None:
    while len(target):
        n = sock.recv_into(target)
        if not n:
            raise ConnectionResetError("the peer closed the connection within a message")
        target = target[n:]


def failure(error: ElasticRLError) -> dict[str, Any]:
    """The answer that reports an error."""
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def raise_failure(header: dict[str, Any]) -> None:
    """Raises the error that an answer reports, if it does."""
    if name := header.get("error"):
        kind = _ERRORS.get(str(name), NodeUnavailable)
        raise kind(str(header.get("message", name)), hint=str(header.get("hint", "")))
