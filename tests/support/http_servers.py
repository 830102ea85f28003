"""HTTP servers in a thread of the test process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import HTTPServer
from typing import TypeVar

S = TypeVar("S", bound=HTTPServer)

_POLL_INTERVAL_S = 0.02
"""How long ``close`` waits at most. The standard library's half second would be most of what many tests take."""


def serve(server: HTTPServer) -> None:
    """Answers requests in a daemon thread, until ``close(server)``."""
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _POLL_INTERVAL_S}, daemon=True).start()


def close(server: HTTPServer) -> None:
    """Ends the thread and then closes the socket. A thread whose socket is closed first never ends: the socket looks
    readable to it, again and again, and it takes a core for as long as the test process runs."""
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Answers requests within the block."""
    serve(server)
    try:
        yield server
    finally:
        close(server)
