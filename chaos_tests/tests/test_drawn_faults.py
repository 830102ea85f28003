"""Runs of a job with faults that a seed has drawn, some of them at once, judged by every rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import full

from chaos_tests import runner
from chaos_tests.scenarios import SCENARIOS


@full(proved_in="chaos_tests/tests/test_runner_with_light_job.py tests/e2e/test_faults_at_once.py",
      why="faults in orders and pairs that nobody has chosen")
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_run_keeps_every_rule_under_drawn_faults(seed: int, tmp_path: Path) -> None:
    outcome = runner.run(SCENARIOS["drawn"].schedule(seed), tmp_path / "results", say=print)
    assert [*outcome.wrong] == [] and not outcome.aborted
