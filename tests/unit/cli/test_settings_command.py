"""Which words of a command line are settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from elastic_rl.cli import main
from elastic_rl.cli.common import SettingsCommand, split_settings
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.errors import ConfigError
from tests.support.budget import seeds

OPTIONS = {"-o": True, "--output": True, "--wait": False, "-c": True, "--help": False}


@pytest.mark.parametrize(("line", "own", "found"), [
    ("--job=b", "", "--job=b"), ("--job b", "", "--job=b"), ("4 --job=b --wait", "4 --wait", "--job=b"),
    ("--job b 4", "4", "--job=b"), ("--lr -1", "", "--lr=-1"), ("-o json --job=b", "-o json", "--job=b"),
    ("--output=json x", "--output=json x", ""),
    ("--output json --train.lr 1", "--output json", "--train.lr=1"),
    ("x -- --job=b", "x -- --job=b", ""), ("policy/-1 -ojson", "policy/-1 -ojson", "")])
def test_settings_are_told_from_options_and_arguments(line: str, own: str, found: str) -> None:
    assert split_settings(line.split(), OPTIONS) == (own.split(), found.split())


@pytest.mark.parametrize("line", ["-c --job=b", "--output --job=b", "-o", "x --output", "-c -o json",
                                  "--output -c f", "--job -o json", "--train.lr --job=b", "--train.lr"])
def test_option_takes_no_other_option_for_its_value(line: str) -> None:
    with pytest.raises(ConfigError, match="has no value"):
        split_settings(line.split(), OPTIONS)
    split_settings(line.split(), OPTIONS, strict=False)


@settings(max_examples=seeds(60))
@given(st.lists(st.sampled_from(["x", "4", "--job=b", "--job", "--wait", "-o", "--output=json", "-c", "--a.b=1"])))
def test_no_word_is_lost_and_no_setting_is_an_argument(words: list[str]) -> None:
    own, found = split_settings(words, OPTIONS, strict=False)
    for written in (words, own + found):
        assert sorted("=".join(own + found).split("=")) == sorted("=".join(written).split("="))
    assert not any(word.startswith(("--job", "--a.b")) for word in own)


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))
        if not hasattr(command, "commands"):
            yield (*path, name), command


COMMANDS = dict(_commands(get_command(main.app)))
NEEDING = [path for path, command in COMMANDS.items() if isinstance(command, SettingsCommand) and any(
    p.param_type_name == "argument" and p.required for p in command.params)]


@pytest.mark.parametrize("path", NEEDING, ids=" ".join)
def test_setting_stands_for_no_forgotten_argument(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main.main([*path, "--job=other", "--run_dir=/tmp/none"])
    assert e.value.code == Exit.USAGE
    assert "Missing argument" in capsys.readouterr().err


def test_all_commands_that_take_settings_tell_them_from_arguments() -> None:
    assert len(NEEDING) > 12
    unparsed = {path for path, command in COMMANDS.items()
                if command.context_settings.get("ignore_unknown_options") and not isinstance(command, SettingsCommand)}
    assert unparsed == {("test-hosts", "run")}, "it runs a command, which has options of its own"


GROUPS = sorted({path[:n] for path in COMMANDS for n in range(len(path))})


@pytest.mark.parametrize("path", [*COMMANDS, *GROUPS], ids=lambda path: " ".join(path) or "elastic-rl")
def test_every_command_says_what_it_does_and_takes(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main.main([*path, "--help"])
    assert not e.value.code
    said = capsys.readouterr().out
    assert "Usage: elastic-rl" in said
    if path in COMMANDS:
        assert COMMANDS[path].help, "it says nothing of itself"
        assert all(option in said for p in COMMANDS[path].params if not getattr(p, "hidden", False)
                   for option in p.opts if option.startswith("--"))
