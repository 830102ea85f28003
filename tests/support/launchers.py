"""What the tests of the launchers in ops/ share: their files, and the options of the commands that they call."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from elastic_rl import config
from elastic_rl.cli.main import app
from elastic_rl.config.reading import known_keys
from elastic_rl.host.local_cluster import SAVE_GRACE_S

OPS = Path(__file__).parents[2] / "ops"
ENDS_S = 2 * SAVE_GRACE_S
"""Seconds that a launcher gives a host, at least, to end what runs: two jobs save their versions, one after the other.
"""


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The options of a command line of elastic-rl, by name. Fails for a command or an option that does not exist."""
    program, name, *given = words
    assert Path(program).name == "elastic-rl"
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    found = dict(word.partition("=")[::2] for word in given if word.startswith("--"))
    assert {option for option in found if option.removeprefix("--") not in known_keys(config.Config)} <= known
    return found


def seconds(options: dict[str, str], name: str = "--grace") -> float:
    """An option that is a number of seconds; 0 where it is not given."""
    return float(options.get(name, "0"))


def words_of(line: str) -> list[str]:
    """The words of a command line of systemd, or of a shell, without what is a variable by itself."""
    return [word for word in shlex.split(line) if not word.startswith("$")]
