"""Child processes and services.

The kernel ends a *child* when its parent ends, also after kill -9 (PR_SET_PDEATHSIG). A *service* outlives the command
that started it; its record in ``<dir>/pids`` (pid, boot and start time, so that a reused pid is never signalled) lets a
later command stop it, also after a crash.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.errors import PreflightFailed
from elastic_rl.runtime.files import UMASK_ENV, preflight_writes, replace_file, user_umask
from elastic_rl.runtime.process import start_child, start_process
from elastic_rl.telemetry.log_files import open_log

_log = logging.getLogger(__name__)


def python(module: str, *args: str) -> list[str]:
    """Command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *args]


def spawn(cmd: Sequence[str], *, log: Path, env: Mapping[str, str | None] | None = None, service: bool = False,
          cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts ``cmd`` in a session of its own with stdout and stderr appended to ``log``. A child ends with this
    process, a ``service`` does not. ``env`` is added to this process's environment; a variable that is None there is
    left out of it. Raises PreflightFailed when the program cannot be started, or its log cannot be written."""
    with preflight_writes(log.parent), open_log(log) as out:
        popen: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT,
                                 "env": {name: value for name, value in {
                                     **os.environ, UMASK_ENV: f"{user_umask():03o}", **(env or {})}.items()
                                     if value is not None}, "cwd": cwd}
        try:
            return (start_process if service else start_child)(cmd, **popen)
        except OSError as e:
            raise PreflightFailed(f"cannot start {cmd[0]}: {e.strerror}",
                                  hint="run `elastic-rl doctor` to check this machine") from e


def stop(pid: int, *, grace_s: float = 5.0) -> bool:
    """Ends a process and its group: SIGTERM, then after ``grace_s`` seconds SIGKILL. Returns whether it ended before
    the latter. No error when it is gone."""
    try:
        process = psutil.Process(pid)
        # Grandchildren may be in other groups (torch's and SGLang's are); find them while their parent still runs.
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return True
    _signal_group(pid, signal.SIGTERM)
    in_time = True
    try:
        process.wait(grace_s)
    except psutil.TimeoutExpired:
        in_time = False
    except psutil.NoSuchProcess:
        pass
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
            group = psutil.wait_procs(trackers, timeout=grace_s)[1]
        for process in group:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(group, timeout=grace_s)


def _signal_group(pid: int, sig: int) -> None:
    try:
        os.killpg(pid, sig)
    except (ProcessLookupError, PermissionError):
        pass


RUN_MARK = "ELASTIC_RL_RUN"
"""Environment variable that every process of a run's compute plane inherits; its value identifies the run."""


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
    """Kills the processes that a run left behind: Ray's agents outlive a driver that was killed. Returns their pids."""
    victims = marked(value, variable)
    kill(victims, grace_s=grace_s)
    return [p.pid for p in victims]


@dataclass(frozen=True)
class PidRecord:
    """A service that was started. Boot and start time distinguish it from a later process with the same pid."""

    name: str
    pid: int
    boot: str
    """The kernel's id of the boot."""
    start_ticks: int
    """Clock ticks from the boot to the start of the process. Unlike a time of day it does not move with the clock."""
    url: str = ""

    @classmethod
    def of(cls, name: str, pid: int, url: str = "") -> PidRecord:
        """The record of a running process. Raises ProcessLookupError when there is none."""
        found = _stat(pid)
        if found is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(name, pid, boot_id(), found[1], url)

    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[0] not in "ZX" and (boot_id(), found[1]) == (self.boot, self.start_ticks)


def boot_id() -> str:
    """The kernel's id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process (fields 3 and 22 of proc(5)'s stat), or None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])


class PidRecords:
    """The records in a folder, one JSON file a service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, pid: int, url: str = "") -> PidRecord:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = PidRecord.of(name, pid, url)
        replace_file(self.folder / f"{name}.json", json.dumps(asdict(record)))
        return record

    def all(self) -> list[PidRecord]:
        """Every record. A damaged one is left out: its process is then one without a record."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(PidRecord(**json.loads(path.read_text())))
            except FileNotFoundError:
                continue
            except (ValueError, TypeError) as e:
                _log.warning("%s is damaged and is not used: %s", path, e)
        return found

    def alive(self) -> list[PidRecord]:
        return [r for r in self.all() if r.alive()]

    def forget(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def clear(self) -> None:
        """Deletes every record, damaged ones too."""
        for path in self.folder.glob("*.json"):
            path.unlink(missing_ok=True)


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
