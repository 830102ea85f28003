"""Runs of a job with faults that a seed has drawn, some of them at once, judged by the checkers of all rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiers import full

from chaos_tests import job_run
from chaos_tests.faults.catalogue import WEIGHTS
from chaos_tests.nemesis.schedule import drawn
from chaos_tests.validate.judge import judge

FAULTS, STEPS, APART, AFTER = 10, 140, 8, 30
"""Steps take half a second, and go on without the driver or a coordinator: there are some for each recovery."""


@full(proved_in="tests/e2e/test_faults_at_once.py tests/unit/chaos/test_verdict.py",
      why="faults in orders and pairs that nobody has chosen")
@pytest.mark.e2e
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_run_keeps_every_rule_under_drawn_faults(seed: int, tmp_path: Path) -> None:
    schedule = drawn(seed, STEPS, FAULTS, WEIGHTS, apart=APART, after=AFTER)
    print(schedule.to_json())
    verdicts = judge(job_run.run(tmp_path, schedule))
    assert [str(violation) for verdict in verdicts for violation in verdict.violations] == []
