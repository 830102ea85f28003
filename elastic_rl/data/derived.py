"""Files that are made from the data and kept in a job's folder. Each appears as a whole, and survives a loss of power;
who finds one that cannot be read makes it again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from elastic_rl.errors import SourceFailed
from elastic_rl.files import replace_file


def state_of(file: Path | int) -> tuple[int, int]:
    """Size of a file, by its path or descriptor, and time of its last change. Raises OSError."""
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def require_same(path: Path, before: tuple[int, int], now: tuple[int, int]) -> None:
    """Raises SourceFailed when a file has changed since something was derived from it."""
    if now != before:
        raise SourceFailed(f"{path} has changed since it was first read", hint="put it back with the time of its last "
                           "change, or begin a new job, with --from-job for the policy of this one")


def write(target: Path, content: str | Callable[[IO[bytes]], object]) -> None:
    """See ``files.replace_file``; several processes may write the same file at once. Raises OSError, and what
    ``content`` raises."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_partial(target.parent)
    replace_file(target, content, mark=str(os.getpid()), durable=True)


def _remove_partial(folder: Path) -> None:
    """Removes what processes of this machine that were killed have left behind."""
    for path in folder.glob("*.partial"):
        pid = path.name.split(".")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            with contextlib.suppress(OSError):
                path.unlink()
