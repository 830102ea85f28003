"""Whom clients of the admin API trust."""

from __future__ import annotations

import ssl

from elastic_rl.errors import ConfigError


def trust(ca_file: str) -> ssl.SSLContext:
    """A client's context that believes the authority in a PEM file, or, for "", the system's authorities.

    Raises ConfigError when the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as e:  # ssl.SSLError is one
        raise ConfigError(f"the authority file {ca_file} cannot be read: {e}",
                          hint="set coordinator.tls_ca to a PEM file") from e
