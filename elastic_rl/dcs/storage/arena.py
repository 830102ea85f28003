"""A node's arena: one file in /dev/shm that the processes of its host map.

A node locks its file (flock) for as long as its process lives, however it ends. A file without that lock belongs to a
dead node; the next node that starts on this host removes it.

Other processes may still map the file of a dead node, and its memory stays allocated until the last of them unmaps it.
A process may keep a mapping for hours without using it, so a node that starts does not wait for that: it frees the
pages themselves. So that no reader finds zeros, a reader holds a shared lock (of the open file description) on the
range that it reads for as long as it can reach those bytes; a locked range is freed when the lock is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

from elastic_rl.errors import NodeUnavailable, PreflightFailed

SHM = Path("/dev/shm")
PREFIX = "elastic-rl-"
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class ArenaFile:
    """The file, mapped for reading and writing. A node makes it with ``create``; publishers ``attach``."""

    def __init__(self, path: Path, fd: int, *, owner: bool) -> None:
        self.path = path
        self._fd = fd
        self._owner = owner
        self.size = os.fstat(fd).st_size
        self.map = mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self.map)

    @classmethod
    def create(cls, job: str, node_id: str, nbytes: int, *, folder: Path = SHM) -> ArenaFile:
        """Makes a locked file with all of its memory reserved. Raises PreflightFailed when there is too little."""
        path, fd = _new_locked_file(folder, f"{PREFIX}{job}-{node_id}")
        try:
            _require_room(folder, nbytes)
            # Reserved now: a write into a hole of a full tmpfs would raise SIGBUS in the process that writes.
            os.posix_fallocate(fd, 0, nbytes)
            return cls(path, fd, owner=True)
        except OSError as e:
            _discard(path, fd)
            if e.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise
            raise _too_small(folder, nbytes) from e
        except PreflightFailed:
            _discard(path, fd)
            raise

    @classmethod
    def attach(cls, path: Path) -> ArenaFile:
        """Maps a node's arena for writing. Raises OSError when it is not on this host."""
        return cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW), owner=False)

    def close(self) -> None:
        """Unmaps the file; the owner also removes it. Views that others still hold stay valid until they drop them."""
        if self._owner:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):
            self.view.release()
            self.map.close()
        os.close(self._fd)


def is_owned(path: Path) -> bool:
    """Whether a living process of this host owns the arena file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


# -- reading -----------------------------------------------------------------------------------------------------------
def open_for_reading(path: Path, start: int, end: int) -> int:
    """Opens an arena and locks the bytes from ``start`` to ``end``: they stay until the descriptor is closed, even if
    the node dies. Raises NodeUnavailable when the file was removed, that is, when its node has ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as e:
        raise _gone(path, e.strerror or str(e)) from e
    page = mmap.PAGESIZE
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, start // page * page, -(-max(end, start + 1) // page) * page)
        # A node that starts unlinks first and frees then; what is still linked was not freed before it was locked.
        if path.stat().st_ino != os.fstat(fd).st_ino:
            raise _gone(path, "it was replaced")
    except OSError as e:
        os.close(fd)
        raise _gone(path, e.strerror or str(e)) from e
    except NodeUnavailable:
        os.close(fd)
        raise
    return fd


def _gone(path: Path, why: str) -> NodeUnavailable:
    return NodeUnavailable(f"the arena {path} cannot be read: {why}", hint="its node has ended; pull again")


def _lock(fd: int, command: int, kind: int, start: int, end: int) -> tuple[int, int, int, int, int]:
    request = _LOCK.pack(kind, os.SEEK_SET, start, end - start, 0)
    return _LOCK.unpack(fcntl.fcntl(fd, command, request))


# -- dead nodes --------------------------------------------------------------------------------------------------------
class Leftovers:
    """The arenas of dead nodes, of any job, that this user may remove: unlinked when this is made, and freed as far as
    no process reads them. ``reclaim`` frees the rest once the readers are done."""

    def __init__(self, folder: Path = SHM) -> None:
        self.removed: list[Path] = []
        self._in_use: list[_Leftover] = []
        for path in sorted(folder.glob(f"{PREFIX}*")):
            leftover = _Leftover.claim(path)
            if leftover is not None:
                self.removed.append(path)
                self._in_use.append(leftover)
        self.reclaim()

    @property
    def nbytes(self) -> int:
        """Bytes that are still being read."""
        return sum(end - start for leftover in self._in_use for start, end in leftover.left)

    def reclaim(self) -> None:
        """Frees what has no reader any longer."""
        for leftover in self._in_use:
            leftover.reclaim()
        self._in_use = [leftover for leftover in self._in_use if leftover.left]

    def close(self) -> None:
        """Lets go of what is left; the kernel frees it when the last process unmaps it."""
        for leftover in self._in_use:
            leftover.close()
        self._in_use = []


class _Leftover:
    """One file: unlinked, locked as its owner would lock it, and freed piece by piece."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size) if size else None
        self.left = [(0, size)] if size else []
        """Ranges that are not freed yet."""
        if not size:
            self.close()

    @classmethod
    def claim(cls, path: Path) -> _Leftover | None:
        """None when a living process owns the file, or it is another user's, or gone."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return cls(fd)
        except OSError:
            os.close(fd)
            return None

    def reclaim(self) -> None:
        before, self.left = self.left, []
        for start, end in before:
            for is_read, first, last in self._pieces(start, end):
                if is_read:
                    self.left.append((first, last))
                else:
                    self._free(first, last)
        if before and not self.left:
            self.close()

    def _pieces(self, start: int, end: int) -> Iterator[tuple[bool, int, int]]:
        """The range, cut where readers' locks begin and end (at pages): (whether it is read, start, end)."""
        rest = [(start, end)]  # no recursion: one reader, of a file of this name that is no arena, may have any locks
        while rest:
            start, end = rest.pop()
            if start >= end:
                continue
            kind, _, at, nbytes, _ = _lock(self._fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, end)
            if kind == fcntl.F_UNLCK:
                yield False, start, end
                continue
            first, last = max(at, start), min(at + nbytes, end) if nbytes else end  # length 0: to the end of the file
            yield True, first, last
            rest += [(last, end), (start, first)]

    def _free(self, start: int, end: int) -> None:
        with contextlib.suppress(OSError):  # a file system that cannot: the memory goes with the last mapping
            assert self._map is not None
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._fd)


# -- files -------------------------------------------------------------------------------------------------------------
def _new_locked_file(folder: Path, stem: str) -> tuple[Path, int]:
    while True:
        path = folder / f"{stem}-{secrets.token_hex(6)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Another node that starts now may take the file for a leftover before it is locked; then make another one.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, fd
        _discard(path, fd)


def _require_room(folder: Path, nbytes: int) -> None:
    fs = os.statvfs(folder)
    if fs.f_bavail * fs.f_frsize < nbytes:
        raise _too_small(folder, nbytes)


def _too_small(folder: Path, nbytes: int) -> PreflightFailed:
    fs = os.statvfs(folder)
    mib = 1 << 20
    free, size = fs.f_bavail * fs.f_frsize // mib, fs.f_blocks * fs.f_frsize // mib
    return PreflightFailed(
        f"{folder} has {free} MiB free of {size} MiB, and the arena needs {-(-nbytes // mib)} MiB "
        f"(dcs.arena_bytes={nbytes})",
        hint=f"set a smaller dcs.arena_bytes, or enlarge it: `mount -o remount,size=... {folder}` or "
             f"`docker run --shm-size=...`")


def _discard(path: Path, fd: int) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)
