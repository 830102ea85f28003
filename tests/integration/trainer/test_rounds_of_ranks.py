"""Jobs of unequal length on real ranks over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic_rl.net.addresses import free_port

RANKS = 2


def test_ranks_wait_for_the_slowest_and_notice_a_lost_one() -> None:
    program = [sys.executable, str(Path(__file__).with_name("rounds_rank.py")), str(free_port())]
    shown = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout.splitlines()
    lines = [[line.removeprefix(f"{rank} ") for line in shown if line.startswith(f"{rank} ")] for rank in range(RANKS)]
    assert [rank_lines[0] for rank_lines in lines] == ["result of 0 True", "result of 1 True"]
    assert [rank_lines[1] for rank_lines in lines] == ["met ['waits'] True"] * RANKS, "longer than a round may take"
    assert [rank_lines[2] for rank_lines in lines] == ["met again 2"] * RANKS
    assert [rank_lines[3] for rank_lines in lines] == ["rank 1: chunk 17 is on no node"] * RANKS
    assert [rank_lines[4] for rank_lines in lines] == ["again"] * RANKS
    assert [rank_lines[5] for rank_lines in lines] == ["TrainerFailed", "ValueError"]
    assert [rank_lines[6] for rank_lines in lines] == ["TrainerFailed", "ValueError"]
