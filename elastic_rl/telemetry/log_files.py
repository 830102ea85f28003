"""Bounded log files: size, number of rotated parts, and number of files in a folder.

Some logs are written by programs that cannot rotate them (etcd, SGLang, the router). So a log is rotated from the
outside, as logrotate's ``copytruncate`` does: its end is copied to ``<name>.log.1`` and the file is truncated. The
writer appends (``O_APPEND``), so its next line starts the file again. A line that is written between the copy and the
truncation is lost.

Every long-lived process of a host runs a ``LogRotation`` of the same folder; a lock on the folder lets one of them work
at a time, and the kernel takes it from a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol, Self

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 5.0
_COPY_BYTES = 1 << 20
_PART = re.compile(r"(.+\.log)\.(\d+)")


class LogLimits(Protocol):
    """The settings of this module (``telemetry``)."""

    @property
    def log_max_bytes(self) -> int: ...

    @property
    def log_backups(self) -> int: ...

    @property
    def log_files(self) -> int: ...


def open_log(path: Path) -> BinaryIO:
    """Opens a log for appending, for its owner only, and marks it as in use while any process holds the descriptor or
    an inherited copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open(path, "ab", opener=_private)  # noqa: SIM115 - the caller closes it
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # deleted between the two calls


def redirect_output(path: Path) -> None:
    """Has this process, and what it starts from now on, write stdout and stderr to a log. For workers of Ray, whose own
    files are in a folder that ends with the job. A log that cannot be opened is no reason not to work."""
    try:
        with open_log(path) as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as e:
        log.warning("cannot write to %s: %s", path, e)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def tail(path: Path, max_bytes: int = 1 << 16) -> str:
    """The end of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""


class LogTail:
    """Reads a log from its last lines on, then what is written to it, as ``tail -F`` does: the log may be rotated,
    truncated, replaced, deleted, or not be there yet. Last lines that were rotated away are read from the rotated
    parts; a line that is written between a ``read`` and a rotation is missed. At most a block is in memory."""

    def __init__(self, path: Path, lines: int) -> None:
        self._path = path
        self._files = _before_last_lines(partial(_open_part, path), lines)  # oldest first

    def read(self) -> bytes:
        """The next block; empty when nothing is there for now. Raises OSError."""
        while self._files or self._open_next():
            file = self._files[0]
            if file.tell() > os.fstat(file.fileno()).st_size:
                file.seek(0)  # it was truncated
            if data := file.read(_COPY_BYTES):
                return data
            if len(self._files) == 1 and not self._open_next():
                break
            self._files.pop(0).close()
        return b""

    def close(self) -> None:
        while self._files:
            self._files.pop().close()

    def _open_next(self) -> bool:
        """Opens the log, unless it is the file that is open already."""
        try:
            file = _open_part(self._path, 0)
        except FileNotFoundError:
            return False
        if self._files and os.path.samestat(os.fstat(self._files[-1].fileno()), os.fstat(file.fileno())):
            file.close()
            return False
        self._files.append(file)
        return True


OpenPart = Callable[[int], FileIO]
"""Opens a log (0), or its n-th rotated part, for reading. Raises FileNotFoundError where there is none."""


@dataclass(frozen=True)
class LogPosition:
    """A place in a log, for a reader that keeps no file open between two blocks. Its text is for other hosts."""

    file: int
    """Inode of the log or of a rotated part."""
    offset: int
    """Bytes from the beginning of that file."""

    def __str__(self) -> str:
        return f"{self.file}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        if not (found := re.fullmatch(r"([0-9]{1,20})-([0-9]{1,18})", text)):
            raise ValueError(f"{text[:100]!r} is no position in a log")
        return cls(int(found[1]), int(found[2]))


def before_last_lines(open_part: OpenPart, lines: int) -> LogPosition:
    """Where the last lines begin, of which some may be in rotated parts. Raises FileNotFoundError where there is
    neither the log nor a part, and OSError."""
    files = _before_last_lines(open_part, lines)
    try:
        if not files:
            raise FileNotFoundError(errno.ENOENT, "there is no such log")
        return LogPosition(_inode(files[0]), files[0].tell())
    finally:
        for file in files:
            file.close()


def read_from(open_part: OpenPart, at: LogPosition, most_bytes: int) -> tuple[bytes, LogPosition]:
    """The next block of a log, and the position after it; nothing when nothing is there for now. What the log has lost
    meanwhile is passed over: it goes on where the log or part begins that is there instead. Raises FileNotFoundError
    where there is neither the log nor a part, and OSError."""
    newer: list[FileIO] = []  # newest first, the one of the position last
    try:
        for n in itertools.count():
            try:
                newer.append(open_part(n))
            except FileNotFoundError:
                if n:
                    break
                continue  # the log itself may be gone, and its parts not
            if _inode(newer[-1]) == at.file:
                break
        if not newer:
            raise FileNotFoundError(errno.ENOENT, "there is no such log")
        if _inode(newer[-1]) != at.file:
            at = LogPosition(_inode(newer[0]), 0)
            return _block(newer[0], at, most_bytes)
        for file in reversed(newer):
            data, at = _block(file, at if _inode(file) == at.file else LogPosition(_inode(file), 0), most_bytes)
            if data:
                return data, at
        return b"", at
    finally:
        for file in newer:
            file.close()


def _block(file: FileIO, at: LogPosition, most_bytes: int) -> tuple[bytes, LogPosition]:
    begin = at.offset if at.offset <= os.fstat(file.fileno()).st_size else 0  # else it was truncated
    file.seek(begin)
    data = file.read(most_bytes)
    return data, LogPosition(at.file, begin + len(data))


def _inode(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_ino


def _before_last_lines(open_part: OpenPart, lines: int) -> list[FileIO]:
    """A log with as many of its rotated parts as have the last lines, oldest first, each at the line to begin with."""
    found: list[FileIO] = []
    for n in itertools.count():
        try:
            file = open_part(n)
        except FileNotFoundError:
            if n:
                return found
            continue  # the log itself may be gone, and its parts not
        found.insert(0, file)
        lines = _seek_last_lines(file, lines)
        if not lines:
            return found
    raise AssertionError("unreachable")


def _seek_last_lines(file: FileIO, lines: int) -> int:
    """Puts a file before its last lines; returns how many of them it does not have."""
    begin = file.seek(0, os.SEEK_END)
    if not lines or not begin:
        return lines
    end = begin - 1  # a line break at the end begins no further line
    while begin:
        begin = max(0, begin - _COPY_BYTES)
        file.seek(begin)
        block = file.read(end - begin)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            lines -= 1
            if not lines:
                file.seek(begin + at + 1)
                return 0
        end = begin
    file.seek(0)
    return lines - 1


def _open_part(path: Path, n: int) -> FileIO:
    return (_part(path, n) if n else path).open("rb", buffering=0)


def enforce_limits(folder: Path, limits: LogLimits) -> None:
    """Rotates each ``*.log`` of the folder that is larger than ``log_max_bytes`` and deletes what exceeds
    ``log_backups`` and ``log_files``. A rotated part has at most twice ``log_max_bytes``: the end of what was written
    between two calls. Does nothing while another process does the same. Raises OSError."""
    with _exclusive(folder) as ours:
        if not ours:
            return
        for path in sorted(folder.glob("*.log")):
            if _size(path) > limits.log_max_bytes:
                _rotate(path, limits.log_max_bytes, limits.log_backups)
        _delete_excess(folder, limits)


class LogRotation:
    """A thread that enforces the limits on a folder every few seconds, so a log exceeds ``log_max_bytes`` by what is
    written to it within that time."""

    def __init__(self, folder: Path, limits: LogLimits, *, check_every_s: float = _CHECK_EVERY_S) -> None:
        self._folder, self._limits, self._check_every_s = folder, limits, check_every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-rotation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(self._check_every_s)

    def _run(self) -> None:
        failed = ""
        while not self._stopping.wait(self._check_every_s):
            try:
                enforce_limits(self._folder, self._limits)
                failed = ""
            except OSError as e:
                if str(e) != failed:
                    log.error("cannot rotate the logs in %s: %s", self._folder, e)
                failed = str(e)


def ray_environment(limits: LogLimits) -> dict[str, str]:
    """Environment variables that hold Ray's own processes to the same limits; Ray rotates its files by itself."""
    return {"RAY_ROTATION_MAX_BYTES": str(limits.log_max_bytes), "RAY_ROTATION_BACKUP_COUNT": str(limits.log_backups)}


@contextmanager
def _exclusive(folder: Path) -> Iterator[bool]:
    """Whether this process holds the folder's lock in the block; false as well when there is no such folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _rotate(path: Path, max_bytes: int, backups: int) -> None:
    for n in range(backups, 1, -1):
        older = _part(path, n - 1)
        if older.exists():
            older.rename(_part(path, n))
    partial = path.with_name(path.name + ".partial")
    with path.open("r+b") as source:
        try:
            _copy_end(source, partial, 2 * max_bytes)
            partial.rename(_part(path, 1))
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            partial.unlink(missing_ok=True)  # the disk is full: free it rather than keep old lines
        source.truncate(0)


def _copy_end(source: BinaryIO, target: Path, max_bytes: int) -> None:
    source.seek(max(0, source.seek(0, os.SEEK_END) - max_bytes))
    left = max_bytes
    with open(target, "wb", opener=_private) as out:
        while data := source.read(min(_COPY_BYTES, left)):  # also what the writer adds meanwhile
            left -= out.write(data)


def _delete_excess(folder: Path, limits: LogLimits) -> None:
    files = [p for p in folder.iterdir() if p.suffix == ".log" or _PART.fullmatch(p.name)]
    kept: list[tuple[float, Path]] = []
    for path in files:
        part = _PART.fullmatch(path.name)
        if part and int(part[2]) > limits.log_backups:
            path.unlink(missing_ok=True)
        else:
            kept.append((_written_at(path), path))
    excess = len(kept) - limits.log_files
    for _, path in sorted(kept):
        if excess <= 0:
            return
        excess -= _delete_unused(path)


def _delete_unused(path: Path) -> bool:
    """Deletes a file unless a process writes to it. Returns whether it is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def _part(path: Path, n: int) -> Path:
    return path.with_name(f"{path.name}.{n}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
