"""Commands of the command line, run in this process."""

from __future__ import annotations

import pytest

from elastic_rl.cli import main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """Exit code and output of a command, stdout before stderr."""
    with pytest.raises(SystemExit) as e:
        main.main(args)
    seen = capsys.readouterr()
    return int(e.value.code or 0), seen.out + seen.err


def run_in_one_line(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """As ``run``, with one space in the place of each line break and indentation."""
    code, said = run(capsys, *args)
    return code, " ".join(said.split())
