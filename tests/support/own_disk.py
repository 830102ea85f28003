"""A file system of a test's own, which can be full: a tmpfs in a mount namespace that ends with its last process, also
after a kill -9 of the test. A full one refuses writes with ENOSPC, as a disk does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from elastic_rl.runtime.process import start_child

_MOUNT = 'mount -t tmpfs -o size="$2" disk "$1"; echo mounted; exec sleep infinity'


class OwnDisk:
    """A disk of ``size`` bytes, at a folder that processes outside of ``inside`` see without what is on it."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._holder = start_child(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _MOUNT, "sh", str(folder), str(size)],
            stdout=subprocess.PIPE)
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"mounted\n"

    @property
    def inside(self) -> Sequence[str]:
        """What a command line begins with that sees the disk."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={Path.cwd()}"]

    def path(self, inside: Path) -> Path:
        """Where this process finds a path on the disk."""
        return Path(f"/proc/{self._holder.pid}/root{inside}")

    def fill(self) -> None:
        """Leaves no room on it."""
        found = os.statvfs(self.path(self._folder))
        self._resize((found.f_blocks - found.f_bfree) * found.f_frsize)

    def free(self) -> None:
        """Makes room again."""
        self._resize(self._size)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()

    def _resize(self, size: int) -> None:
        subprocess.run([*self.inside, "mount", "-o", f"remount,size={size}", str(self._folder)], check=True)
