"""Messages and their delivery through real Apprise services."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_rl import config, runtime
from elastic_rl.config import AlertConfig, AlertRoute
from elastic_rl.coordinator.alerts import message, notifier, receivers
from elastic_rl.coordinator.alerts.delivery import (
    Limits,
    NotificationGroup,
    Outcome,
    ReceiverQueue,
    next_send,
    settle,
    without_told,
)
from elastic_rl.coordinator.alerts.notifier import NOT_LEADING, Notification, Notifier, notification
from elastic_rl.coordinator.alerts.receivers import receiver_name
from elastic_rl.coordinator.alerts.state_machine import TEST, Alert, Phase, make_test_alert
from elastic_rl.coordinator.alerts.write_failures import WriteFailureNotifier
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.records import Severity


def alert(n: int = 0, kind: str = "dcs.dead", severity: Severity = Severity.ERROR, cause: str = "", **more) -> Alert:
    return Alert(**{"id": f"id{n:03}", "kind": kind, "subject": f"s{n}", "message": f"it {n} is gone",
                    "severity": severity, "phase": Phase.FIRING, "since": 5.0, "fired_at": 5.0, "cause": cause, **more})


def parcel(*alerts_: Alert, phase: Phase = Phase.FIRING) -> NotificationGroup:
    return NotificationGroup(id="p1", phase=phase, alerts=[a.id for a in alerts_], created_at=5.0)


def letter(n: int = 0) -> Notification:
    return notifier.notification("job", parcel(alert(n)), [alert(n)], lambda: True)


# -- words ------------------------------------------------------------------------------------------------------
def test_the_message_of_one_alert_holds_its_id_and_that_of_the_message() -> None:
    title, body = message.compose("job", parcel(alert()), [alert()])
    assert title == "[FIRING] job: dcs.dead s0"
    assert body.startswith("it 0 is gone\n") and "id=id000 phase=firing severity=error" in body and "message=p1" in body
    over = alert(phase=Phase.RESOLVED, resolved_at=9.0)
    title, body = message.compose("job", parcel(over, phase=Phase.RESOLVED), [over])
    assert title.startswith("[RESOLVED]") and "over after 4.0 s" in body


def test_few_alerts_are_told_in_full_and_many_by_kind_and_cause_with_every_id() -> None:
    few = [alert(1), alert(0), alert(2, "pool.short", Severity.WARNING)]
    title, body = message.compose("job", parcel(*few), few)
    assert title == "[FIRING] job: 3 alerts: dcs.dead ×2, pool.short" and "dcs.dead s1: it 1 is gone id=id001\n" in body
    many = [alert(n, "engine.dead", cause="host-3") for n in range(40)]
    title, body = message.compose("job", parcel(*many), many)
    assert title == "[FIRING] job: 40 alerts on host-3: engine.dead ×40"
    assert "engine.dead on host-3 ×40: s0, s1," in body and "and 28 more" in body
    assert all(a.id in body for a in many) and len(body.splitlines()) == 2


def test_a_test_and_news_say_so_and_the_worst_severity_gives_the_type() -> None:
    t = make_test_alert(5.0, "t1", "ada")
    assert message.compose("job", parcel(t), [t])[0] == f"[TEST] job: {TEST} t1"
    news = alert(kind="job.finished", severity=Severity.INFO, tell_end=False)
    assert message.compose("job", parcel(news), [news])[0].startswith("[NEWS]")
    both = [news, alert(1)]
    assert notifier.notification("job", parcel(*both), both, lambda: True).type == notifier.NotifyType.FAILURE
    assert notifier.notification("job", parcel(*both, phase=Phase.RESOLVED), both, lambda: True).type == (
        notifier.NotifyType.SUCCESS)


# -- who --------------------------------------------------------------------------------------------------------
def names(cfg: AlertConfig, a: Alert) -> list[str]:
    return receivers.audience(a, list(receivers.load(cfg)), cfg.tags)


def test_routes_choose_by_severity_and_by_the_kind_and_urls_get_everything(tmp_path: Path) -> None:
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
    paged = cfg.model_copy(update={"tags": {"warning": ["page"]}})
    assert set(names(paged, alert(kind="x.y", severity=Severity.WARNING))) == set(names(cfg, short))
    assert "pager" in names(paged, alert()), "a severity without tags of its own has its name"


def test_a_receiver_that_is_named_twice_is_one_and_gets_what_either_gets() -> None:
    cfg = AlertConfig(urls=["json://localhost:1"], routes=[AlertRoute(url="json://localhost:1", tags=["error"])])
    (only,) = receivers.load(cfg)
    assert not only.tags
    with pytest.raises(ConfigError, match="name 'x'"):
        receivers.load(AlertConfig(routes=[AlertRoute(url=f"json://h:{p}", name="x") for p in (1, 2)]))


def test_a_url_that_apprise_does_not_know_is_refused_without_showing_its_secret(tmp_path: Path) -> None:
    for cfg, where in ((AlertConfig(urls=["nosuch://secret-token@host"]), r"alerts\.urls\[0\]"),
                       (AlertConfig(routes=[AlertRoute(url="nosuch://secret-token@h")]), r"alerts\.routes\[0\]\.url"),
                       (AlertConfig(config_file=str(tmp_path / "none.yaml")), "alerts.config_file")):
        with pytest.raises(ConfigError, match=where) as e:
            Notifier("j", cfg)
        assert "secret" not in str(e.value)
    with pytest.raises(ConfigError, match="alerts.tags"):
        config.parse({"alerts": {"tags": {"fatal": ["page"]}}})


# -- the mailbox ------------------------------------------------------------------------------------------------
LIMITS = Limits(2.0, 3)


def test_a_failure_counts_once_and_doubles_the_pause_up_to_a_bound() -> None:
    box, pauses = ReceiverQueue(receiver="r", parcel=parcel(alert())), []
    for n in range(1, 9):
        box, told, _ = settle(100.0, box.replace(parcel=box.parcel.replace(attempts=n)), Outcome("p1", n, False, "no"))
        assert settle(100.0, box, Outcome("p1", n, False, "no")) == (box, [], "") and not told
        pauses.append(box.not_before - 100.0)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60] and box.failures == 8 and box.error == "no"
    done, told, mark = settle(101.0, box, Outcome("p1", 3, True))
    assert done.parcel is None and not done.failures and told == ["id000"] and mark == "firing:r"
    assert settle(101.0, done, Outcome("p1", 3, True))[1] == []


def test_another_leaders_clock_neither_stops_the_sending_for_long_nor_lifts_the_bound() -> None:
    known = {"id000": alert()}
    ahead = ReceiverQueue(receiver="r", parcel=parcel(alert()), not_before=5000.0)
    assert next_send(100.0, ahead, [], known, LIMITS) is not None, "no pause is longer than the longest"
    full = ahead.replace(not_before=0.0, sent=[104.0, 105.0, 106.0])
    assert next_send(100.0, full, [], known, LIMITS) is None
    assert next_send(167.0, full, [], known, LIMITS) is not None


def test_what_is_told_already_or_forgotten_is_not_sent_again() -> None:
    three = [alert(0), alert(1).replace(told=["firing:r"]), alert(2)]
    box = ReceiverQueue(receiver="r", parcel=parcel(*three))
    left = without_told(box, {a.id: a for a in three[:2]})
    assert left.parcel is not None and left.parcel.alerts == ["id000"]
    assert without_told(box, {"id001": three[1]}).parcel is None


# -- delivery ---------------------------------------------------------------------------------------------------
@pytest.fixture
def services() -> Iterator[tuple[str, str, list[str], threading.Event, threading.Event]]:
    """URL of a service that takes a request and never answers; of one that answers, and the titles that it got; whether
    the first was asked, and what ends it."""
    leave, arrived, got = threading.Event(), threading.Event(), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path.startswith("/hang"):
                arrived.set()
                leave.wait(60)
                return
            got.append(body["title"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"json://127.0.0.1:{server.server_port}"
    yield f"{base}/hang", f"{base}/ok", got, arrived, leave
    leave.set()
    server.shutdown()
    server.server_close()


def outcome(notifier: Notifier, name: str) -> Outcome:
    return runtime.wait_until(lambda: notifier.outcome(name), timeout_s=20, what="the outcome")


def test_a_hanging_service_blocks_no_caller_and_no_other_receiver(services) -> None:
    hanging, well, got, arrived, leave = services
    hanging += "?rto=60"
    notifier = Notifier("j", AlertConfig(urls=[hanging, well], timeout_s=60.0))
    try:
        assert notifier.send(receiver_name(hanging), letter())
        assert arrived.wait(10), "the service was never asked"
        assert not notifier.send(receiver_name(hanging), letter(1)), "one letter at a time"
        for n in range(3):
            assert notifier.send(receiver_name(well), letter(n))
            assert outcome(notifier, receiver_name(well)).ok
        assert len(got) == 3 and notifier.busy(receiver_name(hanging))
    finally:
        leave.set()
        notifier.close()


def test_a_hanging_service_is_given_up_in_time(services) -> None:
    hanging, _, _, arrived, _ = services
    notifier = Notifier("j", AlertConfig(urls=[hanging], timeout_s=1.0))
    try:
        notifier.send(receiver_name(hanging), letter())
        failed = outcome(notifier, receiver_name(hanging))
        assert not failed.ok and failed.error == "no answer within 1 s" and arrived.is_set()
    finally:
        notifier.close()


def test_a_dead_service_fails_without_its_secret_in_the_answer() -> None:
    url = f"json://user:secret@127.0.0.1:{runtime.free_port()}"
    notifier, woken = Notifier("j", AlertConfig(urls=[url], timeout_s=5.0)), threading.Event()
    notifier.on_outcome(woken.set)
    try:
        assert "secret" not in receiver_name(url)
        notifier.send(receiver_name(url), letter())
        failed = outcome(notifier, receiver_name(url))
        assert not failed.ok and failed.error and "secret" not in failed.error and woken.wait(5)
    finally:
        notifier.close()


def test_a_replica_that_leads_no_more_sends_nothing(services) -> None:
    _, well, got, _, _ = services
    notifier = Notifier("j", AlertConfig(urls=[well]))
    try:
        late = notification("job", parcel(alert()), [alert()], lambda: False)
        notifier.send(receiver_name(well), late)
        assert outcome(notifier, receiver_name(well)).error == NOT_LEADING and not got
    finally:
        notifier.close()


def test_an_etcd_that_takes_no_writes_is_told_past_it_once_and_its_end_too(services) -> None:
    _, well, got, _, _ = services
    notifier, now = Notifier("j", AlertConfig(urls=[well])), [100.0]
    outcry = WriteFailureNotifier(notifier, clock=lambda: now[0])
    try:
        outcry.over()
        for _ in range(10):
            outcry.tell("etcd refused: mvcc: database space exceeded")
            now[0] += 2.0
            runtime.wait_until(lambda: not notifier.busy(receiver_name(well)), timeout_s=10, what="the delivery")
        outcry.over()
        runtime.wait_until(lambda: len(got) == 2, timeout_s=10, what="the end")
        outcry.over()
        assert [t.split()[0] for t in got] == ["[FIRING]", "[RESOLVED]"] and not notifier.busy(receiver_name(well))
    finally:
        notifier.close()
