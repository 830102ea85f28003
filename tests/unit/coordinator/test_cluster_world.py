"""The cluster's leader and host agents in a world that fails (``chaos_tests/sim/cluster.py``)."""

from __future__ import annotations

from collections import Counter

import pytest
from support.budget import seeds

from chaos_tests.sim.cluster import run
from chaos_tests.sim.violation import RuleViolated

SEEDS, BATCHES = seeds(20), 2


@pytest.mark.timeout(600 + SEEDS)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_assignments_have_one_effective_holder_and_are_carried_out_whatever_fails(batch: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(batch, SEEDS, BATCHES):
        try:
            seen += run(seed).counts
        except RuleViolated as e:
            raise AssertionError(f"seed {seed}: {e}") from e
    worlds = SEEDS // BATCHES
    assert min(seen["starts"], seen["refused"], seen["leases lost"], seen["host suspected"]) > worlds, seen
    assert min(seen["moves"], seen["adopted"], seen["host lost"]) > worlds / 2, seen
    assert min(seen["self-fenced"], seen["fenced"], seen["over"], seen["taken back"]) > 0, "too few faults happened"


def test_seed_reproduces_the_same_history() -> None:
    assert run(7).counts == run(7).counts
