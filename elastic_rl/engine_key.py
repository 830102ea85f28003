"""The key of a job's engines and routers: who has it may ask them for samples, list servers in a router, and change the
weights of an engine, whose endpoint for these takes a pickle.

It is in a file of the cluster's folder, which its owner alone may read, and never on a command line, which every user
of a host can see.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from elastic_rl.errors import ConfigError
from elastic_rl.files import replace_file

KEY_FILE_ENV = "ELASTIC_RL_ENGINE_KEY_FILE"
"""Names the file to a server or router that is started; without it they ask for no key."""


def create_key(path: Path) -> None:
    """Unless there is one. Raises OSError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, secrets.token_hex(32), private=True)


def read_key(path: Path) -> str:
    """Raises ConfigError, which names the file."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the key of the engines, {path}, cannot be read: {e}",
                          hint="`elastic-rl up` makes it; it must be readable by the user of the job") from e
    if not (key.isascii() and key.isprintable() and key):
        raise ConfigError(f"the key of the engines, {path}, is empty or not one line of printable ASCII",
                          hint="stop the job, remove the file, and `elastic-rl up` makes another one")
    return key


def key_headers(key: str) -> dict[str, str]:
    """Of a request with the key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}
