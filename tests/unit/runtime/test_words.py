"""Numbers of things in messages."""

from __future__ import annotations

import pytest

from elastic_rl.runtime.words import counted


@pytest.mark.parametrize(("count", "one", "many", "said"), [
    (1, "prompt group", "", "1 prompt group"), (0, "prompt group", "", "0 prompt groups"), (2, "rank", "", "2 ranks"),
    (1, "process", "processes", "1 process"), (3, "process", "processes", "3 processes")])
def test_thing_is_in_the_plural_unless_there_is_one(count: int, one: str, many: str, said: str) -> None:
    assert counted(count, one, many) == said
