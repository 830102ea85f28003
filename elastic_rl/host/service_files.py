"""The services of one machine, each with a file that its process holds locked for as long as it lives.

Who starts a service locks its file first and passes the open file on, so the lock lives exactly as long as the
service: it does not end with the process that started it, and a service whose starter was killed in the middle of the
start is found as any other. No second process of a service can be started beside a living one. The lock tells whether a
service runs; its pid is looked up where the file does not have it yet.

A service whose work ends says so in its file before it ends (``report_completed``). Its exit code would not do: only
the process that started it learns that, and it may have ended before.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from elastic_rl.errors import Conflict
from elastic_rl.host import file_lock, processes

SERVICE_FILE_ENV = "ELASTIC_RL_SERVICE_FILE"
"""Environment variable with the path of its file in each service, and in all that the service starts: their mark
(``processes.sweep``)."""


_SUFFIX = ".json"
_NODE_PREFIX, _RAY_WORKER_PREFIX = "dcs-", "ray-worker-"
"""Prefixes of services that are for one job, with whose name theirs end."""


def node_service(job: str) -> str:
    """Name of the service that is a job's DCS node."""
    return _NODE_PREFIX + job


def job_of_node(service: str) -> str:
    """The job whose DCS node this is; empty for another service."""
    return service.removeprefix(_NODE_PREFIX) if service.startswith(_NODE_PREFIX) else ""


def ray_worker_service(job: str) -> str:
    """Name of the service that is this host's worker of a job's Ray whose head is on another host."""
    return _RAY_WORKER_PREFIX + job


def job_of_ray_worker(service: str) -> str:
    """The job whose Ray this is a worker of; empty for another service."""
    return service.removeprefix(_RAY_WORKER_PREFIX) if service.startswith(_RAY_WORKER_PREFIX) else ""


def job_of_service(service: str) -> str:
    """The job that a service is for; empty for one of the cluster."""
    return job_of_node(service) or job_of_ray_worker(service)


@dataclass(frozen=True)
class ServiceRecord:
    """A service that was started and not forgotten since."""

    name: str
    url: str = ""
    """Address of what it serves."""
    pid: int = 0
    """Its process; 0 while it does not run, and for one that runs elsewhere."""
    running: bool = False
    named: bool = False
    """Whether its file names the process: else ``pid`` may be that of who is just starting it."""
    generation: int = 0
    """Generation of the assignment that it was started for; 0 where there is none."""
    completed: bool = False
    """Whether the service has said that its work is done."""

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
              url: str = "", generation: int = 0, cwd: Path | None = None,
              lock_s: float = file_lock.READER_S) -> int:
        """Starts a service that outlives this process, and returns its pid. ``lock_s``: longest wait for its lock.
        Raises Conflict while it runs, and PreflightFailed where it cannot be started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._path(name), "r+b", opener=_make) as file:
            if not file_lock.taken(file, timeout_s=lock_s):
                raise Conflict(f"{name} runs already: its lock {self._path(name)} is held")
            _write(file, url, generation, pid=0)
            child = processes.spawn(cmd, log=log, env={**(env or {}), SERVICE_FILE_ENV: self.mark(name)},
                                    service=True, cwd=cwd, pass_fds=(file.fileno(),))
            _write(file, url, generation, pid=child.pid)
            return child.pid

    def names(self) -> list[str]:
        """Names of every service that was started and not forgotten, in order. No process is looked at."""
        try:
            found = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []
        return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))

    def all(self) -> list[ServiceRecord]:
        """Every service that was started and not forgotten, by name."""
        return [record for name in self.names() if (record := self.get(name))]

    def running(self) -> list[ServiceRecord]:
        return [record for record in self.all() if record.running]

    def get(self, name: str) -> ServiceRecord | None:
        """The record of a service; None for one that was never started, or forgotten."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                record = replace(_read(file), name=name)
                if record.pid and file_lock.holds(record.pid, path):
                    return replace(record, running=True, named=True)
                if file_lock.taken(file, shared=True):
                    return replace(_read(file), name=name, pid=0)  # it may have ended, and written this, since
        except FileNotFoundError:
            return None
        holders = file_lock.holders(path)
        # Forked children of a service that has died lead no session. Without any holder here it runs elsewhere.
        leader = next(filter(_leads_session, holders), 0)
        return replace(record, pid=leader, running=bool(leader) or not holders)

    def runs(self, name: str) -> bool:
        record = self.get(name)
        return record is not None and record.running

    def is_run_by(self, name: str, pid: int) -> bool:
        """Whether a process is that of a service. Unlike ``get`` this never looks at other processes, also where the
        file does not name it."""
        return file_lock.holds(pid, self._path(name))

    def forget(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def clear(self) -> None:
        for path in (*map(self._path, self.names()), *self.folder.glob("*.complete")):  # ``RayNode.is_complete``
            path.unlink(missing_ok=True)

    def end_leftovers(self, name: str) -> None:
        """Kills what a service that has ended has left behind with its lock: processes that it had forked."""
        record = self.get(name)
        if record is None or record.running:
            return
        for pid in file_lock.holders(self._path(name)):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.kill([psutil.Process(pid)])

    def mark(self, name: str) -> str:
        """Value of ``SERVICE_FILE_ENV`` in what a service has started."""
        return str(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def _make(path: str, flags: int) -> int:
    """An ``opener`` of ``open``, for a file that is made unless it is there."""
    return os.open(path, flags | os.O_CREAT, 0o600)


def report_completed() -> None:
    """Called by a service that has done its work, right before it ends: it is not started again. Killed before, it is
    started once more."""
    with open(os.environ[SERVICE_FILE_ENV], "r+b") as file:
        generation = _read(file).generation
        file.seek(0, os.SEEK_END)
        file.write(_completed(generation))


def _completed(generation: int) -> bytes:
    return json.dumps({"completed": generation}).encode() + b"\n"


def _write(file: IO[bytes], url: str, generation: int, pid: int) -> None:
    """Writes the first line of a service's file in one call, so that a writer that is killed leaves the old or the new
    one. The line is as long with the pid as without, so that what the service has added meanwhile stays; what an
    earlier process of it has added is for another generation, and dropped with the first write."""
    values = json.dumps({"url": url, "generation": generation})
    line = f'{{"pid": {pid:10d}, {values[1:]}\n'.encode()
    os.pwrite(file.fileno(), line, 0)
    if not pid:
        os.ftruncate(file.fileno(), len(line))


def _read(file: IO[bytes]) -> ServiceRecord:
    """What the starter and the service have written; nothing of a damaged file, whose service is found by its lock all
    the same."""
    file.seek(0)
    first, *added = file.read().splitlines(keepends=True) or [b""]
    try:
        values = json.loads(first)
        generation = int(values["generation"])
        return ServiceRecord("", str(values["url"]), int(values["pid"]), generation=generation,
                             completed=bool(added) and _completed(generation) in added)
    except (ValueError, TypeError, KeyError):
        return ServiceRecord("")


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False
