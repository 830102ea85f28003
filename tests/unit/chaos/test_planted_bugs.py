"""Each bug that is planted into the product is caught, by its world or by the validators in its log; without it neither
finds anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from support.budget import seeds

from chaos_tests.event_log import Kind
from chaos_tests.sim.logs import LOGS, violated
from chaos_tests.sim.planted import PLANTED, Check, Planted
from chaos_tests.sim.worlds import WORLDS, failures
from chaos_tests.validate.verdict import RULES

MOST_SEEDS = 600
"""Most that a planted bug may take to be caught; most take a few."""


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Planted) -> None:
    assert bug.caught(0) is not None, f"{bug.rule}: {bug.what}, and the run of seed {bug.seed} does not find it"


@pytest.mark.parametrize("world", WORLDS)
def test_world_finds_nothing_without_a_planted_bug(world: str) -> None:
    assert [str(found) for found in failures([world], range(seeds(4))) if found is not None] == []


@pytest.mark.parametrize("world", LOGS)
def test_validators_find_nothing_in_a_log_without_a_planted_bug(world: str) -> None:
    assert [str(verdict.violations[0]) for seed in range(seeds(4)) for verdict in violated(world, seed)] == []


@pytest.mark.parametrize("world", LOGS)
def test_log_is_that_of_the_seed(world: str) -> None:
    kinds = [Counter(event["kind"] for event in LOGS[world](3)) for _ in range(2)]
    assert kinds[0] == kinds[1] and kinds[0][Kind.CHANGE] > 20 and kinds[0][Kind.RUN] == kinds[0][Kind.END] == 1


def test_bug_is_taken_out_again() -> None:
    for by in Check:
        first = next(bug for bug in PLANTED if bug.by is by)
        with first.planted():
            pass
        assert replace(first, plant=lambda patch: None).caught(2) is None


def test_log_has_to_break_the_rule_of_the_bug() -> None:
    bug = next(bug for bug in PLANTED if bug.by is Check.LOG)
    assert bug.caught(0) is not None and replace(bug, rule="I7").caught(0) is None


def test_there_are_bugs_of_every_kind() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 20
    assert {bug.rule for bug in PLANTED} <= RULES.keys()
    by_log = [bug for bug in PLANTED if bug.by is Check.LOG]
    assert len(by_log) >= 8 and {bug.rule for bug in by_log} >= {"I1", "I2", "I3", "I4", "I9"}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_bug_is_one_of_the_product_and_not_of_its_world(bug: Planted) -> None:
    patched = list[Any]()

    class Targets:
        def setattr(self, target: Any, name: str, value: Any) -> None:
            patched.append(target)

    bug.plant(Targets())
    modules = [target.__name__ if isinstance(target, ModuleType) else target.__module__ for target in patched]
    assert modules and all(module.startswith("elastic_rl.") for module in modules)
