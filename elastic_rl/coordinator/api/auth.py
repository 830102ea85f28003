"""Bearer tokens of the admin API. The table holds digests only, so that no token can be read from it."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_rl.errors import ConfigError
from elastic_rl.runtime.files import replace_file

MIN_TOKEN_CHARS = 16
"""Fewest characters of a token that is written into a table in the short form."""


class Role(StrEnum):
    VIEWER = "viewer"
    """Reads."""
    OPERATOR = "operator"
    """Reads and changes."""

    def may(self, needed: Role) -> bool:
        return self is needed or self is Role.OPERATOR


class Token(BaseModel):
    """One entry of the table of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Hex digest of the token's UTF-8 bytes. Tokens are random and long, so no salt and no slow hash are needed."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: list[Token]


class _Stamp(NamedTuple):
    """Differs between two contents of a file, so that the file need not be read to see whether it was replaced."""

    mtime_ns: int
    inode: int
    size: int


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


def write_table(path: Path, tokens: Mapping[str, str]) -> None:
    """Writes a table of tokens by role, readable by its owner only."""
    _write(path, _entries(tokens))


def replace_tokens(path: Path, old: Collection[str], new: Mapping[str, str]) -> None:
    """Replaces the entries of the ``old`` tokens in a table by those of ``new``, tokens by role. All others stay.
    Raises ConfigError for a damaged table."""
    withdrawn = {digest(token) for token in old}
    _write(path, _entries(new) + [entry for entry in TokenTable(path).entries() if entry.sha256 not in withdrawn])


def _entries(tokens: Mapping[str, str]) -> list[Token]:
    return [Token(name=role, role=Role(role), sha256=digest(token)) for role, token in tokens.items()]


def _write(path: Path, entries: list[Token]) -> None:
    replace_file(path, _Table(tokens=entries).model_dump_json(indent=2), private=True)


class TokenTable:
    """The tokens of one file. The file is read again when it was replaced, so that a token is added or withdrawn
    without a restart.

    Raises ConfigError when the file is missing, malformed, or readable by others.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: _Stamp | None = None
        self._tokens: list[Token] = []
        self._refresh()

    def find(self, token: str) -> Token | None:
        """The entry of a token or None."""
        return self.find_digest(digest(token))

    def find_digest(self, sha256: str) -> Token | None:
        """The entry with this digest or None. Compares in constant time, with every entry."""
        found = None
        for entry in self.entries():
            if hmac.compare_digest(entry.sha256, sha256):
                found = entry
        return found

    def entries(self) -> list[Token]:
        """All entries of the file as it is now."""
        with self._lock:
            self._refresh()
            return self._tokens

    def _refresh(self) -> None:
        try:
            stat = self._path.stat()
        except FileNotFoundError as e:
            raise ConfigError(f"the token table {self._path} is missing", hint="`elastic-rl up` writes it") from e
        except OSError as e:  # a circle of links, a folder that may not be searched
            raise ConfigError(f"the token table {self._path} cannot be read: {e}") from e
        stamp = _Stamp(stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if stamp == self._stamp:
            return
        if stat.st_mode & 0o077:
            raise ConfigError(f"the token table {self._path} may be read by others (mode {stat.st_mode & 0o777:o})",
                              hint=f"chmod 600 {self._path}")
        try:
            self._tokens = _parse(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError) as e:
            raise ConfigError(f"the token table {self._path} cannot be read: {e}") from e
        self._stamp = stamp


def _parse(table: object) -> list[Token]:
    """Entries of a table: digests under ``tokens``, or the short form ``{role: token}``, which is also what the command
    line takes as a token file."""
    if isinstance(table, dict) and "tokens" not in table:
        return [Token(name=role, role=Role(role), sha256=digest(_strong(role, token))) for role, token in table.items()]
    tokens = _Table.model_validate(table).tokens
    for token in tokens:
        if token.sha256 == digest(""):
            raise _weak(token.name)
    return tokens


def _strong(role: str, token: object) -> str:
    """Raises ConfigError for what a stranger can guess."""
    if not isinstance(token, str) or len(token.strip()) < MIN_TOKEN_CHARS:
        raise _weak(role)
    return token


def _weak(name: str) -> ConfigError:
    return ConfigError(f"the token {name!r} of the token table is not a string of {MIN_TOKEN_CHARS} characters or more",
                       hint="make one with `openssl rand -hex 32`")
