"""A node's memory: one file in /dev/shm, and who has which part of it.

The file is locked (flock) by the node that owns it for as long as that process lives, however it ends; a file without a
lock is a dead node's, and the next start of any node removes it.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path

from elastic_rl.dcs.manifest import ALIGN, aligned
from elastic_rl.errors import ArenaFull, PreflightFailed

SHM = Path("/dev/shm")
PREFIX = "elastic-rl-"


class Allocator:
    """First fit over ``size`` bytes; free neighbours are joined. Pure; offsets and sizes are multiples of ALIGN."""

    def __init__(self, size: int) -> None:
        self.size = size - size % ALIGN
        self.used = 0
        self._starts = [0] if self.size else []  # of the free regions, ascending
        self._sizes = [self.size] if self.size else []
        self._taken: dict[int, int] = {}

    @property
    def largest_free(self) -> int:
        return max(self._sizes, default=0)

    def alloc(self, nbytes: int) -> int:
        """Offset of a new region of at least ``nbytes`` (> 0). Raises ArenaFull."""
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        want = aligned(nbytes)
        for i, have in enumerate(self._sizes):
            if have >= want:
                start = self._starts[i]
                if have == want:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i], self._sizes[i] = start + want, have - want
                self._taken[start] = want
                self.used += want
                return start
        raise ArenaFull(f"no room for {nbytes} bytes: {self.used} of {self.size} are used, the largest free piece has "
                        f"{self.largest_free}", hint="set a larger dcs.arena_bytes, or a smaller dcs.keep_versions")

    def split(self, offset: int, nbytes: int) -> int:
        """Makes two regions of one, the first with ``nbytes``; the offset of the second."""
        have, keep = self._taken[offset], aligned(nbytes)
        if not 0 < keep < have:
            raise ValueError(f"cannot split {have} bytes after {nbytes}")
        self._taken[offset], self._taken[offset + keep] = keep, have - keep
        return offset + keep

    def shrink(self, offset: int, nbytes: int) -> None:
        """Gives the end of a region back, all but its first ``nbytes``."""
        if aligned(nbytes) != self._taken[offset]:
            self.free(self.split(offset, nbytes))

    def free(self, offset: int) -> None:
        """Gives a region back. Raises KeyError for an offset that is not one's start."""
        self._insert(offset, self._taken.pop(offset))

    def _insert(self, start: int, size: int) -> None:
        self.used -= size
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)

    def regions(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Taken and free regions as (offset, size), ascending."""
        return sorted(self._taken.items()), list(zip(self._starts, self._sizes, strict=True))


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
        """A new locked file with all of its memory reserved. Raises MachineUnfit, which says how much is there."""
        path, fd = _new_locked_file(folder, f"{PREFIX}{job}-{node_id}")
        try:
            _require_room(folder, nbytes)
            # Reserved now: a write into a hole of a full tmpfs would be a SIGBUS in whoever writes.
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
        """Unmaps; the owner also removes the file. Views that others still hold stay valid until they let go."""
        if self._owner:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):
            self.view.release()
            self.map.close()
        os.close(self._fd)


def remove_leftovers(folder: Path = SHM) -> list[Path]:
    """Removes the arenas of dead nodes, of any job, that this user may remove; returns them."""
    removed = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


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
