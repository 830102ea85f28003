"""Who may talk to a node: those who know the job's token and, with TLS, have a certificate of the job's authority."""

from __future__ import annotations

import hmac
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastic_rl.config import DcsConfig
from elastic_rl.errors import ConfigError

TOKEN_FILE = "dcs.token"
"""Name of the token's file in a cluster's folder, unless ``dcs.token_file`` names another."""


@dataclass(frozen=True)
class Security:
    """What one process needs to serve, or to call, the nodes of a job."""

    token: str = ""
    """Empty: none is asked for."""
    server_context: ssl.SSLContext | None = None
    client_context: ssl.SSLContext | None = None
    """Both None: no TLS."""

    @classmethod
    def from_config(cls, cfg: DcsConfig, default_token_file: Path | None = None) -> Self:
        """Reads the files that ``dcs`` names; ``default_token_file`` counts where it names none and the file exists.

        Raises ConfigError, which names the setting and the file.
        """
        token = ""
        if cfg.token_file:
            token = _token(Path(cfg.token_file).expanduser())
        elif default_token_file is not None and default_token_file.exists():
            token = _token(default_token_file)
        if not cfg.tls_cert:
            return cls(token)
        return cls(token, _context(cfg, ssl.PROTOCOL_TLS_SERVER), _context(cfg, ssl.PROTOCOL_TLS_CLIENT))

    def admits(self, token: object) -> bool:
        """Whether this is the token; takes as long for a nearly right one as for a wrong one."""
        return not self.token or hmac.compare_digest(str(token).encode(errors="replace"), self.token.encode())


def new_token() -> str:
    """A secret of 256 bits."""
    return secrets.token_hex(32)


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the token {path} of the DCS cannot be read (dcs.token_file): {e}",
                          hint="name a text file that this user may read") from e
    if not token:
        raise ConfigError(f"the token file {path} is empty (dcs.token_file)",
                          hint="put a secret in it: `openssl rand -hex 32`")
    return token


def _context(cfg: DcsConfig, protocol: int) -> ssl.SSLContext:
    """Both sides show a certificate, and both check that the other's comes from ``tls_ca``. Nodes move between hosts
    and are found by address, so it is the authority that vouches for them and not a host name."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # one that arrives between two calls would look like an answer
    try:
        context.load_cert_chain(Path(cfg.tls_cert).expanduser(), Path(cfg.tls_key).expanduser())
        context.load_verify_locations(Path(cfg.tls_ca).expanduser())
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"TLS cannot be set up from dcs.tls_cert={cfg.tls_cert}, dcs.tls_key={cfg.tls_key} and "
                          f"dcs.tls_ca={cfg.tls_ca}: {e}",
                          hint="all three must be readable PEM files, and the key the certificate's") from e
    return context
