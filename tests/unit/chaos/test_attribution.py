"""Which fault an alert is a sign of, where faults overlap."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.faults.catalogue import FAULTS, Part
from chaos_tests.validate.attribution import (
    AFTER_S,
    RESOLVED_S,
    Windows,
    attributed,
    began,
    ended,
    explains,
    may_restart_all,
    resolves_by,
    seen_in,
    struck,
    under_way,
)

KILLED = "pid 1 (x) was sent SIGKILL and seen to end"


def fault(name: str, began: float = 10.0, ended: float | None = 20.0, *, target: str = "",
          witness: str = KILLED) -> dict[str, Any]:
    return {"name": name, "target": target, "witness": witness, "injected_at": began, "healed_at": ended}


def alert(kind: str, subject: str = "x", since: float = 11.0, over: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "subject": subject, "since": since, "resolved_at": over, "severity": "error"}


def left_over(alerts: list[dict[str, Any]], *faults: dict[str, Any]) -> list[str]:
    return [found["subject"] for found in attributed(alerts, faults).left_over]


def test_fault_gives_one_alert_of_its_part() -> None:
    of_engine = fault("engine_killed")
    assert left_over([alert("engine.dead", "a")], of_engine) == []
    assert left_over([alert("engine.dead", "a"), alert("engine.dead", "b", 12.0)], of_engine) == ["b"]
    assert left_over([alert("dcs.dead", "n")], of_engine) == ["n"], "no engine's death is the death of a node"
    assert left_over([alert("engine.dead", "a", 9.0)], of_engine) == ["a"], "before the fault"
    assert left_over([alert("engine.dead", "a", 20.1 + AFTER_S)], of_engine) == ["a"], "long after it"
    assert left_over([alert("engine.dead", "a", 500.0)], fault("engine_killed", ended=None)) == []


def test_consequence_of_a_fault_comes_within_a_minute_of_its_end() -> None:
    of_engine = fault("engine_killed", 10.0, 20.0)
    assert left_over([alert("engine.dead", "a", 79.0)], of_engine) == []
    assert left_over([alert("engine.dead", "a", 81.0)], of_engine) == ["a"]


def test_fault_gives_as_many_alerts_as_it_has_killed_processes() -> None:
    both = fault("all_engines_killed", witness=f"{KILLED}; {KILLED}")
    alerts = [alert("engine.dead", name) for name in "abc"]
    assert left_over(alerts[:2], both) == [] and left_over(alerts, both) == ["c"]


def test_alert_of_a_part_that_goes_with_another_is_not_one_more_of_the_main_part() -> None:
    killed = fault("engine_runner_killed", witness=f"{KILLED}; {KILLED}") | {"parts": ["driver", "dcs"]}
    assert left_over([alert("driver.dead", "a"), alert("dcs.dead", "n")], killed) == []
    assert left_over([alert("driver.dead", "a"), alert("driver.dead", "b", 12.0)], killed) == ["b"]


def test_alerts_of_faults_that_overlap_are_shared_out_so_that_none_is_left() -> None:
    """The earlier alert goes to the fault that is over first: the other one can still account for the later alert."""
    soon, late = fault("engine_killed", 10.0, 12.0), fault("scheduler_killed", 10.0, 100.0)
    alerts = [alert("engine.dead", "a", 11.0), alert("engine.dead", "b", 130.0)]
    found = attributed(alerts, [late, soon])
    assert [(a["subject"], f["name"]) for a, f in found.of] == [("a", "engine_killed"), ("b", "scheduler_killed")]
    assert not found.left_over and not found.untold


def test_alert_goes_to_the_fault_that_names_its_subject() -> None:
    found = attributed([alert("engine.dead", "b")], [fault("engine_killed", target="a"),
                                                     fault("engine_killed", ended=90.0, target="b")])
    assert [f["target"] for _, f in found.of] == ["b"] and [f["target"] for f in found.untold] == []


def test_alert_goes_to_the_fault_that_has_to_give_one_where_both_strike_one_host() -> None:
    """A slow link, and then a power cut, of the same host, each of whose parts is lost once."""
    slow = fault("leader_host_late", 10.0, 30.0, target="leader on host-1, node-0", witness="late")
    off = fault("leader_host_powered_off", 31.0, 60.0, target="leader on host-1, node-0", witness="off")
    again = fault("bystander_host_powered_off", 61.0, 90.0, target="bystander on host-1, node-0", witness="off")
    for one in (slow, off, again):
        one["may_go_unnoticed"] = one is slow
    found = attributed([alert("dcs.dead", "node-0", 40.0), alert("dcs.dead", "node-0", 70.0)], [slow, off, again])
    assert [f["name"] for _, f in found.of] == [off["name"], again["name"]] and not found.untold


def test_fault_that_takes_others_with_it_gives_one_alert_of_each() -> None:
    raylet = fault("raylet_killed")
    alerts = [alert(f"{name}.dead", name) for name in ("actor", "rollout", "advantages", "trainer", "engine")]
    assert left_over(alerts, raylet) == []
    assert left_over([*alerts, alert("engine.dead", "e2")], raylet) == [], "each engine of the host"
    assert left_over([*alerts, alert("actor.dead", "actor", 12.0)], raylet) == ["actor"]
    assert left_over(alerts, fault("gcs_killed")) == ["actor", "rollout", "advantages", "trainer", "engine"]


def test_alerts_of_how_long_a_fault_lasts_are_no_faults_and_no_storm() -> None:
    waits = [alert("run.waiting", str(n), 11.0 + n) for n in range(3)]
    assert left_over(waits[:1], fault("dcs_killed")) == [] and left_over(waits, fault("dcs_killed")) == ["1", "2"]
    assert left_over([alert("pool.short", "p"), alert("pool.short", "p", 12.0)], fault("dcs_killed")) == ["p"]
    assert left_over([alert("run.waiting"), alert("pool.short")], fault("dcs_killed")) == [], "one of each kind"


@pytest.mark.parametrize(("name", "kind", "may"), [
    ("engine_killed", "leader.absent", False), ("coordinator_killed", "leader.absent", True),
    ("coordinator_killed", "dcs.under_replicated", False), ("dcs_killed", "dcs.under_replicated", True),
    ("advantages_killed", "engine.lagging", False), ("trainer_rank_killed", "engine.lagging", True),
    ("coordinator_clock_set_ahead", "pool.short", True), ("router_killed", "pool.short", False),
    ("etcd_stopped", "durable.behind", True), ("actor_killed", "record.unreadable", False),
    ("holder_host_cut", "run.waiting", True), ("coordinator_killed", "run.waiting", False)])
def test_consequence_is_of_a_fault_of_a_part_that_may_have_it(name: str, kind: str, may: bool) -> None:
    assert left_over([alert(kind)], fault(name)) == ([] if may else ["x"])
    assert explains(fault(name), event(kind)) == (may and bool(seen_in(fault(name))))


def test_each_record_of_another_release_that_is_none_is_an_alert() -> None:
    unreadable = [alert("record.unreadable", f"{n}/foreign") for n in range(4)]
    assert left_over(unreadable, fault("foreign_records"), fault("engine_killed")) == ["3/foreign"]


# -- global restarts ---------------------------------------------------------------------------------------------------
RESTART = "run.global_restart"


@pytest.mark.parametrize(("name", "may"), [
    ("engine_killed", False), ("trainer_rank_killed", False), ("coordinator_killed", False), ("etcd_stopped", False),
    ("driver_killed", False), ("busy_cores", False), ("leader_host_late", False), ("host_agent_killed", False),
    ("gcs_killed", True), ("run_killed", True), ("holder_host_powered_off", True), ("of_a_later_release", True)])
def test_global_restart_is_of_a_fault_that_may_cause_it(name: str, may: bool) -> None:
    assert left_over([alert(RESTART)], fault(name)) == ([] if may else ["x"])
    assert name not in FAULTS or explains(fault(name), event(RESTART)) == may


def test_global_restart_is_of_faults_of_one_part_without_a_step_in_between() -> None:
    def left(*names: str, steps: Sequence[float] = ()) -> int:
        of = [fault(name, 10.0 + 5.0 * n, 30.0) for n, name in enumerate(names)]
        return len(attributed([alert(RESTART, since=40.0)], of, steps).left_over)

    assert left("trainer_rank_killed", "trainer_rank_exited") == 0
    assert left("trainer_rank_killed", "trainer_rank_exited", steps=[9.0, 16.0]) == 0, "none between the two"
    assert left("trainer_rank_killed", "trainer_rank_exited", steps=[12.0]) == 1
    assert left("trainer_rank_killed", "engine_killed") == 1 and left("engine_killed", "engine_killed") == 1
    assert left("trainer_rank_stopped", "driver_killed") == 0, "nobody carries out the restart of the trainer"
    twice = fault("driver_killed_taking_over", witness=f"{KILLED}; {KILLED}")
    assert may_restart_all([twice], []) and not may_restart_all([fault("driver_killed_taking_over")], [])
    assert not may_restart_all([], [])


# -- alerts that stay open ---------------------------------------------------------------------------------------------
def test_alert_that_never_ends_tells_of_no_later_fault() -> None:
    faults = [fault("engine_killed", 100.0 * n, 100.0 * n + 20.0, target=f"e{n}") for n in range(4)]
    assert [f["target"] for f in attributed([alert("engine.dead", "e0", 1.0)], faults).untold] == ["e1", "e2", "e3"]
    near = [fault("engine_killed", 70.0 * n, 70.0 * n + 20.0, target=f"e{n}") for n in range(3)]
    assert not attributed([alert("engine.dead", "e0", 1.0, 160.0)], near).untold, "each is a sign that goes on"
    nobodys = [alert("engine.dead", "e9", -30.0), alert("engine.dead", "e9", -90.0)]
    assert not attributed(nobodys[:1], faults[:1]).untold and attributed(nobodys[1:], faults[:1]).untold


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30) | st.none()), max_size=12), st.integers(0, 80),
       st.integers(0, 80))
def test_windows_find_what_was_under_way(times: list[tuple[int, int | None]], one: int, other: int) -> None:
    of = [fault("engine_killed", begin, None if length is None else begin + length) for begin, length in times]
    since, until = sorted((one, other))
    found = [id(f) for f in of if began(f) <= until and ended(f) >= since]
    windows = Windows(of)
    assert windows.count(since, until) == len(found)
    assert sorted(map(id, windows.between(since, until))) == sorted(found)


def test_faults_of_a_part_and_of_leaders_keep_an_alert_open() -> None:
    first, of = fault("engine_killed", 10.0, 20.0), alert("engine.dead")
    def due(*others: dict[str, Any]) -> float:
        return resolves_by(of, 15.0, first, Windows([first, *others]))

    assert due() == due(fault("dcs_killed", 30.0, 90.0)) == 20.0 + RESOLVED_S
    assert due(fault("engine_killed", 50.0, 60.0)) == 30.0 + RESOLVED_S
    assert due(fault("engine_killed", 15.0, 60.0), fault("engine_killed", 50.0, 90.0)) == 90.0 + RESOLVED_S
    assert due(fault("engine_killed", 50.0, 60.0), fault("engine_killed", 205.0, 206.0)) == 31.0 + RESOLVED_S
    assert due(fault("engine_killed", 201.0, 210.0)) == 20.0 + RESOLVED_S, "it was due before"
    assert due(fault("coordinator_killed", 190.0, 210.0)) == 40.0 + RESOLVED_S
    assert due(fault("engine_killed", 50.0, None)) == math.inf


def test_killed_part_of_which_no_alert_tells_is_found() -> None:
    def untold(*alerts: dict[str, Any], name: str = "dcs_killed", witness: str = KILLED) -> int:
        return len(attributed(alerts, [fault(name, witness=witness)]).untold)

    assert untold() == 1 and untold(alert("engine.dead")) == 1 and untold(alert("dcs.dead")) == 0
    assert untold(alert("dcs.dead", since=1.0, over=15.0)) == 0, "the alert of the fault before was open"
    assert untold(alert("dcs.dead", since=1.0, over=5.0)) == 1
    assert untold(witness="pid 1 was stopped for 12 s") == 0, "what comes back may go unnoticed"
    assert untold(witness="pid 1 exited with code 0 in the middle of its work") == 1
    assert untold(name="host_agent_killed") == 0, "it is replaced before anything depends on it"
    stopped = {**fault("trainer_rank_stopped", witness="pid 1 was sent SIGSTOP"), "may_go_unnoticed": False}
    assert len(attributed([], [stopped]).untold) == 1


def test_product_that_misses_every_second_fault_is_found() -> None:
    faults = [fault("engine_killed", 25.0 * n, 25.0 * n + 20.0, target=f"e{n}") for n in range(12)]
    alerts = [alert("engine.dead", f"e{n}", 25.0 * n + 1.0, 25.0 * n + 20.0) for n in range(1, 12, 2)]
    assert [f["target"] for f in attributed(alerts, faults).untold] == [f"e{n}" for n in range(0, 12, 2)]


def test_death_of_one_role_is_not_told_by_an_alert_of_another() -> None:
    killed = fault("advantages_killed")
    found = attributed([alert("rollout.dead", "rollout")], [killed])
    assert [a["kind"] for a in found.left_over] == ["rollout.dead"] and [*found.untold] == [killed]
    found = attributed([alert("advantages.dead", "advantages")], [killed])
    assert not found.left_over and not found.untold
    open_ = attributed([alert("rollout.dead", "rollout", 1.0, 15.0), alert("advantages.dead", since=1.0, over=15.0)],
                       [killed])
    assert not open_.untold, "signs of one part that does not work are one alert"
    assert attributed([alert("rollout.dead", "rollout", 1.0, 15.0)], [killed]).untold


def test_alert_without_a_subject_is_of_no_target() -> None:
    assert left_over([alert("dcs.dead", "")], fault("engine_killed", target="e1")) == [""]


# -- what a fault may be the reason for --------------------------------------------------------------------------------
def event(kind: str, subject: str = "x") -> dict[str, Any]:
    return {"name": kind, "subject": subject}


@pytest.mark.parametrize("name", [
    "racing_requests", "coordinator_follower_killed", "foreign_records", "zombie_driver", "stale_leader", "busy_cores",
    "etcd_slow", "etcd_answers_lost", "dcs_killed", "host_agent_killed", "run_killed", "router_killed"])
def test_fault_explains_no_loss_of_a_part_that_it_does_not_strike(name: str) -> None:
    assert not any(explains(fault(name), event(kind)) for kind in ("engine.dead", "trainer.dead", "actor.hung"))


@pytest.mark.parametrize(("name", "kind"), [
    ("engine_killed", "engine.replaced"), ("chunks_torn", "engine.quarantined"), ("trainer_stopped", "critic.hung"),
    ("etcd_stopped", "dcs.dead"), ("raylet_killed", "actor.dead"), ("run_killed", "run.restarted"),
    ("second_actor", "actor.dead"), ("stale_leader", "coordinator.dead"), ("router_killed", "router.restarted"),
    ("gcs_killed", "run.global_restart"), ("driver_killed", "run.restarted")])
def test_fault_explains_what_it_strikes_and_what_comes_of_it(name: str, kind: str) -> None:
    assert explains(fault(name), event(kind))


def test_fault_explains_the_loss_of_what_its_target_names() -> None:
    assert explains(fault("coordinator_killed", target="coordinator rollout-1"), event("engine.dead", "rollout-1"))
    assert not explains(fault("coordinator_killed", target="coordinator rollout-12"), event("engine.dead", "rollout-1"))


@pytest.mark.parametrize(("name", "kind", "subject", "explained"), [
    ("bystander_host_powered_off", "coordinator.restarted", "coordinator-host-3", True),
    ("bystander_host_powered_off", "coordinator.restarted", "coordinator-0", False),
    ("bystander_host_powered_off", "dcs.dead", "host-host-3", True),
    ("bystander_host_powered_off", "dcs.dead", "node-0", False),
    ("leader_host_deaf", "coordinator.dead", "coordinator-host-2", False),
    ("holder_host_cut", "run.restarted", "job", True), ("holder_host_cut", "driver.dead", "driver-1", True),
    ("holder_host_cut", "engine.dead", "rollout-1", True), ("holder_host_cut", "actor.dead", "actor-1", True),
    ("leader_host_apart", "leader.absent", "coordinator-0", True),
    ("holder_host_powered_off", "dcs.under_replicated", "policy", True),
    ("holder_host_powered_off", "etcd.restarted", "etcd-host-3", True),
    ("etcd_quorum_stopped", "coordinator.dead", "coordinator-0", True),
    ("leader_host_coordinator_killed", "coordinator.restarted", "coordinator-host-3", True)])
def test_fault_of_one_host_is_no_reason_for_the_loss_of_what_another_host_has(name: str, kind: str, subject: str,
                                                                              explained: bool) -> None:
    target = "bystander on host-3, coordinator-host-3, host-host-3, 198.18.0.3:2379"
    assert explains(fault(name, target=target), event(kind, subject)) == explained


def test_record_of_a_fault_says_what_it_strikes_whatever_the_catalogue_says() -> None:
    """A log of a later release may have faults that this one does not know."""
    later = {**fault("of_a_later_release"), "parts": ["dcs", "of_a_later_release", "engines"], "seen_in": ["engines"]}
    assert [*struck(later)] == [Part.DCS, Part.ENGINES] and seen_in(later) == {Part.ENGINES}
    assert explains(later, event("engine.dead")) and not explains(later, event("dcs.dead"))
    assert not explains(fault("of_a_later_release"), event("engine.dead"))
    assert left_over([alert("dcs.dead", "n"), alert("engine.dead", "e"), alert("trainer.dead", "t")], later) == ["t"]


@pytest.mark.parametrize("name", FAULTS)
def test_record_of_a_fault_says_what_the_catalogue_says(name: str) -> None:
    entry, old = FAULTS[name], fault(name)
    new = {**old, **json.loads(json.dumps(entry.fields))}
    assert struck(new) == struck(old) and seen_in(new) == seen_in(old) == entry.seen_in
    assert struck(new)[0] is entry.part and {*struck(new)} == entry.parts
    assert entry.slows == name.endswith(("busy_cores", "etcd_slow", "_late", "_lossy"))
    assert not (entry.slows and entry.seen_in)


NAMES = st.sampled_from(sorted(FAULTS))
FAULT = st.builds(lambda name, began, length: fault(name, began, began + length), NAMES, st.integers(0, 50),
                  st.integers(0, 50))
ALERT = st.builds(lambda kind, subject, since: alert(kind, str(subject), since), st.sampled_from(
    ["engine.dead", "dcs.dead", "trainer.dead", "actor.dead", "run.waiting", "driver.dead", "of.later_release"]),
    st.integers(0, 3), st.integers(0, 150))


@given(st.lists(ALERT, max_size=8), st.lists(FAULT, max_size=4))
def test_each_alert_has_one_fault_that_was_under_way_or_is_left_over(alerts: list[dict[str, Any]],
                                                                     faults: list[dict[str, Any]]) -> None:
    found = attributed(alerts, faults)
    assert sorted(map(id, [a for a, _ in found.of] + list(found.left_over))) == sorted(map(id, alerts))
    assert all(under_way(f, a["since"]) for a, f in found.of)
    assert {id(f) for f in found.untold}.isdisjoint(id(f) for _, f in found.of)
