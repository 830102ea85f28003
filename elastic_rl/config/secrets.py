"""Which settings hold secrets, and how they are shown: URLs of alerts and of the durable store contain passwords, and
options of the user's own code may be keys of services."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml

from elastic_rl.runtime.secret_names import HIDDEN, is_secret_name, may_be_secret, text_without_secrets, without_users

_SECTIONS = ("alerts", "dcs.durable_url", "telemetry.otlp_endpoint")
"""Keys whose values, and those below them, no error shows."""
_REDACTED = re.compile(rf"""^{HIDDEN}$|"{HIDDEN}"|//{HIDDEN}@|"""
                       rf"""(?:[=:]|\bbearer|^basic|(?<![\w-])--?[\w-]+)\s*["']?{HIDDEN}""", re.IGNORECASE)


def is_secret(key: str) -> bool:
    """Whether values of the dotted key, or of a key below it, may be secret. A section that has such a key counts too:
    what should be below it may have been written in its place."""
    return (any(f"{key}.".startswith(f"{secret}.") or secret.startswith(f"{key}.") for secret in _SECTIONS)
            or any(map(is_secret_name, key.split("."))))


def without_secrets(value: Any, *, hide: bool = False) -> Any:
    """JSON-able values to be shown, without those whose names say that they may be secrets, and without secrets in
    texts. A name may be beside its value, too: in ``{name: API_KEY, value: ...}``, in a pair, as an option before it.
    ``hide``: the value itself is one."""
    if isinstance(value, Mapping):
        named = any(_names_secret(value.get(key)) for key in ("name", "key"))
        return {key: without_secrets(one, hide=hide or may_be_secret(str(key)) and not (key == "key" and named)
                                     or named and key == "value") for key, one in value.items()}
    if isinstance(value, list):
        before = [None, *value]
        return [without_secrets(one, hide=hide or _names_secret(name) and (len(value) == 2 or name.startswith("-")))
                for name, one in zip(before, value, strict=False)]
    if hide and value and value is not True:
        return HIDDEN
    return text_without_secrets(value) if isinstance(value, str) else value


def _names_secret(value: Any) -> bool:
    return isinstance(value, str) and may_be_secret(value)


def redacted_url(url: str) -> str:
    """A URL without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return HIDDEN
    host = parts.netloc.rpartition("@")
    netloc = f"{HIDDEN}@{host[2]}" if host[1] else host[2]
    return parts._replace(netloc=netloc, query=HIDDEN if parts.query else "", fragment="").geturl()


def redacted_receiver(url: str) -> str:
    """An Apprise URL with its scheme only: services have their tokens in the place of host, user and path alike."""
    scheme, found, _ = url.partition("://")
    return f"{scheme}://{HIDDEN}" if found else HIDDEN


def redacted_setting(word: str) -> str:
    """A setting ``--key.sub=value`` of a command line, to be shown or kept where others read it."""
    key, _, value = word.partition("=")
    name = key.removeprefix("--")
    if is_secret(name) or any(map(may_be_secret, name.split("."))):
        return f"{key}={HIDDEN}"
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, Mapping | list):
        shown = without_secrets(parsed)
        return (f"{key}={json.dumps(shown, ensure_ascii=False, default=str)}" if shown != parsed else
                f"{key}={without_users(value)}")
    return f"{key}={text_without_secrets(value)}"


def is_redacted(word: str) -> bool:
    """Whether ``redacted_setting`` has taken a secret out of the setting."""
    return _REDACTED.search(word.partition("=")[2]) is not None


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as nested JSON-able values, to be shown."""
    alerts, dcs, telemetry = dict(values["alerts"]), dict(values["dcs"]), dict(values["telemetry"])
    alerts["urls"] = [redacted_receiver(url) for url in alerts["urls"]]
    alerts["routes"] = [{**route, "url": redacted_receiver(route["url"])} for route in alerts["routes"]]
    dcs["durable_url"] = redacted_url(dcs["durable_url"])
    telemetry["otlp_endpoint"] = redacted_url(telemetry["otlp_endpoint"])
    return {**without_secrets(values), "alerts": alerts, "dcs": dcs, "telemetry": telemetry}
