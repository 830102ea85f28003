"""The services of one machine, each with a file that its process holds locked for as long as it lives.

Who starts a service locks its file first and passes the open file on, so the lock lives exactly as long as the
service: it does not end with the process that started it, and a service whose starter was killed in the middle of the
start is found as any other. No second process of a service can be started beside a living one. The lock tells whether a
service runs; its pid is looked up where the file does not have it yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import psutil

from elastic_rl.errors import Conflict, DeadlineExceeded
from elastic_rl.host import processes
from elastic_rl.host.cluster_lock import taken
from elastic_rl.runtime.waiting import wait_until

_LOCK_S = 5.0
"""Longest wait for a lock whose holder has been killed, or that a reader has for a moment."""
_LOCK_LINE = re.compile(r"^lock:.*\bFLOCK\b.*\bWRITE\b", re.MULTILINE)
"""What proc(5)'s fdinfo says of an open file that has the lock of a service; a reader's momentary one is READ."""


@dataclass(frozen=True)
class ServiceRecord:
    """A service that was started and not forgotten since."""

    name: str
    url: str = ""
    """Address of what it serves."""
    pid: int = 0
    """Its process; 0 while it does not run, and for one that runs elsewhere."""
    running: bool = False

    @property
    def elsewhere(self) -> bool:
        """Whether it runs where this process cannot see it: on another machine that shares the folder, or in another
        container."""
        return self.running and not self.pid


class ServiceFiles:
    """The files in a folder, one a service. A file that is deleted loses sight of its service: only ``forget`` and
    ``clear`` delete files, once the services have ended."""

    def __init__(self, folder: Path) -> None:
        """``folder``: an absolute path without links."""
        self.folder = folder

    def start(self, name: str, cmd: Sequence[str], *, log: Path, env: Mapping[str, str | None] | None = None,
              url: str = "") -> int:
        """Starts a service that outlives this process, and returns its pid. Raises Conflict while it runs, and
        PreflightFailed where it cannot be started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self._path(name), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            try:
                wait_until(partial(taken, file), timeout_s=_LOCK_S, what=f"the lock of {name}")
            except DeadlineExceeded as e:
                raise Conflict(f"{name} runs already: its lock {self._path(name)} is held") from e
            _write(file, url, pid=0)
            child = processes.spawn(cmd, log=log, env=env, service=True, pass_fds=(file.fileno(),))
            _write(file, url, pid=child.pid)
            return child.pid

    def all(self) -> list[ServiceRecord]:
        """Every service that was started and not forgotten, by name."""
        return [record for path in sorted(self.folder.glob("*.json")) if (record := self.get(path.stem))]

    def running(self) -> list[ServiceRecord]:
        return [record for record in self.all() if record.running]

    def get(self, name: str) -> ServiceRecord | None:
        """The record of a service; None for one that was never started, or forgotten."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                url, pid = _read(file)
                if pid and _holds(pid, path):
                    return ServiceRecord(name, url, pid, running=True)
                if taken(file, shared=True):
                    return ServiceRecord(name, url)
        except FileNotFoundError:
            return None
        holders = list(_holders(path))
        # Forked children of a service that has died lead no session. Without any holder here it runs elsewhere.
        leader = next(filter(_leads_session, holders), 0)
        return ServiceRecord(name, url, leader, running=bool(leader) or not holders)

    def runs(self, name: str) -> bool:
        record = self.get(name)
        return record is not None and record.running

    def forget(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self.folder.glob("*.json"):
            path.unlink(missing_ok=True)

    def end_leftovers(self, name: str) -> None:
        """Kills what a service that has ended has left behind with its lock: processes that it had forked."""
        record = self.get(name)
        if record is None or record.running:
            return
        for pid in _holders(self._path(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.kill([psutil.Process(pid)])

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _write(file: IO[bytes], url: str, pid: int) -> None:
    """Writes the first line of a service's file in one call, so that a writer that is killed leaves the old or the new
    one. What follows the line is the end of a longer one, and is not read."""
    os.pwrite(file.fileno(), json.dumps({"url": url, "pid": pid}).encode() + b"\n", 0)


def _read(file: IO[bytes]) -> tuple[str, int]:
    """URL and pid as written; nothing of a damaged file, whose service is found by its lock all the same."""
    try:
        values = json.loads(file.readline())
        return str(values["url"]), int(values["pid"])
    except (ValueError, TypeError, KeyError):
        return "", 0


def _holders(path: Path) -> Iterator[int]:
    """Pids of this user's processes, other than this one, that hold the lock of the file."""
    for pid in sorted(psutil.pids()):
        if pid != os.getpid() and _holds(pid, path):
            yield pid


def _holds(pid: int, path: Path) -> bool:
    """Whether a process holds the lock of the file, and not merely has it open."""
    try:
        return any(_locks(pid, fd, path) for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended, or is another user's
        return False


def _locks(pid: int, fd: str, path: Path) -> bool:
    """Whether an open file of a process is this one, with the lock. Other files are not touched: one may be on a file
    system that does not answer."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}") == str(path) and bool(
            _LOCK_LINE.search(Path(f"/proc/{pid}/fdinfo/{fd}").read_text()))
    except OSError:  # closed meanwhile
        return False


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
