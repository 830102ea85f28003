"""Text, audience, grouping and retries of notifications."""

from __future__ import annotations

from pathlib import Path

import pytest
from apprise import NotifyType

from elastic_rl import config
from elastic_rl.config import AlertConfig, AlertRoute
from elastic_rl.coordinator.alerts import message, receivers
from elastic_rl.coordinator.alerts.notifier import Notifier, render
from elastic_rl.coordinator.alerts.receiver_queue import (
    AttemptResult,
    NotificationGroup,
    ReceiverQueue,
    SendLimits,
    next_send,
    record_result,
    without_notified,
)
from elastic_rl.coordinator.alerts.receivers import receiver_name
from elastic_rl.coordinator.alerts.state_machine import TEST, Alert, PendingNotice, Phase, make_test_alert
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.records import Severity


def alert(n: int = 0, kind: str = "dcs.dead", severity: Severity = Severity.ERROR, cause: str = "", **more) -> Alert:
    return Alert(**{"id": f"id{n:03}", "kind": kind, "subject": f"s{n}", "message": f"it {n} is gone",
                    "severity": severity, "phase": Phase.FIRING, "since": 5.0, "fired_at": 5.0, "cause": cause, **more})


def group(*alerts: Alert, phase: Phase = Phase.FIRING) -> NotificationGroup:
    return NotificationGroup(id="g1", phase=phase, alerts=[a.id for a in alerts], created_at=5.0)


# -- text -------------------------------------------------------------------------------------------------------
def test_text_of_one_alert_has_its_id_and_that_of_the_notification() -> None:
    title, body = message.compose("job", group(alert()), [alert()])
    assert title == "[FIRING] job: dcs.dead s0"
    assert body.startswith("it 0 is gone\n") and "id=id000 phase=firing severity=error" in body and "message=g1" in body
    over = alert(phase=Phase.RESOLVED, resolved_at=9.0)
    title, body = message.compose("job", group(over, phase=Phase.RESOLVED), [over])
    assert title.startswith("[RESOLVED]") and "resolved after 4.0 s" in body


def test_text_lists_few_alerts_in_full_and_many_by_kind_and_cause() -> None:
    few = [alert(1), alert(0), alert(2, "pool.short", Severity.WARNING)]
    title, body = message.compose("job", group(*few), few)
    assert title == "[FIRING] job: 3 alerts: dcs.dead ×2, pool.short" and "dcs.dead s1: it 1 is gone id=id001\n" in body
    many = [alert(n, "engine.dead", cause="host-3") for n in range(40)]
    title, body = message.compose("job", group(*many), many)
    assert title == "[FIRING] job: 40 alerts on host-3: engine.dead ×40"
    assert "engine.dead on host-3 ×40: s0, s1," in body and "and 28 more" in body
    assert all(a.id in body for a in many) and len(body.splitlines()) == 2


def test_title_tags_tests_and_events_and_severity_gives_the_type() -> None:
    t = make_test_alert(5.0, "t1", "ada")
    assert message.compose("job", group(t), [t])[0] == f"[TEST] job: {TEST} t1"
    event = alert(kind="job.finished", severity=Severity.INFO, notify_resolved=False)
    assert message.compose("job", group(event), [event])[0].startswith("[EVENT]")
    both = [event, alert(1)]
    assert render("job", group(*both), both, lambda: True).type == NotifyType.FAILURE
    assert render("job", group(*both, phase=Phase.RESOLVED), both, lambda: True).type == NotifyType.SUCCESS


# -- audience ---------------------------------------------------------------------------------------------------
def names(cfg: AlertConfig, a: Alert) -> list[str]:
    return receivers.audience(a, list(receivers.load(cfg)), cfg.severity_tags)


def test_routes_select_by_severity_and_kind_and_urls_get_everything(tmp_path: Path) -> None:
    file = tmp_path / "apprise.yaml"
    file.write_text("urls:\n  - json://localhost:5:\n      tag: pool, page\n"
                    "  - json://localhost:6:\n      tag: always\n")
    cfg = AlertConfig(urls=["json://localhost:1"], config_file=str(file), routes=[
        AlertRoute(url="json://localhost:2", tags=["error"], name="pager"),
        AlertRoute(url="json://localhost:3", tags=["engine", "dcs.dead"], name="hosts")])
    everything = {receiver_name("json://localhost:1")} | {
        r.name for r in receivers.load(cfg) if "always" in r.tags}
    assert len(everything) == 2
    short = alert(kind="pool.short", severity=Severity.WARNING)
    assert set(names(cfg, alert())) == everything | {"pager", "hosts"}
    assert {r.name for r in receivers.load(cfg) if "page" in r.tags} == set(names(cfg, short)) - everything
    assert set(names(cfg, alert(kind="job.finished", severity=Severity.INFO))) == everything
    assert len(names(cfg, make_test_alert(1.0, "t", "ada"))) == 5
    paged = cfg.model_copy(update={"severity_tags": {"warning": ["page"]}})
    assert set(names(paged, alert(kind="x.y", severity=Severity.WARNING))) == set(names(cfg, short))
    assert "pager" in names(paged, alert()), "a severity without tags of its own has its name"


def test_receiver_that_is_configured_twice_gets_what_either_gets() -> None:
    cfg = AlertConfig(urls=["json://localhost:1"], routes=[AlertRoute(url="json://localhost:1", tags=["error"])])
    (only,) = receivers.load(cfg)
    assert not only.tags
    with pytest.raises(ConfigError, match="name 'x'"):
        receivers.load(AlertConfig(routes=[AlertRoute(url=f"json://h:{p}", name="x") for p in (1, 2)]))


def test_url_of_a_service_in_a_file_keeps_its_options(tmp_path: Path) -> None:
    file = tmp_path / "apprise.yaml"
    file.write_text("urls:\n  - json://user:pass@localhost:5/path?rto=17&cto=3&:key=value\n")
    (url,) = receivers.load(AlertConfig(config_file=str(file))).values()
    assert url.startswith("json://user:pass@localhost:5/path") and all(
        option in url for option in ("rto=17", "cto=3", "key=value"))


def test_unknown_url_is_refused_without_its_secret(tmp_path: Path) -> None:
    for cfg, where in ((AlertConfig(urls=["nosuch://secret-token@host"]), r"alerts\.urls\[0\]"),
                       (AlertConfig(routes=[AlertRoute(url="nosuch://secret-token@h")]), r"alerts\.routes\[0\]\.url"),
                       (AlertConfig(config_file=str(tmp_path / "none.yaml")), "alerts.config_file")):
        with pytest.raises(ConfigError, match=where) as e:
            Notifier("j", cfg)
        assert "secret" not in str(e.value)
    with pytest.raises(ConfigError, match="alerts.severity_tags"):
        config.parse({"alerts": {"severity_tags": {"fatal": ["page"]}}})


# -- receiver queues --------------------------------------------------------------------------------------------
LIMITS = SendLimits(2.0, 3)


def test_failed_attempt_counts_once_and_doubles_the_backoff_up_to_a_maximum() -> None:
    queue, pauses = ReceiverQueue(receiver="r", in_flight=group(alert())), []
    for n in range(1, 9):
        failed = AttemptResult("g1", n, False, "no")
        queue = queue.replace(in_flight=queue.in_flight.replace(attempts=n))
        queue, delivered, _ = record_result(100.0, queue, failed)
        assert record_result(100.0, queue, failed) == (queue, [], "") and not delivered
        pauses.append(queue.not_before - 100.0)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60] and queue.failures == 8 and queue.error == "no"
    done, delivered, entry = record_result(101.0, queue, AttemptResult("g1", 3, True))
    assert done.in_flight is None and not done.failures and delivered == ["id000"] and entry == "firing:r"
    assert record_result(101.0, done, AttemptResult("g1", 3, True))[1] == []


def test_earlier_leaders_clock_neither_blocks_sending_nor_lifts_the_limit() -> None:
    ahead = ReceiverQueue(receiver="r", in_flight=group(alert()), not_before=5000.0)
    assert next_send(100.0, ahead, [], LIMITS) is not None, "no backoff is longer than the longest"
    full = ahead.replace(not_before=0.0, sent_at=[104.0, 105.0, 106.0])
    assert next_send(100.0, full, [], LIMITS) is None
    assert next_send(167.0, full, [], LIMITS) is not None


def test_notices_of_one_phase_are_grouped_after_the_wait() -> None:
    idle = ReceiverQueue(receiver="r")
    over = alert(2, phase=Phase.RESOLVED, resolved_at=6.0, notified=["firing:r"])
    due = [PendingNotice(alert(1, severity=Severity.WARNING), Phase.FIRING, "r"),
           PendingNotice(over, Phase.RESOLVED, "r"), PendingNotice(alert(0), Phase.FIRING, "r")]
    assert next_send(6.9, idle, due, LIMITS) is None and next_send(7.0, idle, [], LIMITS) is None
    sent = next_send(7.0, idle, due, LIMITS)
    assert sent is not None and sent.sent_at == [7.0] and sent.in_flight is not None
    assert (sent.in_flight.phase, sent.in_flight.alerts) == (Phase.FIRING, ["id000", "id001"])


def test_delivered_and_dropped_alerts_leave_the_group() -> None:
    three = [alert(0), alert(1).replace(notified=["firing:r"]), alert(2)]
    queue = ReceiverQueue(receiver="r", in_flight=group(*three))
    left = without_notified(queue, {a.id: a for a in three[:2]})
    assert left.in_flight is not None and left.in_flight.alerts == ["id000"]
    assert without_notified(queue, {"id001": three[1]}).in_flight is None


def test_url_without_a_scheme_is_not_printed() -> None:
    with pytest.raises(ConfigError) as e:
        receivers.load(AlertConfig(urls=["secret-token@host"]))
    assert "secret-token" not in str(e.value)
