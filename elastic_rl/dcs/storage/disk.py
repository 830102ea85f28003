"""A node's disk: one file a chunk, named by its digest.

    <dcs.disk_dir>/<node id>/lock           locked (flock) while the node lives; its text names the job
    <dcs.disk_dir>/<node id>/<aa>/<digest>  a chunk, whole; ``aa`` are its digest's first two digits

A file is written under another name, synced and renamed, so a file that has a chunk's name is whole. The reader checks
whether it still has the chunk's bytes. Files of any other name are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic_rl.errors import ChunkCorrupt, ChunkMissing, DiskFull, PreflightFailed
from elastic_rl.runtime import failpoints
from elastic_rl.runtime.files import sync_folder

_CHUNK = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SYNCS = 4
"""fsync calls at once: a journaling file system commits them together."""


class DiskFolder:
    """The files of one node. Reading is thread-safe; ``write``, ``batch`` and ``remove`` are for one thread at a
    time."""

    def __init__(self, folder: Path, limit_bytes: int, job: str) -> None:
        """Makes and locks the folder. Raises PreflightFailed when another node, or another job, has it."""
        self.folder, self.limit_bytes = folder, limit_bytes
        self.used_bytes = 0
        self._sizes: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(folder / "lock", job)
        except OSError as e:
            raise PreflightFailed(f"the folder {folder} cannot be used (dcs.disk_dir): {e.strerror}",
                                  hint="set a dcs.disk_dir that this user may write, or dcs.disk_bytes=0") from e

    def room(self) -> int:
        """Bytes that can be added: under the limit, and in the file system. 0 when that does not answer."""
        try:
            fs = os.statvfs(self.folder)
        except OSError:
            return 0
        return max(min(self.limit_bytes - self.used_bytes, fs.f_bavail * fs.f_frsize), 0)

    def index(self) -> dict[str, int]:
        """Finds the chunks that are there: digest → bytes. Removes what an earlier process left half written. Raises
        PreflightFailed when the disk fails."""
        try:
            self._scan()
        except OSError as e:
            raise PreflightFailed(f"the chunks in {self.folder} cannot be listed: {e}",
                                  hint="repair that disk, set another dcs.disk_dir, or dcs.disk_bytes=0") from e
        failpoints.reach("node.indexed")
        return dict(self._sizes)

    def _scan(self) -> None:
        for path in sorted(self.folder.glob("[0-9a-f][0-9a-f]/*")):
            name = path.name.removesuffix(_PARTIAL)
            if not _CHUNK.fullmatch(name) or path.parent.name != name[:2] or path.is_symlink() or not path.is_file():
                continue
            if path.suffix == _PARTIAL:
                path.unlink(missing_ok=True)
            elif nbytes := path.stat().st_size:
                self.account(name, nbytes)

    def write(self, digest: str, data: memoryview) -> None:
        """Stores one chunk, whole or not at all. Raises DiskFull, and OSError when the disk fails."""
        with self.batch() as batch:
            batch.add(digest, data)
            batch.commit()

    def batch(self) -> WriteBatch:
        """Several chunks that are made durable together. A context manager: what is not committed is removed."""
        return WriteBatch(self)

    def read_into(self, digest: str, out: memoryview) -> None:
        """Fills ``out`` with a chunk of its size, not verified. Raises ChunkMissing and ChunkCorrupt."""
        try:
            with self.path(digest).open("rb", buffering=0) as f:
                filled = 0
                while filled < len(out) and (n := f.readinto(out[filled:])):
                    filled += n
                if filled < len(out) or f.read(1):
                    raise ChunkCorrupt(f"{f.name} does not have {len(out)} bytes")
        except FileNotFoundError as e:
            raise ChunkMissing(f"chunk {digest} is not on this node's disk") from e
        except OSError as e:
            raise ChunkCorrupt(f"{self.path(digest)} cannot be read: {e.strerror}") from e

    def remove(self, digest: str) -> None:
        """Removes a chunk, if it is there. Raises OSError when the disk fails."""
        self.path(digest).unlink(missing_ok=True)
        self.used_bytes -= self._sizes.pop(digest, 0)
        failpoints.reach("disk.removed")

    def close(self) -> None:
        """Unlocks the folder; the files stay."""
        os.close(self._lock)

    def path(self, digest: str) -> Path:
        """The chunk's file."""
        return self.folder / digest[:2] / digest

    def account(self, digest: str, nbytes: int) -> None:
        """The chunk's file has so many bytes now."""
        self.used_bytes += nbytes - self._sizes.get(digest, 0)
        self._sizes[digest] = nbytes

    def size(self, digest: str) -> int:
        """Bytes of the chunk's file, 0 without one."""
        return self._sizes.get(digest, 0)


class WriteBatch:
    """Chunks that are written one after the other and synced at once: a sync costs about as much as the chunk."""

    def __init__(self, disk: DiskFolder) -> None:
        self._disk = disk
        self._files: dict[str, tuple[int, Path, int]] = {}  # digest -> descriptor, partial file, bytes

    def add(self, digest: str, data: memoryview) -> None:
        """Writes a chunk under a temporary name. Raises DiskFull, and OSError when the disk fails; chunks that were
        added before are not affected."""
        disk, nbytes = self._disk, len(data)
        used = disk.used_bytes + sum(size - disk.size(d) for d, (_, _, size) in self._files.items())
        if used - disk.size(digest) + nbytes > disk.limit_bytes:
            raise DiskFull(f"{used} of {disk.limit_bytes} bytes of {disk.folder} are used, and a chunk of {nbytes} is "
                           f"to be added", hint="set a larger dcs.disk_bytes or fewer dcs.keep_versions")
        path = disk.path(digest)
        with self._removed_on_failure(path.with_name(path.name + _PARTIAL), nbytes) as partial:
            if not path.parent.exists():
                path.parent.mkdir()
                sync_folder(disk.folder)
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._files[digest] = fd, partial, nbytes
            try:
                while len(data):
                    data = data[os.write(fd, data):]
            except BaseException:
                del self._files[digest]
                os.close(fd)
                raise

    def commit(self) -> list[str]:
        """Makes the chunks durable under their names; their digests. Raises DiskFull, and OSError when the disk fails:
        then none of them counts as stored."""
        renamed = []
        try:
            _in_parallel(os.fsync, [fd for fd, _, _ in self._files.values()])
            failpoints.reach("disk.partial")
            for digest, (_, partial, _) in self._files.items():
                partial.rename(self._disk.path(digest))
                renamed.append(digest)
            _in_parallel(sync_folder, {self._disk.path(digest).parent for digest in renamed})
            failpoints.reach("disk.saved")
        except OSError as e:
            for digest in renamed:
                with contextlib.suppress(OSError):
                    self._disk.remove(digest)
            raise self._explained(e, sum(nbytes for _, _, nbytes in self._files.values())) from e
        for digest, (fd, _, nbytes) in self._files.items():
            os.close(fd)
            self._disk.account(digest, nbytes)
        self._files.clear()
        return renamed

    @contextlib.contextmanager
    def _removed_on_failure(self, partial: Path, nbytes: int) -> Iterator[Path]:
        try:
            yield partial
        except OSError as e:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._explained(e, nbytes) from e

    def _explained(self, error: OSError, nbytes: int) -> OSError | DiskFull:
        """The error of a write of so many bytes. A quota, or a file system without inodes, refuses them while there
        seems to be room, which nobody would see if it were for want of room."""
        if error.errno not in _FULL or self._disk.room() >= nbytes:
            return error
        return DiskFull(f"the file system of {self._disk.folder} has no room for a chunk",
                        hint="free some, or set a smaller dcs.disk_bytes")

    def __enter__(self) -> WriteBatch:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd, partial, _nbytes in self._files.values():
            os.close(fd)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        self._files.clear()


def _in_parallel(act: Callable[[Any], object], items: Iterable[Any]) -> None:
    many = list(items)
    if len(many) < 2:
        for item in many:
            act(item)
        return
    with ThreadPoolExecutor(min(_SYNCS, len(many)), thread_name_prefix="sync") as pool:
        list(pool.map(act, many))


def owner(folder: Path) -> str:
    """The job whose chunks a node's folder holds; empty for none."""
    try:
        return (folder / "lock").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _locked(path: Path, job: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise PreflightFailed(f"another process has {path.parent}", hint="stop it, or use another --id") from e
        of = os.pread(fd, 4096, 0).decode(errors="replace")
        if of not in ("", job):
            raise PreflightFailed(f"{path.parent} holds the chunks of job {of}",
                                  hint="set another dcs.disk_dir, or remove the folder if that job is over")
        os.pwrite(fd, job.encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd
