"""The files through which the processes of a host hand their heartbeats to the host's agent.

Each member of a job that runs on the host replaces a small file of its own, named by its incarnation, in the job's
folder. The agent reads the folder and writes what it has read to etcd. Once etcd has confirmed that, it says in the
folder until when which processes can rely on it (``CollectedMark``). All others write their records themselves: those
whose file the agent could not read, and all of them when it ends, hangs, or does not reach etcd.

There is such a folder only where there is an agent, which makes the one that all folders of jobs are in.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic_rl.etcd.process_state import machine_id
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Heartbeat
from elastic_rl.runtime.clock import boottime_s
from elastic_rl.runtime.files import replace_file

log = logging.getLogger(__name__)

MAX_FILES = 256
"""The heartbeats of so many processes of a job are collected on a host; further ones write their records themselves."""
MAX_FILE_BYTES = 2048
_MAX_MARK_BYTES = 64 * MAX_FILES
_MAX_SEEN = 4 * MAX_FILES
"""So many entries of a folder are looked at."""
_INCARNATION = re.compile("[0-9a-f]{16}")
_SUFFIX = ".json"
_MARK = "collected"
_ABANDONED_S = 3600.0
"""A file that was not written for so long, and whose process cannot be looked at from here, is nobody's."""


class HeartbeatFile(Record):
    """What the file of a member's process has."""

    beat: Heartbeat
    pid: int
    started: int
    """Clock ticks from the boot to the start of the process (``process_state.start_ticks``)."""
    machine: str
    """The boot and pid namespace that the pid is of (``process_state.machine_id``)."""
    lease_s: float
    """Time to live of the lease of its entry among the members."""
    written_s: float
    """When it was written (``boottime_s``)."""


class CollectedMark(Record):
    """What the agent has written of the folder's files to etcd, and etcd has confirmed."""

    machine: str
    until_s: float
    """Until when members can expect the next mark (``boottime_s``)."""
    incarnations: list[str]
    """The processes whose heartbeats were written, and which etcd had registered then."""


@dataclass(frozen=True)
class HeartbeatFolder:
    """The folder of a job on this host."""

    path: Path
    host: str
    """Name of this host in its cluster: that of the key that its agent writes."""

    # -- for a member ----------------------------------------------------------------------------------------------
    def write(self, file: HeartbeatFile) -> bool:
        """Replaces the file of a process. False where no agent of this user has made a place for it. Raises OSError."""
        if not self._is_ours():
            return False
        target = self._file(file.beat.incarnation)
        try:
            replace_file(target, file.encode(), private=True)
        except FileNotFoundError:
            try:
                self.path.mkdir(mode=0o700)
            except FileNotFoundError:
                return False
            except FileExistsError:
                pass
            replace_file(target, file.encode(), private=True)
        return True

    def _is_ours(self) -> bool:
        """Whether this user has the folder of all jobs, which is where others may make one of its name, and no other
        one has made that of the job."""
        try:
            found = [self.path.parent.lstat()]
            with contextlib.suppress(FileNotFoundError):  # it is made with the first file
                found.append(self.path.lstat())
        except OSError:
            return False
        return all(stat.S_ISDIR(each.st_mode) and each.st_uid == os.getuid() for each in found)

    def is_collected(self, incarnation: str) -> bool:
        """Whether the agent keeps etcd informed of a process, which need not do that itself."""
        if not self._is_ours():
            return False
        try:
            mark = CollectedMark.decode(_read(self.path / _MARK, _MAX_MARK_BYTES))
        except (OSError, ValueError):  # pydantic's errors are ValueErrors
            return False
        return mark.machine == machine_id() and boottime_s() < mark.until_s and incarnation in mark.incarnations

    def remove(self, incarnation: str) -> None:
        """Deletes the file of a process that has ended or was replaced. Raises OSError."""
        if self._is_ours():
            self._file(incarnation).unlink(missing_ok=True)

    # -- for the agent -----------------------------------------------------------------------------------------------
    def contents(self) -> FolderContents:
        """The files of processes of this boot and namespace, and why others cannot be read. Raises OSError."""
        files, unreadable, others = list[HeartbeatFile](), dict[str, str](), list[str]()
        if not self._is_ours():
            return FolderContents(files, unreadable, others)
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in itertools.islice(entries, _MAX_SEEN):
                path = Path(entry.path)
                try:
                    if entry.name == _MARK:
                        continue
                    if path.suffix == _SUFFIX and (file := _heartbeat_of(path)).machine == machine_id():
                        files.append(file)
                    else:
                        others.append(entry.name)
                except FileNotFoundError:
                    continue  # its process has deregistered
                except (OSError, ValueError) as e:  # pydantic's errors are ValueErrors
                    unreadable[entry.name] = f"{type(e).__name__}: {e}"
        return FolderContents(files, unreadable, others)

    def delete_abandoned(self, found: FolderContents) -> None:
        """Deletes what was found, is of no process that can be looked at, and was not written for an hour."""
        for name in (*found.unreadable, *found.others):
            with contextlib.suppress(OSError):
                if time.time() - (self.path / name).lstat().st_mtime > _ABANDONED_S:
                    (self.path / name).unlink()

    def mark(self, incarnations: Iterable[str], until_s: float) -> None:
        """Tells these processes that they need not write their heartbeats to etcd until then (``boottime_s``). Raises
        OSError."""
        record = CollectedMark(machine=machine_id(), until_s=until_s, incarnations=sorted(incarnations))
        replace_file(self.path / _MARK, record.encode(), private=True)

    def discard(self) -> None:
        """Deletes the folder once it has no file of a process any more."""
        with contextlib.suppress(OSError):
            (self.path / _MARK).unlink(missing_ok=True)
            self.path.rmdir()  # only an empty one; a member that comes now makes another

    def _file(self, incarnation: str) -> Path:
        return self.path / f"{incarnation}{_SUFFIX}"


@dataclass(frozen=True)
class FolderContents:
    files: list[HeartbeatFile]
    """The files of this machine's processes."""
    unreadable: dict[str, str]
    """Why a file cannot be read, by its name."""
    others: list[str]
    """Names of the files that are of another boot or namespace, or of nobody."""

    @property
    def unread(self) -> set[str]:
        """Incarnations of the processes whose files cannot be read now."""
        return {name.removesuffix(_SUFFIX) for name in self.unreadable}


def _heartbeat_of(path: Path) -> HeartbeatFile:
    file = HeartbeatFile.decode(_read(path, MAX_FILE_BYTES))
    if not _INCARNATION.fullmatch(path.stem) or file.beat.incarnation != path.stem:
        raise ValueError("it is named by another incarnation")
    return file


def _read(path: Path, limit: int) -> bytes:
    """Raises ValueError for a longer file and for none, such as a pipe, and OSError, also for a link, which none of
    ours is."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is no file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content
