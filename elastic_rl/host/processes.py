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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.errors import PreflightFailed
from elastic_rl.runtime.files import UMASK_ENV, preflight_writes, user_umask
from elastic_rl.runtime.process import start_child, start_process
from elastic_rl.telemetry.log_files import open_log

_KILL_S = 5.0
"""Longest wait for processes to end after SIGKILL, which takes them milliseconds."""


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
    return pid in stop_all([pid], grace_s=grace_s, descendants=descendants)


def stop_all(pids: Iterable[int], *, grace_s: float = 5.0, descendants: bool = True) -> set[int]:
    """Ends processes side by side, each as ``stop`` does, within a few seconds after ``grace_s``. Returns those that
    ended before they were killed."""
    asked = set(pids)
    with contextlib.ExitStack() as stack:
        leaders = list[_Leader]()
        family = dict[psutil.Process, None]()  # as a set, in this order
        for pid in asked:
            with contextlib.suppress(psutil.NoSuchProcess):
                leader = _Leader(psutil.Process(pid))
                stack.callback(leader.close)
                leaders.append(leader)
                # Grandchildren may be in other groups (torch's and SGLang's are); find them while their parent runs.
                family |= dict.fromkeys([leader.process, *leader.group(),
                                         *(leader.process.children(recursive=True) if descendants else ())])
        for leader in leaders:
            leader.signal_group(signal.SIGTERM)
        late = set[int]()
        for leader, in_time in _ends(leaders, grace_s):
            # What was started since is found while nobody else can have the number of the group.
            family |= dict.fromkeys(leader.group())
            if in_time:
                with contextlib.suppress(psutil.Error):
                    leader.process.wait(0.0)
            else:
                late.add(leader.pid)
        kill(family, grace_s=_KILL_S)
        for leader in leaders:
            leader.signal_group(signal.SIGKILL)
    return asked - late


class _Leader:
    """A process that is to end with its group. Its number, which is that of the group, is its own until it is reaped:
    after that, and once the group is empty, another one may have it."""

    def __init__(self, process: psutil.Process) -> None:
        self.process, self.pid = process, process.pid
        self.descriptor: int | None = None
        """None where it has ended, on an old kernel, and with too many open files."""
        with contextlib.suppress(OSError):
            self.descriptor = os.pidfd_open(self.pid)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)

    @property
    def _has_number(self) -> bool:
        if self.descriptor is None:
            return self.process.is_running()
        try:
            signal.pidfd_send_signal(self.descriptor, 0)
        except ProcessLookupError:  # one that has ended, and was not reaped, is no error
            return False
        except PermissionError:
            pass
        return True

    def group(self) -> list[psutil.Process]:
        """The other processes of its group; none once it was reaped."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if pid != self.pid and os.getpgid(pid) == self.pid:
                    found.append(psutil.Process(pid))
        return found if found and self._has_number else []

    def signal_group(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._has_number:
                os.killpg(self.pid, sig)


def _ends(leaders: Iterable[_Leader], timeout_s: float) -> Iterator[tuple[_Leader, bool]]:
    """Each of them once it ends, before this process reaps it, with True; the others after ``timeout_s`` seconds, with
    False."""
    until, poll, waiting = time.monotonic() + timeout_s, select.poll(), dict[int, _Leader]()
    others = list[_Leader]()
    for leader in leaders:
        if leader.descriptor is None:
            others.append(leader)
        else:
            poll.register(leader.descriptor, select.POLLIN)
            waiting[leader.descriptor] = leader
    while waiting and (ended := poll.poll(max(0.0, until - time.monotonic()) * 1000)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            yield waiting.pop(descriptor), True
    for leader in waiting.values():
        yield leader, False
    for leader in others:
        yield leader, not _not_ended([leader.process], max(0.0, until - time.monotonic()))


def kill(family: Iterable[psutil.Process], *, grace_s: float = 5.0) -> None:
    """Sends SIGKILL to all of them, to Python's resource trackers last and only when they do not end by themselves:
    they unlink the named semaphores of the killed processes. Returns once all have ended, after ``grace_s`` seconds at
    the latest."""
    until = time.monotonic() + grace_s
    trackers: list[psutil.Process] = []
    others: list[psutil.Process] = []
    for process in family:
        try:
            (trackers if "resource_tracker" in " ".join(process.cmdline()) else others).append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    for group in (others, trackers):
        if group is trackers:
            group = _not_ended(trackers, max(0.0, until - time.monotonic()))
        for process in group:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _not_ended(group, max(0.0, until - time.monotonic()))


def _not_ended(family: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """The processes that have not ended after ``timeout_s`` seconds. One that has is known for as long as its
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
    return [process for process, found in with_variable(variable) if found == value]


def with_variable(variable: str) -> list[tuple[psutil.Process, str]]:
    """Processes of this user with the variable in their environment, and its value, without this one and its ancestors.
    Of others root could read it too, and they have in it what they like."""
    found = []
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if (process.pid not in own and (value := process.environ().get(variable)) is not None
                    and process.uids().real == os.geteuid()):
                found.append((process, value))
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
