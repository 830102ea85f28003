"""``elastic-rl test-hosts``: links that cannot be, or that nothing is to happen to, are refused before hosts are looked
for."""

from __future__ import annotations

import pytest

from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit


@pytest.mark.parametrize(("args", "said"), [
    (["block", "host-1", "host-1"], "name two hosts"),
    (["impair", "host-1"], "nothing is to be impaired"),
    (["impair", "host-1", "--rate", "inf"], "numbers are finite"),
    (["impair", "host-1", "--loss", "nan"], "Input should be")])
def test_link_that_cannot_be_is_refused(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main.main(["test-hosts", *args])
    assert e.value.code == Exit.USAGE and said in capsys.readouterr().err
