"""Locks on files (flock), which say that a process lives: the kernel releases a lock when it ends, however it ends.

A lock belongs to an open file. A child that is given the open file keeps the lock when its parent ends; a process that
opens the file once more competes with itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
from pathlib import Path
from typing import IO, Any

import psutil

from elastic_rl.errors import DeadlineExceeded, PreflightFailed
from elastic_rl.runtime.waiting import wait_until

READER_S = 5.0
"""Longest wait for a lock that nobody holds for long: one that ``is_held`` has for a moment, or whose holder has been
killed."""
_EXCLUSIVE = re.compile(rb"^lock:.*\bFLOCK\b.*\bWRITE\b", re.MULTILINE)
"""What proc(5)'s fdinfo says of an open file that has the exclusive lock; that of ``is_held`` is READ."""
_MAX_FOUND = 1024
_found: dict[tuple[int, int, int], tuple[str, str]] = {}
"""Where ``holds`` has found a lock last: by pid, and device and inode of the file, the descriptor and what it is linked
to. A process keeps a lock for its life, so that it need not be searched for at each look."""
_finding = threading.Lock()
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_OTHER_RUN_DIR = "set a run_dir on a local disk, or mount its file system with locks (NFS: with a lock service; " \
                 "Lustre: -o flock)"


def taken(file: IO[Any], *, shared: bool = False, timeout_s: float = 0.0) -> bool:
    """Whether this process has the lock of an open file, which it takes if nobody has it. ``shared``: several may have
    it at once, while nobody has the exclusive one. ``timeout_s``: how long to wait for it. Raises PreflightFailed where
    the file system has no locks."""
    def is_taken() -> bool:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            raise PreflightFailed(f"{file.name} cannot be locked: {e.strerror}", hint=_OTHER_RUN_DIR) from e
        return True

    if timeout_s <= 0:
        return is_taken()
    with contextlib.suppress(DeadlineExceeded):
        return wait_until(is_taken, timeout_s=timeout_s, what=f"the lock of {file.name}")
    return False


def is_held(path: Path) -> bool:
    """Whether a process has the exclusive lock of a file. False where there is no file. Callers do not see each other:
    each has the shared lock for a moment."""
    try:
        with path.open("rb") as file:
            return not taken(file, shared=True)
    except FileNotFoundError:
        return False


def require_exclusive(path: Path) -> None:
    """Raises PreflightFailed where the file system gives the exclusive lock of a file to everybody, or has no locks:
    two of everything would run there. ``path``: a file that may be locked now; it is made unless it is there."""
    with path.open("a", encoding="utf-8") as one, path.open("a", encoding="utf-8") as other:
        if taken(one) and taken(other):
            raise PreflightFailed(f"the file system of {path.parent} does not keep locks: two open files have the one "
                                  f"of {path.name} at once", hint=_OTHER_RUN_DIR)


def holders(path: Path) -> list[int]:
    """Pids of this user's processes on this machine, other than this one, that have the exclusive lock of a file."""
    target = str(path.resolve())
    return [pid for pid in sorted(psutil.pids()) if pid != os.getpid() and _locked_by(pid, target)]


def holds(pid: int, path: Path) -> bool:
    """Whether a process of this user has the exclusive lock of a file, and not merely has it open."""
    try:
        file = os.stat(path)
    except OSError:  # a file that was deleted is no longer at this path, whoever has its lock
        return False
    key = pid, file.st_dev, file.st_ino
    known = _found.get(key)
    if known is not None and _locks(pid, *known):
        return True
    target = str(path.resolve())
    fd = _locked_by(pid, target)
    with _finding:
        _found.pop(key, None)
        if fd:
            if len(_found) >= _MAX_FOUND:  # those that nobody asks for any more; the others are found again
                _found.clear()
            _found[key] = fd, target
    return bool(fd)


def _locked_by(pid: int, target: str) -> str:
    """The descriptor by which a process has the lock of the file at ``target``; empty where it has it not."""
    try:
        return next((fd for fd in os.listdir(f"/proc/{pid}/fd") if _locks(pid, fd, target)), "")
    except OSError:  # it has ended, or is another user's
        return ""


def _locks(pid: int, fd: str, target: str) -> bool:
    """Whether an open file of a process is the one at ``target``, with the lock. Other files are not touched: one may
    be on a file system that does not answer."""
    try:
        if os.readlink(f"/proc/{pid}/fd/{fd}") != target:
            return False
        with open(f"/proc/{pid}/fdinfo/{fd}", "rb", buffering=0) as info:
            return bool(_EXCLUSIVE.search(info.read()))
    except OSError:  # closed meanwhile
        return False
