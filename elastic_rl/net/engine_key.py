"""The key of a job's engines and routers: who has it may ask them for samples, list servers in a router, and change the
weights of an engine, whose endpoint for these takes a pickle.

Servers and routers get it in a file, which its owner alone may read, and never on a command line, which every user of a
host can see.
"""

from __future__ import annotations

from pathlib import Path

from elastic_rl.net import secret_file

KEY_FILE_ENV = "ELASTIC_RL_ENGINE_KEY_FILE"
"""Names the file to a server or router that is started; without it they ask for no key."""


OTHER_KEY = "it asks for another key than that of the job: `elastic-rl restart job` starts all that use it again"
"""What to do when an engine or a router of the job answers 401."""
_HOW_TO_REPLACE = "remove the file: `elastic-rl up`, and each start of a router or an engine, writes it again"


def read_key(path: Path) -> str:
    """Raises ConfigError, which names the file, for one that cannot be read, is no key, or is not this user's alone."""
    return secret_file.read(path, what="the key of the engines", made_by="`elastic-rl up`",
                            how_to_replace=_HOW_TO_REPLACE)


def key_headers(key: str) -> dict[str, str]:
    """Headers of a request with the key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}
