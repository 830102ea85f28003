"""Names of secrets, and text without them: one rule for settings that are shown and for errors of libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "…"
_NAME = re.compile(r"(?:^|(?<!per)_)(?:api_?keys?|(?:access|private|secret)_?key|(?:access|auth)?token|secret|"
                   r"password|passwd|authorization)$")
"""Last words of the names, in lower case, of options that are secrets: of ``hf_token`` and ``apikey``, but neither of
``max_tokens``, ``token_file`` and ``cost_per_token`` nor of ``answer_key``, which names a column."""
_USER = re.compile(r"(?<=://)[^/\s]*@")
"""User and password of a URL."""
_FIELD = re.compile(r"(?i)([\w-]+)=([^&\s]+)")
"""A name and its value, of a URL's query or of a connection's text."""
_SHORTEST = 8
"""Fewest characters of the value of a secret environment variable: shorter ones are words."""


def is_secret_name(name: str) -> bool:
    """Whether the name, of an option or of an environment variable, is that of a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_")  # apiKey and api-key are api_key
    return _NAME.search(words.lower()) is not None


def without_users(text: str) -> str:
    """The text without users and passwords of URLs."""
    return _USER.sub(f"{HIDDEN}@", text)


def without_secrets_of(environment: Mapping[str, str], text: str) -> str:
    """The text without users and passwords of URLs, values after ``name=`` whose name is that of a secret or ends with
    *key*, which is no column there, and values of such variables of the environment, wherever they are."""
    shown = _FIELD.sub(lambda found: f"{found[1]}={HIDDEN}" if _hides(found[1]) else found[0], without_users(text))
    for name, value in environment.items():
        if len(value) >= _SHORTEST and _hides(name):
            shown = shown.replace(value, HIDDEN)
    return shown


def _hides(name: str) -> bool:
    return name.lower().endswith("key") or is_secret_name(name)
