"""Child processes and services.

The kernel ends a *child* when its parent ends, also after kill -9 (PR_SET_PDEATHSIG). A *service* outlives the command
that started it; its record in ``<dir>/pids`` (pid and start time, so that a reused pid is never signalled) lets a later
command stop it, also after a crash.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.errors import PreflightFailed
from elastic_rl.runtime import start_child
from elastic_rl.telemetry.log_files import open_log


def python(module: str, *args: str) -> list[str]:
    """Command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *args]


def spawn(cmd: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, service: bool = False,
          cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts ``cmd`` in a session of its own with stdout and stderr appended to ``log``. A child ends with this
    process, a ``service`` does not. ``env`` is added to this process's environment. Raises PreflightFailed when the
    program cannot be started."""
    with open_log(log) as out:
        popen: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT,
                                 "env": {**os.environ, **(env or {})}, "cwd": cwd}
        try:
            if service:
                return subprocess.Popen(list(cmd), start_new_session=True, **popen)
            return start_child(cmd, **popen)
        except OSError as e:
            raise PreflightFailed(f"cannot start {cmd[0]}: {e.strerror}",
                                  hint="run `elastic-rl doctor` to check this machine") from e


def stop(pid: int, *, grace_s: float = 5.0) -> None:
    """Ends a process and its group: SIGTERM, then after ``grace_s`` seconds SIGKILL. No error when it is gone."""
    try:
        process = psutil.Process(pid)
        # Grandchildren may be in other groups (torch's and SGLang's are); find them while their parent still runs.
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    _signal_group(pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except (psutil.TimeoutExpired, psutil.NoSuchProcess):
        pass
    _kill(family, grace_s=grace_s)
    _signal_group(pid, signal.SIGKILL)


def _kill(family: Iterable[psutil.Process], *, grace_s: float) -> None:
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


def sweep(value: str, variable: str = RUN_MARK, *, grace_s: float = 5.0) -> list[int]:
    """Kills the processes that a run left behind: Ray's agents outlive a driver that was killed. Returns their pids."""
    victims = marked(value, variable)
    _kill(victims, grace_s=grace_s)
    return [p.pid for p in victims]


@dataclass(frozen=True)
class PidRecord:
    """A service that was started. The creation time distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    create_time: float
    url: str = ""

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.create_time) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class PidRecords:
    """The records in a folder, one JSON file a service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, pid: int, url: str = "") -> PidRecord:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = PidRecord(name, pid, psutil.Process(pid).create_time(), url)
        partial = self.folder / f".{name}.partial"
        partial.write_text(json.dumps(asdict(record)))
        partial.rename(self.folder / f"{name}.json")
        return record

    def all(self) -> list[PidRecord]:
        return [PidRecord(**json.loads(p.read_text())) for p in sorted(self.folder.glob("*.json"))]

    def alive(self) -> list[PidRecord]:
        return [r for r in self.all() if r.alive()]

    def forget(self, name: str) -> None:
        (self.folder / f"{name}.json").unlink(missing_ok=True)

