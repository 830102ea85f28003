"""Commands in hints address what the command line has addressed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl.cli import main
from elastic_rl.cli.hints import address, with_address


@pytest.mark.parametrize(("line", "found"), [
    ([], []), (["status", "--job=j", "-o", "json"], ["--job=j"]), (["status", "--job", "j"], ["--job=j"]),
    (["-c", "a b.yaml", "--run_dir=/x y"], ["-c 'a b.yaml'", "--run_dir='/x y'"]),
    (["--config=a.yaml"], ["-c a.yaml"]), (["--job=a", "--job=b"], ["--job=b"]), (["--url="], []),
    (["--url=http://h:1", "--token-file", "t", "--train.steps=3"], ["--url=http://h:1", "--token-file=t"]),
    (["test-hosts", "--", "--job=j"], []), (["--job"], [])])
def test_address_of_a_command_line(line: list[str], found: list[str]) -> None:
    assert address(line) == found


@pytest.mark.parametrize(("hint", "shown"), [
    ("`elastic-rl down` first", "`elastic-rl down -c c.yaml --run_dir=/r` first"),
    ("`elastic-rl down`, then `elastic-rl up`",
     "`elastic-rl down -c c.yaml --run_dir=/r`, then `elastic-rl up -c c.yaml --run_dir=/r`"),
    ("`elastic-rl down --job=other --run_dir=/x`", "`elastic-rl down --job=other --run_dir=/x`"),
    ("`elastic-rl up --cluster=NAME`", "`elastic-rl up --cluster=NAME`"),
    ("`elastic-rl config schema` lists every key", "`elastic-rl config schema` lists every key"),
    ("`elastic-rl config explain train`, or `elastic-rl version`",
     "`elastic-rl config explain train`, or `elastic-rl version`"),
    ("`elastic-rl versions ls`", "`elastic-rl versions ls -c c.yaml --run_dir=/r`"),
    ("`elastic-rl jobs` lists them", "`elastic-rl jobs -c c.yaml --run_dir=/r` lists them"),
    ("write `--job=NAME`", "write `--job=NAME`"), ("", "")])
def test_commands_of_a_hint_have_the_address_of_the_command_line(hint: str, shown: str) -> None:
    assert with_address(hint, ["status", "-c", "c.yaml", "--run_dir=/r", "-o", "json"]) == shown
    if "jobs" in hint:
        assert with_address(hint, ["status", "--job=j", "-c", "c.yaml", "--run_dir=/r"]) == shown
    assert with_address(hint, ["status", "-o", "json"]) == hint


def test_error_names_commands_with_the_options_that_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                                 ) -> None:
    (tmp_path / "c.yaml").write_text("job: j\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main.main(["status", "-c", str(tmp_path / "c.yaml"), f"--run_dir={tmp_path}"])
    assert f"--run_dir={tmp_path}" in capsys.readouterr().err.partition("hint:")[2]
