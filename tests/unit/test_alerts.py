"""The alert engine under a virtual clock."""

from __future__ import annotations

import http.server
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import processes
from elastic_rl.coordinator import alert_rules, alerts
from elastic_rl.coordinator.alerts import Alert, Condition, Notice, Phase
from elastic_rl.coordinator.notify import Notifier, receiver_name, text
from elastic_rl.coordinator.records import Engine, EngineState, Event, JobStatus, PoolSpec, PoolStatus, Severity
from elastic_rl.coordinator.roster import Sighting
from elastic_rl.errors import ConfigError

RECEIVERS = ["pager", "chat"]


class Machine:
    """The engine with a store of its own and receivers that take a notice or not."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.known: dict[str, Alert] = {}
        self.taken: list[Notice] = []

    def look(self, holding: dict[str, Condition], reports: list[Condition] = (), released=lambda a: False,
             deaf: frozenset[str] = frozenset()) -> None:
        todo = alerts.step(self.now, list(self.known.values()), holding, list(reports), released, RECEIVERS)
        for alert in todo.put:
            self.known[alert.id] = alert
        for alert in todo.drop:
            del self.known[alert.id]
        for alert in list(self.known.values()):
            for notice in alerts.untold(alert, RECEIVERS):
                if notice.receiver not in deaf:
                    self.taken.append(notice)
                    self.known[alert.id] = alerts.was_told(self.known[alert.id], [notice.mark])


def gone(subject: str = "a", hold_s: float = 0.0) -> Condition:
    return Condition("member.dead", subject, "it is gone", hold_s=hold_s)


looks = st.lists(st.tuples(st.floats(0.1, 20.0), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("ab")),
                           st.sets(st.sampled_from(RECEIVERS))), max_size=40)


@given(looks, st.sampled_from([0.0, 5.0]))
def test_each_id_is_told_firing_then_resolved_once_to_each_receiver(story, hold_s) -> None:
    m = Machine()
    for revision, (pause, holding, reported, deaf) in enumerate(story, 1):
        m.now += pause
        reports = [Condition("publish.failed", s, "no", revision=revision) for s in reported]
        m.look({c.key: c for c in (gone(s, hold_s) for s in holding)}, reports,
               lambda a, at=m.now: at - a.last_at > 15, frozenset(deaf))
        assert len({a.key for a in m.known.values() if a.open}) == sum(a.open for a in m.known.values())
    for _ in range(4):  # everything is well again, and everyone listens
        m.now += 100
        m.look({}, [], lambda a: True)
    assert not m.known
    told: dict[tuple[str, str], list[Phase]] = {}
    for notice in m.taken:
        told.setdefault((notice.alert.id, notice.receiver), []).append(notice.phase)
    assert all(phases == [Phase.FIRING, Phase.RESOLVED] for phases in told.values())
    assert {i for i, _ in told} == {i for i, r in told if r == "pager"} == {i for i, r in told if r == "chat"}


@given(st.lists(st.floats(0.1, 1.9), max_size=30))
def test_a_condition_that_flaps_faster_than_its_hold_time_never_fires(pauses) -> None:
    m = Machine()
    for n, pause in enumerate(pauses):
        m.now += pause
        m.look({} if n % 2 else {gone().key: gone(hold_s=2.0)})
    assert not m.taken


def test_a_lasting_condition_fires_once_after_its_hold_time() -> None:
    m = Machine()
    for _ in range(20):
        m.look({gone().key: gone(hold_s=5.0)})
        assert bool(m.taken) == (m.now >= 1005.0)
        m.now += 1.0
    assert [n.phase for n in m.taken] == [Phase.FIRING] * 2


def test_a_condition_and_a_report_of_the_same_fault_are_one_alert() -> None:
    m = Machine()
    m.look({}, [Condition("member.dead", "a", "seen by a peer", revision=7)])
    m.look({gone().key: gone()})
    m.look({gone().key: gone()}, [Condition("member.dead", "a", "seen by another", revision=9)])
    assert len(m.known) == 1
    m.look({}, released=lambda a: a.revision == 9)
    assert [n.phase for n in m.taken if n.receiver == "chat"] == [Phase.FIRING, Phase.RESOLVED]


def test_a_leader_that_repeats_a_look_makes_the_same_alert() -> None:
    first, again = (alerts.step(5.0, [], {}, [Condition("a", "b", "c", revision=4)], lambda a: False, []).put
                    for _ in range(2))
    assert first == again


def test_news_has_no_end_to_tell() -> None:
    m = Machine()
    c = Condition("job.finished", "j", "done", Severity.INFO, tell_end=False)
    m.look({c.key: c})
    m.look({})
    m.look({})
    assert [n.phase for n in m.taken] == [Phase.FIRING] * 2
    assert not m.known


def test_without_receivers_an_alert_is_dropped_as_soon_as_it_is_over() -> None:
    todo = alerts.step(1.0, [], {gone().key: gone()}, [], lambda a: False, [])
    resolved = alerts.step(2.0, todo.put, {}, [], lambda a: False, []).put
    assert [a.phase for a in resolved] == [Phase.RESOLVED]
    assert alerts.step(3.0, resolved, {}, [], lambda a: False, []).drop == resolved


# -- rules ------------------------------------------------------------------------------------------------------
def event(kind: str, subject: str = "x", severity: Severity = Severity.INFO, **data) -> Event:
    return Event(id="1", at=0.0, kind=kind, subject=subject, message="m", severity=severity, data=data)


def engine(engine_id: str, state: EngineState, updated_at: float = 0.0) -> Engine:
    return Engine(id=engine_id, pool="rollout", state=state, epoch=1, updated_at=updated_at)


def world(**changes) -> alert_rules.World:
    given_ = {"job": "j", "specs": {"rollout": PoolSpec(name="rollout", desired=2)},
              "statuses": {"rollout": PoolStatus(name="rollout", ready=1, starting=1, draining=0)}}
    return alert_rules.World(**{**given_, **changes})


def test_the_runner_the_driver_and_the_leader_report_one_engine_under_one_key() -> None:
    found = {alert_rules.report(event(k, "e1", by="leader" if k == "engine.dead" else ""), 3, "j").key
             for k in ("engine.dead", "engine.replaced", "engine.quarantined")}
    assert found == {"engine.dead/e1"}


@pytest.mark.parametrize(("kind", "severity", "asks"), [
    ("publish.failed", Severity.INFO, True), ("logprob.mismatch", Severity.WARNING, True),
    ("staleness.exceeded", Severity.WARNING, True), ("anything.bad", Severity.ERROR, True),
    ("router.restarted", Severity.WARNING, False), ("version.committed", Severity.INFO, False)])
def test_which_events_ask_for_an_alert(kind: str, severity: Severity, asks: bool) -> None:
    assert (alert_rules.report(event(kind, severity=severity), 3, "j") is not None) is asks


def test_a_death_that_the_leader_told_of_is_alerted_by_the_roster_and_not_again_by_its_event() -> None:
    assert alert_rules.report(event("coordinator.dead", severity=Severity.ERROR, by="leader"), 3, "j") is None


def test_ranks_that_fall_together_are_one_alert() -> None:
    dead = [Sighting(role="trainer", id=f"rank-{i}", incarnation="1", first_seen=1, dead_at=5) for i in range(2)]
    assert [k for k in alert_rules.conditions(world(roster=dead)) if "trainer" in k] == ["trainer.dead/trainer"]


def test_an_engine_alert_is_over_when_the_pool_is_whole_again() -> None:
    alert = alerts.step(100.0, [], {}, [Condition("engine.dead", "e1", "m", revision=3)], lambda a: False, []).put[0]
    two = [engine("e2", EngineState.READY), engine("e3", EngineState.READY)]
    assert not alert_rules.released(alert, world(engines=[engine("e2", EngineState.READY)]), 200.0)
    assert not alert_rules.released(alert, world(engines=[*two, engine("e1", EngineState.READY, 50.0)]), 200.0)
    assert not alert_rules.released(alert, world(engines=two), 101.0)
    assert alert_rules.released(alert, world(engines=two), 104.0)


def test_an_engine_that_cannot_fetch_is_one_alert_until_it_can_or_is_gone() -> None:
    told = Event(id="1", at=1.0, kind="engine.cannot_fetch", subject="e1", message="m", severity=Severity.WARNING)
    condition = alert_rules.report(told, 5, "j")
    assert condition and condition.key == "engine.cannot_fetch/e1"
    over = Event(id="2", at=2.0, kind="engine.fetch_recovered", subject="e1", message="m")
    assert alert_rules.ends(over) == condition.key
    alert = alerts.step(1.0, [], {}, [condition], lambda a: False, []).put[0]
    engine = Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1)
    assert not alert_rules.released(alert, alert_rules.World("j", engines=[engine]), 1e6)
    assert alert_rules.released(alert, alert_rules.World("j"), 1e6)


def test_a_dropped_version_is_a_publish_alert_of_its_stream() -> None:
    dropped = Event(id="1", at=1.0, kind="version.dropped", subject="policy", message="m", severity=Severity.WARNING)
    condition = alert_rules.report(dropped, 5, "j")
    assert condition and condition.key == "publish.failed/policy"


def test_a_publish_alert_is_over_when_the_head_moved_after_the_failure() -> None:
    alert = alerts.step(1.0, [], {}, [Condition("publish.failed", "policy", "m", revision=30)], lambda a: False, []
                        ).put[0]
    assert not alert_rules.released(alert, world(heads={"policy": 29}), 2.0)
    assert alert_rules.released(alert, world(heads={"policy": 31}), 2.0)


def test_a_short_pool_counts_only_after_an_engine_could_have_started_and_only_while_the_run_goes_on() -> None:
    found = alert_rules.conditions(world(pool_hold_s=77.0))
    assert found["pool.short/rollout"].hold_s == 77.0
    over = alert_rules.conditions(world(status=JobStatus(phase="finished")))
    assert list(over) == ["job.finished/j"]
    assert list(alert_rules.conditions(world(status=JobStatus(phase="failed", message="no")))) == ["job.failed/j"]


# -- delivery ---------------------------------------------------------------------------------------------------
def notice(url: str, n: int = 0) -> Notice:
    alert = alerts.step(float(n), [], {gone().key: gone()}, [], lambda a: False, []).put[0]
    return Notice(alert, Phase.FIRING, receiver_name(url))


@pytest.fixture
def hanging_url():
    """A service that takes the connection and never answers."""
    leave = threading.Event()
    arrived = threading.Event()

    class Hang(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.set()
            leave.wait(20)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hang)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}", arrived
    leave.set()
    server.shutdown()
    server.server_close()


def test_a_hanging_notification_service_blocks_no_caller_and_is_given_up_in_time(hanging_url) -> None:
    url, arrived = hanging_url
    notifier = Notifier("j", [url], timeout_s=1.0)
    try:
        started = time.monotonic()
        for n in range(500):
            notifier.offer(notice(url, n))
        assert time.monotonic() - started < 0.5
        assert arrived.wait(5), "the service was never asked"
        assert not notifier.delivered()
    finally:
        started = time.monotonic()
        notifier.close()
    assert time.monotonic() - started < 2.5
    assert not notifier.delivered()


def test_a_dead_service_gets_a_pause_and_loses_nothing() -> None:
    url = f"json://127.0.0.1:{processes.free_port()}"
    notifier = Notifier("j", [url], timeout_s=1.0)
    try:
        notifier.offer(notice(url))
        processes.wait_until(lambda: notifier._failures.get(receiver_name(url)), timeout_s=5, what="the failure")
        notifier.offer(notice(url))
        assert not notifier._waiting and not notifier.delivered()
    finally:
        notifier.close()


def test_a_url_that_apprise_does_not_know_is_refused_without_showing_its_secret() -> None:
    with pytest.raises(ConfigError) as e:
        Notifier("j", ["nosuch://secret-token@host"], timeout_s=1.0)
    assert "secret" not in str(e.value) and "alerts.urls[0]" in str(e.value)


def test_the_text_of_a_notice_holds_its_id() -> None:
    n = notice("json://x")
    title, body = text("job", n)
    assert title.startswith("[FIRING] job: member.dead") and f"id={n.alert.id}" in body
