"""A process that runs one function of a user's code for its owner (``process.py``), over a socket.

The owner's frames are pickled: they are this project's own. What goes back is JSON, since nothing that comes from code
which may be wrong is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import psutil

from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.user_code import describe, text_of
from elastic_rl.runtime.imports import imported
from elastic_rl.runtime.process import adopt_orphans, die_with_parent

MAX_MESSAGE = 256 << 20
"""Bytes of a JSON message: a group of 16 samples of 400,000 tokens with their log-probs has about as many."""
CALL, CANCEL = b"c", b"x"
"""Kinds of frames: a call, with its pickled arguments; and the wish that a call ends."""
HEAD = struct.Struct("!cQQ")
"""Head of a frame: kind, number of the call, bytes that follow."""
_LENGTH = struct.Struct("!I")
_CLEAN_UP_S = 1.0
"""Limit for what was asked to end: multiprocessing's resource tracker removes the shared memory of its process then."""
_END_S = 10.0
"""Limit for the end of what was killed."""
_POLL_S = 0.02
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}


def send(connection: socket.socket, message: Any) -> None:
    """Sends a JSON value behind its length in 4 bytes. Raises ValueError for what is too large or no JSON, TypeError,
    and OSError."""
    connection.sendall(encoded(message))


def encoded(message: Any) -> bytes:
    """A message as ``send`` sends it. Raises ValueError and TypeError."""
    body = json.dumps(message, allow_nan=False).encode()
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message has {len(body)} bytes; at most {MAX_MESSAGE} are allowed")
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket, end: float | None = None) -> Any:
    """The next JSON value, whole by ``end`` (monotonic seconds). Raises EOFError when the other side is gone,
    ValueError for what is no message, TimeoutError and OSError."""
    (size,) = _LENGTH.unpack(exactly(connection, _LENGTH.size, end))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes was announced; at most {MAX_MESSAGE} are allowed")
    try:
        return json.loads(exactly(connection, size, end))
    except RecursionError as e:
        raise ValueError("a message is nested too deeply") from e


def exactly(connection: socket.socket, size: int, end: float | None = None) -> bytes:
    """So many bytes. Raises as ``receive``."""
    received = bytearray()
    while len(received) < size:
        if end is not None:
            if (left_s := end - time.monotonic()) <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError("the other side is gone")
        received += piece
    return bytes(received)


def guard_family(descriptor: int) -> None:
    """Goes on in a grandchild of this process. Once that has ended, however it ends, or this process has, their guard
    between them ends all that the grandchild has started, in whatever sessions, so that nothing of a user's function
    outlives it; then this process ends as the grandchild did. ``descriptor``: the descriptor of the connection, which
    is closed to its other side last. Call it before there is another thread."""
    others = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    this = os.getpid()
    if guard := os.fork():
        _stand_by(guard, signal.SIGTERM)
    os.setsid()  # who kills the group of this process does not kill the guard
    adopt_orphans()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != this:
        os._exit(1)
    if worker := os.fork():
        os.close(descriptor)
        _stand_by(worker, signal.SIGKILL)
    os.setsid()
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, others)


def _stand_by(child: int, sig: int) -> NoReturn:
    """Waits for the end of a child, which gets ``sig`` when this process is asked to end. Ends its other children then,
    and itself as the child did."""
    try:
        while True:
            if signal.sigwait(_WATCHED) == signal.SIGTERM:
                os.kill(child, sig)
            elif (status := _reaped().get(child)) is not None:
                break
        _end_children()
        if os.WIFSIGNALED(status):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if os.WTERMSIG(status) != signal.SIGKILL:
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))
    finally:
        os._exit(1)


def _reaped() -> dict[int, int]:
    """Status of each child that has ended, by its pid."""
    found = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def _end_children() -> None:
    """Asks all that descends from this process to end, and kills what does not; children of what has ended become its
    own children."""
    this = psutil.Process()
    began = time.monotonic()
    _signal(this.children(recursive=True), signal.SIGTERM)
    while (left := this.children(recursive=True)) and time.monotonic() < began + _END_S:
        if time.monotonic() >= began + _CLEAN_UP_S:
            _signal(left, signal.SIGKILL)
        time.sleep(_POLL_S)
        _reaped()


def _signal(processes: Iterable[psutil.Process], sig: int) -> None:
    for one in processes:
        with contextlib.suppress(psutil.Error):
            one.send_signal(sig)


class _Host:
    """Runs the calls in one event loop, so that a user's code keeps its connections and caches between them."""

    def __init__(self, connection: socket.socket, call: Callable[..., Any]) -> None:
        self._connection, self._call, self._pid = connection, call, os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serves calls until the owner is gone, which ends the process."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="frames", daemon=True).start()
        await asyncio.Event().wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                kind, number, size = HEAD.unpack(exactly(self._connection, HEAD.size))
                loop.call_soon_threadsafe(self._take, kind, number, exactly(self._connection, size))
        except (EOFError, OSError):
            os._exit(0)

    def _take(self, kind: bytes, number: int, body: bytes) -> None:
        if kind == CALL:
            self._tasks[number] = asyncio.create_task(self._run(number, body))
        elif task := self._tasks.get(number):
            task.cancel()

    async def _run(self, number: int, body: bytes) -> None:
        try:
            found = self._call(*pickle.loads(body))
            answer = encoded({"id": number, "value": await found if inspect.isawaitable(found) else found})
        except PluginFailed as e:
            answer = encoded({"id": number, "error": text_of(e)})
        except BaseException as e:  # whatever a user's function raises: also SystemExit
            answer = encoded({"id": number, "error": describe(e)})
        finally:
            self._tasks.pop(number, None)
        if os.getpid() != self._pid:
            os._exit(1)  # a fork that the function has made, and that has come back from it
        self._connection.sendall(answer)


def main(descriptor: int) -> None:
    """Serves the function that the first frame describes."""
    guard_family(descriptor)
    with socket.socket(fileno=descriptor) as connection:
        os.set_inheritable(descriptor, False)  # what the function starts does not get it
        _, _, size = HEAD.unpack(exactly(connection, HEAD.size))
        maker, arguments = pickle.loads(exactly(connection, size))
        try:
            function = imported(maker)(*arguments)
            host = _Host(connection, function)
        except ConfigError as e:
            send(connection, {"config": text_of(e), "message": e.message, "hint": e.hint})
            return
        except BaseException as e:  # whatever a user's module raises while it is imported: also SystemExit
            send(connection, {"error": describe(e)})
            return
        send(connection, {"value": getattr(function, "about", None)})
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(host.serve())
        except BaseException as e:
            # A task that the function has made has raised SystemExit. To cancel the calls under way, as asyncio.run
            # does, would answer them as if each had failed itself; so they are lost.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(e.code if isinstance(e, SystemExit) and isinstance(e.code, int) else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
