"""How this process shows etcd who it is, and checks who etcd is: TLS certificates, and a user with a password."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from elastic_rl.config import EtcdConfig
from elastic_rl.errors import ConfigError

_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class Access:
    """What one client needs to get in. The default: no TLS and no user."""

    ca: bytes = field(default=b"", repr=False)
    """PEM. Empty: no TLS."""
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    server_name: str = ""
    user: str = ""
    """Empty: nobody signs in."""
    password_file: Path = Path()

    @classmethod
    def from_config(cls, cfg: EtcdConfig) -> Self:
        """Reads and tries the files that ``etcd`` names. Raises ConfigError, which names the setting and the file."""
        ca, cert, key = (_read(getattr(cfg, name), f"etcd.{name}") for name in ("tls_ca", "tls_cert", "tls_key"))
        if cfg.tls_ca:
            _try(cfg)
        access = cls(ca, cert, key, cfg.tls_server_name, cfg.user, Path(cfg.password_file).expanduser())
        if access.user:
            access.password()
        return access

    def password(self) -> str:
        """The password as the file has it now. Raises ConfigError."""
        password = _read(str(self.password_file), "etcd.password_file").decode(errors="replace").strip()
        if not password:
            raise ConfigError(f"{self.password_file} is empty (etcd.password_file)", hint="put the password in it")
        return password

    def addresses(self, endpoints: Sequence[str]) -> list[str]:
        """``host:port`` of each endpoint. Raises ConfigError when a URL's scheme says otherwise than the settings."""
        if not endpoints:
            raise ConfigError("no etcd endpoint is given", hint="set etcd.endpoints, or start one with `elastic-rl up`")
        for endpoint in endpoints:
            if endpoint.startswith("https://") and not self.ca:
                raise ConfigError(f"{endpoint} wants TLS", hint="set etcd.tls_ca to the authority's PEM file")
            if endpoint.startswith("http://") and self.ca:
                raise ConfigError(f"{endpoint} is without TLS, and etcd.tls_ca is set",
                                  hint="write https:// (or host:port), or leave etcd.tls_ca out")
        return [e.removeprefix("http://").removeprefix("https://").rstrip("/") for e in endpoints]

    def channel(self, address: str) -> grpc.Channel:
        """A connection to one member, which is made when it is first used."""
        if not self.ca:
            return grpc.insecure_channel(address, options=_OPTIONS)
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        credentials = grpc.ssl_channel_credentials(self.ca, self.key or None, self.cert or None)
        return grpc.secure_channel(address, credentials, options=[*_OPTIONS, *name])


def _read(path: str, setting: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read ({setting}): {e.strerror}",
                          hint="name a file that this user may read") from e


def _try(cfg: EtcdConfig) -> None:
    """gRPC takes any bytes for a certificate and tells of it in a log at the first call; OpenSSL says it now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(Path(cfg.tls_ca).expanduser())
        if cfg.tls_cert:
            context.load_cert_chain(Path(cfg.tls_cert).expanduser(), Path(cfg.tls_key).expanduser())
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"TLS cannot be set up from etcd.tls_ca={cfg.tls_ca}, etcd.tls_cert={cfg.tls_cert} and "
                          f"etcd.tls_key={cfg.tls_key}: {e}",
                          hint="all must be PEM files, and the key the certificate's") from e
