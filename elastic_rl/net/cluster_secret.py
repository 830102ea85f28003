"""The secret of a cluster, and the tokens that are derived from it.

Each token is the HMAC-SHA256 of its purpose under the secret, so that one file is kept and protected, every process
that may read it knows every token without asking for it, and who learns one token learns neither the secret nor
another token.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from elastic_rl.net import secret_file
from elastic_rl.runtime.files import replace_file

_WHAT = "the secret of the cluster"
_HOW_TO_REPLACE = "`elastic-rl down`, remove the file, and `elastic-rl up` makes another one, with other tokens"


@dataclass(frozen=True)
class ClusterSecret:
    value: str = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """A new secret of 256 random bits."""
        return cls(secrets.token_hex(32))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError, which names the file, for one that cannot be read, is no secret, or is not this user's
        alone."""
        return cls(secret_file.read(path, what=_WHAT, made_by="`elastic-rl up`", how_to_replace=_HOW_TO_REPLACE))

    def save(self, path: Path) -> None:
        """Writes the file, which its owner alone may read. Raises OSError."""
        replace_file(path, self.value, private=True, durable=True)

    # -- tokens: 64 hexadecimal characters. Names of jobs have no slash, so no purpose is another one's --------------
    def dcs(self, job: str) -> str:
        """What clients of the job's DCS nodes, and of its trainer ranks, must present."""
        return self._derived(f"dcs/{job}")

    def engine(self, job: str) -> str:
        """The key that the job's engines and routers ask for (``engine_key``)."""
        return self._derived(f"engine/{job}")

    def ray(self, job: str, epoch: int) -> str:
        """What whoever connects to the Ray of this epoch must have."""
        return self._derived(f"ray/{job}/{epoch}")

    def logs(self) -> str:
        """What a client must present to a host's agent to read logs there."""
        return self._derived("logs")

    def authority(self) -> str:
        """What the key of the cluster's certificate authority is derived from (``net.authority``)."""
        return self._derived("authority")

    def settings(self, job: str) -> str:
        """The key that seals the settings of the job in its record (``etcd.job_settings``)."""
        return self._derived(f"settings/{job}")

    def api(self, role: str) -> str:
        """The token of the admin API for a role: operator or viewer."""
        return self._derived(role)

    def _derived(self, purpose: str) -> str:
        return hmac.digest(self.value.encode(), purpose.encode(), "sha256").hex()
