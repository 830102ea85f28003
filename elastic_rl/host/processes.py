"""Child processes and services.

The kernel ends a *child* when its parent ends, also after kill -9 (PR_SET_PDEATHSIG). A *service* outlives the process
that started it (``service_files``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.errors import PreflightFailed
from elastic_rl.runtime.files import UMASK_ENV, preflight_writes, user_umask
from elastic_rl.runtime.process import start_child, start_process
from elastic_rl.telemetry.log_files import open_log


def python(module: str, *args: str, interpreter: str = sys.executable) -> list[str]:
    """Command line that runs a module, with this interpreter by default."""
    return [interpreter, "-m", module, *args]


def spawn(cmd: Sequence[str], *, log: Path, env: Mapping[str, str | None] | None = None, service: bool = False,
          cwd: Path | None = None, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts ``cmd`` in a session of its own with stdout and stderr appended to ``log``. A child ends with this
    process, a ``service`` does not. ``env`` is added to this process's environment; a variable that is None there is
    left out of it. ``pass_fds``: open files that it has too. Raises PreflightFailed when the program cannot be started,
    or its log cannot be written."""
    with preflight_writes(log.parent), open_log(log) as out:
        popen: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT,
                                 "env": {name: value for name, value in {
                                     **os.environ, UMASK_ENV: f"{user_umask():03o}", **(env or {})}.items()
                                     if value is not None}, "cwd": cwd, "pass_fds": pass_fds}
        try:
            return (start_process if service else start_child)(cmd, **popen)
        except OSError as e:
            raise PreflightFailed(f"cannot start {cmd[0]}: {e.strerror}",
                                  hint="run `elastic-rl doctor` to check this machine") from e


def stop(pid: int, *, grace_s: float = 5.0, descendants: bool = True) -> bool:
    """Ends a process and its group: SIGTERM, then after ``grace_s`` seconds SIGKILL. Returns whether it ended before
    the latter. No error when it is gone. ``descendants``: whether those of other groups end with it."""
    try:
        process = psutil.Process(pid)
        # Grandchildren may be in other groups (torch's and SGLang's are); find them while their parent still runs.
        family = [process, *(process.children(recursive=True) if descendants else ())]
    except psutil.NoSuchProcess:
        return True
    _signal_group(pid, signal.SIGTERM)
    in_time = not _not_ended([process], grace_s)
    kill(family, grace_s=grace_s)
    _signal_group(pid, signal.SIGKILL)
    return in_time


def kill(family: Iterable[psutil.Process], *, grace_s: float = 5.0) -> None:
    """Sends SIGKILL to all of them, to Python's resource trackers last and only when they do not end by themselves:
    they unlink the named semaphores of the killed processes."""
    trackers: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for process in family:
        try:
            (trackers if "resource_tracker" in " ".join(process.cmdline()) else others).append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    for group in (others, trackers):
        if group is trackers:
            group = _not_ended(trackers, grace_s)
        for process in group:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _not_ended(group, grace_s)


def _not_ended(family: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those of the processes that have not ended after ``timeout_s`` seconds. One that has is known for as long as its
    parent has not asked for its exit code, which may be for ever; psutil waits for that."""
    found, until = [], time.monotonic() + timeout_s
    for process in family:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        except OSError:  # an old kernel, or too many open files
            found += psutil.wait_procs([process], max(0.0, until - time.monotonic()))[1]
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                found.append(process)
                continue
        finally:
            os.close(descriptor)
        with contextlib.suppress(psutil.Error):
            process.wait(0.0)  # does ask, where this process is the parent
    return found


def _signal_group(pid: int, sig: int) -> None:
    try:
        os.killpg(pid, sig)
    except (ProcessLookupError, PermissionError):
        pass


RUN_MARK = "ELASTIC_RL_RUN"
"""Environment variable that every process of a run's compute plane inherits; its value, the job's private folder on
this host, identifies the run."""
OWNER_ENV = "ELASTIC_RL_CLUSTER"
"""Environment variable with the cluster's folder, in every service of a cluster but workers of Ray; ``down`` finds
services without a record by it. The compute plane has ``RUN_MARK`` instead: what ends a run kills what has that, and
must not kill the durable plane."""


def marked(value: str, variable: str = RUN_MARK) -> list[psutil.Process]:
    """Processes of this user with this value of the variable in their environment, without this one and its
    ancestors."""
    found = []
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(variable) == value:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def marked_outside(families: Iterable[int], value: str, variable: str = RUN_MARK) -> list[int]:
    """Pids of the marked processes that are neither one of ``families`` nor descend from one."""
    roots, found = set(families), []
    for process in marked(value, variable):
        try:
            line = {process.pid, *(p.pid for p in process.parents())}
        except psutil.NoSuchProcess:
            continue
        if not line & roots:
            found.append(process.pid)
    return found


def sweep(value: str, variable: str = RUN_MARK, *, grace_s: float = 5.0) -> list[int]:
    """Kills the processes that a run, or one of its services, left behind. Returns their pids."""
    victims = marked(value, variable)
    kill(victims, grace_s=grace_s)
    return [p.pid for p in victims]


class StoppedProcesses:
    """Decides when a stopped process (SIGSTOP) counts as lost. Pure.

    It executes nothing, so nothing inside it can end it, and others would wait for it. One that continues in time is
    left alone; one that a debugger holds is not stopped.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[int, float] = {}

    def lost(self, now: float, stopped: Collection[int]) -> list[int]:
        """The pids that are stopped now and have been for the limit. Call it regularly."""
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        return [pid for pid, since in self._since.items() if now - since >= self._limit_s]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP); false for one that has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
