"""Which names are of secrets, and text without them: one rule for settings that are shown and errors of libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

HIDDEN = "…"
_NAME = re.compile(r"(?:^|(?<!per)_)(?:api_?keys?|(?:access|private|secret)_?key|(?:access|auth)?token|secret|"
                   r"password|passwd|authorization)$")
"""Last words of the names, in lower case, of options that are secrets: of ``hf_token`` and ``apikey``, but neither of
``max_tokens``, ``token_file`` and ``cost_per_token`` nor of ``answer_key``, which names a column."""
_MORE = re.compile(r"(?:^|_)(?:credentials?|secrets|passwords|(?:access|api|auth)_?tokens|bearer|pw|pwd|passphrase|sig|"
                   r"signature)$")
"""Last words of more such names, of settings and in text. Variables of the environment with them are often paths."""
_NO_SECRETS = frozenset({"prompt_key", "messages_key", "answer_key", "tls_key"})
"""Settings that end with *key* and name a column or a file."""
_USER = re.compile(r"(?<=://)[^/\s]*@")
"""User and password of a URL."""
_NAMED = re.compile(r"""(?<![\w-])([\w-]+)['"]?\s*[=:]\s*""")
"""A name before its value, of a URL's query, of a connection's text, of JSON, or of a header."""
_VALUE = re.compile(r"""(?:(?:Bearer|Basic)\s+)?(?:"[^"]*"|'[^']*'|[^&\s,;'"}\])]+)""", re.IGNORECASE)
_OPTION = re.compile(r"""(?<!\S)--?([\w-]+)\s+(?=[^\s-])""")
"""An option before its value in the next word, of a command line."""
_CREDENTIALS = re.compile(r"""(\bBearer\s+|^Basic\s+)[^\s"',;})\]]+""", re.IGNORECASE)
"""What a header ``Authorization`` has; *basic* within a text is a word."""
_SHORTEST, _SHORTEST_PASSWORD = 8, 4
"""Fewest characters of the value of a secret environment variable, and of a password: shorter ones are words."""


def is_secret_name(name: str) -> bool:
    """Whether the name, of an option or of an environment variable, is that of a secret."""
    return _NAME.search(_words(name)) is not None


def may_be_secret(name: str) -> bool:
    """Whether a setting of the user's own code, or a value in a text, of this name is not to be kept: it is the name of
    a secret, or ends with *key*, or is *credential*, *bearer*, *pw*, *signature* or alike, and is no column."""
    name = re.split(r"[^\w-]+", name.rstrip(" \"'"))[-1]
    return name not in _NO_SECRETS and (_hides(name) or _MORE.search(_words(name)) is not None)


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()  # apiKey and api-key are api_key


def without_users(text: str) -> str:
    """The text without users and passwords of URLs."""
    return _USER.sub(f"{HIDDEN}@", text)


def text_without_secrets(text: str) -> str:
    """The text without users and passwords of URLs, values after ``name=``, ``name:`` or ``--name`` whose name
    ``may_be_secret``, and what follows ``Bearer``."""
    return _CREDENTIALS.sub(rf"\1{HIDDEN}", _without_values(_without_values(without_users(text)), _OPTION))


def without_secrets_of(environment: Mapping[str, str], text: str) -> str:
    """``text_without_secrets`` without the values of secret variables of the environment, wherever they are, also as
    URLs have them."""
    shown = text_without_secrets(text)
    for name, value in environment.items():
        if _hides(name) and len(value) >= (_SHORTEST_PASSWORD if "passw" in name.lower() else _SHORTEST):
            for form in (value, quote(value, safe="")):
                shown = shown.replace(form, HIDDEN)
    return shown


def _without_values(text: str, name: re.Pattern[str] = _NAMED) -> str:
    parts, at = list[str](), 0
    for found in name.finditer(text):
        if found.start() >= at and may_be_secret(found[1]) and (value := _VALUE.match(text, found.end())):
            parts += [text[at:found.end()], HIDDEN]
            at = value.end()
    return "".join([*parts, text[at:]])


def _hides(name: str) -> bool:
    return name.lower().endswith("key") or is_secret_name(name)
