"""A receiver of alerts: what an operator would have been told during a run."""

from __future__ import annotations

import http.server
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_TITLE = re.compile(r"\[(?:FIRING|RESOLVED|EVENT)\] [^:]+: (?P<kind>\S+) (?P<subject>.+)")
_LINE = re.compile(r"(?P<kind>\S+) (?P<subject>.+?): .* id=(?P<id>\S+)")
_TRAILER = re.compile(r"(?:ids?=(?P<ids>\S+) )?phase=(?P<phase>\w+) ")
_MAX_BYTES = 1 << 20
_IP_FREEBIND = 15
"""Option of a socket of Linux that may have an address which this machine is going to have."""


@dataclass(frozen=True)
class Notice:
    """One alert of a notification."""

    alert: str
    """Its kind; "" in a notification that only sums up, and so is the subject."""
    subject: str
    phase: str
    key: str
    """Id of the alert: a notification is delivered at least once, so the same one may come again."""


def notices(title: str, body: str) -> Iterator[Notice]:
    """The alerts that a notification is about; none for what is no notification of an alert. Pure."""
    *lines, last = body.splitlines() or [""]
    if (trailer := _TRAILER.match(last)) is None:
        return
    phase = trailer["phase"]
    ids = (trailer["ids"] or "").split(",") if trailer["ids"] else []
    if len(ids) == 1 and (found := _TITLE.fullmatch(title)):
        yield Notice(found["kind"], found["subject"], phase, ids[0])
    elif ids:
        yield from (Notice("", "", phase, each) for each in ids)
    else:
        for line in lines:
            if found := _LINE.fullmatch(line):
                yield Notice(found["kind"], found["subject"], phase, found["id"])


class Receiver:
    """An HTTP server on an address of this machine that takes notifications, of who knows its URL, until ``close``."""

    def __init__(self, on_notice: Callable[[Notice], None], address: str = "127.0.0.1") -> None:
        """``address``: one that this machine has, or is going to have."""
        path = f"/{secrets.token_hex(16)}"

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # who sends it has ended the connection, and sends it again

            def server_bind(self) -> None:
                self.socket.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
                super().server_bind()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if self.path.rstrip("/") != path:
                    self._answer(404)
                    return
                try:
                    length = min(int(self.headers["content-length"] or 0), _MAX_BYTES)
                    sent = json.loads(self.rfile.read(max(0, length)))
                    found = [*notices(str(sent["title"]), str(sent["message"]))]
                except (ValueError, TypeError, LookupError):
                    self._answer(400)
                    return
                for notice in found:
                    on_notice(notice)
                self._answer(200)

            def _answer(self, code: int) -> None:
                self.send_response(code)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = Server((address, 0), Handler)
        self.url = f"json://{address}:{self._server.server_port}{path}"
        """Apprise URL."""
        threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
