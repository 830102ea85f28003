"""Files with a secret, which their owner alone may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from elastic_rl.errors import ConfigError

_LENGTHS = range(32, 257)
"""Characters of a secret."""
_MAX_BYTES = 4096


def read(path: Path, *, what: str, made_by: str, how_to_replace: str) -> str:
    """The secret in a file, of which it is the only line. ``what``: its name in errors. ``made_by``,
    ``how_to_replace``: what makes the file, and how the user gets another one. Raises ConfigError, which names the
    file, for one that cannot be read, is no secret, or is not this user's alone."""
    secret = private_text(path, what=what, made_by=made_by, how_to_replace=how_to_replace).strip()
    if not (secret.isascii() and secret.isprintable() and len(secret) in _LENGTHS):
        raise ConfigError(f"{what}, {path}, is not one line of {_LENGTHS[0]} to {_LENGTHS[-1]} printable ASCII "
                          "characters", hint=how_to_replace)
    return secret


def private_text(path: Path, *, what: str, made_by: str, how_to_replace: str, max_bytes: int = _MAX_BYTES) -> str:
    """The first ``max_bytes`` of a file that its owner alone may read. Otherwise as ``read``, but for what it holds."""
    try:
        with path.open("rb") as file:
            status, raw = os.fstat(file.fileno()), file.read(max_bytes)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{what}, {path}, cannot be read: {e}",
                          hint=f"{made_by} makes it; it must be readable by the user of the job") from e
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(f"{what}, {path}, belongs to user {status.st_uid} and has the mode {mode:03o}: others than "
                          "the user of the job may know it", hint=how_to_replace)
    return text
