"""Bearer tokens of the admin API. The table holds digests only, so that reading it gives nobody a token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import threading
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_rl.config import CoordinatorConfig
from elastic_rl.errors import ConfigError


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"

    def may(self, needed: Role) -> bool:
        return self is needed or self is Role.OPERATOR


class Token(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hex digest of the token's UTF-8 bytes. Tokens are random and long, so no salt and no slow hash are needed."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[Token]


def _parse(table: object) -> list[Token]:
    """Entries of a table: digests under ``tokens``, or the short form ``{role: token}`` that a local cluster's owner
    keeps for the command line as well."""
    if isinstance(table, dict) and "tokens" not in table:
        return [Token(name=role, role=Role(role), sha256=digest(str(token))) for role, token in table.items()]
    return _Table.model_validate(table).tokens


class Stamp(NamedTuple):
    """What tells one content of the file from another without reading it."""

    mtime_ns: int
    inode: int
    size: int


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tokens_required(cfg: CoordinatorConfig) -> bool:
    """Whether a request without a token is refused: as configured, else everywhere but on loopback."""
    return cfg.require_token if cfg.require_token is not None else not is_loopback(cfg.host)


class TokenTable:
    """The tokens of one file, read again when the file was replaced, so that a token is withdrawn without a restart.

    Raises ConfigError when the file is missing (and ``must_exist``), malformed, or readable by others.
    """

    def __init__(self, path: Path, *, must_exist: bool) -> None:
        self._path, self._must_exist = path, must_exist
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._tokens: list[Token] = []
        self._refresh()

    def find(self, token: str) -> Token | None:
        """The entry of a token or None. Compares in constant time, with every entry."""
        with self._lock:
            self._refresh()
            tokens = self._tokens
        mine, found = digest(token), None
        for entry in tokens:
            if hmac.compare_digest(entry.sha256, mine):
                found = entry
        return found

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
        except FileNotFoundError as e:
            if self._must_exist:
                raise ConfigError(f"the token table {self._path} is missing",
                                  hint="`elastic-rl up` writes it; or set coordinator.require_token=false") from e
            self._stamp, self._tokens = None, []
            return
        stamp = Stamp(stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if stamp == self._stamp:
            return
        if stat.st_mode & 0o077:
            raise ConfigError(f"the token table {self._path} may be read by others (mode {stat.st_mode & 0o777:o})",
                              hint=f"chmod 600 {self._path}")
        try:
            self._tokens = _parse(json.loads(self._path.read_text()))
        except (OSError, ValueError, ValidationError) as e:
            raise ConfigError(f"the token table {self._path} cannot be read: {e}") from e
        self._stamp = stamp
