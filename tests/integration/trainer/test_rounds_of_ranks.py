"""Jobs of unequal length on real ranks over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic_rl.net.addresses import free_port

RANKS = 2


def test_ranks_wait_for_the_slowest_job_give_up_together_and_notice_a_lost_rank() -> None:
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, str(Path(__file__).with_name("rounds_rank.py")), str(rank), str(port)],
                              stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
    try:
        lines = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank_lines[0] for rank_lines in lines] == ["result of 0 True", "result of 1 True"]
    assert [rank_lines[1] for rank_lines in lines] == ["rank 1: chunk 17 is on no node"] * RANKS
    assert [rank_lines[2] for rank_lines in lines] == ["again"] * RANKS
    assert [rank_lines[3] for rank_lines in lines] == ["TrainerFailed", "ValueError"]
