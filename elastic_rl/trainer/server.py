"""HTTP server of rank 0. Requests go into a queue for the main thread, so that one thread works on tensors.

``GET /status`` · ``GET /sft?since=N`` (progress records from N on) · ``POST /sft`` (202) · ``POST /train``
(safetensors; answers when the step is done). Errors are JSON ``{"error": …}``: 400 bad batch or incomplete body, 403
request of a web page, 409 wrong step or busy, 504 a step that took too long.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from elastic_rl.errors import ConfigError
from elastic_rl.trainer.batch import TrainBatch, meta_of

log = logging.getLogger(__name__)
_MAX_BODY = 1 << 30


class Refused(Exception):
    """The request does not fit the trainer's state."""


@dataclass
class TrainJob:
    """A requested RL step; ``done`` gets its metrics."""

    step: int
    cursor: dict[str, Any]
    body: bytes
    done: Future[dict[str, Any]] = field(default_factory=Future)


class StepQueue:
    """Passes requests from the HTTP threads to the main thread, and its status back."""

    def __init__(self, step_timeout_s: float) -> None:
        self.step_timeout_s = step_timeout_s
        self.jobs: queue.Queue[TrainJob] = queue.Queue(maxsize=1)
        self.sft_requested = threading.Event()
        self.wake = threading.Event()
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {"ready": False}
        self._records: list[dict[str, Any]] = []
        self._sft: dict[str, Any] = {}
        self._heartbeat_at = 0.0

    def heartbeat(self) -> None:
        """Called by the main thread between two commands: no rank hangs then."""
        self._heartbeat_at = time.monotonic()

    def set_status(self, **fields: Any) -> None:
        with self._lock:
            self._status = {**self._status, **fields}

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {**self._status, "heartbeat_age_s": time.monotonic() - self._heartbeat_at}

    def record_sft(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._records.append(record)

    def end_sft(self, result: dict[str, Any]) -> None:
        with self._lock:
            self._sft = result

    def sft(self, since: int) -> dict[str, Any]:
        with self._lock:
            return {"records": self._records[since:], "next": len(self._records), "result": self._sft or None}

    def start_sft(self) -> None:
        self.sft_requested.set()
        self.wake.set()

    def train(self, body: bytes) -> dict[str, Any]:
        """Runs a step and returns its metrics. Raises Refused, ConfigError for a bad batch, TimeoutError."""
        meta = meta_of(body)
        TrainBatch.from_bytes(body)  # a bad batch is refused before any rank gets it
        job = TrainJob(int(meta["step"]), dict(meta.get("cursor") or {}), body)
        status = self.status()
        if not status["ready"] or status["phase"] != "rl" or job.step != status["step"] + 1:
            raise Refused(f"step {job.step} does not follow: the trainer is at {status.get('phase')} step "
                          f"{status.get('step')}")
        try:
            self.jobs.put_nowait(job)
        except queue.Full:
            raise Refused("another step is waiting") from None
        self.wake.set()
        return job.done.result(timeout=self.step_timeout_s)


class CommandServer:
    """Serves a StepQueue on ``host`` at a free port until ``close``."""

    def __init__(self, step_queue: StepQueue, host: str) -> None:
        handler = type("Handler", (_Handler,), {"step_queue": step_queue, "own_host": host})
        self._http = ThreadingHTTPServer((host, 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1},
                                        name="command-server", daemon=True)

    def start(self) -> CommandServer:
        self._thread.start()
        return self

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    step_queue: StepQueue
    own_host: str
    protocol_version = "HTTP/1.1"
    timeout = 120  # frees the thread of a client that stops sending

    def do_GET(self) -> None:
        if self._of_a_page():
            return None
        url = urlparse(self.path)
        if url.path == "/status":
            return self._answer(200, self.step_queue.status())
        if url.path == "/sft":
            since = parse_qs(url.query).get("since", ["0"])[0]
            if not since.isdecimal():
                return self._answer(400, {"error": "since must be a number"})
            return self._answer(200, self.step_queue.sft(int(since)))
        return self._answer(404, {"error": f"no such path: {url.path}"})

    def do_POST(self) -> None:
        if self._of_a_page():
            return None
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > _MAX_BODY:
            self.close_connection = True
            return self._answer(413, {"error": f"the request needs a Content-Length of 0 to {_MAX_BODY} bytes"})
        body = self.rfile.read(int(size))
        if len(body) != int(size):
            self.close_connection = True
            return self._answer(400, {"error": f"the connection ended after {len(body)} of {size} bytes"})
        if self.path == "/sft":
            self.step_queue.start_sft()
            return self._answer(202, self.step_queue.status())
        if self.path == "/train":
            return self._train(body)
        return self._answer(404, {"error": f"no such path: {self.path}"})

    def _of_a_page(self) -> bool:
        """Whether a browser sent this for a web page; answers 403 then. Such a request has an Origin or Sec-Fetch-Site,
        or, after DNS rebinding, a Host that is a name of the page's site."""
        own = self._is_own(self.headers.get("Host", ""))
        if own and not any(name in self.headers for name in ("Origin", "Sec-Fetch-Site")):
            return False
        self.close_connection = True
        self._answer(403, {"error": "requests of web pages, or for another host name, are refused"})
        return True

    def _is_own(self, given: str) -> bool:
        try:
            parts = urlparse(f"//{given}")
            host = parts.hostname or ""
            return "@" not in parts.netloc and (host in ("localhost", self.own_host.lower())
                                                or ipaddress.ip_address(host) is not None)
        except ValueError:  # a name, or no host at all
            return False

    def _train(self, body: bytes) -> None:
        try:
            self._answer(200, self.step_queue.train(body))
        except Refused as e:
            self._answer(409, {"error": str(e), "status": self.step_queue.status()})
        except (ConfigError, KeyError, ValueError, TypeError) as e:
            self._answer(400, {"error": str(e)})
        except TimeoutError:
            self._answer(504, {"error": f"the step took longer than {self.step_queue.step_timeout_s:g} s"})

    def _answer(self, code: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
