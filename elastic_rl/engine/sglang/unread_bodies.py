"""Bodies that SGLang's HTTP server does not read.

The server answers a request without the job's key at once, and then has to discard its body to find the next request. A
client without the key could send a body without an end, and each chunk of it costs the process from which an engine
answers. So a connection ends with an answer that was given before the body had ended: every client of an engine sends
its whole request first.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http import auto


def install() -> None:
    """Has each server that uvicorn starts in this process close such connections."""
    protocol: Any = auto.AutoHTTPProtocol

    class ClosesUnread(protocol):  # type: ignore[misc]
        def on_response_complete(self) -> None:
            unread = self.cycle.more_body
            super().on_response_complete()
            if unread:
                self.transport.close()

    auto.AutoHTTPProtocol = ClosesUnread  # type: ignore[misc]
