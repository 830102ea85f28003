"""The alert engine under a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.alerts import rules, state_machine
from elastic_rl.coordinator.alerts.conditions import Thresholds, behind_s, etcd_conditions
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition, Notice, Phase
from elastic_rl.coordinator.election import leader_gap
from elastic_rl.coordinator.etcd_health import Health
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.client import KeyValue, MemberStatus
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    Event,
    JobStatus,
    PoolSpec,
    PoolStatus,
    Severity,
    Silence,
    Version,
    VersionState,
)

RECEIVERS = ["pager", "chat"]
KEYS = Keys("j")


class Machine:
    """The engine with a store of its own and receivers that take a notice or not."""

    def __init__(self) -> None:
        self.now, self.revision = 1000.0, 1_000_000
        self.silences: list[Silence] = []
        self.known: dict[str, Alert] = {}
        self.taken: list[Notice] = []

    def look(self, holding: dict[str, Condition], reports: list[Condition] = (), released=lambda a: False,
             deaf: frozenset[str] = frozenset()) -> None:
        self.revision += 1
        todo = state_machine.step(self.now, self.revision, list(self.known.values()), holding, list(reports), released,
                           lambda a: RECEIVERS, silences=self.silences)
        for alert in todo.put:
            self.known[alert.id] = alert
        for alert in todo.drop:
            del self.known[alert.id]
        for alert in list(self.known.values()):
            for notice in state_machine.unnotified(alert, RECEIVERS):
                if notice.receiver not in deaf:
                    self.taken.append(notice)
                    self.known[alert.id] = state_machine.was_notified(self.known[alert.id], [notice.mark])


def gone(subject: str = "a", hold_s: float = 0.0) -> Condition:
    return Condition("member.dead", subject, "it is gone", hold_s=hold_s)


def look_once(now: float, known: Sequence[Alert] = (), holding: Mapping[str, Condition] | None = None,
              reports: Sequence[Condition] = (), receivers: Sequence[str] = ()) -> state_machine.Step:
    return state_machine.step(now, 7, list(known), holding or {}, reports, lambda a: False, lambda a: receivers)


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
    first, again = (look_once(5.0, reports=[Condition("a", "b", "c", revision=4)]).put for _ in range(2))
    assert first == again
    held = {gone().key: gone()}
    assert look_once(5.0, holding=held).put[0].id == look_once(9.0, holding=held).put[0].id


def test_news_has_no_end_to_tell() -> None:
    m = Machine()
    c = Condition("job.finished", "j", "done", Severity.INFO, tell_end=False)
    m.look({c.key: c})
    m.look({})
    m.look({})
    assert [n.phase for n in m.taken] == [Phase.FIRING] * 2
    assert not m.known


def test_without_receivers_an_alert_is_dropped_as_soon_as_it_is_over() -> None:
    todo = look_once(1.0, holding={gone().key: gone()})
    resolved = look_once(2.0, todo.put).put
    assert [a.phase for a in resolved] == [Phase.RESOLVED]
    assert look_once(3.0, resolved).drop == resolved


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


def test_a_silenced_alert_is_shown_and_told_when_it_outlives_the_silence() -> None:
    m = Machine()
    m.silences = [silence(1010.0, "member.*", "a")]
    m.look({gone().key: gone()})
    assert [(a.silenced_by, a.phase) for a in m.known.values()] == [("s1", Phase.FIRING)] and not m.taken
    m.now = 1011.0
    m.look({gone().key: gone()})
    assert phases(m) == [Phase.FIRING] and [a.silenced_by for a in m.known.values()] == [""]
    m.look({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED]


def test_an_alert_that_comes_and_goes_in_a_silence_is_never_told() -> None:
    m = Machine()
    m.silences = [silence(1010.0)]
    m.look({gone().key: gone()})
    m.look({})
    m.look({})
    assert not m.known
    m.now = 1011.0
    m.look({})
    assert not m.taken


def test_who_was_told_of_the_beginning_is_told_of_the_end_after_the_silence_and_nobody_else() -> None:
    m = Machine()
    m.look({gone().key: gone()}, deaf=frozenset({"pager"}))
    m.silences = [silence(1010.0)]
    m.now = 1001.0
    m.look({gone().key: gone()})
    m.look({})
    m.look({})
    assert phases(m) == [Phase.FIRING] and len(m.known) == 1
    m.now = 1010.0
    m.look({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED] and phases(m, "pager") == []
    m.look({})
    assert not m.known


def test_an_end_that_waited_for_a_long_silence_is_told_and_not_given_up() -> None:
    m = Machine()
    m.look({gone().key: gone()})
    m.silences = [silence(1000.0 + 3 * state_machine.UNNOTIFIED_KEEP_S)]
    m.look({})
    m.now += 3 * state_machine.UNNOTIFIED_KEEP_S - 1
    m.look({})
    assert len(m.known) == 1
    m.now += 1
    m.look({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED]


def test_what_nobody_takes_is_given_up_after_a_day_and_never_more_than_a_bound_waits() -> None:
    over = [Alert(id=f"{n:04}", kind="k", subject=str(n), message="", severity=Severity.ERROR, phase=Phase.RESOLVED,
                  since=0.0, fired_at=1.0, last_at=1.0, resolved_at=float(n))
            for n in range(state_machine.UNNOTIFIED_MOST + 3)]
    todo = look_once(2000.0, over, receivers=["pager"])
    assert [a.id for a in todo.given_up] == ["0000", "0001", "0002"] == [a.id for a in todo.drop]
    todo = look_once(500.0 + state_machine.UNNOTIFIED_KEEP_S, over[:600], receivers=["pager"])
    assert [a.id for a in todo.given_up] == [f"{n:04}" for n in range(501)]


# -- rules ------------------------------------------------------------------------------------------------------
def event(kind: str, subject: str = "x", severity: Severity = Severity.INFO, **data) -> Event:
    return Event(id="1", at=0.0, kind=kind, subject=subject, message="m", severity=severity, data=data)


def engine(engine_id: str, state: EngineState, updated_at: float = 0.0) -> Engine:
    return Engine(id=engine_id, pool="rollout", state=state, epoch=1, updated_at=updated_at)


def empty_snapshot(engines: Sequence[Engine] = (), registry: Sequence[LastSeen] = (), nodes: Sequence[DcsNode] = (),
                   revisions: Mapping[str, int] | None = None, **changes) -> ClusterSnapshot:
    """A snapshot without a pool. ``revisions``: of the last change, by key."""
    return ClusterSnapshot(
        "j", engines={e.id: e for e in engines}, registry={s.name: s for s in registry}, nodes={n.id: n for n in nodes},
        revisions={key: KeyValue(key, b"", 1, mod, 1, 0) for key, mod in (revisions or {}).items()}, **changes)


def snapshot(**changes) -> ClusterSnapshot:
    """With a pool that has one of two engines."""
    return empty_snapshot(**{
        "specs": {"rollout": PoolSpec(name="rollout", desired=2)},
        "statuses": {"rollout": PoolStatus(name="rollout", ready=1, starting=1, draining=0)}, **changes})


def test_the_runner_the_driver_and_the_leader_report_one_engine_under_one_key() -> None:
    found = {rules.report(event(k, "e1", by="leader" if k == "engine.dead" else ""), 3, "j").key
             for k in ("engine.dead", "engine.replaced", "engine.quarantined")}
    assert found == {"engine.dead/e1"}


@pytest.mark.parametrize(("kind", "severity", "asks"), [
    ("publish.failed", Severity.INFO, True), ("logprob.mismatch", Severity.WARNING, True),
    ("staleness.exceeded", Severity.WARNING, True), ("anything.bad", Severity.ERROR, True),
    ("router.restarted", Severity.WARNING, True), ("engine.drain_timeout", Severity.WARNING, False),
    ("version.committed", Severity.INFO, False)])
def test_which_events_ask_for_an_alert(kind: str, severity: Severity, asks: bool) -> None:
    assert (rules.report(event(kind, severity=severity), 3, "j") is not None) is asks


def test_a_death_that_the_leader_told_of_is_alerted_by_the_roster_and_not_again_by_its_event() -> None:
    assert rules.report(event("coordinator.dead", severity=Severity.ERROR, by="leader"), 3, "j") is None


def test_ranks_that_fall_together_are_one_alert() -> None:
    dead = [LastSeen(role="trainer", id=f"rank-{i}", incarnation="1", first_seen=1, dead_at=5) for i in range(2)]
    assert [k for k in rules.conditions(snapshot(registry=dead), 9.0) if "trainer" in k] == ["trainer.dead/trainer"]


def test_an_engine_alert_is_over_when_the_pool_is_whole_again() -> None:
    alert = look_once(100.0, reports=[Condition("engine.dead", "e1", "m", revision=3)]).put[0]
    two = [engine("e2", EngineState.READY), engine("e3", EngineState.READY)]
    assert not rules.released(alert, snapshot(engines=[engine("e2", EngineState.READY)]), 200.0)
    assert not rules.released(alert, snapshot(engines=[*two, engine("e1", EngineState.READY, 50.0)]), 200.0)
    assert not rules.released(alert, snapshot(engines=two), 101.0)
    assert rules.released(alert, snapshot(engines=two), 104.0)


def test_an_engine_that_cannot_fetch_is_one_alert_until_it_can_or_is_gone() -> None:
    told = Event(id="1", at=1.0, kind="engine.cannot_fetch", subject="e1", message="m", severity=Severity.WARNING)
    condition = rules.report(told, 5, "j")
    assert condition and condition.key == "engine.cannot_fetch/e1"
    over = Event(id="2", at=2.0, kind="engine.fetch_recovered", subject="e1", message="m")
    assert rules.ends(over, "j") == condition.key
    alert = look_once(1.0, reports=[condition]).put[0]
    engine = Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1)
    assert not rules.released(alert, empty_snapshot(engines=[engine]), 1e6)
    assert rules.released(alert, empty_snapshot(), 1e6)


def test_a_dropped_version_is_a_publish_alert_of_its_stream() -> None:
    dropped = Event(id="1", at=1.0, kind="version.dropped", subject="policy", message="m", severity=Severity.WARNING)
    condition = rules.report(dropped, 5, "j")
    assert condition and condition.key == "publish.failed/policy"


def test_a_publish_alert_is_over_when_the_head_moved_after_the_failure() -> None:
    alert = look_once(1.0, reports=[Condition("publish.failed", "policy", "m", revision=30)]).put[0]
    head = {"policy": Version(stream="policy", number=4, state=VersionState.COMMITTED, epoch=1)}

    def released(moved_at: int) -> bool:
        return rules.released(alert, snapshot(heads=head, revisions={KEYS.stream_head("policy"): moved_at}), 2.0)

    assert not released(29) and released(31)


def test_a_short_pool_counts_only_after_an_engine_could_have_started_and_only_while_the_run_goes_on() -> None:
    found = rules.conditions(snapshot(), 9.0, Thresholds(pool_hold_s=77.0))
    assert found["pool.short/rollout"].hold_s == 77.0
    over = rules.conditions(snapshot(status=JobStatus(phase="finished")), 9.0)
    assert list(over) == ["job.finished/j"]
    assert list(rules.conditions(snapshot(status=JobStatus(phase="failed", message="no")), 9.0)) == [
        "job.failed/j"]



def folded(*found: Condition, known: Sequence[Alert] = ()) -> list[str]:
    return [c.key for c in rules.fold(found, known)]


def opened(kind: str, subject: str, severity: Severity = Severity.ERROR, revision: int = 0) -> Alert:
    c = Condition(kind, subject, "m", severity, revision=revision)
    return look_once(1.0, holding={} if revision else {c.key: c}, reports=[c] if revision else []).put[0]


def test_a_member_that_hangs_and_is_killed_for_it_is_one_alert() -> None:
    dead = Condition("engine.dead", "e1", "m", revision=9)
    assert folded(dead, known=[opened("engine.hung", "e1")]) == ["engine.hung/e1"]
    assert folded(dead, known=[opened("engine.hung", "e2")]) == ["engine.dead/e1"]
    trainer = Condition("trainer.dead", "trainer", "m")
    assert folded(trainer, known=[opened("trainer.hung", "trainer")]) == ["trainer.hung/trainer"]
    hung = LastSeen(role="engine", id="e1", incarnation="1", first_seen=1, hung_at=5)
    assert list(rules.conditions(snapshot(registry=[hung], statuses={}), 9.0)) == ["engine.hung/e1"]
    assert not rules.conditions(snapshot(registry=[hung.replace(dead_at=6.0)], statuses={}), 9.0)


def test_the_end_of_a_driver_and_the_global_restart_after_it_are_one_alert_whichever_is_seen_first() -> None:
    restart, dead = Condition("run.global_restart", "j", "m", revision=9), Condition("driver.dead", "d1", "m")
    assert folded(restart, known=[opened("driver.dead", "d1")]) == ["driver.dead/d1"]
    assert folded(dead, known=[opened("run.global_restart", "j", revision=9)]) == ["run.global_restart/j"]
    assert len(set(folded(restart, dead))) == 1


def test_a_grave_sign_is_not_hidden_under_a_light_alert() -> None:
    lag = opened("engine.lagging", "e1", Severity.WARNING)
    assert folded(Condition("engine.dead", "e1", "m", revision=9), known=[lag]) == ["engine.dead/e1"]
    cannot = Condition("engine.cannot_fetch", "e1", "m", Severity.WARNING, revision=9)
    assert folded(cannot, known=[lag]) == ["engine.lagging/e1"]
    both = [lag, opened("engine.dead", "e1", revision=9)]
    assert folded(Condition("engine.lagging", "e1", "m", Severity.WARNING), known=both) == ["engine.lagging/e1"]


def test_news_of_a_restart_is_told_unless_its_fault_is_an_alert_already() -> None:
    wanted = rules.report(event("restart.requested", "engines/e1", by="ada"), 5, "j")
    assert wanted and not wanted.tell_end and folded(wanted) == ["restart.requested/engines/e1"]
    assert folded(wanted, known=[opened("engine.hung", "e1")]) == []
    role = replace(wanted, subject="roles/critic")
    assert folded(role, known=[opened("critic.hung", "critic-7")]) == []
    assert folded(role, known=[opened("critic2.dead", "x")]) == ["restart.requested/roles/critic"]
    assert folded(replace(wanted, subject="job"), known=[opened("run.global_restart", "j", revision=3)]) == []
    assert folded(Condition("trainer.hung", "trainer", "m"), replace(wanted, subject="trainer")) == [
        "trainer.hung/trainer"]


def test_a_global_restart_is_over_when_the_new_epoch_makes_progress() -> None:
    alert = opened("run.global_restart", "j", revision=30)
    status = JobStatus(phase="rl")

    def over(epoch: int, written: int, status: JobStatus = status) -> bool:
        return rules.released(alert, snapshot(status=status, revisions={
            KEYS.epoch(): epoch, KEYS.job_status(): written}), 1e9)

    assert not over(20, 40), "the old epoch still writes"
    assert not over(35, 34) and over(35, 36)
    assert not over(35, 36, JobStatus(phase="starting")) and over(20, 40, JobStatus(phase="failed"))
    assert rules.ends(event("operation.cancelled", "job"), "j") == alert.key


def test_a_crash_loop_and_the_failed_job_are_one_alert_until_it_runs_again() -> None:
    loop = rules.report(event("run.crash_loop", "j", Severity.ERROR, by="policy"), 5, "j")
    failed = rules.conditions(snapshot(status=JobStatus(phase="failed"), statuses={}), 1.0)["job.failed/j"]
    assert loop and len(set(folded(loop, failed))) == 1
    alert = opened("run.crash_loop", "j", revision=5)
    assert not rules.released(alert, snapshot(status=JobStatus(phase="failed")), 1e9)
    assert rules.released(alert, snapshot(status=JobStatus(phase="starting")), 2.0)


def test_the_end_that_was_said_of_one_sign_ends_the_alert_that_stands_for_it() -> None:
    lag, dead = (opened(f"engine.{k}", "e1", revision=5) for k in ("lagging", "dead"))
    assert rules.declared_over(lag, {"engine.cannot_fetch/e1"})
    assert not rules.declared_over(lag, {"engine.cannot_fetch/e2"})
    assert not rules.declared_over(dead, {"engine.cannot_fetch/e1"})
    assert rules.declared_over(opened("trainer.hung", "trainer", revision=5), {"trainer.dead/trainer"})


def test_what_was_reported_and_over_between_two_looks_is_told_and_ends() -> None:
    report = Condition("engine.cannot_fetch", "e1", "m", revision=7)
    put = state_machine.step(1.0, 9, [], {}, [report], lambda a: False, lambda a: RECEIVERS,
                      declared=lambda a: a.key == report.key).put
    assert [a.phase for a in put] == [Phase.FIRING]
    assert [a.phase for a in look_once(2.0, put, receivers=RECEIVERS).put] == [Phase.RESOLVED]


def test_a_condition_outlasts_the_end_of_what_was_reported_under_its_alert() -> None:
    m = Machine()
    m.look({}, [Condition("member.dead", "a", "m", revision=7)])
    m.look({gone().key: gone()}, released=lambda a: True)
    assert phases(m) == [Phase.FIRING]
    m.look({})
    assert phases(m) == [Phase.FIRING, Phase.RESOLVED]


COMMITTED = {n: 100.0 * n for n in range(10, 21)}


def test_an_engine_lags_by_versions_or_by_the_time_since_the_first_one_that_it_lacks() -> None:
    assert behind_s(1450.0, 13, COMMITTED) == 50.0
    assert behind_s(9999.0, 20, COMMITTED) == 0.0
    assert behind_s(1450.0, 3, COMMITTED) == 450.0, "what was released is not known any more"

    def lagging(version: int, now: float, state: EngineState = EngineState.READY) -> list[str]:
        e = engine("e1", state).replace(version=version)
        return [k for k in rules.conditions(snapshot(engines=[e], committed={"policy": COMMITTED}), now)
                if "lag" in k]

    assert not lagging(20, 9999.0) and not lagging(18, 1950.0)
    assert lagging(18, 2021.0) == ["engine.lagging/e1"]
    assert lagging(12, 1301.0) == ["engine.lagging/e1"]
    assert not lagging(0, 9999.0, EngineState.SYNCING) and not lagging(12, 9999.0, EngineState.DEAD)


def test_a_stream_is_behind_in_the_durable_store_only_by_time() -> None:
    def behind(number: int, now: float) -> list[str]:
        return list(rules.conditions(empty_snapshot(committed={"policy": COMMITTED}, durable={"policy": number}), now))

    assert behind(20, 1e9) == [] and behind(18, 2000.0) == []
    assert behind(18, 1900.0 + 901.0) == ["durable.behind/policy"] == behind(0, 1e9)


def test_a_node_is_full_by_its_disk_and_without_one_by_its_arena_and_stays_so_until_there_is_some_room() -> None:
    def full(used: int, disk: int = 0, room: int = 0, firing: frozenset[str] = frozenset()) -> bool:
        node = DcsNode(id="n0", host="h", port=1, pid=1, arena_path="/x", arena_bytes=100, used_bytes=used,
                       disk_bytes=disk, disk_room_bytes=room)
        return "dcs.full/n0" in rules.conditions(empty_snapshot(nodes=[node]), 1.0, Thresholds(full_fraction=0.9),
                                                 firing)

    assert full(91) and not full(89)
    assert not full(100, disk=100, room=50) and full(1, disk=100, room=5), "with a disk the arena is a cache"
    assert full(88, firing=frozenset({"dcs.full/n0"})) and not full(84, firing=frozenset({"dcs.full/n0"}))


def test_staleness_beyond_its_bound_is_an_alert_while_the_last_step_had_it() -> None:
    def found(staleness: int, phase: str = "rl") -> list[str]:
        status = JobStatus(phase=phase, staleness=staleness)
        return [k for k in rules.conditions(empty_snapshot(status=status), 1.0, Thresholds(max_staleness=1))
                if "stale" in k]

    assert found(2) == ["staleness.exceeded/j"] and not found(1) and not found(2, "finished")


def test_an_etcd_member_that_is_silent_is_the_graver_the_fewer_are_left() -> None:
    def found(*errors: str, read_s: float = 0.0) -> list[tuple[str, Severity]]:
        health = Health([MemberStatus(f"m{i}", error=e) for i, e in enumerate(errors)], read_s)
        return [(c.key, c.severity) for c in etcd_conditions(health, 0.5, 1000)]

    assert found("", "", "") == [] == found("")
    assert found("x", "", "") == [("etcd.degraded/m0", Severity.ERROR)]
    assert found("x", "", "", "", "") == [("etcd.degraded/m0", Severity.WARNING)]
    assert [s for _, s in found("x", "y", "", "", "")] == [Severity.ERROR] * 2
    assert found("", read_s=0.6) == [("etcd.slow/etcd", Severity.WARNING)]
    large = Health([MemberStatus("m0", db_bytes=1001), MemberStatus("m1", db_bytes=900)])
    assert [c.key for c in etcd_conditions(large, 0.5, 1000)] == ["etcd.full/etcd"]
    full = Health([MemberStatus("m0", alarms=("NOSPACE",))])
    assert [c.key for c in etcd_conditions(full, 0.5, 1000)] == ["etcd.alarm/m0"]


def test_a_time_without_a_leader_is_told_by_the_next_one_unless_the_service_was_stopped() -> None:
    before = leader_gap.SignOfLife(replica="a", term=5, at=100.0)
    assert leader_gap.gap_s(before, 6, 160.0, 15.0, closed=False) == 60.0
    assert leader_gap.gap_s(before, 6, 110.0, 15.0, closed=False) == 0.0
    assert leader_gap.gap_s(before, 5, 160.0, 15.0, closed=False) == 0.0, "it is the same leader"
    assert leader_gap.gap_s(before, 6, 160.0, 15.0, closed=True) == 0.0
    assert leader_gap.gap_s(None, 6, 160.0, 15.0, closed=True) == 0.0
    news = rules.report(event("leader.absent", "leader", Severity.WARNING, seconds=60), 5, "j")
    assert news and not news.tell_end
