"""Runs of a job in which each fault of the catalogue happens once, one after the other, judged by one check of all
rules. What several of them at once do is in ``test_drawn_faults.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.tiers import full

from chaos_tests import job_run
from chaos_tests.faults.catalogue import WEIGHTS
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.validate.run import check

APART, AFTER = 8, 30
"""Steps take half a second, and some go on while a part is away."""
AT_MOST = 16
"""Faults of a run: more of them would cost more than the crash-loop rule allows, and hours until one is judged."""
RUNS = [tuple(sorted(WEIGHTS)[first:first + AT_MOST]) for first in range(0, len(WEIGHTS), AT_MOST)]


def _schedule(names: Sequence[str]) -> Schedule:
    strikes = tuple(Strike(3 + APART * i, (name,)) for i, name in enumerate(names))
    return Schedule(0, strikes[-1].step + AFTER, strikes)


@full(proved_in="chaos_tests/tests/test_faults_of_coordinators.py tests/unit/chaos/test_fault_catalogue.py",
      why="each fault of the catalogue on a job that runs: hours of a machine with two cores")
@pytest.mark.e2e
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("names", RUNS, ids=lambda names: names[0])
def test_run_keeps_every_rule_under_each_fault_of_the_catalogue(names: tuple[str, ...], tmp_path: Path) -> None:
    assert [*map(str, check(job_run.run(tmp_path, _schedule(names))))] == []
