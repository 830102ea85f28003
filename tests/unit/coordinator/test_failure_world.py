"""The failure policy in a world that fails (``chaos_tests/sim/failures.py``)."""

from __future__ import annotations

from collections import Counter

from support.budget import seeds

from chaos_tests.sim.failures import run
from chaos_tests.sim.violation import RuleViolated


def test_faults_are_counted_once_and_recovered_or_end_the_run_whatever_fails() -> None:
    seen: Counter[str] = Counter()
    for seed in range(seeds(10)):
        try:
            seen += run(seed).counts
        except RuleViolated as e:
            raise AssertionError(f"seed {seed}: {e}") from e
    assert min(seen["fault counted"], seen["restart by the policy"], seen["pass ended early"]) > seeds(10), seen
    assert seen["global restart for faults in a row"] > 0 and seen["stale leader fenced"] > 0, "too few faults happened"


def test_seed_reproduces_the_same_history() -> None:
    assert run(7).counts == run(7).counts
