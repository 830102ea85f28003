"""What the runner makes of its log, and what it reads of notifications and processes. Pure parts."""

from __future__ import annotations

from typing import Any

import pytest

from chaos_tests.event_log import FORM, Kind
from chaos_tests.receiver import Notice, notices
from chaos_tests.runner import below_floor, judged
from chaos_tests.sampling import role_of
from elastic_rl.coordinator.alerts.message import compose
from elastic_rl.coordinator.alerts.receiver_queue import NotificationGroup
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity

RUN = {"kind": Kind.RUN, "form": FORM, "scenario": "quick", "settings": {"train": {"max_staleness": 0}},
       "schedule": {"form": 2, "seed": 1, "steps": 3, "minutes": 0.0, "scenario": "quick", "settings": [],
                    "strikes": [{"step": 2, "faults": ["engine_killed"], "second": 0.0}]}}
FAULT = {"kind": Kind.FAULT, "name": "engine_killed", "step": 2, "witness": "seen", "problem": "", "injected_at": 12.5,
         "detected_at": 13.0, "healed_at": 14.0}
STEPS = [{"kind": Kind.STEP, "at": 10.0 + step, "step": step, "staleness": 0, "logprob_diff_max": 1e-6}
         for step in (1, 2, 3)]
END = {"kind": Kind.END, "committed_steps": [1, 2, 3], "alerts": [], "aborted": "", "report": {
    "steps": 3, "versions_committed": 4, "groups_lost": 0, "groups_duplicated": 0, "audit_problems": []}}


def test_log_of_a_sound_run_is_judged_so() -> None:
    assert judged([RUN, *STEPS, FAULT, END]) == [] and below_floor([RUN, *STEPS, FAULT, END]) == []


@pytest.mark.parametrize(("changed", "said"), [
    ([RUN, *STEPS, END], "engine_killed was planned"),
    ([RUN, *STEPS, FAULT | {"witness": ""}, END], "engine_killed was planned"),
    ([RUN, *STEPS, FAULT, {"kind": Kind.LEFTOVER, "what": "process 7"}, END], "I8: process 7 is left"),
    ([RUN, *STEPS, FAULT, END | {"committed_steps": [1, 3]}], "I11"),
    ([RUN, *STEPS, FAULT], "no report of the job"),
    ([RUN, *STEPS, FAULT, END | {"report": {}}], "no report of the job")])
def test_what_is_wrong_with_a_log_is_said(changed: list[dict[str, Any]], said: str) -> None:
    assert any(said in line for line in judged(changed))


def test_fault_before_there_was_load_fails_the_run() -> None:
    early = FAULT | {"injected_at": 11.5}
    assert "1 steps were done before the first fault" in below_floor([RUN, *STEPS, early, END])[0]
    again = [STEPS[0], STEPS[0], *STEPS[1:]]
    assert below_floor([RUN, *again, early, END]), "a step that was done twice counts once"
    assert below_floor([RUN, END]) == [], "no fault has happened"


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("phase", [Phase.FIRING, Phase.RESOLVED])
def test_notifications_of_the_product_are_read(count: int, phase: Phase) -> None:
    alerts = [Alert(id=f"id{n}", kind="engine.dead", subject=f"engine {n}", message="it: is dead", phase=phase,
                    severity=Severity.ERROR, since=1.0, resolved_at=2.0) for n in range(count)]
    group = NotificationGroup(id="g", phase=phase, alerts=[alert.id for alert in alerts], created_at=1.0)
    found = [*notices(*compose("job", group, alerts))]
    assert {notice.key for notice in found} == {alert.id for alert in alerts} and len(found) == count
    assert {notice.phase for notice in found} == {phase.value}
    if count < 10:
        assert Notice("engine.dead", "engine 0", phase.value, "id0") in found


def test_what_is_no_alert_is_no_notice() -> None:
    assert [*notices("[TEST] job: hello", "it works")] == []


@pytest.mark.parametrize(("command", "role"), [
    (["/venv/bin/python", "-m", "elastic_rl.coordinator.service", "--replica", "a"], "elastic_rl.coordinator.service"),
    (["ray::ServeReplica:actor:actor"], "ray::ServeReplica:actor:actor"),
    (["sglang::scheduler 3"], "sglang::scheduler"),
    (["python", "/x/ray/dashboard/agent.py", "--a"], "agent.py"), (["/usr/bin/etcd", "--name", "e"], "etcd"),
    ([], "unknown")])
def test_role_of_a_process_is_the_same_over_its_restarts(command: list[str], role: str) -> None:
    assert role_of(command) == role
