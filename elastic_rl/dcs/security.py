"""Who may call a node: those that know the job's token and, with TLS, have a certificate of its authority."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from elastic_rl.config import Config, DcsConfig
from elastic_rl.errors import ConfigError
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.tls import ReloadingContext, TlsFolder


@dataclass(frozen=True)
class Security:
    """What one process needs to serve, or to call, the nodes of a job."""

    token: str = ""
    """Empty: none is required."""
    server: ReloadingContext | None = None
    client: ReloadingContext | None = None
    """Both None: no TLS."""

    @classmethod
    def from_config(cls, cfg: Config, secret: Path | None, *, required: bool, tls: TlsFolder | None = None) -> Self:
        """Reads the files that the settings name. The token is that of ``dcs.token_file``, which needs no secret, else
        the job's, derived from the cluster's secret in the file ``secret``. ``required``: without either this raises
        ConfigError; else the process then has no token. ``tls``: this host's certificate, for settings that name none.

        Raises ConfigError, which names the setting and the file.
        """
        token = _token(cfg, secret, required=required)
        dcs = cfg.dcs
        if tls is not None and not dcs.tls_cert:
            dcs = dcs.model_copy(update={"tls_cert": str(tls.cert), "tls_key": str(tls.key), "tls_ca": str(tls.ca)})
        if not dcs.tls_cert:
            return cls(token)
        files = (dcs.tls_cert, dcs.tls_key, dcs.tls_ca)
        return cls(token, *(ReloadingContext(partial(_context, dcs, protocol), files)
                            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)))

    def with_token(self, token: str) -> Self:
        """The same with another token; with an empty one, as it is."""
        return replace(self, token=token) if token else self

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """The context for the next connection that is accepted; None without TLS."""
        return self.server.current() if self.server is not None else None

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """The context for the next connection that is opened; None without TLS."""
        return self.client.current() if self.client is not None else None

    def admits(self, token: object) -> bool:
        """Whether this is the token; takes as long for a nearly right one as for a wrong one."""
        return not self.token or hmac.compare_digest(str(token).encode(errors="replace"), self.token.encode())

    def require_for(self, address: str) -> None:
        """Raises ConfigError when a node bound to this IP address would serve everybody who can reach it."""
        if self.token or self.server is not None or ipaddress.ip_address(address).is_loopback:
            return
        raise ConfigError(f"a DCS node at {address} would serve, and take chunks from, everybody who can reach that "
                          f"address: it has neither a token nor TLS certificates",
                          hint="set dcs.token_file (a secret for all processes of the job: `openssl rand -hex 32`), or "
                               "dcs.tls_cert, dcs.tls_key and dcs.tls_ca, or bind a loopback address")


def _token(cfg: Config, secret: Path | None, *, required: bool) -> str:
    if cfg.dcs.token_file:
        return _token_in(Path(cfg.dcs.token_file).expanduser())
    if secret is not None and (required or secret.exists()):
        return ClusterSecret.read(secret).dcs(cfg.job)
    if required:
        raise ConfigError(f"there is no token for the DCS nodes of job {cfg.job}",
                          hint="name the cluster's secret with --secret, or a file with a token in dcs.token_file")
    return ""


def _token_in(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the token {path} of the DCS cannot be read (dcs.token_file): {e}",
                          hint="name a text file that this user may read; without one the token is derived from the "
                               "cluster's secret") from e
    if not token:
        raise ConfigError(f"the token file {path} is empty (dcs.token_file)",
                          hint="write a secret to it: `openssl rand -hex 32`")
    return token


def _context(cfg: DcsConfig, protocol: int) -> ssl.SSLContext:
    """Both sides present a certificate, and both check that the other's comes from ``tls_ca``. Nodes move between hosts
    and are found by address, so the authority is what is trusted, and no host name is checked."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # one that arrives between two calls would be taken for an answer
    try:
        context.load_cert_chain(Path(cfg.tls_cert).expanduser(), Path(cfg.tls_key).expanduser())
        context.load_verify_locations(Path(cfg.tls_ca).expanduser())
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"TLS cannot be set up from dcs.tls_cert={cfg.tls_cert}, dcs.tls_key={cfg.tls_key} and "
                          f"dcs.tls_ca={cfg.tls_ca}: {e}",
                          hint="all three must be readable PEM files, and the key must belong to the certificate"
                          ) from e
    return context
