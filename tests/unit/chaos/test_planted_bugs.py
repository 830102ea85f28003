"""Each bug that is planted into the product is caught by its world, which finds nothing without it."""

from __future__ import annotations

import pytest
from support.budget import seeds

from chaos_tests.sim.planted import PLANTED, Planted
from chaos_tests.sim.worlds import WORLDS, failures

MOST_SEEDS = 600
"""Most that a planted bug may take to be caught; most take a few."""


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Planted) -> None:
    assert bug.caught(MOST_SEEDS) is not None, f"{bug.rule}: {bug.what}, and nothing finds it"


@pytest.mark.parametrize("world", WORLDS)
def test_world_finds_nothing_without_a_planted_bug(world: str) -> None:
    assert [str(found) for found in failures([world], range(seeds(4))) if found is not None] == []


def test_bug_is_taken_out_again_and_names_are_unique() -> None:
    first = PLANTED[0]
    with first.planted():
        pass
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 20
    assert [*failures([first.world], range(2))] == [None, None]
