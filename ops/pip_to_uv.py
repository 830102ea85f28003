"""Prints pip's configuration as environment variables of uv, one ``export NAME=VALUE`` a line, for ops/setup.sh.

uv reads neither pip's configuration files nor its PIP_* variables, so without this it would install from other indexes
than pip does on the same machine. Run with the Python whose pip counts. Exits with 1, and says why, where pip has a
setting that changes what is installed and that uv has no counterpart for; setup.sh then installs with pip.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping

_COUNTERPARTS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "no-cache-dir": "UV_NO_CACHE",
}
_SEPARATORS = {"UV_FIND_LINKS": ","}
"""Between the values of a list; a space where nothing is said."""
_HARMLESS = frozenset({
    "break-system-packages", "cache-dir", "debug", "disable-pip-version-check", "log", "no-color", "no-input",
    "no-python-version-warning", "no-warn-conflicts", "no-warn-script-location", "prefer-binary", "progress-bar",
    "quiet", "require-virtualenv", "root-user-action", "use-deprecated", "use-feature", "verbose",
})
"""Settings of pip that change how it works or what it prints, but not what it installs."""
_FLAGS = frozenset({"UV_NO_INDEX", "UV_NO_CACHE"})


class UnknownSetting(ValueError):
    """pip has a setting that uv cannot be given."""


def parse(listing: Iterable[str]) -> dict[str, str]:
    """Settings that hold for ``pip install``, from the lines of ``pip config list``: a variable overrides the section
    ``install``, and that overrides ``global``. Raises UnknownSetting for a line that is no ``section.name='value'``."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in filter(None, map(str.strip, listing)):
        key, equals, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if not equals or not name:
            raise UnknownSetting(f"`pip config list` printed {line!r}")
        if section in sections:  # of other commands nothing matters here
            sections[section][name.lower().replace("_", "-")] = str(ast.literal_eval(value))
    return {**sections["global"], **sections["install"], **sections[":env:"]}


def translate(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's environment variables for pip's settings. Raises UnknownSetting for one that has no counterpart."""
    # pip takes the best version that any index has; uv by default the first index that has the package at all.
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in settings.items():
        if name in _HARMLESS or not value.strip():
            continue
        if (variable := _COUNTERPARTS.get(name)) is None:
            raise UnknownSetting(f"pip's setting {name} has no counterpart in uv")
        if variable in _FLAGS:
            if value.lower() in ("1", "true", "yes", "on"):
                env[variable] = "1"
        else:
            env[variable] = _SEPARATORS.get(variable, " ").join(value.split())
    return env


def main() -> int:
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True,
                             check=True, timeout=60, encoding="utf-8", errors="replace").stdout
    try:
        env = translate(parse(listing.splitlines()))
    except UnknownSetting as e:
        print(e, file=sys.stderr)
        return 1
    for name, value in env.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
