"""How long an alert may stay open after its fault, by the log of a run that never was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.chaos_log import KEYS, START

from chaos_tests.event_log import Kind
from chaos_tests.validate.attribution import RESOLVED_S
from chaos_tests.validate.faults import Alerts
from chaos_tests.validate.judge import broken

WITNESS = "pid 1 (x) was sent SIGKILL and seen to end"


class AlertLog:
    """Records of a cluster of the run's own, in which what is given happens; times are seconds of the run."""

    def __init__(self, target: str = "one host") -> None:
        self.records: list[dict[str, Any]] = [{"at": START, "kind": Kind.RUN, "target": target}]
        self._revision, self._created = 0, dict[str, int]()

    def put(self, at: float, key: str, **value: Any) -> None:
        self._revision += 1
        self.records.append({
            "at": START + at, "kind": Kind.CHANGE, "revision": self._revision, "put": True, "key": key,
            "create": self._created.setdefault(key, self._revision), "value": json.dumps(value)})

    def alert(self, at: float, subject: str, phase: str, *, last_at: float = 0.0) -> None:
        self.put(at, KEYS.alert(f"engine.dead/{subject}"), id=subject, kind="engine.dead", subject=subject, phase=phase,
                 severity="error", since=START + at, last_at=last_at, notify_resolved=True)

    def fault(self, began: float, healed: float | None, target: str, name: str = "engine_killed") -> None:
        self.records.append({
            "at": START + began, "kind": Kind.FAULT, "name": name, "target": target, "witness": WITNESS,
            "injected_at": START + began, "healed_at": None if healed is None else START + healed})

    def stop(self, at: float) -> None:
        self.records.append({"at": START + at, "kind": Kind.STOP, "since": START + at, "revision": 1, "step": 1})

    def found(self) -> list[str]:
        return [str(violation) for violation in broken(self.records, [Alerts])]


STAYS = (f"I9: the alert engine.dead of e1 stayed open for {RESOLVED_S:.0f} s beside engine_killed and all that may "
         "keep it open")
LATE = 20.0 + RESOLVED_S + 1.0


def with_alert(resolved: float, stopped: float, target: str = "one host") -> AlertLog:
    log = AlertLog(target)
    log.fault(10.0, 20.0, "e1")
    log.alert(11.0, "e1", "firing")
    if stopped < resolved:
        log.stop(stopped)
    log.alert(resolved, "e1", "resolved")
    log.put(1000.0, KEYS.leader_heartbeat(), term=1)
    return log


@pytest.mark.parametrize(("resolved", "stopped", "sound"), [
    (21.0, 900.0, True), (LATE - 2.0, 900.0, True), (LATE, 900.0, False), (901.0, 900.0, False),
    (LATE, LATE - 2.0, True), (901.0, LATE, False)],
    ids=["at once", "in time", "too late", "by the stop of the job", "stopped before it was due", "after it was due"])
def test_alert_has_to_resolve_by_itself_before_the_job_is_stopped(resolved: float, stopped: float, sound: bool) -> None:
    assert with_alert(resolved, stopped).found() == ([] if sound else [STAYS])


def test_alert_that_stays_open_on_the_cluster_of_others_or_in_a_gap_is_not_judged() -> None:
    assert with_alert(901.0, 900.0, "job j in /runs").found() == []
    log = with_alert(901.0, 900.0)
    log.records.insert(3, {"at": START + 12.0, "kind": Kind.GAP, "first": 2, "last": 2})
    assert log.found() == []


def test_job_that_ends_by_itself_ends_its_alerts() -> None:
    log = with_alert(901.0, 900.0)
    log.records = [record for record in log.records if record["kind"] != Kind.STOP]
    log.put(30.0, KEYS.job_status(), phase="finished")
    log.records.sort(key=lambda record: record["at"])
    assert log.found() == []


def test_alert_that_stays_open_hides_no_later_fault_of_its_part() -> None:
    log = with_alert(901.0, 900.0)
    log.fault(400.0, 410.0, "e2")
    assert log.found() == [STAYS, "I9: engine_killed of e2 gave no alert"]


def test_alert_that_stays_open_among_faults_that_follow_one_another_closely_is_found() -> None:
    log = with_alert(901.0, 900.0)
    for n in range(1, 20):
        log.fault(10.0 + 40.0 * n, 20.0 + 40.0 * n, "", "etcd_terminated")
    assert STAYS in log.found()


def test_alert_that_is_reported_again_is_due_later() -> None:
    def found(reported: bool) -> list[str]:
        log = AlertLog()
        log.fault(10.0, 20.0, "e1")
        log.alert(11.0, "e1", "firing")
        log.alert(60.0, "e1", "firing", last_at=60.0 if reported else 0.0)
        log.alert(LATE + 20.0, "e1", "resolved", last_at=60.0 if reported else 0.0)
        return log.found()

    assert found(True) == [] and found(False) == [STAYS]


def test_one_time_event_has_no_end() -> None:
    log = with_alert(901.0, 900.0)
    for record in log.records:
        record["value"] = record.get("value", "").replace('"notify_resolved": true', '"notify_resolved": false')
    assert log.found() == []


@pytest.mark.parametrize(("first", "last", "found"), [
    (500.0, 520.0, [STAYS, "I9: engine_killed of e2 gave no alert"]), (405.0, 420.0, [STAYS]),
    (20.0, 30.0, ["I9: engine_killed of e2 gave no alert"])],
    ids=["after both", "beside the fault", "in which it may have ended"])
def test_only_what_a_gap_may_hide_is_not_judged(first: float, last: float, found: list[str]) -> None:
    log = with_alert(901.0, 900.0)
    log.fault(400.0, 410.0, "e2")
    log.put(first, KEYS.dcs_catalog(), id="c")
    log.records.append({"at": START + first + 0.1, "kind": Kind.GAP, "first": 900, "last": 901})
    log.records.append({"at": START + last, "kind": Kind.PRESENT, "listed": 901})
    log.records.sort(key=lambda record: record["at"])
    assert log.found() == found
