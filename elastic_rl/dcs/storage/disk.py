"""A node's disk: one file a chunk, named by its digest.

    <dcs.disk_dir>/<node id>/lock           locked (flock) while the node lives; its text names the job
    <dcs.disk_dir>/<node id>/<aa>/<digest>  a chunk, whole; ``aa`` are its digest's first two digits

A file is written under another name, synced and renamed, so that what has a chunk's name is whole. Whether it still has
the chunk's bytes is for the reader to check. Files of any other name are nobody's business.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path

from elastic_rl.dcs import failpoints
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, DiskFull, PreflightFailed

_CHUNK = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFolder:
    """The files of one node. Reading is thread-safe; ``write`` and ``remove`` are for one thread at a time."""

    def __init__(self, folder: Path, limit_bytes: int, job: str) -> None:
        """Makes and locks the folder. Raises MachineUnfit when another node, or another job, has it."""
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
        """Finds what is there: digest → bytes. Removes what an earlier process left half written. Raises MachineUnfit
        when the disk fails."""
        try:
            self._scan()
        except OSError as e:
            raise PreflightFailed(f"the chunks in {self.folder} cannot be listed: {e}",
                               hint="mend that disk, set another dcs.disk_dir, or dcs.disk_bytes=0") from e
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
                self._account(name, nbytes)

    def write(self, digest: str, data: memoryview) -> None:
        """Stores a chunk, whole or not at all. Raises DiskFull, and OSError when the disk fails."""
        if self.used_bytes - self._sizes.get(digest, 0) + len(data) > self.limit_bytes:
            raise DiskFull(f"{self.used_bytes} of {self.limit_bytes} bytes of {self.folder} are used, and a chunk of "
                           f"{len(data)} is to be added", hint="set a larger dcs.disk_bytes or fewer dcs.keep_versions")
        path = self._path(digest)
        partial = path.with_name(path.name + _PARTIAL)
        try:
            if not path.parent.exists():
                path.parent.mkdir()
                _sync_folder(self.folder)
            with partial.open("wb", buffering=0) as f:
                while len(data):
                    data = data[f.write(data):]
                os.fsync(f.fileno())
                nbytes = f.tell()
            failpoints.reach("disk.partial")
            partial.rename(path)
            _sync_folder(path.parent)
            failpoints.reach("disk.saved")
        except OSError as e:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if e.errno not in _FULL:
                raise
            raise DiskFull(f"the file system of {self.folder} has no room for a chunk",
                           hint="free some, or set a smaller dcs.disk_bytes") from e
        self._account(digest, nbytes)

    def read_into(self, digest: str, out: memoryview) -> None:
        """Fills ``out`` with a chunk of its size, not verified. Raises ChunkMissing and ChunkCorrupt."""
        try:
            with self._path(digest).open("rb", buffering=0) as f:
                filled = 0
                while filled < len(out) and (n := f.readinto(out[filled:])):
                    filled += n
                if filled < len(out) or f.read(1):
                    raise ChunkCorrupt(f"{f.name} does not have {len(out)} bytes")
        except FileNotFoundError as e:
            raise ChunkMissing(f"chunk {digest} is not on this node's disk") from e
        except OSError as e:
            raise ChunkCorrupt(f"{self._path(digest)} cannot be read: {e.strerror}") from e

    def remove(self, digest: str) -> None:
        """Removes a chunk, if it is there. Raises OSError when the disk fails."""
        self._path(digest).unlink(missing_ok=True)
        self.used_bytes -= self._sizes.pop(digest, 0)
        failpoints.reach("disk.removed")

    def close(self) -> None:
        """Unlocks the folder; the files stay."""
        os.close(self._lock)

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / digest

    def _account(self, digest: str, nbytes: int) -> None:
        self.used_bytes += nbytes - self._sizes.get(digest, 0)
        self._sizes[digest] = nbytes


def _locked(path: Path, job: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise PreflightFailed(f"another process has {path.parent}", hint="stop it, or use another --id") from e
        owner = os.pread(fd, 4096, 0).decode(errors="replace")
        if owner not in ("", job):
            raise PreflightFailed(f"{path.parent} holds the chunks of job {owner}",
                               hint="set another dcs.disk_dir, or remove the folder if that job is over")
        os.pwrite(fd, job.encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
