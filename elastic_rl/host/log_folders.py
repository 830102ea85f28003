"""The logs of a cluster and its jobs on this host, for the host's agent, which reads them for other hosts.

Only regular files of this user are read, whose names end as those of logs do, and only in the log folders of the
cluster and of its own jobs. Neither the folder nor a file may be a link: each is opened below the one before, so that
nothing that is exchanged meanwhile leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path

from elastic_rl.config import JOB_NAME, Config
from elastic_rl.etcd.record import Record
from elastic_rl.host import cluster_settings
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.telemetry import log_files
from elastic_rl.telemetry.log_files import LogPosition

_SUFFIX = ".log"
_NAME_BYTES = 200
"""Longest name of a part."""


class LogPart(Record):
    """A log of a host."""

    part: str
    nbytes: int
    """Without its rotated parts."""
    written_at: float
    """Unix seconds, by the host's clock."""
    path: str


class LogFolders:
    """The log folders of a cluster and, where one is named, of a job."""

    def __init__(self, cfg: Config, job: str) -> None:
        """``cfg``: the cluster, as it is on this host. ``job``: empty for the cluster's logs alone, and as it is for
        what no job of the cluster is called."""
        self._folders = [ClusterPaths.of(cfg).logs]
        if re.fullmatch(JOB_NAME, job):
            paths = JobPaths.of(cfg.model_copy(update={"job": job}))
            if paths.logs not in self._folders and cluster_settings.cluster_of(paths) == cfg.cluster:
                self._folders.append(paths.logs)

    @property
    def described(self) -> str:
        """Where they are."""
        return " and ".join(map(_text, self._folders))

    def parts(self) -> list[LogPart]:
        """All logs, by name. There are at most ``telemetry.log_files`` in a folder. Raises OSError."""
        found = {}
        for path in self._folders:
            with contextlib.suppress(FileNotFoundError), _opened(path) as folder:
                for name in os.listdir(folder):
                    part = name.removesuffix(_SUFFIX)
                    if part == name or not is_part(part):
                        continue
                    with contextlib.suppress(FileNotFoundError), _open(folder, name) as file:
                        status = os.fstat(file.fileno())
                        found[part] = LogPart(part=part, nbytes=status.st_size, written_at=status.st_mtime,
                                              path=_text(path / name))
        return [found[part] for part in sorted(found)]

    def before_last_lines(self, part: str, lines: int) -> LogPosition:
        """See ``log_files``. Raises FileNotFoundError where there is no such log, and OSError."""
        with self._folder_of(part) as folder:
            if not log_files.between_rotations(folder):
                raise OSError(errno.EBUSY, "another process rotates the logs")
            return log_files.before_last_lines(partial(_open_part, folder, part), lines)

    def read_from(self, part: str, at: LogPosition, most_bytes: int) -> tuple[bytes, LogPosition]:
        """See ``log_files``. Raises FileNotFoundError where there is no such log, and OSError."""
        with self._folder_of(part) as folder:
            if not log_files.between_rotations(folder):
                return b"", at
            return log_files.read_from(partial(_open_part, folder, part), at, most_bytes)

    @contextmanager
    def _folder_of(self, part: str) -> Iterator[int]:
        """The folder that has a part's log, the last one that may have it else."""
        if not is_part(part):
            raise FileNotFoundError(errno.ENOENT, "this cannot be a log's name")
        for n, path in enumerate(self._folders, 1):
            with contextlib.ExitStack() as opened:
                try:
                    folder = opened.enter_context(_opened(path))
                    if n < len(self._folders):
                        os.stat(part + _SUFFIX, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield folder
                return
        raise FileNotFoundError(errno.ENOENT, "there is no such log")


def is_part(name: str) -> bool:
    """Whether this can be a part with a log: the name of a file, of characters that every terminal and JSON have."""
    return name.isprintable() and "/" not in name and 0 < len(os.fsencode(name)) <= _NAME_BYTES


def _text(path: Path) -> str:
    """A path as records have it: what is no UTF-8 is replaced."""
    return os.fsencode(path).decode(errors="replace")


def choose(parts: Sequence[str], part: str) -> list[str]:
    """The parts that a name, or the start of one, can mean."""
    return [part] if part in parts else [name for name in parts if name.startswith(part)]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A log folder, whose parent nobody but this user may enter."""
    with contextlib.ExitStack() as stack:
        folder = _enter(str(path.parent), None, stack)
        yield _enter(path.name, folder, stack)


def _enter(name: str, parent: int | None, stack: contextlib.ExitStack) -> int:
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError as e:  # a link, too
        raise FileNotFoundError(errno.ENOENT, "this is no folder", name) from e
    stack.callback(os.close, folder)
    if os.fstat(folder).st_uid != os.geteuid():
        raise FileNotFoundError(errno.ENOENT, "this is another user's folder", name)
    return folder


def _open_part(folder: int, part: str, n: int) -> FileIO:
    return _open(folder, part + _SUFFIX + (f".{n}" if n else ""))


def _open(folder: int, name: str) -> FileIO:
    """A regular file of this user. Raises FileNotFoundError for anything else, and OSError."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # or it waits at a FIFO
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise FileNotFoundError(errno.ENOENT, "this is no regular file", name) from e
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "this is no regular file of this user", name)
    return FileIO(descriptor, "rb")
