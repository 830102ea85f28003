"""Commands in hints address what the command line has addressed. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_NAMES = {"-c": "-c", "--config": "-c", "--job": "--job", "--run_dir": "--run_dir", "--cluster": "--cluster",
          "--url": "--url", "--token-file": "--token-file", "--ca": "--ca"}
"""Options that say which cluster and job are meant, and with which settings."""
_COMMAND = re.compile(r"`elastic-rl ([^`]+)`")
_OF_NOTHING = ("config schema", "config explain", "version", "completion", "node", "bench")
"""Commands that address neither a cluster nor a job."""
_OF_FOLDER = ("-c", "--run_dir")
"""Options that ``jobs`` has a use for, which lists all jobs of a folder."""


def with_address(hint: str, words: Sequence[str]) -> str:
    """A hint whose commands have the options of a command line that name its cluster, job and file of settings, as far
    as they have none of these of their own."""
    options = address(words)
    if not options:
        return hint

    def completed(found: re.Match[str]) -> str:
        command = found[1]
        names = {word.partition("=")[0] for word in command.split()}
        if names & _NAMES.keys() or f"{command} ".startswith(tuple(f"{name} " for name in _OF_NOTHING)):
            return found[0]
        taken = [o for o in options if o.startswith(_OF_FOLDER)] if command.split()[0] == "jobs" else options
        return f"`elastic-rl {' '.join((command, *taken))}`"

    return _COMMAND.sub(completed, hint)


def address(words: Sequence[str]) -> list[str]:
    """The options of a command line that name its cluster, its job and its file of settings, as a shell takes them; of
    one that is given twice the last."""
    found, left = dict[str, str](), list(words)
    while left and (word := left.pop(0)) != "--":
        option, given, value = word.partition("=")
        name = _NAMES.get(option)
        if name is None:
            continue
        if not given and left:
            value = left.pop(0)
        if value:
            found[name] = f"-c {shlex.quote(value)}" if name == "-c" else f"{name}={shlex.quote(value)}"
    return list(found.values())
