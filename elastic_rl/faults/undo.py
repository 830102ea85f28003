"""A record of what faults have stopped or limited and not undone yet, so that it can be undone by somebody else: by an
abort switch, or after the kill -9 of the process that injected them.

A line is written to the file before a process is touched, and another one after it was undone. To undo is idempotent,
and never touches a process that has the number of one that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.runtime.files import sync_folder

FILE = "undo.jsonl"


class Undo(StrEnum):
    """What undoes a fault."""

    CONTINUE = "continue"
    """SIGCONT to the process ``pid``."""
    UNLIMIT = "unlimit"
    """The process ``pid`` gets back the limit ``limit`` of the size of its files."""
    END = "end"
    """The process ``pid``, which is one that the fault has started, is killed with its group."""


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
        Raises psutil.NoSuchProcess."""
        entry = {"id": secrets.token_hex(8), "undo": undo.value, "pid": pid,
                 "started": _started(pid) if pid else 0, **values}
        self._append(entry)
        return entry

    def undo(self, entry: dict[str, Any]) -> bool:
        """Undoes one entry and marks it. Returns whether there was anything left to do."""
        found = _undo(entry)
        self._append({"done": entry["id"]})
        return found

    def pending(self) -> list[dict[str, Any]]:
        """What is not marked as undone, in the order in which it was noted. A line that cannot be read is that of a
        writer that was killed before it did anything."""
        try:
            with (self.folder / FILE).open(encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                    return []  # what others may write has this user signal the processes that they choose
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        entries = dict[str, dict[str, Any]]()
        for line in lines:
            try:
                read = json.loads(line) if line else {}
            except ValueError:
                continue
            if "done" in read:
                entries.pop(read["done"], None)
            elif "id" in read:
                entries[read["id"]] = read
        return [*entries.values()]

    def _append(self, entry: dict[str, Any]) -> None:
        """Writes an entry in one call, which other writers cannot tear, and returns once the disk has it. It begins a
        line of its own, also after one that was torn."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"\n" + json.dumps(entry).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self.folder)


def undo_all(folder: Path) -> list[str]:
    """Undoes whatever faults have left in the folder, newest first; returns what was done, for people."""
    registry = UndoRegistry(folder)
    done, failed = list[str](), list[str]()
    for entry in reversed(registry.pending()):
        what = f"{entry.get('undo')} {entry.get('pid')}"
        try:
            if registry.undo(entry):
                done.append(what)
        except (OSError, ValueError, KeyError, TypeError, psutil.Error) as e:  # the others are undone all the same
            failed.append(f"{what}: not undone: {type(e).__name__} {e}")
    return [*done, *failed]


def _started(pid: int) -> int:
    """When a process was started, in clock ticks since the boot: unlike a time of day, no change of the clock moves it.
    Raises psutil.NoSuchProcess."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    return int(stat.rpartition(")")[2].split()[19])


def _undo(entry: dict[str, Any]) -> bool:
    """Whether there was anything to do. Never raises for what is gone."""
    undo, pid = Undo(entry["undo"]), int(entry["pid"])
    try:
        process = psutil.Process(pid)
        if _started(pid) != entry["started"]:
            return False  # another process has its number
        if undo is Undo.CONTINUE:
            was_stopped = process.status() == psutil.STATUS_STOPPED
            process.send_signal(signal.SIGCONT)
            return was_stopped
        if undo is Undo.UNLIMIT:
            limit = tuple(entry["limit"])
            was_limited = resource.prlimit(pid, resource.RLIMIT_FSIZE) != limit
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            return was_limited
        os.killpg(pid, signal.SIGKILL)
        return True
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
