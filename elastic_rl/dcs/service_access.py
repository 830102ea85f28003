"""What a program needs to use a checkpoint service: where etcd is, which job's versions it means, and the secrets.

``elastic-rl versions access FILE`` writes it as a file, which is this user's alone. Paths of certificates in it are
those of the host that it was written on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from elastic_rl.config import Config, parse
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.record import Record
from elastic_rl.net import secret_file
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.files import replace_file

_HOW = "`elastic-rl versions access FILE --job=JOB`"
_MAX_BYTES = 1 << 20


class ServiceAccess(Record):
    job: str
    """The job whose streams these are."""
    etcd_endpoints: list[str]
    """``host:port`` of etcd's members."""
    token: str = Field(default="", repr=False)
    """What the DCS nodes ask for; empty: they ask for none."""
    settings: dict[str, Any] = {}
    """Sections ``etcd`` and ``dcs`` of the settings, where they differ from the defaults."""

    @classmethod
    def of(cls, cfg: Config, etcd_endpoints: list[str], security: Security, tls: TlsFolder | None = None) -> Self:
        """The access to the service of a job. ``cfg``: as it holds on this host. ``tls``: this host's certificate, for
        settings that name none."""
        dcs = cfg.dcs.model_dump(mode="json", exclude_defaults=True)
        if tls is not None and not cfg.dcs.tls_cert:
            dcs |= {"tls_cert": str(tls.cert), "tls_key": str(tls.key), "tls_ca": str(tls.ca)}
        dcs.pop("token_file", None)  # the token itself is here
        return cls(job=cfg.job, etcd_endpoints=etcd_endpoints, token=security.token, settings={
            "etcd": cfg.etcd.model_dump(mode="json", exclude_defaults=True), "dcs": dcs})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError, which names the file, for one that cannot be read, is damaged, or that others than this
        user may read."""
        text = secret_file.private_text(path, what="the access to a checkpoint service", made_by=_HOW,
                                        how_to_replace=f"`chmod 600` it, or write it again: {_HOW}",
                                        max_bytes=_MAX_BYTES)
        try:
            return cls.decode(text.encode())
        except ValidationError as e:
            raise ConfigError(f"{path} does not describe a checkpoint service: {e.errors()[0]['msg']}",
                              hint=f"write it again: {_HOW}") from e

    def save(self, path: Path) -> None:
        """Writes the file, which its owner alone may read. Raises OSError."""
        replace_file(path, self.model_dump_json(indent=2) + "\n", private=True)

    def config(self) -> Config:
        """Raises ConfigError, which names the setting."""
        return parse({**self.settings, "job": self.job})

    def security(self) -> Security:
        """Raises ConfigError, which names the setting and the file."""
        return Security.from_config(self.config(), None, required=False).with_token(self.token)
