"""A process that runs one function of a user's code for its owner (``plugin_process.py``), over a socket.

The owner's frames are pickled: they are this project's own. What goes back is JSON, since nothing that comes from code
which may be wrong is unpickled.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins import describe, text_of

MAX_MESSAGE = 64 << 20
"""Bytes of a JSON message."""
CALL, CANCEL = b"c", b"x"
"""Kinds of frames: a call, with its pickled arguments; and the wish that a call ends."""
HEAD = struct.Struct("!cQQ")
"""Of a frame: kind, number of the call, bytes that follow."""
_LENGTH = struct.Struct("!I")
_CLEAN_UP_S = 1.0
"""For what was asked to end: multiprocessing's resource tracker removes the shared memory of its process then."""


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


def receive(connection: socket.socket) -> Any:
    """The next JSON value. Raises EOFError when the other side is gone, ValueError for what is no message, and
    OSError."""
    (size,) = _LENGTH.unpack(exactly(connection, _LENGTH.size))
    if size > MAX_MESSAGE:
        raise ValueError(f"a message of {size} bytes was announced; at most {MAX_MESSAGE} are allowed")
    return json.loads(exactly(connection, size))


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises EOFError and OSError."""
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError("the other side is gone")
        received += piece
    return bytes(received)


def imported(name: str) -> Any:
    """What ``module:attribute`` names. Raises whatever importing it raises."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def guard_group(descriptor: int) -> None:
    """Starts a process that ends this process group once this process has ended, however it ends, so that nothing which
    a user's function has started outlives it, or holds its connection open. ``descriptor``: of the connection. Call it
    before there is another thread."""
    this = os.pidfd_open(os.getpid())
    if middle := os.fork():
        os.waitpid(middle, 0)
        os.close(this)
        return
    try:
        if os.fork() == 0:  # no child of this process, which a user's function might wait for, or end with its children
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(descriptor)
            select.select([this], [], [])  # until it has ended
            os.killpg(os.getpgrp(), signal.SIGTERM)
            time.sleep(_CLEAN_UP_S)
            os.killpg(os.getpgrp(), signal.SIGKILL)
    finally:
        os._exit(0)


class _Host:
    """Runs the calls in one event loop, so that a user's code keeps its connections and caches between them."""

    def __init__(self, connection: socket.socket, call: Callable[..., Any]) -> None:
        self._connection, self._call, self._pid = connection, call, os.getpid()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the owner is gone, which ends the process."""
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
    guard_group(descriptor)
    with socket.socket(fileno=descriptor) as connection:
        os.set_inheritable(descriptor, False)  # what the function starts does not get it
        _, _, size = HEAD.unpack(exactly(connection, HEAD.size))
        maker, arguments = pickle.loads(exactly(connection, size))
        try:
            host = _Host(connection, imported(maker)(*arguments))
        except ConfigError as e:
            send(connection, {"config": text_of(e), "message": e.message, "hint": e.hint})
            return
        except BaseException as e:  # whatever a user's module raises while it is imported: also SystemExit
            send(connection, {"error": describe(e)})
            return
        send(connection, {"value": "ready"})
        asyncio.run(host.serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
