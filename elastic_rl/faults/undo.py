"""A record of what faults have stopped, limited, set, started or resized and not undone yet, so that somebody else can
undo it: an abort switch, or whoever comes after the kill -9 of the process that injected them.

A line is written to the file before anything is touched, and another one after it was undone. To undo is idempotent,
never touches a process that has the number of one that ended, and is done on the machine where the fault was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.process_state import ProcessState, look_at, machine_id, start_ticks
from elastic_rl.faults import clock
from elastic_rl.runtime.files import sync_folder

FILE = "undo.jsonl"
_MOST_BYTES = 1 << 20
"""Most bytes of a line."""
_MOST_PID = 1 << 31


class NotUndone(ElasticRLError):
    """What a fault has left could not be undone here, and stays noted."""


class Undo(StrEnum):
    """What undoes a fault."""

    CONTINUE = "continue"
    """SIGCONT to the process ``pid``."""
    UNLIMIT = "unlimit"
    """The process ``pid`` gets back the limit ``limit`` of the size of its files."""
    RESET_CLOCK = "reset clock"
    """The process ``pid`` has the wall clock of the machine again."""
    END = "end"
    """The process ``pid``, which is one that the fault has started, is killed, with its group where it leads one."""
    RESIZE = "resize"
    """The pool ``pool`` of the job ``job`` is to have ``desired`` engines again, as long as it has one of the sizes
    ``during``, which the fault sets: another one is somebody else's, and stays. ``info``: the file that says where the
    cluster is; ``id_file``: the one with the id of the job, which was ``id_of_job``. Another one has another id."""


@dataclass(frozen=True)
class Undone:
    """What ``undo_all`` did, for people."""

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What could not be undone, with the reason. It is still noted, and is tried again."""


class UndoRegistry:
    """What is to be undone, in a folder. Several processes may write to one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def noted(self, undo: Undo, pid: int = 0, **values: Any) -> Iterator[None]:
        """Notes what undoes the block's fault before it begins, and undoes it at its end, whatever happens."""
        entry = self.note(undo, pid, **values)
        try:
            yield
        finally:
            self.undo(entry)

    def note(self, undo: Undo, pid: int = 0, **values: Any) -> dict[str, Any]:
        """Notes what undoes a fault that is about to happen to a process; ``values``: the fields that ``undo`` names.
        Raises psutil.NoSuchProcess, and OSError where the disk has not taken all of it: nothing is to be done then."""
        started = start_ticks(pid) if pid else 0
        if pid and not started:
            raise psutil.NoSuchProcess(pid)
        entry = {"id": secrets.token_hex(8), "undo": undo.value, "pid": pid, "started": started,
                 "machine": machine_id(), **values}
        self._append(entry)
        return entry

    def undo(self, entry: dict[str, Any]) -> bool:
        """Undoes one entry and marks it. Returns whether there was anything left to do. Raises NotUndone, and what an
        odd entry raises; then it is not marked."""
        return self._undone(entry)[0]

    def _undone(self, entry: dict[str, Any]) -> tuple[bool, str]:
        """What ``undo`` returns; and why something was left as it is, if it was."""
        found = _undo(entry)
        self._append({"done": entry["id"]})
        return found

    def pending(self) -> list[dict[str, Any]]:
        """What is not marked as undone, in the order in which it was noted. A line that cannot be read is that of a
        writer that was killed before it did anything. Raises OSError for a file that others may write, or could have
        put there: it would have this user signal the processes that they choose."""
        entries = dict[str, dict[str, Any]]()
        for line in self._lines():
            try:
                read = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError):
                continue
            if not isinstance(read, dict):
                continue
            if isinstance(read.get("done"), str):
                entries.pop(read["done"], None)
            elif isinstance(read.get("id"), str):
                entries[read["id"]] = read
        return [*entries.values()]

    def _lines(self) -> Iterator[bytes]:
        """The lines of the file, one after the other: a long run notes a lot, of which little is pending. A line that
        is too long is read as several."""
        path = self.folder / FILE
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "it is not a file that this user alone may write", str(path))
            yield from iter(lambda: file.readline(_MOST_BYTES), b"")

    def _append(self, entry: dict[str, Any]) -> None:
        """Writes an entry in one call, which other writers cannot tear, and returns once the disk has it. It begins a
        line of its own, also after one that was torn. Raises OSError, also where a part of it was written."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
                             | os.O_CLOEXEC, 0o600)
        try:
            line = b"\n" + json.dumps(entry).encode() + b"\n"
            if (written := os.write(descriptor, line)) != len(line):
                raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written", str(self.folder / FILE))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self.folder)


def undo_all(folder: Path) -> Undone:
    """Undoes whatever faults have left in the folder, newest first. Nothing that cannot be undone keeps anything else
    from it."""
    registry, found = UndoRegistry(folder), Undone()
    try:
        pending = registry.pending()
    except OSError as e:
        return replace(found, failed=[f"{folder / FILE} is left alone: {e.strerror}"])
    for entry in reversed(pending):
        what = shown(entry)
        try:
            changed, left = registry._undone(entry)
            if changed or left:
                found.done.append(f"{what}: {left}" if left else what)
        except (ElasticRLError, OSError, ValueError, KeyError, TypeError, OverflowError) as e:
            found.failed.append(f"{what}: {e if isinstance(e, ElasticRLError) else f'{type(e).__name__} {e}'}"[:500])
    return found


def shown(entry: dict[str, Any]) -> str:
    """What undoes an entry, and of what, for people."""
    return f"{entry.get('undo') or 'an entry without a kind:'} {entry.get('pid') or entry.get('pool')}"


def id_of_job(id_file: Path) -> str:
    """The id of the job that is in a folder now, which is another one for each job; "" where it has none."""
    try:
        return id_file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _undo(entry: dict[str, Any]) -> tuple[bool, str]:
    """Whether there was anything to do, and why something was left as it is. Never raises for what is gone."""
    if entry.get("machine") != machine_id():
        raise NotUndone("it is of another machine, or of another boot or pid namespace of this one")
    try:
        undo = Undo(entry.get("undo", ""))
    except ValueError:
        raise NotUndone("it is of another release: this one knows no such kind of entry; undo it by hand") from None
    if undo is Undo.RESIZE:
        return _resize(entry)
    return _undo_of_process(undo, entry), ""


def _undo_of_process(undo: Undo, entry: dict[str, Any]) -> bool:
    pid, started = entry["pid"], entry["started"]
    if type(pid) is not int or not 0 < pid < _MOST_PID or type(started) is not int:
        raise ValueError(f"{pid!r}, started at {started!r}, is no process")
    seen = look_at(pid, started).state
    if seen is ProcessState.UNKNOWN:
        raise NotUndone(f"this user may not look at process {pid}")
    if seen is ProcessState.GONE:
        return False
    try:
        if undo is Undo.CONTINUE:
            os.kill(pid, signal.SIGCONT)
            return seen is ProcessState.STOPPED
        if undo is Undo.UNLIMIT:
            limit = tuple(entry["limit"])
            was_limited = resource.prlimit(pid, resource.RLIMIT_FSIZE) != limit
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            return was_limited
        if undo is Undo.RESET_CLOCK:
            return clock.reset(pid)
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


def _resize(entry: dict[str, Any]) -> tuple[bool, str]:
    """A cluster that is down has no pool any more."""
    cluster, pool, desired = ClusterInfo.load(Path(entry["info"])), f"pools/{entry['pool']}", entry["desired"]
    if cluster is None:
        return False, ""
    if id_of_job(Path(entry["id_file"])) != entry["id_of_job"]:
        return False, f"left alone, for job {entry['job']} is another one of that name"
    api = AdminClient(replace(cluster, job=entry["job"]))
    before = api.get(pool)["desired"]
    if before == desired:
        return False, ""
    if before not in entry["during"]:
        return False, f"left at {before}, which somebody has set since"
    api.patch(pool, {"desired": desired})
    return True, ""
