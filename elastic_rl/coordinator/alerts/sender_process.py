"""The process that hands notifications to Apprise, apart from the coordinator, and its client.

A notification service may take a request and never answer, and a thread that waits for it cannot be ended: Apprise runs
all of them in one small pool, which such threads use up. So each notification is sent by a process of its own that is
killed at its timeout. It is forked from one helper process in which Apprise is loaded already (2 s, 57 MiB).

Protocol: the client passes one end of a stream socket over the helper's standard input (a Unix socket of datagrams),
with the timeout in seconds as text. The forked process reads the request from that socket (JSON, up to the end of the
stream) and answers ``{"error": ""}``. Secrets (URLs) cross no command line, environment or file.

The kernel kills the helper when the coordinator ends and each forked process when the helper ends, so that kill -9 of
the coordinator leaves nothing behind.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import NoReturn

from elastic_rl.runtime.process import die_with_parent, freeze_heap, start_child
from elastic_rl.telemetry import logs

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_SUBMIT_TIMEOUT_S = 2.0
"""A helper that reads accepts a request at once."""
_READ_BYTES = 1 << 16
REFUSED = "the service refused it or cannot be reached"


@dataclass(frozen=True)
class SendRequest:
    """One notification for one service."""

    url: str
    """Apprise URL; it holds secrets."""
    title: str
    body: str
    type: str
    """An Apprise notify type: info, success, warning or failure."""


class SenderProcess:
    """The helper process as its client sees it. Started by the first call and again after its end; thread-safe."""

    def __init__(self, *, start_timeout_s: float = _START_TIMEOUT_S) -> None:
        """``start_timeout_s``: how long a request may wait for the helper, beyond its own timeout."""
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the helper ahead of the first request; returns at once."""
        with self._lock:
            try:
                self._ensure_started()
            except OSError as e:  # the next request tries again and reports it
                log.error("the sender process cannot be started: %s", e)

    def send(self, request: SendRequest, timeout_s: float) -> str:
        """Sends a notification. Returns an empty string once the service has taken it, else what went wrong, without
        anything secret."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(self._start_timeout_s + timeout_s)
            process = None
            try:
                with theirs:
                    process = self._submit(theirs, timeout_s)
                ours.sendall(json.dumps(asdict(request)).encode())
                ours.shutdown(socket.SHUT_WR)
                return str(json.loads(_read_all(ours))["error"])
            except TimeoutError:
                if process is not None:
                    self._discard(process)
                return "the sender process did not answer in time and was restarted"
            except OSError as e:
                return f"the sender process cannot be reached: {e.strerror}"
            except ValueError:  # no answer, or half of one
                return "the sender process ended"

    def close(self) -> None:
        """Ends the helper and whatever it still sends."""
        with self._lock:
            if self._process is not None and self._requests is not None:
                self._requests.close()
                self._process.kill()
                self._process.wait()
            self._process = self._requests = None

    def _submit(self, connection: socket.socket, timeout_s: float) -> subprocess.Popen[bytes]:
        """Passes a connection to the helper, and to a new one if that has just ended. Returns the helper."""
        with self._lock:
            for attempt in (1, 2):
                process, requests = self._ensure_started()
                try:
                    socket.send_fds(requests, [f"{timeout_s}".encode()], [connection.fileno()])
                    return process
                except OSError:  # it has just ended, or it is stuck
                    process.kill()
                    process.wait()
                    if attempt == 2:
                        raise
        raise AssertionError("unreachable")

    def _ensure_started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._process is not None and self._requests is not None and self._process.poll() is None:
            return self._process, self._requests
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(_SUBMIT_TIMEOUT_S)
        with theirs:
            self._process = start_child([sys.executable, "-m", __name__], stdin=theirs, stdout=subprocess.DEVNULL)
        return self._process, self._requests

    def _discard(self, process: subprocess.Popen[bytes]) -> None:
        """Kills a helper that does not answer; what it was sending fails."""
        with self._lock:
            process.kill()
            process.wait()


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(_READ_BYTES):
        parts.append(part)
    return b"".join(parts)


# -- the helper -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Child:
    pid: int
    connection: socket.socket
    timeout_s: float
    deadline: float


class _Helper:
    """Forks a process for each request and kills it at its deadline. Ends when the client closes its socket."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: dict[int, _Child] = {}  # by pidfd
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            nearest = min((c.deadline for c in self._children.values()), default=None)
            wait_s = None if nearest is None else max(0.0, nearest - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._requests:
                    if not self._accept():
                        return
                else:
                    self._finish(key.fd)
            now = time.monotonic()
            for descriptor in [d for d, c in self._children.items() if c.deadline <= now]:
                self._finish(descriptor, timed_out=True)

    def stop(self) -> None:
        for descriptor in list(self._children):
            self._finish(descriptor, timed_out=True)

    def _accept(self) -> bool:
        """Starts to serve a request; false when the client is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._requests, 64, 1)
        if not data:
            return False
        connection, timeout_s = socket.socket(fileno=descriptors[0]), float(data)
        helper = os.getpid()
        try:
            pid = os.fork()
        except OSError as e:
            _answer(connection, f"no process can be started: {e.strerror}")
            connection.close()
            return True
        if pid == 0:
            self._run_child(connection, helper)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = _Child(pid, connection, timeout_s, time.monotonic() + timeout_s)
        self._selector.register(descriptor, selectors.EVENT_READ)
        return True

    def _finish(self, descriptor: int, *, timed_out: bool = False) -> None:
        child = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        if timed_out:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not made its own group yet
                os.kill(child.pid, signal.SIGKILL)
            _answer(child.connection, f"no answer within {child.timeout_s:g} s")
        os.waitpid(child.pid, 0)
        os.close(descriptor)
        child.connection.close()

    def _run_child(self, connection: socket.socket, helper: int) -> NoReturn:
        """The forked process: sends and ends."""
        code = 1
        try:
            os.setsid()
            die_with_parent()
            if os.getppid() == helper:  # else the helper ended before the line above
                self._selector.close()
                self._requests.close()
                for other in self._children.values():
                    other.connection.close()
                _answer(connection, _notify(SendRequest(**json.loads(_read_all(connection)))))
                code = 0
        except Exception as e:
            log.error("a notification was not sent: %s", type(e).__name__)
        finally:
            os._exit(code)


def _answer(connection: socket.socket, error: str) -> None:
    try:
        connection.sendall(json.dumps({"error": error}).encode())
    except OSError:  # its parent waits for it no longer
        pass


def _notify(request: SendRequest) -> str:
    """Hands a notification to its service. Returns an empty string, or what went wrong."""
    import apprise
    client = apprise.Apprise(asset=apprise.AppriseAsset(app_id="elastic-rl", async_mode=False))
    try:
        if not client.add(request.url):
            return "Apprise does not know the URL"
        # Falsy for everything but success: `is False` would never match.
        taken = client.notify(body=request.body, title=request.title, notify_type=apprise.NotifyType(request.type))
    except Exception as e:  # whatever a plug-in raises; its text may hold a secret
        return type(e).__name__
    return "" if taken else REFUSED


def main() -> None:
    die_with_parent()
    logs.setup("alert-sender", "warning")
    import apprise
    apprise.Apprise().add("json://localhost")  # loads every plug-in, so that a forked process need not
    freeze_heap()  # the forked processes share the pages
    helper = _Helper(socket.socket(fileno=os.dup(0)))
    try:
        helper.run()
    finally:
        helper.stop()


if __name__ == "__main__":
    main()
