"""The copy of a job's history on this host: ``steps.jsonl``, which people read.

It only ever gets what etcd has, so each copy is the beginning of the one history, whoever wrote it. A file that is
something else (a user has edited or replaced it, or it is that of another job of this name) is set aside once the
history was written to a file beside it, which then takes its place; of one that only ends otherwise, that end. Where
the history has a gap, the file has either the bytes, which an earlier actor wrote, or the record of the gap.

One process writes a copy: the one with the lock. Nothing waits for that; without the lock there is nothing to do.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from elastic_rl.errors import ChunkCorrupt, ChunkMissing
from elastic_rl.host import file_lock, kept_state
from elastic_rl.pipeline.records.history import TAIL_BYTES, History
from elastic_rl.pipeline.records.segments import FIRST_RECORD_BYTES, Segment, first_record, gap_in_file
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.runtime.files import open_for_readers, replace_file

log = logging.getLogger(__name__)

_HEAD_BYTES = 256
"""Bytes in which the record of a gap is looked for."""
_COMPARE_S = (30.0, 600.0)
"""First and longest pause before a file that could not be compared with the sealed records is compared again."""
_RESERVE_BYTES = 256 << 20
"""Bytes of the file system that the copy leaves free. The chunks of the weights and the logs are often on the same one:
a run can do without the copy, not without those."""
_MOST_ASIDE = 8
"""So often in a term something is set aside. Whoever changes the file still more often keeps what is at the path."""


class SealedHistory(Protocol):
    """The sealed part of the history. Both raise ElasticRLError."""

    def segments(self) -> Sequence[Segment]:
        """The segments from 0 to where the log is sealed, in order and without holes."""

    def read(self, segment: Segment) -> bytes: ...


class LocalCopy:
    """Checks, makes and continues the copy at a path. For one thread."""

    def __init__(self, path: Path, lock: Path, history: History, sealed: SealedHistory) -> None:
        """``lock``: the file with the lock."""
        self._path, self._lock_path, self._history, self._sealed = path, lock, history, sealed
        self._partial = path.with_name(f"{path.name}.partial")
        self._lock: IO[str] | None = None
        self._file: IO[bytes] | None = None
        """The file that is continued: the one at ``path``, or at ``_partial`` while that is being made."""
        self._replaces = False
        """Whether the file is at ``_partial``."""
        self._at = self._file_at = 0
        """How far the file was checked or written, in the history and in the file. They differ after a gap."""
        self._seen: tuple[int, ...] = ()
        """The file at ``path`` as this process left it."""
        self._foreign: tuple[int, ...] = ()
        """The file at ``path`` as it was found to be something else than the history."""
        self._set_aside = 0
        """How often something was set aside."""
        self._left_alone = False
        self._uncompared, self._compare = False, RetryBackoff(*_COMPARE_S)
        """Whether the file is continued without a comparison (``_goes_on``), and when to try that again."""

    def step(self) -> bool:
        """Does a part of what is to be done; returns whether there is more. Raises OSError, and ElasticRLError where
        sealed bytes are needed and cannot be had, or the file system has no room. Then the next call goes on there; a
        file that takes the place of another one is given up for lack of room, and made from its beginning."""
        if not self._locked():
            return False
        if self._file is None:
            return self._check()
        if self._uncompared and self._compare.is_due(time.monotonic()):
            self._forget()
            return True
        if not self._replaces and self._stat() != self._seen:
            self._forget()  # somebody else has changed it
            return True
        try:
            self._require_room()
            if data := self._next():
                self._write(data)
                return True
        except OSError:
            if self._replaces:
                self._forget()
            raise
        if self._replaces:
            self._swap()
        return self._at < self._history.committed

    def intact(self, segment: Segment) -> bytes | None:
        """The bytes of a segment, if the file at the path has them where they are in the history. Raises nothing."""
        with contextlib.suppress(OSError):
            if not self._path.is_file():  # opening a FIFO would wait for its writer
                return None
            with self._path.open("rb") as file:
                data = _read(file, segment.start, segment.end - segment.start)
                return data if segment.has_bytes(data) else None
        return None

    def close(self) -> None:
        self._forget()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _locked(self) -> bool:
        if self._lock is None:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            file = self._lock_path.open("a", encoding="utf-8")
            if not file_lock.taken(file):
                file.close()
                return False
            self._lock = file
            with contextlib.suppress(OSError):
                self._partial.unlink()  # of a process that was killed
        return True

    def _forget(self) -> None:
        """What is at the path is to be checked from its beginning. An unfinished file is deleted."""
        if self._file is not None:
            self._file.close()
        if self._replaces:
            with contextlib.suppress(OSError):
                self._partial.unlink()
        self._file, self._replaces, self._at, self._file_at = None, False, 0, 0

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    # -- checking ------------------------------------------------------------------------------------------------------
    def _check(self) -> bool:
        """Compares the next segment of the file at the path with the history."""
        before, self._seen = self._seen, self._stat()
        if self._seen and self._set_aside >= _MOST_ASIDE:
            if not self._left_alone:
                log.error("%s was changed %d times in this term, and is left alone from now on", self._path,
                          self._set_aside + 1)
            self._left_alone = True
            return False
        if not self._path.is_file() or self._seen == self._foreign:
            self._begin_again()
            return True
        if self._at and self._seen != before:  # what was compared may be another file's
            self._forget()
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                agrees = self._agrees(file, size)
                self._uncompared = False
            except (ChunkMissing, ChunkCorrupt):
                if not self._goes_on(file):
                    raise
                agrees = True
        if agrees is None:
            return True
        if not agrees:
            self._foreign = self._seen
            self._begin_again()
        elif self._file_at >= size:
            self._file = self._path.open("ab", buffering=0)
        return True

    def _agrees(self, file: IO[bytes], size: int) -> bool | None:
        """Whether what comes next in a file is the history's, which is skipped then. None: ask again."""
        segment = self._segment()
        if segment is None:
            expected = self._history.read(self._at)
            if expected is None:
                return None
            found = _read(file, self._file_at, TAIL_BYTES + 1)
            if expected.startswith(found):
                self._advance(len(found))
                return True
            same = expected.rfind(b"\n", 0, len(os.path.commonprefix([expected, found]))) + 1
            if not self._file_at + same or len(found) > TAIL_BYTES:
                return False
            self._advance(same)
            self._cut(found[same:])
            return None
        left = segment.end - self._at
        if segment.entry is None:
            gap = gap_in_file(_read(file, self._file_at, _HEAD_BYTES), self._at, segment.end)
            if gap is not None:
                self._advance(gap[1] - self._at, gap[0])
                return True
            self._advance(left)
            return self._file_at <= size
        found = _read(file, self._file_at, left)
        if self._at > segment.start or len(found) < left:
            expected = self._sealed.read(segment)[self._at - segment.start:] if found else b""
            agrees = expected.startswith(found)
        else:
            agrees = segment.has_bytes(found)
        self._advance(len(found))
        return agrees

    def _goes_on(self, file: IO[bytes]) -> bool:
        """Whether a file whose sealed part cannot be compared, for no node has it now, is a copy by its first record
        and by what it has of the tail. It is continued then, and compared once that can be done: it may have the only
        copy of those bytes."""
        sealed = self._history.sealed
        tail, found = self._history.read(sealed) or b"", _read(file, sealed, TAIL_BYTES + 1)
        if (self._at != self._file_at or not tail.startswith(found) or _read(file, sealed - 1, 1) != b"\n"
                or first_record(_read(file, 0, FIRST_RECORD_BYTES)).get("id") != self._history.identity):
            return False
        if not self._uncompared:
            log.warning("%s is continued, and was not compared with the sealed records, which no node has now",
                        self._path)
        self._uncompared = True
        self._compare.failed(time.monotonic())
        self._advance(sealed + len(found) - self._at)
        return True

    def _segment(self) -> Segment | None:
        """The sealed segment in which the next byte is; None for one of the tail. Raises ElasticRLError."""
        if self._at >= self._history.sealed:
            return None
        segments = self._sealed.segments()  # which cover what is sealed
        return segments[bisect.bisect_right(segments, self._at, key=lambda s: s.start) - 1]

    def _advance(self, nbytes: int, in_file: int | None = None) -> None:
        self._at += nbytes
        self._file_at += nbytes if in_file is None else in_file

    def _cut(self, end: bytes) -> None:
        """Sets the end of the file at the path aside, from ``_file_at`` on, unless somebody changes it just now."""
        self._require_room(len(end))
        with self._path.open("ab", buffering=0) as file:
            aside = kept_state.free_name(self._path)
            replace_file(aside, end)
            if self._stat() != self._seen:
                aside.unlink()
                return
            file.truncate(self._file_at)
        self._set_aside += 1
        self._seen = self._stat()
        log.warning("the end of %s did not have the records of this job as they were written; it is now %s", self._path,
                    aside)

    # -- writing -------------------------------------------------------------------------------------------------------
    def _begin_again(self) -> None:
        """What is at the path is not the history: it is written to another file, which then takes the place."""
        self._forget()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._require_room()
        self._partial.unlink(missing_ok=True)
        self._file = open(self._partial, "ab", buffering=0, opener=open_for_readers)  # noqa: SIM115
        self._replaces = True

    def _require_room(self, more: int = 0) -> None:
        """Raises OSError unless the file system has room for what the file lacks, and for so many bytes more."""
        at, sealed = self._at, self._history.sealed
        lacking = more + self._history.committed - max(at, sealed)
        if at < sealed:
            lacking += sum(s.end - max(at, s.start) for s in self._sealed.segments()
                           if s.entry is not None and s.end > at)
        folder = self._path.parent
        if lacking and (free := shutil.disk_usage(folder).free) < lacking + _RESERVE_BYTES:
            raise OSError(errno.ENOSPC, f"it waits for {_mib(lacking + _RESERVE_BYTES)} MiB of free space, of which "
                                        f"{_mib(_RESERVE_BYTES)} MiB are left free; {free >> 20} MiB are free",
                          str(folder))

    def _next(self) -> bytes:
        """The next bytes of the file, of which there may be none now; ``_at`` and ``_file_at`` follow in ``_write``."""
        segment = self._segment()
        if segment is None:
            return self._history.read(self._at) or b""
        if segment.entry is None:
            gap = Segment(self._at, segment.end, None)
            return gap.gap_line()
        data = self.intact(segment) if self._replaces else None
        return (data or self._sealed.read(segment))[self._at - segment.start:]

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        segment = self._segment()
        try:
            written = self._file.write(data)
            while written < len(data):
                written += self._file.write(memoryview(data)[written:])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._file_at)
            if not self._replaces:
                self._seen = self._stat()
            raise
        is_gap = segment is not None and segment.entry is None
        self._advance(segment.end - self._at if segment is not None and is_gap else len(data), len(data))
        if not self._replaces:
            self._seen = self._stat()

    def _swap(self) -> None:
        """The file that was made takes the place of what is at the path."""
        if aside := kept_state.set_aside(self._path):
            self._set_aside += 1
            log.warning("%s does not have the records of this job as they were written; it is now %s", self._path,
                        aside)
        self._partial.rename(self._path)
        self._replaces, self._seen = False, self._stat()


def _mib(nbytes: int) -> int:
    return -(-nbytes >> 20)


def _read(file: IO[bytes], offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    return file.read(nbytes)
