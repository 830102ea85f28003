"""The bound on the body of a request that nobody reads. Pure.

An HTTP server answers most requests without credentials before their bodies have arrived, and then has to discard the
bodies to find the next request. A client without a token could send one without an end: chunks of one byte each cost
an interpreter more than the requests of everybody else. So a connection is closed once too much of such a body has
come, or has not ended in time (``HttpServer``'s ``request_timeout_s``). Bodies of authenticated requests are not
counted: their handlers have limits, and the client of a body that was refused has to be able to read why.
"""

from __future__ import annotations

UNREAD_BYTES = 1 << 20
"""More than what arrives before a handler can authenticate the request: uvicorn stops reading at 64 KiB that nobody
has taken, and asyncio reads up to 256 KiB at once."""
UNREAD_CHUNKS = 512
"""Pieces in which it arrives: chunks of the transfer encoding, or reads of the socket."""


class UnreadBody:
    """What has come of the body of one request."""

    def __init__(self) -> None:
        self._bytes = self._chunks = 0

    def take(self, size: int) -> bool:
        """Counts a piece of the body. False once the body is beyond the bound: the connection is to be closed."""
        self._bytes += size
        self._chunks += 1
        return self._bytes <= UNREAD_BYTES and self._chunks <= UNREAD_CHUNKS
