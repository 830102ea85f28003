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
from chaos_tests.model.models import ASSIGNMENT, TERMS
from chaos_tests.model.terms import FENCED
from chaos_tests.sim import cluster, election
from chaos_tests.sim.logs import LOGS, violated
from chaos_tests.sim.patch import Patch
from chaos_tests.sim.planted import PLANTED, Caught, Check, Missed, Planted
from chaos_tests.sim.recorded import RecordedCluster, RecordedElection
from chaos_tests.sim.store import Log
from chaos_tests.sim.worlds import STEPS, WORLDS, Counted, failures
from chaos_tests.validate import histories
from chaos_tests.validate.judge import CHECKERS, broken, judge
from chaos_tests.validate.verdict import RULES, State
from elastic_rl.coordinator.election.protocol import ElectionProtocol
from elastic_rl.dcs.catalog.writer import StreamWriter
from elastic_rl.driver.placement import Placer
from elastic_rl.host.agent import duties
from elastic_rl.pipeline.flow.group_flow import GroupFlow
from elastic_rl.trainer.service.commands import WriterGate


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Planted) -> None:
    found = bug.tried(0)
    assert isinstance(found, Caught), f"{bug.rule}: {bug.what}, and the run of seed {bug.seed} shows: {found.instead}"


@pytest.mark.parametrize("world", WORLDS)
def test_world_finds_nothing_without_a_planted_bug(world: str) -> None:
    assert [str(found) for found in failures([world], range(seeds(4))) if found is not None] == []


@pytest.mark.parametrize("world", LOGS)
def test_validators_find_nothing_in_a_log_without_a_planted_bug(world: str) -> None:
    assert [str(verdict.violations[0]) for seed in range(seeds(4)) for verdict in violated(world, seed)] == []


@pytest.mark.parametrize("world", LOGS)
def test_log_without_a_planted_bug_shows_that_the_rules_of_its_bugs_are_kept(world: str) -> None:
    state = {verdict.rule: verdict.state for verdict in judge(LOGS[world](3))}
    of_bugs = {bug.rule for bug in PLANTED if bug.by is Check.LOG and bug.world == world}
    assert of_bugs and {state[rule] for rule in of_bugs} == {State.KEPT}


@pytest.mark.parametrize("world, model, calls", [
    ("election", TERMS, {"acquire", "write", "read"}), ("cluster", ASSIGNMENT, {"put", "read"})])
def test_log_has_what_clients_of_the_world_were_told(world: str, model: str, calls: set[str]) -> None:
    events = LOGS[world](2)
    told = [event for event in events if event["kind"] == Kind.OPERATION]
    assert {(event["model"], event["call"]) for event in told} == {(model, call) for call in calls}
    assert any(event["ended_s"] is None for event in told) and len(told) > 200
    [of_rule] = [verdict for verdict in judge(events) if verdict.rule == "I1"]
    assert f"{len(told):,} operations of clients, by {model}" in of_rule.evidence


def test_history_of_an_election_has_refused_writes_of_terms_that_are_over() -> None:
    told = [event for event in LOGS["election"](2) if event["kind"] == Kind.OPERATION]
    assert any(event["result"] == FENCED for event in told)


@pytest.mark.parametrize("name, seen_otherwise", [
    ("write-of-a-term-that-is-over", True), ("assignments-of-a-stale-reading", False),
    ("assignments-are-deleted", True)])
def test_bug_is_caught_by_what_clients_were_told(name: str, seen_otherwise: bool) -> None:
    bug = next(bug for bug in PLANTED if bug.name == name)
    with bug.planted():
        events = LOGS[bug.world](bug.seed)
    assert {violation.rule for violation in broken(events, histories.CHECKERS)} == {"I1"}
    others = broken(events, [checker for checker in CHECKERS if checker not in histories.CHECKERS])
    assert ("I1" in {violation.rule for violation in others}) == seen_otherwise


def test_history_changes_nothing_in_its_world() -> None:
    def happened(world: Counted) -> dict[str, int]:
        return {kind: count for kind, count in world.counts.items() if kind != STEPS}

    assert happened(RecordedElection(3, Log("election", 3)).run(election.END_S)) == happened(election.run(3))
    assert happened(RecordedCluster(3, Log("cluster", 3)).run()) == happened(cluster.run(3))


@pytest.mark.parametrize("world", LOGS)
def test_log_is_that_of_the_seed(world: str) -> None:
    kinds = [Counter(event["kind"] for event in LOGS[world](3)) for _ in range(2)]
    assert kinds[0] == kinds[1] and kinds[0][Kind.CHANGE] > 20 and kinds[0][Kind.RUN] == kinds[0][Kind.END] == 1


def test_bug_is_taken_out_again() -> None:
    for by in Check:
        first = next(bug for bug in PLANTED if bug.by is by)
        with first.planted():
            pass
        assert replace(first, plant=lambda patch: None).tried(2) == Missed(3, "")


@pytest.mark.parametrize("by", Check)
def test_another_rule_than_that_of_the_bug_is_no_catch(by: Check) -> None:
    bug = next(bug for bug in PLANTED if bug.by is by)
    assert isinstance(bug.tried(0), Caught)
    found = replace(bug, rule="I7").tried(0)
    assert isinstance(found, Missed) and found.instead.startswith(f"seed {bug.seed}: {bug.rule}: ")


@pytest.mark.parametrize("world, target, name", [
    ("steps", WriterGate, "admit"), ("async", GroupFlow, "lease"), ("cluster", duties, "_why_over"),
    ("engines", Placer, "of"), ("versions", StreamWriter, "_saw_next"), ("election", ElectionProtocol, "steps")])
def test_mutation_that_no_longer_fits_the_product_is_no_catch(world: str, target: Any, name: str) -> None:
    def plant(patch: Patch) -> None:
        patch.setattr(target, name, lambda: None)

    for by in Check if world in LOGS else [Check.WORLD]:
        bug = Planted("of another signature", world, "I1", "", plant, by=by)
        found = [bug.tried(0), *(replace(bug, rule=rule).tried(0) for rule in RULES)]
        assert all(isinstance(one, Missed) and "TypeError: " in one.instead for one in found)


def test_rule_that_is_broken_in_another_way_than_the_bug_promises_is_no_catch() -> None:
    for by in Check:
        bug = next(bug for bug in PLANTED if bug.by is by)
        found = replace(bug, says="of something else").tried(0)
        assert isinstance(found, Missed) and found.instead.startswith(f"seed {bug.seed}: {bug.rule}: ")


def test_hang_is_no_group_that_was_trained_on_twice() -> None:
    bug = next(bug for bug in PLANTED if bug.name == "consumed-groups-stay-in-the-flow")
    found = replace(bug, rule="I5").tried(0)
    assert isinstance(found, Missed) and found.instead == f"seed {bug.seed}: I11: the job did not finish"


def test_there_are_bugs_of_every_kind() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 20
    assert {bug.rule for bug in PLANTED} <= RULES.keys()
    by_log = [bug for bug in PLANTED if bug.by is Check.LOG]
    assert {bug.rule for bug in by_log} >= {f"I{number}" for number in (1, 2, 3, 4, 5, 6, 9, 10, 11, 13)}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_bug_is_one_of_the_product_and_not_of_its_world(bug: Planted) -> None:
    patched = list[Any]()

    class Targets:
        def setattr(self, target: Any, name: str, value: Any) -> None:
            patched.append(target)

    bug.plant(Targets())
    modules = [target.__name__ if isinstance(target, ModuleType) else target.__module__ for target in patched]
    assert modules and all(module.startswith("elastic_rl.") for module in modules)
