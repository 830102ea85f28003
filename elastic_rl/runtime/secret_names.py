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
_USER = re.compile(r"(?<=://)[^/\s]*@")
"""User and password of a URL."""
_NAMED = re.compile(r"""([\w-]+)['"]?\s*[=:]\s*""")
"""A name before its value, of a URL's query, of a connection's text, of JSON, or of a header."""
_VALUE = re.compile(r"""(?:(?:Bearer|Basic)\s+)?(?:"[^"]*"|'[^']*'|[^&\s,;'"}\])]+)""", re.IGNORECASE)
_SHORTEST, _SHORTEST_PASSWORD = 8, 4
"""Fewest characters of the value of a secret environment variable, and of a password: shorter ones are words."""


def is_secret_name(name: str) -> bool:
    """Whether the name, of an option or of an environment variable, is that of a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_")  # apiKey and api-key are api_key
    return _NAME.search(words.lower()) is not None


def without_users(text: str) -> str:
    """The text without users and passwords of URLs."""
    return _USER.sub(f"{HIDDEN}@", text)


def without_secrets_of(environment: Mapping[str, str], text: str) -> str:
    """The text without users and passwords of URLs, values after ``name=`` or ``name:`` whose name is that of a secret
    or ends with *key*, which is no column there, and values of such variables of the environment, wherever they are,
    also as URLs have them."""
    shown = _without_values(without_users(text))
    for name, value in environment.items():
        if _hides(name) and len(value) >= (_SHORTEST_PASSWORD if "passw" in name.lower() else _SHORTEST):
            for form in (value, quote(value, safe="")):
                shown = shown.replace(form, HIDDEN)
    return shown


def _without_values(text: str) -> str:
    parts, at = list[str](), 0
    for found in _NAMED.finditer(text):
        if found.start() >= at and _hides(found[1]) and (value := _VALUE.match(text, found.end())):
            parts += [text[at:found.end()], HIDDEN]
            at = value.end()
    return "".join([*parts, text[at:]])


def _hides(name: str) -> bool:
    return name.lower().endswith("key") or is_secret_name(name)
