"""Worker processes that are killed when a call takes too long: code that hangs, or eats memory, costs its call only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Protocol

import psutil

from elastic_rl.errors import PluginFailed
from elastic_rl.plugins import host as plugin_host
from elastic_rl.plugins import worker
from elastic_rl.plugins.user_code import plain
from elastic_rl.runtime.files import count_temporary_files
from elastic_rl.runtime.process import start_child

_START_S = 120.0
"""A worker imports a function of this project within this time."""
_MAX_CALLS = 5000
"""Calls after which a worker is replaced: libraries that cache what they parse grow."""
_END_S = 5.0
_MAX_FILES = 8192
"""Files of a worker in a sandbox, of which each takes a kilobyte of the kernel's. Libraries make a few in a cache."""
_LOOK_S = 0.25
MAX_MEMORY_MB = 1 << 24
"""More than any machine has, and less than what a limit of the kernel holds."""


_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""Libraries of numbers reserve address space for each thread, by default one a CPU: on a machine with many of them the
imports alone would pass the limit of a worker."""


class CallGivenUp(PluginFailed):
    """The worker was killed since the call took too long, or it died of the call. The next call gets another one."""


class Sandbox(Protocol):
    """What a worker may run in, such as ``rewards.worker_sandbox``'s."""

    def start(self, arguments: Sequence[str], *descriptors: int) -> subprocess.Popen[bytes]:
        """Starts the interpreter with these arguments; it inherits the descriptors. Raises OSError."""


class WorkerPool:
    """Calls of ``module:function`` in at most ``processes`` processes, which are started when they are needed, replaced
    when they were killed, and end with this process, also when it is killed."""

    def __init__(self, function: str, processes: int, *, memory_mb: int, named: str = "",
                 sandbox: Sandbox | None = None, made_of: str = "", start_s: float = _START_S) -> None:
        """``memory_mb``: address space of each process, in MiB. ``named``: what the texts of errors call the function,
        if not by its name. ``sandbox``: what the processes run in; None: they have the rights of this one. ``made_of``:
        what the function is called with as a process starts, which returns the function of the calls; "": it is that
        itself. ``start_s``: seconds for the start of a process, with all that is imported."""
        self._named, self._processes, self._start_s = named or function, processes, start_s
        self._new = functools.partial(_Worker, function, made_of, memory_mb, self._named, sandbox)
        self._threads = ThreadPoolExecutor(processes, "worker-calls")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._running: set[_Worker] = set()
        self._closed = False

    async def call(self, job: Any, timeout_s: float) -> Any:
        """What the function returns for a JSON value, as JSON value. ``timeout_s`` counts from when a worker has the
        call: its start has a limit of its own. Raises CallGivenUp, and PluginFailed for what the function raises and
        when no worker can be started."""
        return values(await self.calls([job], timeout_s))[0]

    def call_and_wait(self, job: Any, timeout_s: float) -> Any:
        """Does what ``call`` does, for a thread without an event loop. When all processes are busy it waits for one,
        which each call holds for at most the time of a start and its own limit."""
        try:
            submitted = self._threads.submit(self._call, job, timeout_s)
        except RuntimeError as e:  # its threads take no more calls
            raise PluginFailed(f"{self._named} is closed") from e
        try:
            return submitted.result()
        except CancelledError as e:
            raise PluginFailed(f"{self._named} is closed") from e

    async def calls(self, jobs: Sequence[Any], timeout_s: float, *, all_or_none: bool = False) -> list[Any]:
        """The outcomes of several calls, in order: each what ``call`` returns or, of the errors, an object. They are
        spread over the processes; what one of them does costs the others nothing but time. ``all_or_none``: once one
        has failed no other is begun, as nobody needs what is left."""
        outcomes: list[Any] = [PluginFailed(f"{self._named} is closed") for _ in jobs]
        left, given_up = queue.SimpleQueue[int](), threading.Event()
        for i in range(len(jobs)):
            left.put(i)

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while not given_up.is_set():
                    i = left.get_nowait()
                    outcomes[i] = self._outcome(jobs[i], timeout_s)
                    if all_or_none and isinstance(outcomes[i], PluginFailed):
                        given_up.set()

        # A thread makes one call after the other: to change threads takes longer than a short call.
        try:
            await asyncio.gather(*(self._submitted(work) for _ in range(min(self._processes, len(jobs)))))
        finally:
            given_up.set()
        return outcomes

    async def _submitted(self, work: Callable[[], None]) -> None:
        """Returns when a thread has done the work, or will never take it, since this is closed."""
        try:
            submitted = self._threads.submit(work)
        except RuntimeError:  # its threads take no more calls
            return
        try:
            await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            if not self._closed or not submitted.cancelled() or _is_cancelled():
                raise

    def close(self) -> None:
        """Kills the workers; calls in progress end with CallGivenUp."""
        with self._lock:
            self._closed = True
            idle, running = list(self._idle), list(self._running)
            self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for one in idle:
            one.close()
        for one in running:
            one.kill()  # its thread closes it

    def _outcome(self, job: Any, timeout_s: float) -> Any:
        try:
            return self._call(job, timeout_s)
        except PluginFailed as e:
            return e

    def _call(self, job: Any, timeout_s: float) -> Any:
        taken = self._take()
        kept = False
        try:
            answer = taken.call(job, timeout_s)
            kept = taken.calls < _MAX_CALLS and not taken.is_crowded()
        finally:
            with self._lock:
                self._running.discard(taken)
                kept = kept and not self._closed
                if kept:
                    self._idle.append(taken)
            if not kept:
                taken.close()
        return self._value(answer)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise PluginFailed(f"{self._named} is closed")
            if self._idle:
                taken = self._idle.pop()
                self._running.add(taken)
                return taken
        started = self._new()
        with self._lock:
            closed = self._closed
            if not closed:
                self._running.add(started)
        try:
            if closed:
                raise PluginFailed(f"{self._named} is closed")
            self._ready(started)
        except BaseException:
            with self._lock:
                self._running.discard(started)
            started.close()
            raise
        return started

    def _ready(self, started: _Worker) -> None:
        """Waits for it. Raises PluginFailed: no call is to blame for a worker that does not start."""
        try:
            self._value(started.receive(self._start_s))
        except CallGivenUp as e:
            raise PluginFailed(f"no worker of {self._named} starts: it died, or was not ready within "
                               f"{self._start_s:g} s") from e

    def _value(self, answer: Any) -> Any:
        if "error" in answer:
            raise PluginFailed(f"{self._named} failed in its worker: {plain(str(answer['error']))}")
        return answer["value"]


def values(outcomes: list[Any]) -> list[Any]:
    """The outcomes of calls, if none of them is an error. Raises the first one that is."""
    for outcome in outcomes:
        if isinstance(outcome, PluginFailed):
            raise outcome
    return outcomes


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_readable(connection: socket.socket, timeout_s: float) -> bool:
    """Whether something can be read within ``timeout_s``, or the other end has closed."""
    poll = select.poll()  # ``select.select`` takes no descriptor from 1024 on, of which an actor has many
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class _Worker:
    """One process. Used by one thread at a time, but for ``kill``."""

    def __init__(self, function: str, made_of: str, memory_mb: int, named: str, sandbox: Sandbox | None) -> None:
        """Raises PluginFailed when the process cannot be started."""
        self._named, self.calls, self._lock = named, 0, threading.Lock()
        self._sandboxed, self._inside = sandbox is not None, 0
        self._connection, other = socket.socketpair()
        with other:
            arguments = ["-P", "-m", worker.__name__, str(other.fileno()), function, made_of, str(memory_mb)]
            try:
                self._process = sandbox.start([*arguments, "sandboxed"], other.fileno()) if sandbox else start_child(
                    [sys.executable, *arguments], pass_fds=(other.fileno(),), stdin=subprocess.DEVNULL,
                    stdout=2, env={  # what it prints goes to the log of this process
                        **os.environ, **_ONE_THREAD, "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0",
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
            except OSError as e:
                self._connection.close()
                raise PluginFailed(f"no process can be started for {named}: {e}") from e

    def call(self, job: Any, timeout_s: float) -> Any:
        """The worker's answer. Raises CallGivenUp, after which the worker is of no use."""
        self.calls += 1
        self._connection.settimeout(timeout_s)
        try:
            plugin_host.send(self._connection, [self.calls, job])
        except TimeoutError as e:
            raise self._too_long(timeout_s) from e
        except (TypeError, ValueError) as e:  # of what the prompt's metadata hold, most likely
            raise PluginFailed(f"the call of {self._named} cannot be sent: {e}") from e
        except OSError as e:
            raise self._died() from e
        answer = self.receive(timeout_s)
        if not isinstance(answer, dict) or answer.get("id") != self.calls or not {"value", "error"} & answer.keys():
            # Something that the function has done, or started, has written to the connection.
            raise self._died()
        return answer

    def receive(self, timeout_s: float) -> Any:
        """The worker's next message, whole within ``timeout_s``. Raises CallGivenUp."""
        end = time.monotonic() + timeout_s
        try:
            while self.calls and self._sandboxed and not _is_readable(self._connection, _LOOK_S):
                if time.monotonic() >= end:
                    raise TimeoutError
                if self.is_crowded():
                    raise self._died()
            return plugin_host.receive(self._connection, end)
        except TimeoutError as e:
            raise self._too_long(timeout_s) from e
        except (EOFError, OSError, ValueError) as e:
            raise self._died() from e

    def is_crowded(self) -> bool:
        """Whether what runs in a sandbox has made more files than any check needs: they are memory that no limit of a
        process counts."""
        if not self._sandboxed or not self.calls:  # before it has started it sees the machine's files
            return False
        if not self._inside:
            with contextlib.suppress(psutil.Error):
                self._inside = max((p.pid for p in psutil.Process(self._process.pid).children(recursive=True)),
                                   default=0)
        return bool(self._inside) and count_temporary_files(self._inside) > _MAX_FILES

    def kill(self) -> None:
        """Ends the process and what it has started. May be called by any thread."""
        with self._lock:
            if self._process.returncode is None:  # not reaped yet, so the number is still its own
                self._process.terminate()  # it ends once its family has
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)

    def close(self) -> None:
        """Kills it. Call it once no thread reads from it."""
        self.kill()
        self._connection.close()

    def _too_long(self, timeout_s: float) -> CallGivenUp:
        return CallGivenUp(f"{self._named} took longer than {timeout_s:g} s and was killed")

    def _died(self) -> CallGivenUp:
        return CallGivenUp(f"the worker of {self._named} died during the call, or ran out of memory")
