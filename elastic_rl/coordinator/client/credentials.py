"""Files with tokens for the admin API, as the command line takes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from elastic_rl.coordinator.api.auth import Role
from elastic_rl.errors import ConfigError

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_HINT = ("--token-file names a file with nothing but a token, or a cluster's credentials.json: "
         '{"operator": "<token>", "viewer": "<token>"}')


def read_token(path: Path, role: str) -> str:
    """The token in a file for a role: the file's only word, or, in a JSON file of tokens by role, that of the role (the
    viewer's where there is none of an operator).

    Raises ConfigError for a file that cannot be read, or holds anything else.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"no token can be read from {path}: {e}", hint=_HINT) from e
    token = _from_json(path, text, role) if text.startswith(("{", "[")) else text
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{path} holds no token" + (": it is empty" if not token else ""), hint=_HINT)
    return token


def _from_json(path: Path, text: str, role: str) -> str:
    try:
        found = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"no token can be read from {path}: it is not valid JSON ({e})", hint=_HINT) from e
    if isinstance(found, dict) and "tokens" in found:
        raise ConfigError(f"{path} is a replica's table with digests, from which no token can be read",
                          hint="use the credentials.json beside it. " + _HINT)
    if not isinstance(found, dict) or not found or not set(found) <= set(Role) or not all(
            isinstance(token, str) for token in found.values()):
        raise ConfigError(f"{path} holds no tokens by role", hint=_HINT)
    return found.get(role) or found.get(Role.VIEWER) or ""
