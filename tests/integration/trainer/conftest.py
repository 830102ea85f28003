"""One process for all tests of ranks: to import Megatron takes longer than what the ranks of most groups do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    made = RankProcesses(tmp_path_factory.mktemp("ranks"))
    try:
        yield made
    finally:
        made.close()
