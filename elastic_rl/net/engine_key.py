"""The key of a job's engines and routers: who has it may ask them for samples, list servers in a router, and change the
weights of an engine, whose endpoint for these takes a pickle.

Servers and routers get it in a file, which its owner alone may read, and never on a command line, which every user of a
host can see.
"""

from __future__ import annotations

import functools
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_rl.errors import ConfigError
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


@dataclass(frozen=True)
class EngineAccess:
    """What a client of engines and routers needs. It may cross to another process."""

    key: str = field(default="", repr=False)
    """The key that they ask for; "" where they ask for none. It is not read from its file: that may be removed while a
    process that uses it is replaced (``job_secrets``)."""
    authority: str = ""
    """PEM file of the authority whose certificates they have, where they are on hosts that others reach; "": they have
    none, or one of an authority that this system trusts."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request; none without a key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def options(self) -> dict[str, Any]:
        """Options of an httpx client. Raises ConfigError for an authority that cannot be read."""
        return {"headers": self.headers, **({"verify": _trust(self.authority)} if self.authority else {})}


@functools.cache
def _trust(authority: str) -> ssl.SSLContext:
    """What believes this authority. It is derived from the cluster's secret, as the key is, so it stays the same."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as e:  # ssl.SSLError is one
        raise ConfigError(f"the cluster's authority {authority} cannot be read: {e}",
                          hint="the host agent makes the file again within seconds") from e
