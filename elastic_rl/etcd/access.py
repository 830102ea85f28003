"""How this process authenticates to etcd and checks etcd's identity: TLS certificates, and a user with a password.

Certificates that are renewed on disk are used without a restart: ``MemberChannels`` makes new channels when the files
have changed.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc

from elastic_rl.config import EtcdConfig
from elastic_rl.errors import ConfigError

log = logging.getLogger(__name__)

_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0),
]
_RECHECK_S = 5.0
"""A renewed file is used this many seconds after it was written, at the latest."""
_RETIRE_S = 300.0
"""Replaced channels are closed after this time: longer than any call. A watch that is still on one resumes on another
channel."""

Fingerprint = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class Pem:
    """What a gRPC channel is made with."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one client: the members' authority, and this client's certificate and key where etcd asks for
    them. ``server_name``: name that the members' certificates are for, where it is not the endpoint's."""

    ca: str
    cert: str = ""
    key: str = ""
    server_name: str = ""

    def read(self) -> Pem:
        """The files' contents, checked. Raises ConfigError, which names the setting and the file."""
        pem = Pem(*(_read(path, f"etcd.{setting}") for path, setting in (
            (self.ca, "tls_ca"), (self.cert, "tls_cert"), (self.key, "tls_key"))))
        self.context()  # gRPC accepts any bytes and logs an error at the first call; OpenSSL checks them now
        return pem

    def context(self) -> ssl.SSLContext:
        """The TLS context for etcd's HTTP endpoints. Raises ConfigError when the files do not fit together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(_path(self.ca))
            if self.cert:
                context.load_cert_chain(_path(self.cert), _path(self.key))
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"TLS cannot be set up from etcd.tls_ca={self.ca}, etcd.tls_cert={self.cert} and "
                              f"etcd.tls_key={self.key}: {e}",
                              hint="all must be PEM files, and the key must be the certificate's") from e
        return context

    def fingerprint(self) -> Fingerprint:
        """Changes when a file is written, renamed over, or swapped behind a symbolic link."""
        return tuple(_stat(path) for path in (self.ca, self.cert, self.key) if path)


@dataclass(frozen=True)
class Access:
    """How one client connects. The default: no TLS and no user."""

    tls: TlsFiles | None = None
    user: str = ""
    """Empty: the client does not sign in."""
    password_file: str = ""

    @classmethod
    def from_config(cls, cfg: EtcdConfig) -> Self:
        """Checks the files that ``etcd`` names. Raises ConfigError, which names the setting and the file."""
        tls = TlsFiles(cfg.tls_ca, cfg.tls_cert, cfg.tls_key, cfg.tls_server_name) if cfg.tls_ca else None
        if tls is not None:
            tls.read()
        access = cls(tls, cfg.user, cfg.password_file)
        if access.user:
            access.password()
        return access

    def password(self) -> str:
        """The password as the file has it now. Raises ConfigError."""
        password = _read(self.password_file, "etcd.password_file").decode(errors="replace").strip()
        if not password:
            raise ConfigError(f"{self.password_file} is empty (etcd.password_file)", hint="put the password in it")
        return password

    def addresses(self, endpoints: Sequence[str]) -> list[str]:
        """``host:port`` of each endpoint. Raises ConfigError when a URL's scheme contradicts the settings."""
        if not endpoints:
            raise ConfigError("no etcd endpoint is given", hint="set etcd.endpoints, or start one with `elastic-rl up`")
        for endpoint in endpoints:
            if endpoint.startswith("https://") and self.tls is None:
                raise ConfigError(f"{endpoint} requires TLS", hint="set etcd.tls_ca to the authority's PEM file")
            if endpoint.startswith("http://") and self.tls is not None:
                raise ConfigError(f"{endpoint} is without TLS, and etcd.tls_ca is set",
                                  hint="write https:// (or host:port), or remove etcd.tls_ca")
        return [e.removeprefix("http://").removeprefix("https://").rstrip("/") for e in endpoints]

    def channel(self, address: str, pem: Pem | None) -> grpc.Channel:
        """A connection to one member, which is made when it is first used."""
        if self.tls is None or pem is None:
            return grpc.insecure_channel(address, options=_OPTIONS)
        name = self.tls.server_name
        target = [("grpc.ssl_target_name_override", name)] if name else []
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key or None, pem.cert or None)
        return grpc.secure_channel(address, credentials, options=[*_OPTIONS, *target])


class MemberChannels:
    """One channel per member, replaced when the certificate files change.

    Calls that are under way on a replaced channel finish on it. While the files do not fit together, because only one
    of them has been replaced yet, the channels stay and the reload is retried. Thread-safe.
    """

    def __init__(self, access: Access, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._access, self._clock = access, clock
        self._lock = threading.Lock()
        self._seen = access.tls.fingerprint() if access.tls else ()
        self._pem = access.tls.read() if access.tls else None
        self._channels: dict[str, grpc.Channel] = {}
        self._checked_at = clock()
        self._retired: list[tuple[float, list[grpc.Channel]]] = []
        self._closed = False

    def __getitem__(self, address: str) -> grpc.Channel:
        """The channel of the member at ``host:port``. Raises ValueError when these are closed."""
        if self._access.tls is not None and self._clock() - self._checked_at >= _RECHECK_S:
            self._recheck()
        with self._lock:
            if self._closed:
                raise ValueError("the channels are closed")
            if address not in self._channels:
                self._channels[address] = self._access.channel(address, self._pem)
            return self._channels[address]

    def keep_only(self, addresses: Collection[str]) -> None:
        """Retires the channels of all other members."""
        with self._lock:
            gone = [self._channels.pop(address) for address in self._channels.keys() - set(addresses)]
            if gone:
                self._retired.append((self._clock(), gone))

    def _recheck(self) -> None:
        assert self._access.tls is not None
        with self._lock:
            now = self._clock()
            if self._closed or now - self._checked_at < _RECHECK_S:
                return
            self._checked_at = now
            for _, channels in (old for old in self._retired if now - old[0] >= _RETIRE_S):
                _close(channels)
            self._retired = [old for old in self._retired if now - old[0] < _RETIRE_S]
            found = self._access.tls.fingerprint()  # before the files are read: a later change is found next time
            if found == self._seen:
                return
            try:
                self._pem = self._access.tls.read()
            except ConfigError as e:
                log.warning("changed TLS files of etcd are not used yet: %s", e)
                return
            self._seen = found
            self._retired.append((now, list(self._channels.values())))
            self._channels = {}
            log.info("reloaded the TLS files of etcd")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for channels in (list(self._channels.values()), *(old for _, old in self._retired)):
                _close(channels)


def _close(channels: Sequence[grpc.Channel]) -> None:
    for channel in channels:
        channel.close()


def _path(path: str) -> Path:
    return Path(path).expanduser()


def _read(path: str, setting: str) -> bytes:
    if not path:
        return b""
    try:
        return _path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read ({setting}): {e.strerror}",
                          hint="name a file that this user may read") from e


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        found = _path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
