"""The alert state machine under a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.alerts import state_machine
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition, PendingNotice, Phase
from elastic_rl.etcd.records import Severity, Silence

RECEIVERS = ["pager", "chat"]


class Machine:
    """The state machine with a store in memory and receivers that take a notice or not."""

    def __init__(self) -> None:
        self.now, self.revision = 1000.0, 1_000_000
        self.silences: list[Silence] = []
        self.known: dict[str, Alert] = {}
        self.taken: list[PendingNotice] = []

    def advance(self, holding: dict[str, Condition], reports: list[Condition] = (), released=lambda a: False,
             failing: frozenset[str] = frozenset()) -> None:
        self.revision += 1
        changes = state_machine.advance(self.now, self.revision, list(self.known.values()), holding, list(reports),
                                        released, lambda a: RECEIVERS, silences=self.silences)
        for alert in changes.put:
            self.known[alert.id] = alert
        for alert in changes.drop:
            del self.known[alert.id]
        for alert in list(self.known.values()):
            for notice in state_machine.due_notices(alert, RECEIVERS):
                if notice.receiver not in failing:
                    self.taken.append(notice)
                    self.known[alert.id] = state_machine.mark_notified(self.known[alert.id], [notice.entry])


def gone(subject: str = "a", hold_s: float = 0.0) -> Condition:
    return Condition("member.dead", subject, "it is gone", hold_s=hold_s)


def advance_once(now: float, known: Sequence[Alert] = (), holding: Mapping[str, Condition] | None = None,
              reports: Sequence[Condition] = (), receivers: Sequence[str] = ()) -> state_machine.Changes:
    return state_machine.advance(now, 7, list(known), holding or {}, reports, lambda a: False, lambda a: receivers)


passes = st.lists(st.tuples(st.floats(0.1, 20.0), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("ab")),
                           st.sets(st.sampled_from(RECEIVERS))), max_size=40)


@given(passes, st.sampled_from([0.0, 5.0]))
def test_each_receiver_gets_firing_then_resolved_once_per_alert_id(history, hold_s) -> None:
    m = Machine()
    for revision, (pause, holding, reported, failing) in enumerate(history, 1):
        m.now += pause
        reports = [Condition("publish.failed", s, "no", revision=revision) for s in reported]
        m.advance({c.key: c for c in (gone(s, hold_s) for s in holding)}, reports,
               lambda a, at=m.now: at - a.last_at > 15, frozenset(failing))
        assert len({a.key for a in m.known.values() if a.open}) == sum(a.open for a in m.known.values())
    for _ in range(4):  # nothing is wrong any more, and every receiver works
        m.now += 100
        m.advance({}, [], lambda a: True)
    assert not m.known
    got: dict[tuple[str, str], list[Phase]] = {}
    for notice in m.taken:
        got.setdefault((notice.alert.id, notice.receiver), []).append(notice.phase)
    assert all(phases == [Phase.FIRING, Phase.RESOLVED] for phases in got.values())
    assert {i for i, _ in got} == {i for i, r in got if r == "pager"} == {i for i, r in got if r == "chat"}


@given(st.lists(st.floats(0.1, 1.9), max_size=30))
def test_condition_that_flaps_faster_than_its_hold_time_never_fires(pauses) -> None:
    m = Machine()
    for n, pause in enumerate(pauses):
        m.now += pause
        m.advance({} if n % 2 else {gone().key: gone(hold_s=2.0)})
    assert not m.taken


def test_lasting_condition_fires_once_after_its_hold_time() -> None:
    m = Machine()
    for _ in range(20):
        m.advance({gone().key: gone(hold_s=5.0)})
        assert bool(m.taken) == (m.now >= 1005.0)
        m.now += 1.0
    assert [n.phase for n in m.taken] == [Phase.FIRING] * 2


@pytest.mark.parametrize("back_s", [3.0, 3600.0])
def test_clock_that_is_set_back_delays_an_alert_by_its_hold_time_at_most(back_s: float) -> None:
    m = Machine()
    for n in range(12):
        if n == 4:
            m.now -= back_s
        m.advance({gone().key: gone(hold_s=5.0)})
        assert not m.taken if n < 5 else m.taken or n < 4 + 5
        m.now += 1.0


def test_resolved_alert_of_a_clock_that_was_set_back_does_not_stay_for_as_long() -> None:
    changes = advance_once(4000.0, holding={gone().key: gone()})
    resolved = advance_once(4001.0, changes.put).put
    assert not advance_once(3998.0, resolved).drop, "another leader's clock may be a little behind"
    assert advance_once(401.0, resolved).drop == resolved


def test_condition_and_report_of_the_same_fault_are_one_alert() -> None:
    m = Machine()
    m.advance({}, [Condition("member.dead", "a", "seen by a peer", revision=7)])
    m.advance({gone().key: gone()})
    m.advance({gone().key: gone()}, [Condition("member.dead", "a", "seen by another", revision=9)])
    assert len(m.known) == 1
    m.advance({}, released=lambda a: a.revision == 9)
    assert [n.phase for n in m.taken if n.receiver == "chat"] == [Phase.FIRING, Phase.RESOLVED]


def test_repeated_pass_makes_the_same_alert() -> None:
    first, again = (advance_once(5.0, reports=[Condition("a", "b", "c", revision=4)]).put for _ in range(2))
    assert first == again
    held = {gone().key: gone()}
    assert advance_once(5.0, holding=held).put[0].id == advance_once(9.0, holding=held).put[0].id


def test_one_time_event_has_no_resolved_notice() -> None:
    m = Machine()
    c = Condition("job.finished", "j", "done", Severity.INFO, notify_resolved=False)
    m.advance({c.key: c})
    m.advance({})
    m.advance({})
    assert [n.phase for n in m.taken] == [Phase.FIRING] * 2
    assert not m.known


def test_resolved_alert_without_receivers_is_dropped() -> None:
    changes = advance_once(1.0, holding={gone().key: gone()})
    resolved = advance_once(2.0, changes.put).put
    assert [a.phase for a in resolved] == [Phase.RESOLVED]
    kept_until = 2.0 + state_machine.RESOLVED_KEEP_S
    assert not advance_once(kept_until - 0.1, resolved).drop, "events of its time may come late"
    assert advance_once(kept_until, resolved).drop == resolved


# -- silences ----------------------------------------------------------------------------------------------------
def silence(until: float, kind: str = "*", subject: str = "*") -> Silence:
    return Silence(id="s1", kind=kind, subject=subject, created_at=0.0, until=until)


def phases(m: Machine, receiver: str = "chat") -> list[Phase]:
    return [n.phase for n in m.taken if n.receiver == receiver]


@pytest.mark.parametrize(("kind", "subject", "hit"), [
    ("*", "*", True), ("engine.*", "*", True), ("engine.dead", "e1", True), ("engine", "*", False), ("*", "e", False),
    ("*.dead", "e*", True), ("e*.d*d", "*1", True), ("[e]ngine.dead", "*", False), ("engine?dead", "*", False)])
def test_only_a_star_is_special_in_a_pattern(kind: str, subject: str, hit: bool) -> None:
    assert silence(10.0, kind, subject).matches("engine.dead", "e1", 9.0) is hit
    assert not silence(10.0, kind, subject).matches("engine.dead", "e1", 10.0)


def test_silenced_alert_that_outlives_the_silence_is_notified() -> None:
    m = Machine()
    m.silences = [silence(1010.0, "member.*", "a")]
    m.advance({gone().key: gone()})
    assert [(a.silenced_by, a.phase) for a in m.known.values()] == [("s1", Phase.FIRING)] and not m.taken
    m.now = 1011.0
    m.advance({gone().key: gone()})
    assert phases(m) == [Phase.FIRING] and [a.silenced_by for a in m.known.values()] == [""]
    m.advance({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED]


def test_alert_that_comes_and_goes_in_a_silence_is_never_notified() -> None:
    m = Machine()
    m.silences = [silence(1010.0)]
    m.advance({gone().key: gone()})
    m.advance({})
    m.now = 1011.0
    m.advance({})
    m.now += state_machine.RESOLVED_KEEP_S
    m.advance({})
    assert not m.known and not m.taken


def test_end_under_a_silence_goes_only_to_receivers_that_got_the_start() -> None:
    m = Machine()
    m.advance({gone().key: gone()}, failing=frozenset({"pager"}))
    m.silences = [silence(1010.0)]
    m.now = 1001.0
    m.advance({gone().key: gone()})
    m.advance({})
    m.advance({})
    assert phases(m) == [Phase.FIRING] and len(m.known) == 1
    m.now = 1010.0
    m.advance({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED] and phases(m, "pager") == []
    m.now += state_machine.RESOLVED_KEEP_S
    m.advance({})
    assert not m.known and phases(m, "pager") == []


def test_end_that_waited_for_a_long_silence_is_notified() -> None:
    m = Machine()
    m.advance({gone().key: gone()})
    m.silences = [silence(1000.0 + 3 * state_machine.UNNOTIFIED_KEEP_S)]
    m.advance({})
    m.now += 3 * state_machine.UNNOTIFIED_KEEP_S - 1
    m.advance({})
    assert len(m.known) == 1
    m.now += 1
    m.advance({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED]


def test_undelivered_alerts_are_dropped_after_a_day_and_beyond_a_maximum() -> None:
    over = [Alert(id=f"{n:04}", kind="k", subject=str(n), message="", severity=Severity.ERROR, phase=Phase.RESOLVED,
                  since=0.0, fired_at=1.0, last_at=1.0, resolved_at=float(n))
            for n in range(state_machine.UNNOTIFIED_MAX + 3)]
    changes = advance_once(2000.0, over, receivers=["pager"])
    assert [a.id for a in changes.undelivered] == ["0000", "0001", "0002"] == [a.id for a in changes.drop]
    changes = advance_once(500.0 + state_machine.UNNOTIFIED_KEEP_S, over[:600], receivers=["pager"])
    assert [a.id for a in changes.undelivered] == [f"{n:04}" for n in range(501)]


def test_report_that_is_over_by_the_next_pass_is_notified_and_resolved() -> None:
    report = Condition("engine.cannot_fetch", "e1", "m", revision=7)
    put = state_machine.advance(1.0, 9, [], {}, [report], lambda a: False, lambda a: RECEIVERS,
                      declared_over=lambda a: a.key == report.key).put
    assert [a.phase for a in put] == [Phase.FIRING]
    assert [a.phase for a in advance_once(2.0, put, receivers=RECEIVERS).put] == [Phase.RESOLVED]


def test_condition_keeps_its_alert_open_after_the_report_is_over() -> None:
    m = Machine()
    m.advance({}, [Condition("member.dead", "a", "m", revision=7)])
    m.advance({gone().key: gone()}, released=lambda a: True)
    assert phases(m) == [Phase.FIRING]
    m.advance({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED]
