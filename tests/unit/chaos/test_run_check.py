"""The check of runs that had faults: it accepts a sound one, and each broken rule is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from chaos_tests.faults.catalogue import WEIGHTS
from chaos_tests.nemesis.schedule import Schedule, Strike, drawn
from chaos_tests.validate.run import Evidence, check
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity

SCHEDULE = Schedule(1, 3, (Strike(1, ("engine_killed", "router_killed")), Strike(2, ("engine_killed",))))
FAULT = {"step": 1, "witness": "seen", "injected_at": 1.0, "detected_at": 2.0, "healed_at": 3.0}
SOUND: dict[str, Any] = {
    "report": {"steps": 3, "versions_committed": 4, "groups_lost": 0, "groups_duplicated": 0, "audit_problems": [],
               "faults": [FAULT | {"name": name} for name in ("engine_killed", "router_killed", "engine_killed")]},
    "steps": [{"step": n, "staleness": 0, "logprob_diff_max": 1e-6} for n in (1, 2, 2, 3)],
    "committed_steps": [1, 2, 3], "max_staleness": 0, "leftovers": [],
    "alerts": [Alert(id="1", kind="engine.dead", subject="e", message="m", severity=Severity.ERROR,
                     phase=Phase.RESOLVED, since=1.0)]}


def rules(changed: Callable[[dict[str, Any]], object] = lambda fields: None) -> list[str]:
    fields = copy.deepcopy(SOUND)
    changed(fields)
    return [violation.rule for violation in check(Evidence(SCHEDULE, **fields))]


def test_sound_run_has_no_violation() -> None:
    assert rules() == []
    assert rules(lambda f: f["steps"][0].update(logprob_diff_max=None)) == [], "the loop has ended before it was told"


@pytest.mark.parametrize(("change", "rule"), [
    (lambda f: f["report"].update(steps=2), "I11"),
    (lambda f: f["committed_steps"].pop(), "I11"),
    (lambda f: f["committed_steps"].insert(1, 1), "I11"),
    (lambda f: f["report"].update(versions_committed=3), "I3"),
    (lambda f: f["report"].update(groups_lost=1), "I5"),
    (lambda f: f["report"].update(groups_duplicated=1), "I5"),
    (lambda f: f["report"].update(audit_problems=["p"]), "I5"),
    (lambda f: f["steps"][1].update(staleness=1), "I5"),
    (lambda f: f["steps"][1].update(logprob_diff_max=0.1), "I4"),
    (lambda f: f["steps"][1].update(logprob_diff_max=float("nan")), "I4"),
    (lambda f: [s.update(logprob_diff_max=None) for s in f["steps"]], "run"),
    (lambda f: f.update(alerts=[f["alerts"][0].replace(phase=Phase.FIRING)]), "I9"),
    (lambda f: f["leftovers"].append("process 1"), "I8"),
    (lambda f: f["report"]["faults"].pop(), "run"),
    (lambda f: f["report"]["faults"][0].update(witness=""), "run"),
    (lambda f: f["report"]["faults"][0].update(detected_at=None), "I10"),
    (lambda f: f["report"]["faults"][0].update(healed_at=None), "I10"),
    (lambda f: f["report"]["faults"][0].update(healed_at=1.5), "I10")])
def test_each_broken_rule_is_found(change: Callable[[dict[str, Any]], object], rule: str) -> None:
    assert rules(change) == [rule]


def test_every_fault_of_the_catalogue_can_be_drawn() -> None:
    found = drawn(1, 60, len(WEIGHTS), WEIGHTS)
    assert sorted(name for strike in found.strikes for name in strike.faults) == sorted(WEIGHTS)
