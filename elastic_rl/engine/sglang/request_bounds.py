"""The bounds of ``net.request_bounds`` for SGLang's HTTP server.

That has none: it collects headers without an end, lets a connection wait for ever, and discards the body of a request
that it has answered without the job's key, in the process from which an engine answers. So headers are bounded in bytes
and time, and a connection ends with an answer that was given before the body had ended: every client of an engine sends
its whole request first. What waits for an answer holds at most 64 KiB of a body, uvicorn's own bound.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http import auto

from elastic_rl.net.request_bounds import HEADER_BYTES, REQUEST_LOG, header_size, refusal

HEADERS_S = 10.0
"""Seconds within which the headers of a request have to be here, of a connection's first one from when it opened."""


def install() -> None:
    """Has each server that uvicorn starts in this process keep to the bounds."""
    protocol: Any = auto.AutoHTTPProtocol

    class Bounded(protocol):  # type: ignore[misc]
        """uvicorn's protocol on httptools, which SGLang uses."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.logger = REQUEST_LOG
            self._awaits_headers, self._too_large = True, False
            self._parsed, self._unparsed_bytes = 0, 0
            self._deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_deadline()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            parsed = self._parsed
            super().data_received(data)
            # Without headers, or a piece of a body, that are complete it is part of headers, or of a chunked body's
            # trailers, which httptools keeps until they end.
            self._unparsed_bytes = self._unparsed_bytes + len(data) if parsed == self._parsed else 0
            if self._unparsed_bytes > HEADER_BYTES:
                self._too_large = True
                self.send_400_response("")
            elif self._unparsed_bytes and self._awaits_headers:
                self._start_deadline()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._start_deadline()

        def on_headers_complete(self) -> None:
            self._cancel_deadline()
            self._awaits_headers = False
            self._parsed += 1
            if header_size(self.parser.get_method(), self.url, self.headers) > HEADER_BYTES:
                self._too_large = True
                raise ValueError("the headers are too large")  # httptools ends its work, and uvicorn answers
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            super().on_body(body)
            self._parsed += 1

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._awaits_headers = True
            self._parsed += 1

        def on_response_complete(self) -> None:
            unread = self.cycle.more_body
            super().on_response_complete()
            if unread:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            """Ends the connection, with a problem where nothing else is being answered."""
            self._cancel_deadline()
            if self.cycle is not None:
                self.cycle.disconnected = True
            if self.transport.is_closing() or self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()
                return
            self.transport.write(refusal(431 if self._too_large else 400, msg))
            self.transport.close()

        def _start_deadline(self) -> None:
            if self._deadline is None and not self.transport.is_closing():
                self._deadline = self.loop.call_later(HEADERS_S, self.transport.abort)

        def _cancel_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    auto.AutoHTTPProtocol = Bounded  # type: ignore[misc]
