"""Replacing a file as a whole: who reads it finds what was there before or all of what is new, also after kill -9. One
process at a time writes a file, or each with a mark of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def replace_file(path: Path, content: str | bytes | Callable[[IO[bytes]], object], *, mark: str = "",
                 private: bool = False, durable: bool = False) -> None:
    """Replaces a file by ``content``, or by what it writes when called with the open file.

    ``mark``: part of the name of the unfinished file, ``NAME[.MARK].partial``, where several processes may write at
    once. What a killed process leaves there is replaced by the next one with this mark. ``private``: readable by its
    owner only. ``durable``: when this returns, the new content also survives a loss of power.

    Raises OSError, and what ``content`` raises; then the file is as it was, but for an OSError of a durable one's last
    sync, which leaves the new content.
    """
    partial = path.with_name(f"{path.name}{'.' if mark else ''}{mark}.partial")
    partial.unlink(missing_ok=True)
    try:
        # Exclusively, so that a link that somebody has put there is not written through.
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(fd, "wb") as file:
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


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder, such as that of a file that was renamed, survive a loss of power. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
