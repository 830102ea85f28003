"""Names of versions, as people write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic_rl.config import Stream
from elastic_rl.errors import ConfigError, VersionNotFound
from elastic_rl.etcd.records import Version, VersionState

LABEL = "elastic-rl.json"
"""Name of the file by which an exported folder says which version it holds."""

_STREAM = re.compile(r"[a-z_][a-z0-9_]*")
_NAME = re.compile(rf"({_STREAM.pattern})(?:/(-?\d+))?")
_OF_THE_RUN = frozenset(Stream) - {Stream.POLICY, Stream.CRITIC}
"""Streams whose versions are no weights: states of trainers, files, records."""


def parse(name: str) -> tuple[str, int]:
    """``policy/12`` → (policy, 12); ``policy`` → (policy, 0), the head; ``policy/-1`` → (policy, -1), the one before.

    Raises ConfigError.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name!r} is not the name of a version",
                          hint="write STREAM for its head, STREAM/12, or STREAM/-1 for the one before the head")
    return found[1], int(found[2] or 0)


def require_stream(name: str) -> None:
    """Raises ConfigError for what is no name of a stream: no command could name its versions."""
    if not _STREAM.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a stream",
                          hint="a stream has lowercase letters, digits and underscores, and begins with no digit")


def require_importable(stream: str) -> None:
    """Raises ConfigError for a stream that takes no weights from outside."""
    require_stream(stream)
    if stream in _OF_THE_RUN:
        raise ConfigError(f"stream {stream} holds what only the run itself can write, and no weights of a model folder",
                          hint="import into policy, or into a new stream under a name of your own")


def pick(versions: Sequence[Version], stream: str, number: int) -> Version:
    """The committed version of a parsed name. ``versions``: all of the stream, oldest first. Raises VersionNotFound,
    which lists the available ones."""
    committed = [v for v in versions if v.state is VersionState.COMMITTED]
    if number > 0:
        wanted = next((v for v in versions if v.number == number), None)
        if wanted is not None and wanted.state is VersionState.COMMITTED:
            return wanted
        what = f"it is {wanted.state}" if wanted is not None else "there is no such number"
    elif len(committed) > -number:
        return committed[number - 1]
    else:
        what = f"it has {len(committed)} committed versions"
    there = ", ".join(str(v.number) for v in committed[-5:]) or "none"
    raise VersionNotFound(f"stream {stream} has no version {number or 'at all'}: {what}",
                          hint=f"committed: {there}; `elastic-rl versions ls` shows all")
