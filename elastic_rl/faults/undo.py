"""What faults leave behind that has to be undone, noted in a file before it is done.

A process that was stopped stays so when the injector is killed. Whoever finds the file has it go on: the next command
does. To undo something twice, or something that was undone already, does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

Undo = Callable[[Mapping[str, Any]], str]
"""Undoes what an entry notes, and returns what it did in words, "" where there was nothing to do."""


class UndoLog:
    """Notes what has to be undone, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()

    def note(self, what: str, **fields: Any) -> None:
        """``what``: a name of ``UNDO``, or of what the caller of ``undo_all`` adds. On the disk when this returns."""
        line = json.dumps({"what": what, **fields}) + "\n"
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def note_stop(self, process: psutil.Process) -> None:
        """Notes that a process is about to be stopped."""
        self.note("continue", pid=process.pid, created=process.create_time())


def _continue(entry: Mapping[str, Any]) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(entry["pid"]))
        if process.create_time() == entry["created"] and process.status() == psutil.STATUS_STOPPED:
            process.resume()
            return f"pid {process.pid} ({process.name()}) goes on"
    return ""


UNDO: Mapping[str, Undo] = {"continue": _continue}


def entries(path: Path) -> Iterator[Mapping[str, Any]]:
    """The entries of a file; none where there is no file. A last line without its end was not acted upon."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def undo_all(path: Path, more: Mapping[str, Undo] | None = None) -> list[str]:
    """Undoes what a file notes, the newest first; returns what it did. ``more``: further kinds of entries by name."""
    known = {**UNDO, **(more or {})}
    done = [known[entry["what"]](entry) for entry in reversed([*entries(path)]) if entry["what"] in known]
    return [text for text in done if text]
