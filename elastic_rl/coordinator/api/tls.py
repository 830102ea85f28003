"""TLS of the admin API: the server's certificate, and the authority that its clients believe. Renewed files are used
without a restart."""

from __future__ import annotations

import functools
import ssl

from elastic_rl.config import CoordinatorConfig
from elastic_rl.errors import ConfigError
from elastic_rl.net.tls import ReloadingContext


def trust(ca_file: str) -> ssl.SSLContext:
    """A client's context that believes the authority in a PEM file, or, for "", the system's authorities.

    Raises ConfigError when the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file) if ca_file else _trust_of_the_system()
    except OSError as e:  # ssl.SSLError is one
        raise ConfigError(f"the authority file {ca_file} cannot be read: {e}",
                          hint="set coordinator.tls_ca to a PEM file") from e


@functools.cache
def _trust_of_the_system() -> ssl.SSLContext:
    """One for the process: to read all of them takes 20 to 80 ms of a core, and every client asks for it."""
    return ssl.create_default_context()


class ReloadingTrust:
    """What clients of the admin API trust: the authority in a PEM file, which is followed, or, for "", the system's
    authorities, which are read when the first connection with TLS needs them."""

    def __init__(self, ca_file: str) -> None:
        """Raises ConfigError when the file cannot be read."""
        self._authority = ReloadingContext(lambda: trust(ca_file), [ca_file]) if ca_file else None

    def for_url(self, url: str) -> ssl.SSLContext | bool:
        """httpx's ``verify`` for the next connection to this URL."""
        if url.startswith("http://"):
            return False
        return self._authority.current() if self._authority is not None else trust("")


def server_context(cfg: CoordinatorConfig) -> ssl.SSLContext | None:
    """The server's context, which follows ``coordinator.tls_cert`` and ``tls_key``; None where it speaks plain HTTP.

    Raises ConfigError when they cannot be used.
    """
    if not cfg.tls_cert:
        return None

    def build() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cfg.tls_cert, cfg.tls_key or None)
        return context

    try:
        return ReloadingContext(build, [cfg.tls_cert, cfg.tls_key]).for_server()
    except OSError as e:  # ssl.SSLError is one
        raise ConfigError(f"the certificate {cfg.tls_cert} cannot be used: {e}",
                          hint="set coordinator.tls_cert and coordinator.tls_key to PEM files that fit together") from e
