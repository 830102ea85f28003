"""Replacing a file as a whole: who reads it finds what was there before or all of what is new, also after kill -9. One
process at a time writes a file, or each with a mark of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from elastic_rl.errors import PreflightFailed

PRIVATE_UMASK = 0o077
"""The umask of every process that the project starts (``process.start_process``): what it makes, sockets as well as
files and folders, is its user's alone. SGLang unpickles whatever arrives at its sockets."""
UMASK_ENV = "ELASTIC_RL_UMASK"
"""Environment variable: the umask, in octal, with which the user started the first of the project's processes."""


def replace_file(path: Path, content: str | bytes | Callable[[IO[bytes]], object], *, mark: str = "",
                 private: bool = False, durable: bool = False) -> None:
    """Replaces a file by ``content``, or by what it writes when called with the open file.

    ``mark``: part of the name of the unfinished file, ``NAME[.MARK].partial``, where several processes may write at
    once. What a killed process leaves there is replaced by the next one with this mark. ``private``: readable by its
    owner only; else by whom the user's umask lets read it (``user_umask``). ``durable``: when this returns, the new
    content also survives a loss of power.

    Raises OSError, and what ``content`` raises; then the file is as it was, but for an OSError of a durable one's last
    sync, which leaves the new content.
    """
    partial = path.with_name(f"{path.name}{'.' if mark else ''}{mark}.partial")
    partial.unlink(missing_ok=True)
    try:
        # Exclusively, so that a link that somebody has put there is not written through.
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(fd, "wb") as file:
            if not private:
                let_readers(fd)
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def read_limited(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes, for a file of somebody else's. Raises OSError, which
    says so, for a larger one, and for what is no regular file: a FIFO would be waited for without end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            content = file.read(most + 1) if found.st_size <= most else None
        if content is None or len(content) > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB, the most that is read", str(path))
        return content


def user_umask() -> int:
    """The umask that the user has set: that of the first process, or of this one where it is the first. For files that
    other users may read if the user lets them."""
    try:
        return int(os.environ[UMASK_ENV], 8) & 0o777
    except (KeyError, ValueError):
        # os.umask() would change it for a moment.
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        return int(status.partition("\nUmask:")[2].split(maxsplit=1)[0], 8)


def open_for_readers(path: str, flags: int) -> int:
    """An ``opener`` of ``open``: a file that it makes has the permissions that the user's umask gives."""
    try:
        return os.open(path, flags & ~os.O_CREAT)
    except FileNotFoundError:
        fd = os.open(path, flags, 0o666)
        let_readers(fd)
        return fd


def let_readers(file: int | Path) -> None:
    """Gives a file that this process has made, by its descriptor or path, the permissions of the user's umask. It keeps
    its own where the file system lets nobody change them, as some of FUSE and CIFS: it may be too private then, which
    must not end a run."""
    mode = 0o666 & ~user_umask()
    if stat.S_IMODE(os.stat(file).st_mode) != mode:
        with contextlib.suppress(PermissionError):
            os.chmod(file, mode)


def delete_oldest(folder: Path, pattern: str, keep: int) -> None:
    """Deletes the files of a folder that match a glob, but for the ``keep`` newest. Others may do the same meanwhile.
    Raises OSError."""
    found = list[tuple[float, Path]]()
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[:max(0, len(found) - keep)]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def preflight_writes(folder: Path) -> Iterator[None]:
    """Runs a block that writes files below ``folder``, that of a job, and raises PreflightFailed for an OSError in it,
    such as that of a full disk."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        raise PreflightFailed(f"cannot write {os_error_text(e, folder)}",
                              hint=f"{'free space' if full else 'make it writable'}, or set another run_dir") from e


def os_error_text(error: OSError, path: Path | None = None) -> str:
    """The path of an error and what is wrong with it, in one line. ``path``: for an error that names none, such as one
    of a write to an open file."""
    where = error.filename if error.filename is not None else path
    what = error.strerror or str(error) or type(error).__name__
    return what if where is None else f"{os.fsdecode(where) if isinstance(where, bytes) else where}: {what}"


_OTHER_TMPDIR = "have it removed, or set TMPDIR to a folder of this user with a short path"


def private_folder(path: Path, *, hint: str = _OTHER_TMPDIR) -> None:
    """Makes a folder that only its owner may enter, unless it is there. For a folder below one that other users may
    write to, such as /tmp, whose name can be guessed. Raises PreflightFailed as ``require_own_folder``, and OSError."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    require_own_folder(path, hint=hint)
    path.chmod(0o700)


def require_own_folder(path: Path, *, hint: str) -> None:
    """Raises PreflightFailed when another user has a folder, or it is a link or none: others may have put it there.
    Raises OSError where there is nothing."""
    found = path.lstat()  # not what a link points to
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PreflightFailed(f"{path} is not a folder of this user, whose it must be, and it cannot be replaced",
                              hint=hint)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder, such as that of a file that was renamed, survive a loss of power. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def count_temporary_files(pid: int) -> int:
    """Files, folders and links in the ``/tmp`` that a process sees; 0 when it is gone. A tmpfs has one more for each
    hard link."""
    try:
        found = os.statvfs(f"/proc/{pid}/root/tmp")
    except OSError:
        return 0
    return found.f_files - found.f_ffree
