"""Files that are made from the data and kept in a job's folder. Each appears as a whole, and survives a loss of power;
who finds one that cannot be read makes it again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from elastic_rl.errors import SourceFailed
from elastic_rl.etcd.process_state import machine_id
from elastic_rl.runtime.files import replace_file

_NAME = re.compile(r".*-[0-9a-f]{16}\.(arrow|npy|jsonl?)")
_STEM_BYTES = 100
"""Bytes of a file's name, at most, in the name of what is derived from it: a name has at most 255 bytes."""
_UNFINISHED_S = 86400.0
"""Time after which a file of another machine, which nothing was written to, is one that was not finished."""
_used: set[Path] = set()


def path(folder: Path, stem: str, digest: str, suffix: str) -> Path:
    """A derived file, which may not be there yet, and is in use by this process from now on. ``digest``: hexadecimal,
    of all that it is made from."""
    short = os.fsencode(stem)[:_STEM_BYTES].decode("utf-8", "ignore")
    named = folder / f"{short}-{digest[:16]}{suffix}"
    _used.add(named)
    return named


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
    for partial in target.parent.glob("*.partial"):
        if _is_left_over(partial):
            _remove(partial)
    replace_file(target, content, mark=f"{_machine()}.{os.getpid()}", durable=True)


def remove_unused(folder: Path) -> None:
    """Removes derived files that this process does not use: those of other data, and of other options. Call it at the
    start of a job, when its source was made and nothing else of it runs."""
    for found in folder.glob("*"):
        if _NAME.fullmatch(found.name) and found not in _used:
            _remove(found)


def _machine() -> str:
    """The machine whose pids this process can see: a job's folder may be shared by several machines."""
    return hashlib.sha256(machine_id().encode()).hexdigest()[:8]


def _is_left_over(partial: Path) -> bool:
    """Whether the process that writes this has ended; that of another machine, when it has not written for long."""
    *_, machine, pid, _suffix = f"..{partial.name}".split(".")
    if machine == _machine() and pid.isdecimal():
        return not psutil.pid_exists(int(pid))
    with contextlib.suppress(OSError):
        return time.time() - partial.stat().st_mtime > _UNFINISHED_S
    return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
