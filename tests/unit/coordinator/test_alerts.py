"""Which events and states are alerts, and which of them are one fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.coordinator.alerts import rules, state_machine
from elastic_rl.coordinator.alerts.conditions import (
    CommitClock,
    Thresholds,
    behind_s,
    conditions,
    etcd_conditions,
    under_replication,
)
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition, Phase
from elastic_rl.coordinator.election import leader_gap
from elastic_rl.coordinator.etcd_health import EtcdHealth
from elastic_rl.coordinator.membership.registry import DCS, DURABLE
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.dcs.catalog.under_replication import ShortVersion, UnderReplication
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import KeyValue, MemberStatus
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    Event,
    GenerationCap,
    JobStatus,
    Member,
    PoolSpec,
    PoolStatus,
    Severity,
    Version,
    VersionState,
)

KEYS = Keys("j")


def advance_once(now: float, known: Sequence[Alert] = (), holding: Mapping[str, Condition] | None = None,
              reports: Sequence[Condition] = (), receivers: Sequence[str] = ()) -> state_machine.Changes:
    return state_machine.advance(now, 7, list(known), holding or {}, reports, lambda a: False, lambda a: receivers)


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


def test_reports_of_one_engine_by_runner_driver_and_leader_have_one_key() -> None:
    found = {rules.report(event(k, "e1", by="leader" if k == "engine.dead" else ""), 5).key
             for k in ("engine.dead", "engine.replaced", "engine.quarantined")}
    assert found == {"engine.dead/e1"}


@pytest.mark.parametrize(("kind", "severity", "opens"), [
    ("version.failing", Severity.WARNING, True), ("version.dropped", Severity.WARNING, False),
    ("logprob.mismatch", Severity.WARNING, True),
    ("samples.unpublished", Severity.WARNING, True), ("router.foreign_worker", Severity.WARNING, True),
    ("pool.scaled", Severity.ERROR, True), ("newer.release", Severity.ERROR, True),
    ("newer.release", Severity.WARNING, False), ("compute.failing", Severity.ERROR, False),
    ("router.restarted", Severity.WARNING, True), ("queue.replaced", Severity.WARNING, True),
    ("engine.drain_timeout", Severity.WARNING, False),
    ("version.republished", Severity.WARNING, False)])
def test_event_opens_an_alert(kind: str, severity: Severity, opens: bool) -> None:
    assert (rules.report(event(kind, severity=severity), 5) is not None) is opens


@pytest.mark.parametrize("kind", ["etcd.restarted", "dcs.restarted", "coordinator.restarted"])
def test_restart_of_a_local_service_is_a_one_time_alert(kind: str) -> None:
    condition = rules.report(event(kind, severity=Severity.WARNING), 5)
    assert condition is not None and not condition.notify_resolved


@pytest.mark.parametrize(("part", "subject"), [("dcs", "node-0"), ("coordinator", "coordinator-1")])
def test_restart_of_a_service_with_an_alert_opens_no_second_one(part: str, subject: str) -> None:
    def restarted(started_at: float) -> Condition:
        found = rules.report(event(f"{part}.restarted", subject, Severity.WARNING, started_at=started_at), 5)
        assert found is not None
        return found

    dead = advance_once(1.0, reports=[Condition(f"{part}.dead", subject, "m", revision=2)]).put
    assert rules.merge_by_fault([restarted(2.0)], dead) == [], "its host says so while it is taken for dead"
    assert rules.merge_by_fault([restarted(2.0)], []) == [restarted(2.0)]
    assert restarted(2).at == 2.0, "a whole second"
    back = [alert.replace(phase=Phase.RESOLVED, resolved_at=3.0) for alert in dead]
    assert rules.merge_by_fault([restarted(2.0)], back) == [], "its host says so once it is back, however late"
    assert rules.merge_by_fault([restarted(3.1)], back) == [restarted(3.1)], "it has ended once more"


@pytest.mark.parametrize("role", DURABLE)
def test_death_of_a_service_that_is_found_with_its_successor_is_left_to_the_word_of_its_host(role: str) -> None:
    dead = LastSeen(role=role, id="a", incarnation="7:1" if role == DCS else "7", first_seen=1.0, dead_at=5.0)

    def about_it(pid: int) -> list[str]:
        member = Member(role=role, id="a", host="h", pid=pid)
        node = DcsNode(id="a", host="h", port=1, pid=pid, arena_path="/x", arena_bytes=1)
        found = conditions(ClusterSnapshot("j", registry={dead.name: dead}, members=[] if role == DCS else [member],
                                           nodes={"a": node} if role == DCS else {}), 9.0)
        return [k for k in found if k.startswith(f"{role}.dead")]

    assert about_it(7) == [f"{role}.dead/a"], "its lease has not run out yet"
    assert about_it(8) == []


def test_death_of_a_role_is_an_alert_also_beside_another_process_of_its_name() -> None:
    """No host says that one was started again."""
    dead = LastSeen(role="rollout", id="a", incarnation="7", first_seen=1.0, dead_at=5.0)
    found = conditions(ClusterSnapshot("j", registry={dead.name: dead}, members=[
        Member(role="rollout", id="a", host="h", pid=8)]), 9.0)
    assert "rollout.dead/a" in found


def test_request_after_the_end_of_an_alert_is_notified() -> None:
    hung = advance_once(1.0, holding={"engine.hung/e1": Condition("engine.hung", "e1", "m")}).put
    over = [alert.replace(phase=Phase.RESOLVED, resolved_at=3.0) for alert in hung]
    requested = [rules.report(event("restart.requested", "engines/e1").replace(at=at), 9) for at in (2.0, 3.5)]
    assert rules.merge_by_fault([c for c in requested if c], over) == [requested[1]]


def test_leaders_own_death_event_opens_no_second_alert() -> None:
    assert rules.report(event("coordinator.dead", severity=Severity.ERROR, by="leader"), 5) is None


def test_dead_ranks_of_a_trainer_are_one_alert() -> None:
    dead = [LastSeen(role="trainer", id=f"rank-{i}", incarnation="1", first_seen=1, dead_at=5) for i in range(2)]
    assert [k for k in conditions(snapshot(registry=dead), 9.0) if "trainer" in k] == ["trainer.dead/trainer"]


def test_report_of_a_group_whose_rank_is_back_already_is_of_the_alert_that_is_open() -> None:
    def of_trainer(found: dict[str, Condition]) -> list[str]:
        return [key for key in found if key.startswith("trainer")]

    back = [LastSeen(role="trainer", id="rank-0", incarnation="2", first_seen=10.0)]
    open_alert = opened("trainer.dead", "trainer")
    now = conditions(snapshot(registry=back, specs={}, statuses={}), 10.1, firing={open_alert.key})
    assert state_machine.advance(10.1, 1, [open_alert], now, [], lambda a: True, lambda a: []).put == []
    reported = Condition("trainer.dead", "trainer", "the group re-formed", revision=7)
    [report] = rules.merge_by_fault([reported], [open_alert])
    [changed] = state_machine.advance(10.9, 8, [open_alert], now, [report], lambda a: True, lambda a: []).put
    assert changed.id == open_alert.id and changed.open
    assert of_trainer(conditions(snapshot(registry=back), 10.1)) == [], "a start is no fault"
    assert of_trainer(conditions(snapshot(registry=back), 30.0, firing={open_alert.key})) == [], "it ends"


def test_rank_that_is_back_does_not_hide_another_one_that_is_dead() -> None:
    ranks = [LastSeen(role="trainer", id="rank-1", incarnation="1", host="h1", first_seen=1.0, dead_at=5.0),
             LastSeen(role="trainer", id="rank-0", incarnation="2", host="h0", first_seen=10.0)]
    for registry in (ranks, ranks[::-1]):
        found = conditions(snapshot(registry=registry), 10.1, firing={"trainer.dead/trainer"})["trainer.dead/trainer"]
        assert "rank-1" in found.message and "is dead" in found.message and found.cause == "h1"


def test_engine_alert_is_over_when_the_pool_is_complete() -> None:
    alert = advance_once(100.0, reports=[Condition("engine.dead", "e1", "m", revision=3)]).put[0]
    two = [engine("e2", EngineState.READY), engine("e3", EngineState.READY)]
    assert not rules.released(alert, snapshot(engines=[engine("e2", EngineState.READY)]), 200.0)
    assert not rules.released(alert, snapshot(engines=[*two, engine("e1", EngineState.READY, 50.0)]), 200.0)
    assert not rules.released(alert, snapshot(engines=two), 101.0)
    assert rules.released(alert, snapshot(engines=two), 104.0)


def test_cannot_fetch_alert_is_over_when_the_engine_recovers_or_is_gone() -> None:
    reported = Event(id="1", at=1.0, kind="engine.cannot_fetch", subject="e1", message="m", severity=Severity.WARNING)
    condition = rules.report(reported, 5)
    assert condition and condition.key == "engine.cannot_fetch/e1"
    over = Event(id="2", at=2.0, kind="engine.fetch_recovered", subject="e1", message="m")
    assert rules.resolved_key(over, "j") == condition.key
    alert = advance_once(1.0, reports=[condition]).put[0]
    engine = Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1)
    assert not rules.released(alert, empty_snapshot(engines=[engine]), 1e6)
    assert rules.released(alert, empty_snapshot(), 1e6)


def test_publish_alert_is_over_when_a_head_of_its_group_moves_after_the_failure() -> None:
    condition = rules.report(event("version.failing", "trainer", Severity.WARNING), 30)
    assert condition and condition.key == "publish.failed/trainer"
    alert = advance_once(1.0, reports=[condition]).put[0]

    def released(stream: str, moved_at: int) -> bool:
        return rules.released(alert, snapshot(revisions={KEYS.stream_head(stream): moved_at}), 2.0)

    assert not released("policy", 29) and released("policy", 31) and released("trainer_state", 31)
    assert not released("run_log", 31) and not released("critic", 31), "that is committed by others"


def test_short_pool_is_an_alert_after_an_engines_start_time() -> None:
    found = conditions(snapshot(), 9.0, Thresholds(pool_hold_s=77.0))
    assert found["pool.short/rollout"].hold_s == 77.0
    cfg = config.parse({"engine": {"start_timeout_s": 40}, "pools": {
        "judge": {"model": "/m", "engine": {"start_timeout_s": 900}}}})
    assert Thresholds.from_config(cfg).pool_holds_s == {"rollout": 40.0, "judge": 900.0}
    found = conditions(snapshot(), 9.0, Thresholds(pool_hold_s=77.0, pool_holds_s={"rollout": 40.0}))
    assert found["pool.short/rollout"].hold_s == 40.0
    over = conditions(snapshot(status=JobStatus(phase="finished")), 9.0)
    assert list(over) == ["job.finished/j"]
    assert list(conditions(snapshot(status=JobStatus(phase="failed", message="no")), 9.0)) == [
        "job.failed/j"]



def merged(*found: Condition, known: Sequence[Alert] = ()) -> list[str]:
    return [c.key for c in rules.merge_by_fault(found, known)]


def opened(kind: str, subject: str, severity: Severity = Severity.ERROR, revision: int = 0) -> Alert:
    c = Condition(kind, subject, "m", severity, revision=revision)
    return advance_once(1.0, holding={} if revision else {c.key: c}, reports=[c] if revision else []).put[0]


@pytest.mark.parametrize(("group", "other"), [("trainer", "critic"), ("critic", "trainer")])
def test_signs_of_a_lost_trainer_group_are_one_alert(group: str, other: str) -> None:
    signs = [rules.report(event(f"{group}.{what}", group, Severity.ERROR), 5)
             for what in ("failed", "agent_ended")]
    assert {sign.key for sign in signs if sign} == {f"{group}.dead/{group}"}
    waiting = Condition("run.waiting", group, "m", Severity.WARNING)
    known = [opened(f"{group}.dead", group)]
    assert merged(Condition(f"{group}.hung", group, "m"), waiting, known=known) == [f"{group}.dead/{group}"] * 2
    assert merged(Condition(f"{other}.hung", other, "m"), known=known) == [f"{other}.hung/{other}"]
    assert rules.resolved_key(event(f"{group}.recovered", group), "j") == f"{group}.dead/{group}"


def test_hang_and_death_of_one_member_are_one_alert() -> None:
    dead = Condition("engine.dead", "e1", "m", revision=9)
    assert merged(dead, known=[opened("engine.hung", "e1")]) == ["engine.hung/e1"]
    assert merged(dead, known=[opened("engine.hung", "e2")]) == ["engine.dead/e1"]
    trainer = Condition("trainer.dead", "trainer", "m")
    assert merged(trainer, known=[opened("trainer.hung", "trainer")]) == ["trainer.hung/trainer"]
    hung = LastSeen(role="engine", id="e1", incarnation="1", first_seen=1, hung_at=5)
    assert list(conditions(snapshot(registry=[hung], statuses={}), 9.0)) == ["engine.hung/e1"]
    assert not conditions(snapshot(registry=[hung.replace(dead_at=6.0)], statuses={}), 9.0)


def test_driver_death_and_global_restart_are_one_alert_in_either_order() -> None:
    restart, dead = Condition("run.global_restart", "j", "m", revision=9), Condition("driver.dead", "d1", "m")
    assert merged(restart, known=[opened("driver.dead", "d1")]) == ["driver.dead/d1"]
    assert merged(dead, known=[opened("run.global_restart", "j", revision=9)]) == ["run.global_restart/j"]
    assert len(set(merged(restart, dead))) == 1


def test_error_is_not_merged_into_a_warning() -> None:
    lag = opened("engine.lagging", "e1", Severity.WARNING)
    assert merged(Condition("engine.dead", "e1", "m", revision=9), known=[lag]) == ["engine.dead/e1"]
    cannot = Condition("engine.cannot_fetch", "e1", "m", Severity.WARNING, revision=9)
    assert merged(cannot, known=[lag]) == ["engine.lagging/e1"]
    both = [lag, opened("engine.dead", "e1", revision=9)]
    assert merged(Condition("engine.lagging", "e1", "m", Severity.WARNING), known=both) == ["engine.lagging/e1"]


def test_restart_event_is_notified_unless_its_fault_has_an_alert() -> None:
    requested = rules.report(event("restart.requested", "engines/e1", by="ada"), 5)
    assert requested and not requested.notify_resolved and merged(requested) == ["restart.requested/engines/e1"]
    assert merged(requested, known=[opened("engine.hung", "e1")]) == []
    role = replace(requested, subject="roles/rollout")
    assert merged(role, known=[opened("rollout.hung", "rollout-7")]) == []
    assert merged(role, known=[opened("rollout2.dead", "x")]) == ["restart.requested/roles/rollout"]
    assert merged(replace(requested, subject="job"), known=[opened("run.global_restart", "j", revision=3)]) == []
    assert merged(Condition("trainer.hung", "trainer", "m"), replace(requested, subject="trainer")) == [
        "trainer.hung/trainer"]


def test_loss_that_the_leader_has_told_of_opens_no_alert() -> None:
    """The loop finds it with its next command, which may be minutes after the end of the leader's own alert."""
    failed = event("trainer.failed", "trainer", Severity.ERROR)
    assert rules.report(failed, 5) and not rules.report(failed.replace(data={event_kinds.ALREADY_REPORTED: True}), 5)


def test_global_restart_alert_is_over_when_the_new_epoch_makes_progress() -> None:
    alert = opened("run.global_restart", "j", revision=30)
    status = JobStatus(phase="rl")

    def over(epoch: int, written: int, status: JobStatus = status) -> bool:
        return rules.released(alert, snapshot(status=status, revisions={
            KEYS.epoch(): epoch, KEYS.job_status(): written}), 1e9)

    assert not over(20, 40), "the old epoch still writes"
    assert not over(35, 34) and over(35, 36)
    assert not over(35, 36, JobStatus(phase="starting")) and over(20, 40, JobStatus(phase="failed"))
    assert rules.resolved_key(event("operation.cancelled", "job"), "j") == alert.key


def driver(number: int, registered: int, **changes: float) -> LastSeen:
    return LastSeen(role="driver", id=f"d{number}", incarnation=str(number), first_seen=1.0,
                    registered_revision=registered, **changes)


def test_reported_end_of_a_driver_is_over_when_the_next_one_is_there_instead() -> None:
    ended = rules.report(event("driver.restarted", "d1", Severity.ERROR), 30)
    assert ended is not None and ended.key == "driver.dead/d1", "the leader finds the same death"
    alert = opened(ended.kind, ended.subject, revision=30)

    def over(*drivers: LastSeen, epoch: int = 10, written: int = 0, phase: str = "rl") -> bool:
        return rules.released(alert, snapshot(status=JobStatus(phase=phase), registry=drivers, revisions={
            KEYS.epoch(): epoch, KEYS.job_status(): written}), 1e9)

    assert not over() and not over(driver(1, 20))
    assert not over(driver(1, 20), driver(2, 31)), "the death of the first has still to be found"
    assert over(driver(2, 31)) and over(driver(2, 31), phase="starting"), "it has taken over"
    assert over(phase="failed")
    assert not over(driver(2, 36), epoch=35), "nothing was taken over"
    assert not over(driver(2, 36), epoch=35, written=34) and over(driver(2, 36), epoch=35, written=37)


def test_hang_of_a_driver_its_restart_and_its_death_are_one_alert_until_it_is_replaced() -> None:
    hung = conditions(snapshot(registry=[driver(1, 20, hung_at=5.0)], statuses={}), 9.0)
    assert list(hung) == ["driver.hung/d1"]
    alert = advance_once(1.0, holding=hung).put[0]
    requested = rules.report(event("restart.requested", "driver", by="failure_policy"), 31)
    dead = conditions(snapshot(registry=[driver(1, 20, hung_at=5.0, dead_at=6.0), driver(2, 32)], statuses={}), 9.0)
    assert requested and merged(requested, *dead.values(), known=[alert]) == [alert.key]
    assert [a.phase for a in advance_once(9.0, [alert]).put] == [state_machine.Phase.RESOLVED]


def test_crash_loop_and_failed_job_are_one_alert_until_the_job_runs() -> None:
    loop = rules.report(event("run.crash_loop", "j", Severity.ERROR, by="failure_policy"), 5)
    failed = conditions(snapshot(status=JobStatus(phase="failed"), statuses={}), 1.0)["job.failed/j"]
    assert loop and len(set(merged(loop, failed))) == 1
    alert = opened("run.crash_loop", "j", revision=5)
    assert not rules.released(alert, snapshot(status=JobStatus(phase="failed")), 1e9)
    assert rules.released(alert, snapshot(status=JobStatus(phase="starting")), 2.0)


def test_refused_run_is_an_alert_until_the_next_one_begins() -> None:
    report = rules.report(event("run.refused", "j", Severity.ERROR), 5)
    assert report and report.kind == "run.refused"
    alert = opened("run.refused", "j", revision=5)
    of_before = snapshot(status=JobStatus(phase="stopped"), revisions={KEYS.job_status(): 4})
    begun = snapshot(status=JobStatus(phase="starting"), revisions={KEYS.job_status(): 6})
    assert not rules.released(alert, of_before, 1e9) and rules.released(alert, begun, 6.0)


def test_end_event_of_one_sign_ends_the_alert_it_was_merged_into() -> None:
    lag, dead = (opened(f"engine.{k}", "e1", revision=5) for k in ("lagging", "dead"))
    assert rules.declared_over(lag, {"engine.cannot_fetch/e1"})
    assert not rules.declared_over(lag, {"engine.cannot_fetch/e2"})
    assert not rules.declared_over(dead, {"engine.cannot_fetch/e1"})
    assert rules.declared_over(opened("trainer.hung", "trainer", revision=5), {"trainer.dead/trainer"})


COMMITTED = {n: 100.0 * n for n in range(10, 21)}


def test_engine_lags_by_versions_or_by_time_since_the_next_version() -> None:
    assert behind_s(1450.0, 13, COMMITTED) == 50.0
    assert behind_s(9999.0, 20, COMMITTED) == 0.0
    assert behind_s(1450.0, 3, COMMITTED) == 450.0, "what was released is not known any more"

    def lagging(version: int, now: float, state: EngineState = EngineState.READY) -> list[str]:
        e = engine("e1", state).replace(version=version)
        found = conditions(snapshot(engines=[e], committed={"policy": COMMITTED}), now)
        assert all(c.hold_s for c in found.values() if "lag" in c.key), "a tiny job is as far ahead in two seconds"
        return [k for k in found if "lag" in k]

    assert not lagging(20, 9999.0) and not lagging(18, 1950.0)
    assert lagging(18, 2021.0) == ["engine.lagging/e1"]
    assert lagging(12, 1301.0) == ["engine.lagging/e1"]
    assert not lagging(0, 9999.0, EngineState.SYNCING) and not lagging(12, 9999.0, EngineState.DEAD)


def test_engine_does_not_lag_by_the_clock_of_a_leader_that_is_ahead() -> None:
    """Each version would count as there for an hour before any engine could fetch it."""
    clock = CommitClock()
    assert clock.at_most(empty_snapshot()) == math.inf

    def lagging(version: int, head: int, leader_s: float, wall_s: float) -> bool:
        heads = {"policy": Version(stream="policy", number=head, epoch=1, state=VersionState.COMMITTED,
                                   committed_at=COMMITTED[head])}
        committed = {"policy": {n: at for n, at in COMMITTED.items() if n <= head}}
        now = replace(snapshot(engines=[engine("e1", EngineState.READY).replace(version=version)],
                               committed=committed), heads=heads, leader_time=leader_s)
        return "engine.lagging/e1" in conditions(now, wall_s, by_commits=clock.at_most(now))

    assert not lagging(18, 19, 50.0, 1900.0 + 3600.0), "it was committed a moment ago"
    assert not lagging(18, 19, 50.0 + 119.0, 1900.0 + 3719.0)
    assert lagging(18, 19, 50.0 + 121.0, 1900.0 + 3721.0), "and two minutes later it lags"
    assert not lagging(19, 20, 180.0, 9999.0) and lagging(18, 20, 201.5, 2021.5)
    assert not lagging(19, 20, 301.0, 1950.0), "nor by one that is behind"


def test_lag_that_is_open_does_not_end_with_its_leader() -> None:
    """The next one has seen the newest version just now, and not when it was committed."""
    head = Version(stream="policy", number=20, epoch=1, state=VersionState.COMMITTED, committed_at=COMMITTED[20])
    now = replace(snapshot(engines=[engine("e1", EngineState.READY).replace(version=18)],
                           committed={"policy": COMMITTED}), heads={"policy": head}, leader_time=5.0)
    by_commits = CommitClock().at_most(now)
    assert "engine.lagging/e1" not in conditions(now, 2600.0, by_commits=by_commits)
    assert "engine.lagging/e1" in conditions(now, 2600.0, firing={"engine.lagging/e1"}, by_commits=by_commits)
    durable = replace(now, durable={"policy": 18})
    assert "durable.behind/policy" in conditions(durable, 9e9, firing={"durable.behind/policy"}, by_commits=by_commits)
    assert "durable.behind/policy" not in conditions(durable, 9e9, by_commits=by_commits)


def test_durable_stream_is_behind_by_time() -> None:
    def behind(number: int, now: float) -> list[str]:
        return list(conditions(empty_snapshot(committed={"policy": COMMITTED}, durable={"policy": number}), now))

    assert behind(20, 1e9) == [] and behind(18, 2000.0) == []
    assert behind(18, 1900.0 + 901.0) == ["durable.behind/policy"] == behind(0, 1e9)


def test_alert_that_is_pending_goes_by_the_shortest_hold_of_what_it_stands_for() -> None:
    slow = Condition("engine.lagging", "e1", "behind", Severity.WARNING, hold_s=10.0)
    [pending] = advance_once(1.0, holding={slow.key: slow}).put
    given_up = replace(slow, message="gets no requests", hold_s=0.0)
    [fires] = advance_once(2.0, [pending], {slow.key: given_up}).put
    assert (pending.phase, fires.phase, fires.id) == (Phase.PENDING, Phase.FIRING, pending.id)
    assert advance_once(2.0, [pending], {slow.key: slow}).put == []


def test_node_that_cannot_save_has_an_alert_that_says_what_is_at_stake() -> None:
    node = DcsNode(id="n0", host="h", port=1, pid=1, arena_path="/x", arena_bytes=100, unsaved=3,
                   disk_fault="this node's disk fails: [Errno 5] Input/output error")
    [found] = conditions(empty_snapshot(nodes=[node]), 1.0).values()
    assert (found.key, found.severity) == ("dcs.disk_failing/n0", Severity.ERROR) and found.hold_s
    assert "3 of them" in found.message and "Errno 5" in found.message


def test_full_node_alert_uses_disk_or_arena_and_has_hysteresis() -> None:
    def full(used: int, disk: int = 0, room: int = 0, firing: frozenset[str] = frozenset()) -> bool:
        node = DcsNode(id="n0", host="h", port=1, pid=1, arena_path="/x", arena_bytes=100, used_bytes=used,
                       disk_bytes=disk, disk_room_bytes=room)
        return "dcs.full/n0" in conditions(empty_snapshot(nodes=[node]), 1.0, Thresholds(full_fraction=0.9),
                                                 firing)

    assert full(91) and not full(89)
    assert not full(100, disk=100, room=50) and full(1, disk=100, room=5), "with a disk the arena is a cache"
    assert full(88, firing=frozenset({"dcs.full/n0"})) and not full(84, firing=frozenset({"dcs.full/n0"}))


def test_staleness_beyond_its_bound_is_an_alert() -> None:
    def found(staleness: int, phase: str = "rl") -> list[str]:
        status = JobStatus(phase=phase, staleness=staleness)
        return [k for k in conditions(empty_snapshot(status=status), 1.0, Thresholds(max_staleness=1))
                if "stale" in k]

    assert found(2) == ["staleness.exceeded/j"] and not found(1) and not found(2, "finished")


def actor_member() -> Member:
    return Member(role="actor", id="actor-1", pid=1, host="h")


def waiting_run(kind: str = "engines", **changes) -> JobStatus:
    return JobStatus(phase="rl", step=7, stage="generate", waiting_kind=kind, waiting_for="an engine at version 8",
                     waiting_since=100.0, updated_at=100.0).replace(**changes)


def waits(now: float, status: JobStatus, members: Sequence[Member] = (actor_member(),), **parts) -> list[Condition]:
    found = conditions(empty_snapshot(status=status, members=members, **parts), now, Thresholds(run_waiting_s=60.0))
    return [c for c in found.values() if c.kind == "run.waiting"]


def test_run_that_waits_too_long_is_an_alert_until_it_goes_on() -> None:
    assert not waits(159.0, waiting_run())
    [found] = waits(161.0, waiting_run())
    assert (found.key, found.severity) == ("run.waiting/engines", Severity.WARNING)
    assert "has waited in generate for more than 60 s for an engine at version 8" in found.message
    assert not waits(161.0, waiting_run(kind="", waiting_since=0.0))
    assert not waits(161.0, waiting_run(phase="finished")) and not waits(161.0, waiting_run(phase="failed"))
    assert [c.key for c in waits(161.0, waiting_run(kind="of a newer release"))] == ["run.waiting/of a newer release"]


def idle_engines(*running: int, firing: frozenset[str] = frozenset(), waiting: int = 0, known: bool = True,
                 cap: str = GenerationCap.REQUESTS, **status) -> list[Condition]:
    """The alert of a pool whose engines run so many requests each, of 8."""
    engines = [engine(f"e{n}", EngineState.READY).replace(running=r, waiting=waiting, slots=8, load_known=known)
               for n, r in enumerate(running)]
    members = [actor_member(), *(Member(role="engine", id=e.id, pid=1, host="h") for e in engines)]
    found = conditions(empty_snapshot(engines, members=members, status=JobStatus(
        phase="rl", stage="generate", generation_cap=cap, **status)), 9.0, Thresholds(engines_idle_s=7.0), firing)
    return [c for c in found.values() if c.kind == "pool.idle"]


def test_engines_that_idle_while_a_limit_binds_are_an_alert_that_names_it() -> None:
    [found] = idle_engines(8, 0)
    assert (found.key, found.severity, found.hold_s) == ("pool.idle/rollout", Severity.WARNING, 7.0)
    assert "the 2 routable engines of pool rollout could process 8 more requests at once, of 16" in found.message
    assert "rollout.groups_per_request" in found.message
    for cap in GenerationCap:
        assert len(idle_engines(8, 0, cap=cap)) == bool(cap), "nothing more is asked for at the end of a step"
    assert "the limit of a newer release binds" in idle_engines(8, 0, cap="of a newer release")[0].message


def test_alert_of_idle_engines_has_hysteresis() -> None:
    firing = frozenset({"pool.idle/rollout"})
    assert not idle_engines(8, 1) and idle_engines(8, 1, firing=firing) and not idle_engines(8, 2, firing=firing)


def test_engines_that_others_hold_up_or_that_are_full_do_not_idle() -> None:
    assert not idle_engines(8, 0, waiting_kind="trainer", waiting_for="the trainer"), "this has an alert"
    assert not idle_engines(1, 1, waiting=3), "their KV cache is full"
    assert not idle_engines(8, 0, known=False) and not idle_engines(), "nobody knows"


def test_run_without_an_actor_is_an_alert_also_during_a_wait() -> None:
    for status in (waiting_run(), waiting_run(kind="", waiting_since=0.0, waiting_for="")):
        for now in (101.0, 1e6):  # however old the status is: an actor that is about to start gets its time
            assert [(c.key, c.hold_s) for c in waits(now, status, members=())] == [("run.waiting/actor", 60.0)]
            assert not waits(now, status.replace(phase="finished"), members=())


def test_alert_about_a_dead_role_covers_the_wait_for_it() -> None:
    dead = [LastSeen(role=role, id=f"{role}-1", incarnation="i", first_seen=1.0, dead_at=110.0)
            for role in ("actor", "reward")]
    assert not waits(161.0, waiting_run(), members=(), registry=dead)
    assert not waits(161.0, waiting_run("reward"), registry=dead)
    assert waits(161.0, waiting_run("reward"), registry=dead[:1])


@pytest.mark.parametrize(("kind", "subject", "of"), [
    ("trainer.dead", "trainer", "trainer"), ("driver.dead", "d", "actor"), ("run.global_restart", "j", "actor")])
def test_wait_that_follows_from_a_fault_is_part_of_its_alert(kind: str, subject: str, of: str) -> None:
    opened = advance_once(0.0, reports=[Condition(kind, subject, "", revision=3)]).put
    wait = Condition("run.waiting", of, "", Severity.WARNING)
    assert [c.key for c in rules.merge_by_fault([wait], opened)] == [f"{kind}/{subject}"]
    # It was noticed before the fault was.
    pending = advance_once(0.0, holding={wait.key: replace(wait, hold_s=60.0)}).put
    assert [c.key for c in rules.merge_by_fault([wait], pending)] == ["run.waiting/" + of]
    assert [c.key for c in rules.merge_by_fault([wait], [*pending, *opened])] == [f"{kind}/{subject}"]
    other = Condition("run.waiting", "engines", "", Severity.WARNING)
    assert [c.key for c in rules.merge_by_fault([other], opened)] == ["run.waiting/engines"]


def test_silent_etcd_member_is_an_error_when_no_other_may_fail() -> None:
    def found(*errors: str, read_s: float = 0.0) -> list[tuple[str, Severity]]:
        health = EtcdHealth([MemberStatus(f"m{i}", error=e) for i, e in enumerate(errors)], read_s)
        return [(c.key, c.severity) for c in etcd_conditions(health, 0.5, 0.9, 1000)]

    assert found("", "", "") == [] == found("")
    assert found("x", "", "") == [("etcd.degraded/m0", Severity.ERROR)]
    assert found("x", "", "", "", "") == [("etcd.degraded/m0", Severity.WARNING)]
    assert [s for _, s in found("x", "y", "", "", "")] == [Severity.ERROR] * 2
    assert found("", read_s=0.6) == [("etcd.slow/etcd", Severity.WARNING)]
    full = EtcdHealth([MemberStatus("m0", alarms=("NOSPACE",))])
    assert [c.key for c in etcd_conditions(full, 0.5, 0.9, 1000)] == ["etcd.alarm/m0"]


def test_etcd_full_uses_the_members_quota_or_the_assumed_one() -> None:
    def full(*members: MemberStatus) -> bool:
        return [c.key for c in etcd_conditions(EtcdHealth(members), 0.5, 0.9, 1000)] == ["etcd.full/etcd"]

    assert full(MemberStatus("m0", db_bytes=901), MemberStatus("m1", db_bytes=100))
    assert not full(MemberStatus("m0", db_bytes=899))
    assert full(MemberStatus("m0", db_bytes=451, quota_bytes=500), MemberStatus("m1", db_bytes=800, quota_bytes=1000))
    assert not full(MemberStatus("m0", db_bytes=901, quota_bytes=2000))


def test_leader_gap_is_reported_unless_the_service_was_stopped() -> None:
    before = leader_gap.LeaderHeartbeat(replica="a", term=5, at=100.0)
    assert leader_gap.gap_s(before, 6, 160.0, 15.0, stopped=False) == 60.0
    assert leader_gap.gap_s(before, 6, 110.0, 15.0, stopped=False) == 0.0
    assert leader_gap.gap_s(before, 5, 160.0, 15.0, stopped=False) == 0.0, "it is the same leader"
    assert leader_gap.gap_s(before, 6, 160.0, 15.0, stopped=True) == 0.0
    assert leader_gap.gap_s(None, 6, 160.0, 15.0, stopped=True) == 0.0
    gap = rules.report(event("leader.absent", "leader", Severity.WARNING, seconds=60), 5)
    assert gap and not gap.notify_resolved


def _driver(epoch: int = 1, **info: object) -> Member:
    return Member(role="driver", id="d", pid=1, host="h", epoch=epoch, phase="rl", info=info)


def test_reports_of_a_driver_that_was_taken_over_are_no_alert() -> None:
    before, now = _driver(faults={"router": "it ended"}), _driver(faults={"trainer": "no host"}).replace(id="d2")
    for members in ([before, now], [now, before]):
        found = conditions(ClusterSnapshot("j", epoch=1, members=members, revisions={
            KEYS.member("driver", m.id): KeyValue("", b"", created, 40, 1, 0) for m, created in ((before, 5), (now, 9))
        }), now=0.0)
        assert list(found) == ["compute.failing/trainer"]


@pytest.mark.parametrize(("driver", "expected"), [
    (_driver(faults={"router": "it ended"}), {"compute.failing/router"}),
    (_driver(waiting={"trainer": "no room"}), {"compute.waiting/trainer"}),
    (_driver(waiting={"pools/rollout": "no room"}), set()),  # pool.short says it
    (_driver(epoch=0, faults={"router": "of an older driver"}), set()),
    (_driver(faults="garbage", waiting=[1]), set()),
])
def test_what_the_driver_reports_of_its_parts_is_an_alert(driver: Member, expected: set[str]) -> None:
    found = conditions(ClusterSnapshot(job="j", epoch=1, members=[driver]), now=0.0)
    assert {key for key in found if key.startswith("compute.")} == expected


@pytest.mark.parametrize(("changes", "stream", "short"), [
    ({}, "policy", False), ({"message": "no room in the cluster"}, "policy", True), ({"pending": 1}, "policy", True),
    ({"ready": 1}, "policy", True), ({}, "", True)])
def test_pool_whose_stream_has_no_version_yet_is_not_short(changes: dict[str, Any], stream: str, short: bool) -> None:
    """In a long supervised phase engines have nothing to serve."""
    status = PoolStatus(**{"name": "rollout", "ready": 0, "starting": 2, "draining": 0, **changes})
    spec = PoolSpec(name="rollout", desired=2, stream=stream)
    seen = ClusterSnapshot(job="j", specs={"rollout": spec}, statuses={"rollout": status})
    assert ("pool.short/rollout" in conditions(seen, now=0.0)) is short
    begun = replace(seen, heads={"policy": Version(stream="policy", number=1, state=VersionState.COMMITTED, epoch=1)})
    assert "pool.short/rollout" in conditions(begun, now=0.0)


def test_pool_that_is_short_says_what_it_waits_for() -> None:
    status = PoolStatus(name="rollout", ready=1, starting=0, draining=0, pending=1, message="no room in the cluster")
    snapshot = ClusterSnapshot(job="j", specs={"rollout": PoolSpec(name="rollout", desired=2)},
                               statuses={"rollout": status})
    assert "no room in the cluster" in conditions(snapshot, now=0.0)["pool.short/rollout"].message


# -- copies of versions ------------------------------------------------------------------------------------------------
def test_versions_that_stay_short_of_copies_are_one_alert_that_names_what_is_away_and_full() -> None:
    why = "there is no other node that could have one"
    short = UnderReplication(tuple(ShortVersion("policy", n, 1, 2, why) for n in range(1, 6)), since_s=100.0)
    seen = empty_snapshot(
        registry=[LastSeen(role="dcs", id="host-b", incarnation="1", first_seen=1.0, dead_at=5.0),
                  LastSeen(role="dcs", id="node-0", incarnation="1", first_seen=1.0)],
        nodes=[DcsNode(id="node-0", host="a", port=1, pid=1, arena_path="", arena_bytes=100, used_bytes=99)])
    kind = {"dcs.under_replicated"}
    assert under_replication(short, 220.0, seen, 120.0, 0.9) == ([], kind), "not for longer than the bound yet"
    [found], unknown = under_replication(short, 220.1, seen, 120.0, 0.9)
    assert not unknown
    assert (found.key, found.severity) == ("dcs.under_replicated/versions", Severity.WARNING)
    assert found.message.startswith(
        "policy/5, policy/4, policy/3 and 2 more have 1 of 2 copies, for more than 120 s: there is no other node that "
        "could have one; nodes that are away: host-b; full: node-0. The loss of another node may lose them")
    none = UnderReplication((ShortVersion("policy", 1, 0, 2, why),), since_s=100.0)
    [found], _ = under_replication(none, 9e9, seen, 120.0, 0.9)
    assert found.severity is Severity.ERROR and "Nobody can read them: bring the hosts back" in found.message
    [found], _ = under_replication(none, 9e9, empty_snapshot(registry=[]), 120.0, 0.9)
    assert found.severity is Severity.ERROR and "no node is away that could bring them back" in found.message
    assert under_replication(UnderReplication(complete=True), 9e9, seen, 120.0, 0.9) == ([], set())
    assert under_replication(UnderReplication(), 9e9, seen, 120.0, 0.9) == ([], kind), "a new leader knows nothing yet"


def trained(**status: object) -> dict[str, Condition]:
    found = {"phase": "rl", "step": 40, "eval_measure": "reward", "eval_start": 0.5, "eval_start_error": 0.04,
             "eval_error": 0.04, "eval_accuracy": 0.5, "update_kl": 0.05, "update_kl_step": 38, "lr": 1e-3, **status}
    now = conditions(snapshot(status=JobStatus.model_validate(found)), 9.0)
    return {key: c for key, c in now.items() if c.kind in ("update.large", "eval.fell", "job.finished")}


def test_updates_that_move_the_policy_too_far_are_an_alert_with_their_cause() -> None:
    assert not trained() and not trained(update_kl=None) and not trained(update_kl=0.99)
    found = trained(update_kl=7.3, lr=1000.0)["update.large/j"]
    assert found.severity is Severity.WARNING
    assert "step 38 moved the policy by 7.3 nats" in found.message and "the learning rate is 1e+03 now" in found.message
    assert "1000 nats or more" in trained(update_kl=1000.0)["update.large/j"].message
    assert "update.large/j" in trained(update_kl=7.3, phase="finished"), "the end does not hide it"
    assert not trained(update_kl=7.3, phase="stopped") and not trained(update_kl=7.3, phase="starting")


def test_policy_that_is_worse_than_before_rl_is_an_alert_with_its_cause() -> None:
    assert not trained(eval_accuracy=0.35), "which chance may do: 2.7 standard errors"
    assert not trained(eval_accuracy=0.0, eval_measure="exact_match"), "that is of the supervised phase"
    assert not trained(eval_start=None, eval_accuracy=0.0)
    assert not trained(eval_start=1.0, eval_start_error=0.0, eval_accuracy=1.0 - 1e-9, eval_error=0.0), "a rounding"
    fell = trained(eval_accuracy=0.0, eval_error=0.0, entropy=0.002)["eval.fell/j"]
    assert fell.severity is Severity.WARNING and "is 0.000, and was 0.500 at step 0" in fell.message
    assert "No update was seen to be large (entropy 0.002 nats), and the learning rate is 0.001" in fell.message
    both = trained(eval_accuracy=0.0, eval_error=0.0, worst_kl=15.9, worst_kl_step=1, worst_kl_lr=100.0,
                   phase="finished")
    assert {"eval.fell/j", "job.finished/j"} == set(both), "a policy that was ruined moves no more"
    assert "those of step 1 moved it by 15.9 nats a token, at a learning rate of 100" in both["eval.fell/j"].message
    assert both["job.finished/j"].message.endswith("the mean reward of evaluations went from 0.500 to 0.000")

