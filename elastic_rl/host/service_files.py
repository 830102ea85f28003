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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from elastic_rl.errors import Conflict
from elastic_rl.host import file_lock, processes


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
        self.folder = folder

    def start(self, name: str, cmd: Sequence[str], *, log: Path, env: Mapping[str, str | None] | None = None,
              url: str = "") -> int:
        """Starts a service that outlives this process, and returns its pid. Raises Conflict while it runs, and
        PreflightFailed where it cannot be started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._path(name), "r+b", opener=_make) as file:
            if not file_lock.taken(file, timeout_s=file_lock.READER_S):
                raise Conflict(f"{name} runs already: its lock {self._path(name)} is held")
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
                if pid and file_lock.holds(pid, path):
                    return ServiceRecord(name, url, pid, running=True)
                if file_lock.taken(file, shared=True):
                    return ServiceRecord(name, url)
        except FileNotFoundError:
            return None
        holders = file_lock.holders(path)
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
        for pid in file_lock.holders(self._path(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.kill([psutil.Process(pid)])

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _make(path: str, flags: int) -> int:
    """An ``opener`` of ``open``, for a file that is made unless it is there."""
    return os.open(path, flags | os.O_CREAT, 0o600)


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


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
