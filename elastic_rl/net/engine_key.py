"""The key of a job's engines and routers: who has it may ask them for samples, list servers in a router, and change the
weights of an engine, whose endpoint for these takes a pickle.

It is in a file of the cluster's folder, which its owner alone may read, and never on a command line, which every user
of a host can see.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from elastic_rl.errors import ConfigError
from elastic_rl.runtime.files import replace_file

KEY_FILE_ENV = "ELASTIC_RL_ENGINE_KEY_FILE"
"""Names the file to a server or router that is started; without it they ask for no key."""


OTHER_KEY = "it asks for another key than that of the job: `elastic-rl restart job` starts all that use it again"
"""What to do when an engine or a router of the job answers 401."""
_LENGTHS = range(32, 257)
"""Characters of a key."""
_MAX_BYTES = 4096
_ANEW = "stop the job, remove the file, and `elastic-rl up` makes another one"


def create_key(path: Path) -> None:
    """Writes a key, unless there is one. Raises OSError, and ConfigError as ``read_key`` for one that is there."""
    if path.exists():
        read_key(path)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, secrets.token_hex(32), private=True)


def read_key(path: Path) -> str:
    """Raises ConfigError, which names the file, for one that cannot be read, is no key, or is not this user's alone."""
    try:
        with path.open("rb") as file:
            status, raw = os.fstat(file.fileno()), file.read(_MAX_BYTES)
        key = raw.decode().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the key of the engines, {path}, cannot be read: {e}",
                          hint="`elastic-rl up` makes it; it must be readable by the user of the job") from e
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(f"the key of the engines, {path}, belongs to user {status.st_uid} and has the mode "
                          f"{mode:03o}: others than the user of the job may know it", hint=_ANEW)
    if not (key.isascii() and key.isprintable() and len(key) in _LENGTHS):
        raise ConfigError(f"the key of the engines, {path}, is not one line of {_LENGTHS[0]} to {_LENGTHS[-1]} "
                          "printable ASCII characters", hint=_ANEW)
    return key


def key_headers(key: str) -> dict[str, str]:
    """Headers of a request with the key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}
