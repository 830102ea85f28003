"""The bounds of a request of a client that nobody knows yet, and the answer to what is no request. Pure; the same for
every HTTP server of the project.

*Headers* are bounded together with the request line, however they arrive. Both have to be here within a time that each
server sets.

*Bodies that nobody reads.* An HTTP server answers most requests without credentials before their bodies have arrived,
and then has to discard the bodies to find the next request. A client without a token could send one without an end:
chunks of one byte each cost an interpreter more than the requests of everybody else. So a connection is closed once too
much of such a body has come, or has not ended in time. Bodies of authenticated requests are not counted: their handlers
have limits, and the client of a body that was refused has to be able to read why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from http import HTTPStatus

from elastic_rl.net.problem_details import HEADERS_TOO_LARGE, MALFORMED, MEDIA_TYPE, OTHER, problem_details

REQUEST_LOG = logging.getLogger("uvicorn.error.requests")
"""Has errors only. Uvicorn warns of each request that is no HTTP, or asks for a websocket: whoever reaches the port
could fill a disk."""
REQUEST_LOG.setLevel(logging.ERROR)

HEADER_BYTES = 32 * 1024
"""Headers of a request, at most, with its first line."""
UNREAD_BYTES = 1 << 20
"""More than what arrives before a handler can authenticate the request: uvicorn stops reading at 64 KiB that nobody
has taken, and asyncio reads up to 256 KiB at once."""
UNREAD_CHUNKS = 512
"""Pieces in which it arrives: chunks of the transfer encoding, or reads of the socket."""
_SHOWN = 200
"""Characters of a parser's message that an answer shows."""
_FIRST_LINE = len(b"  HTTP/1.1\r\n")
_HEADER_LINE = len(b": \r\n")


def header_size(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of the first line of a request and its headers, but for spaces that a client may leave out."""
    return (len(method) + len(target) + _FIRST_LINE
            + sum(len(name) + len(value) + _HEADER_LINE for name, value in headers))


class UnreadBody:
    """What has come of the body of one request."""

    def __init__(self) -> None:
        self._bytes = self._chunks = 0

    def take(self, size: int) -> bool:
        """Counts a piece of the body. False once the body is beyond the bound: the connection is to be closed."""
        self._bytes += size
        self._chunks += 1
        return self._bytes <= UNREAD_BYTES and self._chunks <= UNREAD_CHUNKS


def refusal(status: int, why: str) -> bytes:
    """The answer to what is no request, after which the connection ends: a problem (RFC 9457). ``status``: 431 for
    headers that are too large. ``why``: as the parser says it."""
    if status == 431:
        details = problem_details(HEADERS_TOO_LARGE, status, "The headers are too large",
                                  f"headers and the first line of a request may have {HEADER_BYTES} bytes together")
    else:
        details = problem_details(MALFORMED if status == 400 else OTHER, status, "The request is not valid HTTP",
                                  why[:_SHOWN] or "it cannot be parsed")
    body = json.dumps(details).encode()
    return (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
