"""What the runner reads of notifications and processes. Pure parts."""

from __future__ import annotations

import pytest

from chaos_tests.receiver import Notice, notices
from chaos_tests.sampling import role_of
from elastic_rl.coordinator.alerts.message import compose
from elastic_rl.coordinator.alerts.receiver_queue import NotificationGroup
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity


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
