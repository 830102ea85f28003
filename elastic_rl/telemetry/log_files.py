"""Bounded log files: size, number of rotated parts, and number of files in a folder.

Some logs are written by programs that cannot rotate them (etcd, SGLang, the router). So a log is rotated from the
outside, as logrotate's ``copytruncate`` does: its end is copied to ``<name>.log.1`` and the file is truncated. The
writer appends (``O_APPEND``), so its next line starts the file again. A line that is written between the copy and the
truncation is lost. What else is dropped is named in the part.

Every long-lived process of a host runs a ``LogRotation`` of the same folder; a lock on the folder lets one of them work
at a time, and the kernel takes it from a process that dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, Protocol, Self, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHECK_EVERY_S = 5.0
_COPY_BYTES = 1 << 20
_DROPPED = re.compile(rb"\[elastic-rl: ([0-9]{15}) bytes before this were dropped when this log was rotated, "
                      rb"after the part of ([0-9]{20}) ns\]\n")
_LOST = b"[elastic-rl: lines may be missing here: the log was truncated, replaced, or rotated too often]\n"
_CHECKED_BYTES = 64
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
    truncated, replaced, deleted, or not be there yet. At most a block is in memory, and nothing open between two
    reads."""

    def __init__(self, path: Path, lines: int) -> None:
        self._folder, self._open, self._lines = path.parent, partial(_open_part, path), lines
        self._at: LogPosition | None = None
        try:
            self._at = self._begin()
        except FileNotFoundError:
            self._at = LogPosition.START

    def read(self) -> bytes:
        """The next block; empty when nothing is there for now. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if self._at is None and (at := self._begin()) is not None:
                self._at = at
            if found := self._locked(self._next):
                data, self._at = found
                return data
        return b""

    def _next(self) -> tuple[bytes, LogPosition] | None:
        return read_from(self._open, self._at, _COPY_BYTES) if self._at is not None else None

    def _begin(self) -> LogPosition | None:
        return self._locked(lambda: before_last_lines(self._open, self._lines))

    def _locked(self, call: Callable[[], T]) -> T | None:
        """What a call returns that reads files between two rotations; None while there is one for long."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return call() if between_rotations(descriptor) else None
        finally:
            os.close(descriptor)


OpenPart = Callable[[int], FileIO]
"""Opens a log (0), or its n-th rotated part, for reading. Raises FileNotFoundError where there is none."""


@dataclass(frozen=True)
class LogPosition:
    """A place in a log, for a reader that keeps no file open between two blocks. Its text is for other hosts.

    A rotation copies the log to its newest part, and truncates it: inode, name and size of a file say nothing about
    which lines it has. What stays is the part before: a file is named by that.
    """

    START: ClassVar[LogPosition]
    """Where the oldest part that is there begins."""

    older: int
    """When the rotated part before the file was written, in ns; no two parts of a log have the same. 0: there was none.
    """
    offset: int
    """Bytes from the beginning of the file."""
    check: int
    """CRC-32 of the last bytes before: others may have truncated the file, or replaced it."""

    def __str__(self) -> str:
        return f"{self.older}-{self.offset}-{self.check}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        if not (found := re.fullmatch(r"([0-9]{1,20})-([0-9]{1,18})-([0-9]{1,10})", text)):
            raise ValueError(f"{text[:100]!r} is no position in a log")
        return cls(int(found[1]), int(found[2]), int(found[3]))

    @classmethod
    def in_file(cls, file: FileIO, offset: int, older: int) -> Self:
        return cls(older, offset, _check(file, offset, _header(file).dropped))


LogPosition.START = LogPosition(0, 0, 1)


def before_last_lines(open_part: OpenPart, lines: int) -> LogPosition:
    """Where the last lines begin, of which some may be in rotated parts. Raises FileNotFoundError where there is
    neither the log nor a part, and OSError."""
    at: LogPosition | None = None
    for _, file in _parts(open_part):
        with file:
            if at is not None:
                at = replace(at, older=_written_ns(file))
                if not lines:
                    break
            lines = _seek_last_lines(file, lines)
            at = LogPosition.in_file(file, file.tell(), _header(file).older or 0)
    if at is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such log")
    return at if at.offset or at.older else LogPosition.START


def read_from(open_part: OpenPart, at: LogPosition, most_bytes: int) -> tuple[bytes, LogPosition]:
    """The next block of a log, and the position after it; nothing when nothing is there for now. Where the log has lost
    what comes next, the block begins with a line that says so. Raises FileNotFoundError where there is neither the log
    nor a part, and OSError."""
    newer: list[FileIO] = []  # newest first
    found = rotated = False
    try:
        for n, file in _parts(open_part):
            if found := bool(n and _written_ns(file) == at.older):
                file.close()
                break
            newer.append(file)
            rotated = n > 0
        if not newer:
            if found:
                return b"", at  # the log of the position is gone, and there is no other one yet
            raise FileNotFoundError(errno.ENOENT, "there is no such log")
        # The oldest one is that of the position. Where the part before it is gone it may be a newer one, as its first
        # line says: where that is, the bytes that a position is known by may have been dropped.
        header = _header(newer[-1])
        if at == LogPosition.START:
            begin, lost = 0, False
        elif not found and header.older not in (None, at.older):
            begin, lost = 0, True
        else:
            begin, lost = _resume(newer[-1], header, at)
        older = at.older if found else header.older or 0
        if found:
            lost = lost and not header.dropped  # else its first line says so
        elif not at.offset and at != LogPosition.START:  # nothing was read that it could be known by
            lost = bool(at.older) or rotated
        data = _LOST if lost else b""
        for file in reversed(newer):
            file.seek(begin)
            data += file.read(max(1, most_bytes - len(data)))  # with the line that says so, too: else it comes again
            at, begin, older = LogPosition.in_file(file, file.tell(), older), 0, _written_ns(file)
            if data:
                break
        return data, at
    finally:
        for file in newer:
            file.close()


def _parts(open_part: OpenPart) -> Iterator[tuple[int, FileIO]]:
    """The log and its rotated parts, the newest first, each with its number; whoever gets a file closes it."""
    for n in itertools.count():
        try:
            yield n, open_part(n)
        except FileNotFoundError:
            if n:
                return  # the log itself may be gone, and its parts not


def _resume(file: FileIO, first: _Header, at: LogPosition) -> tuple[int, bool]:
    """Where a position is in a file, and whether it is not there: then it is read from its beginning. ``first``: the
    header of the file."""
    size, dropped, header = os.fstat(file.fileno()).st_size, first.dropped, first.length
    if at.offset <= size and _check(file, at.offset, dropped) == at.check:
        return at.offset, False
    moved = at.offset - dropped + header
    if dropped and header <= moved <= size and (
            moved - header < _CHECKED_BYTES or _check(file, moved, 0) == at.check):  # of the former the rest is dropped
        return moved, False
    return 0, True


def _check(file: FileIO, offset: int, dropped: int) -> int:
    """``dropped``: bytes that the file is without, so that a place in it is none of the file before its rotation."""
    begin = max(0, offset - _CHECKED_BYTES)
    return zlib.crc32(os.pread(file.fileno(), offset - begin, begin), dropped & 0xffffffff) if offset else 0


class _Header(NamedTuple):
    """The first line of a part of which something was dropped; zeros and None for any other file."""

    dropped: int = 0
    """Bytes of the log that are in no part."""
    length: int = 0
    """Length of the line, in bytes."""
    older: int | None = None
    """When the part before was written, as in ``LogPosition``."""


def _header(file: FileIO) -> _Header:
    found = _DROPPED.match(os.pread(file.fileno(), 200, 0))
    return _Header(int(found[1]), found.end(), int(found[2])) if found else _Header()


def _written_ns(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_mtime_ns


def between_rotations(folder: int, *, timeout_s: float = 1.0) -> bool:
    """Whether no rotation of the folder's logs is under way, for which this waits; and none begins before the open
    folder is closed. Raises OSError."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)


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
    ``log_backups`` and ``log_files``. A rotated part has about twice ``log_max_bytes`` at most: the end of what was
    written between two calls. Does nothing while another process does the same. Raises OSError."""
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
        before_ns = _mtime_ns(_part(path, 2 if backups > 1 else 1))
        try:
            _copy_end(source, partial, 2 * max_bytes, before_ns)
            # The clock may not say that it was written after the part before, by which positions are named.
            if _mtime_ns(partial) <= before_ns:
                os.utime(partial, ns=(before_ns + 1, before_ns + 1))
            partial.rename(_part(path, 1))
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            partial.unlink(missing_ok=True)  # the disk is full: free it rather than keep old lines
        source.truncate(0)


def _copy_end(source: BinaryIO, target: Path, max_bytes: int, older: int) -> None:
    """``older``: when the part before was written, as in ``LogPosition``."""
    begin = max(0, source.seek(0, os.SEEK_END) - max_bytes)
    left = max_bytes
    with open(target, "wb", opener=_private) as out:
        if begin:  # what is dropped is named; the line takes the place of as many bytes more
            begin = min(begin + len(_dropped_line(0, 0)), source.tell())
            left -= out.write(_dropped_line(begin, older))
        source.seek(begin)
        while left > 0 and (data := source.read(min(_COPY_BYTES, left))):  # also what the writer adds meanwhile
            left -= out.write(data)
        if left <= 0 and (more := os.fstat(source.fileno()).st_size - source.tell()) > 0:
            out.write(f"\n[elastic-rl: {more} bytes after this were dropped when this log was rotated]\n".encode())


def _dropped_line(nbytes: int, older: int) -> bytes:
    return (f"[elastic-rl: {nbytes:015d} bytes before this were dropped when this log was rotated, after the part of "
            f"{older:020d} ns]\n").encode()


def _delete_excess(folder: Path, limits: LogLimits) -> None:
    files = [p for p in folder.iterdir() if p.suffix == ".log" or _PART.fullmatch(p.name)]
    kept: list[tuple[int, Path]] = []
    for path in files:
        part = _PART.fullmatch(path.name)
        if part and int(part[2]) > limits.log_backups:
            path.unlink(missing_ok=True)
        else:
            kept.append((_mtime_ns(path), path))
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


def _mtime_ns(path: Path) -> int:
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
