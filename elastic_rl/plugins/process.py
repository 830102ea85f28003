"""A function of a user's code in a process of its own, so that nothing it does can hold up, fill or end the process
that needs its results. One that blocks, also while it holds the interpreter's lock, is killed, and the next calls get
another process. Why no thread: docs/decisions/0014-plugins-in-processes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins import host as plugin_host
from elastic_rl.plugins.user_code import describe, plain
from elastic_rl.runtime.process import start_child

START_S = 600.0
"""What a user's module may take to be imported, and to load what it needs."""
CANCEL_S = 5.0
"""What a call may take to end once it was cancelled."""
_END_S = 5.0


class CallLost(PluginFailed):
    """The process ended while the call was under way: killed since a call did not end, or of itself. Which of the calls
    under way is to blame is not known."""


class ProcessLost(PluginFailed):
    """The process has ended, or is being replaced, before the call was begun: call ``start``, and then again."""


class PluginProcess:
    """Calls of one function, several at a time. ``start`` may be called by any thread, and so may ``close``."""

    def __init__(self, what: str, maker: str, *arguments: Any) -> None:
        """``what``: the setting and its value, for texts. ``maker``: ``module:function`` of this project, which is
        called in the process with ``arguments`` and returns the function: plain or async, its result JSON."""
        self._what, self._maker, self._arguments = what, maker, arguments
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    def start(self) -> None:
        """Returns when there is a process for the next calls, also when another thread starts it. One in which a call
        was cancelled is replaced, once its other calls have ended: nobody knows what that call has left behind. Raises
        ConfigError for what the maker refuses, and PluginFailed when the process does not start."""
        with self._lock:
            if self._closed:
                raise PluginFailed(f"{self._what} is closed")
            before = self._process
            if before is not None and before.is_sound:
                process = before
            else:
                if before is not None:
                    before.retire()
                process = self._process = _Process(self._what)
        if process is not before:
            process.make(self._maker, self._arguments)
        process.ready.result()

    @property
    def about(self) -> Any:
        """What the function says of itself, its attribute ``about``, which is JSON; None while there is no process."""
        with self._lock:
            return None if self._process is None else self._process.about

    def start_first(self) -> None:
        """Starts the process as ``start`` does, where a setting is examined: also a process that does not start raises
        ConfigError."""
        try:
            self.start()
        except PluginFailed as e:
            raise ConfigError(e.message, hint=e.hint) from e

    async def call(self, *arguments: Any) -> Any:
        """What the function returns. A call that is cancelled is cancelled in the process too, which is killed if the
        call does not end soon. Raises PluginFailed with the text of what the function raises and for arguments that
        cannot be sent, CallLost, and ProcessLost."""
        with self._lock:
            process = self._process
        if process is None or process.ended or not process.ready.done():
            raise ProcessLost(f"{self._what} waits for its process, which has ended or is being started")
        number, answer = process.send(arguments)
        waiting = asyncio.wrap_future(answer)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
        try:
            return _value(await asyncio.shield(waiting))
        except asyncio.CancelledError:
            process.cancel(number)
            try:
                async with asyncio.timeout(CANCEL_S):
                    await asyncio.shield(waiting)
            except CallLost:
                raise
            except BaseException:
                process.end(f"{self._what} took too long and did not end when it was cancelled, so its process was "
                            "killed")
                raise CallLost(process.ended) from None
            raise

    def replace(self) -> None:
        """Has the next ``start`` replace the process, once the calls under way have ended."""
        with self._lock:
            if self._process is not None:
                self._process.is_sound = False

    def stop(self) -> None:
        """Kills the process until the next ``start``; calls under way end with CallLost."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.end(f"the process of {self._what} was stopped")

    def close(self) -> None:
        """Stops the process for good."""
        with self._lock:
            self._closed = True
        self.stop()


def _value(answer: Any) -> Any:
    if "error" in answer:
        raise PluginFailed(plain(str(answer["error"])))
    return answer["value"]


class _Process:
    """One process, with a thread that writes to it and one that reads: neither a call nor the loop that makes it waits
    for a process that does not read."""

    def __init__(self, what: str) -> None:
        """Raises PluginFailed when it cannot be started."""
        self._what = what
        self.ended = ""
        """Why it was ended; "" while it runs."""
        self.is_sound = True
        """Whether it is good for further calls."""
        self.ready: Future[None] = Future()
        """Result that the function was made, or why not."""
        self.about: Any = None
        """What the function that was made says of itself: its ``about``, JSON."""
        self._retired = False
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = 0
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._connection, other = socket.socketpair()
        with other:
            try:
                self._child = start_child(
                    [sys.executable, "-P", "-m", plugin_host.__name__, str(other.fileno())], pass_fds=(other.fileno(),),
                    stdin=subprocess.DEVNULL, stdout=2, env={  # what it prints goes to this process's log
                        **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0",
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
            except OSError as e:
                self._connection.close()
                raise PluginFailed(f"no process can be started for {what}: {e}") from e

    def make(self, maker: str, arguments: tuple[Any, ...]) -> None:
        """Has it make its function. ``ready`` has ConfigError, or PluginFailed, where it cannot, after which it has
        ended."""
        try:
            self._make(maker, arguments)
        except BaseException as e:  # such as KeyboardInterrupt
            self.ready.set_exception(e)
        else:
            self.ready.set_result(None)

    def _make(self, maker: str, arguments: tuple[Any, ...]) -> None:
        too_long = threading.Timer(START_S, self.end, (f"{self._what} was not imported within {START_S:g} s",))
        too_long.daemon = True
        too_long.start()
        try:
            body = pickle.dumps((maker, arguments))
            self._connection.sendall(plugin_host.HEAD.pack(plugin_host.CALL, 0, len(body)) + body)
            answer = plugin_host.receive(self._connection)
        except (EOFError, OSError, ValueError) as e:
            self.end()
            raise PluginFailed(self.ended, hint="see the log of the process that starts it, where what it prints goes"
                               ) from e
        except BaseException:  # such as KeyboardInterrupt
            self.end("its start was interrupted")
            raise
        finally:
            too_long.cancel()
        if "value" not in answer:
            self.end(f"{self._what} cannot be made")
            if "config" in answer:
                raise ConfigError(plain(str(answer["message"])), hint=plain(str(answer["hint"])))
            raise PluginFailed(f"{self._what} cannot be made: {plain(str(answer.get('error')))}")
        self.about = answer["value"]
        for work in (self._read, self._write):
            threading.Thread(target=work, name="plugin-process", daemon=True).start()

    def send(self, arguments: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        """Number and answer of a call. Raises PluginFailed for arguments that cannot be pickled."""
        try:
            body = pickle.dumps(arguments)
        except BaseException as e:  # whatever the objects of a user's classes raise
            raise PluginFailed(f"what it is called with cannot be sent to its process: {describe(e)}",
                               hint="metadata of prompts and samples must be plain values") from e
        answer: Future[Any] = Future()
        with self._lock:
            self._numbers += 1
            number = self._numbers
            if self.ended:
                raise ProcessLost(self.ended)
            self._calls[number] = answer
        self._frames.put(plugin_host.HEAD.pack(plugin_host.CALL, number, len(body)) + body)
        return number, answer

    def cancel(self, number: int) -> None:
        self.is_sound = False
        self._frames.put(plugin_host.HEAD.pack(plugin_host.CANCEL, number, 0))

    def retire(self) -> None:
        """Ends it as soon as no call is under way."""
        with self._lock:
            self._retired, idle = True, not self._calls
        if idle:
            self.end("it was replaced")

    def end(self, why: str = "") -> None:
        """Kills it; its guard then ends what it has started. ``why``: "" for one that has ended of itself. The first
        reason counts."""
        with self._lock:
            self.is_sound = False
            lost = list(self._calls.values())
            self._calls.clear()
            if self._child.returncode is None:  # not reaped yet, so the number is still its own
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(_END_S)
            self.ended = self.ended or why or f"the process of {self._what} died ({self._status()})"
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the threads that use it
        self._frames.put(None)
        for one in lost:
            one.set_exception(CallLost(self.ended))

    def _status(self) -> str:
        code = self._child.returncode or 0
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError, KeyError, TypeError):
            while True:
                answer = plugin_host.receive(self._connection)
                with self._lock:
                    call = self._calls.pop(answer["id"], None)
                    over = self._retired and not self._calls
                if call is not None:
                    call.set_result(answer)
                if over:
                    self.end("it was replaced")
        self.end()
        self._connection.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self._frames.get()) is not None:
                self._connection.sendall(frame)
