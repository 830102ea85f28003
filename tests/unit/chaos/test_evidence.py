"""No rule is kept without evidence, none is broken by what was not seen, and one bug is one violation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chaos_log import CLUSTER, KEYS, Log, Record, edited, of_kind, value_of

from chaos_tests.event_log import Kind
from chaos_tests.scenarios import SCENARIOS, must_see
from chaos_tests.validate import lifecycles, versions
from chaos_tests.validate.faults import Alerts
from chaos_tests.validate.judge import CHECKERS, broken, judge
from chaos_tests.validate.verdict import OWN_TARGETS, RULES, RUN, State, Verdict
from elastic_rl.dcs.catalog.transitions import TRANSITIONS
from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.records import EngineState, OperationState, VersionState

Edit = Callable[[list[Record]], object]


def verdicts(records: Iterable[Record]) -> dict[str, Verdict]:
    return {verdict.rule: verdict for verdict in judge(records)}


def violations(records: Iterable[Record]) -> list[str]:
    return [str(violation) for verdict in judge(records) for violation in verdict.violations]


def changed(change: Edit, log: Log | None = None) -> list[Record]:
    records = (log or Log()).records
    change(records)
    return records


def end(records: list[Record]) -> Record:
    return records[-1]


def own_receivers(records: list[Record]) -> None:
    records[0]["settings"]["alerts"] = {"urls": ["json://localhost"]}


def steps(records: list[Record]) -> list[Record]:
    return [*of_kind(records, Kind.STEP)]


# -- evidence ----------------------------------------------------------------------------------------------------------
def test_change_that_no_rule_is_about_is_evidence_of_none() -> None:
    log = Log()
    only = [log.records[0], {"at": 1.0, "kind": "change", "revision": 2, "put": True, "key": f"{KEYS.root}cursor",
                             "create": 2, "value": "{}"}]
    found = verdicts(only)
    assert {rule for rule, verdict in found.items() if verdict.state is State.KEPT} == set()
    assert found[RUN].state is State.VIOLATED, "it has no end"


def test_log_without_what_a_rule_is_about_leaves_it_unseen() -> None:
    """What each rule needs, taken away alone: nothing is found wrong, and nothing said to be kept."""
    needed = {"I6": KEYS.pool_status("rollout"), "I12": KEYS.members_prefix(), "I13": KEYS.job_spec()}
    for rule, prefix in needed.items():
        records = [r for r in Log().records if not str(r.get("key", "")).startswith(prefix)]
        assert verdicts(records)[rule].state is State.UNSEEN, rule


@pytest.mark.parametrize("checker", CHECKERS)
def test_checker_that_has_seen_nothing_has_no_evidence(checker: type[Any]) -> None:
    made = checker()
    made.begin({})
    made.finish(None)
    assert made.evidence() == "" and made.lacks


def test_rule_that_a_run_has_to_show_and_has_not_shown_makes_it_worth_nothing() -> None:
    records = Log().records
    records[0]["must_see"] = ["I1", "I2", "I6", "I9"]
    assert violations(records) == []
    records[0]["must_see"] = ["I7"]
    found = verdicts(records)
    assert found[RUN].state is State.VIOLATED and found["I7"].state is State.UNSEEN
    assert "I7 is unseen" in str(found[RUN].violations[0])


@pytest.mark.parametrize("name", SCENARIOS)
def test_run_on_its_own_cluster_has_to_show_more_than_one_on_a_cluster_of_others(name: str) -> None:
    schedule = SCENARIOS[name].schedule(1)
    own, attached = (set(must_see(schedule, own=own)) for own in (True, False))
    assert attached < own <= RULES.keys() and "I8" in own - attached
    assert ("I10" in own) == bool(schedule.strikes) and ("growth" in own) == (name == "growth")
    assert own.isdisjoint({"I4", "I6"}) == (name == "hosts"), "a light run has no engines"
    assert ("I7" in must_see(schedule, own=True, compared=True)) == (name != "hosts")


@pytest.mark.parametrize("change", [
    lambda r: r.pop(),
    lambda r: r.__setitem__(slice(None), [e for e in r if e["kind"] != "change"]),
    lambda r: end(r).update(problems=["the observer has ended: OSError: no space"]),
    lambda r: end(r).update(records=Counter(str(e["kind"]) for e in r[1:-1]) + Counter(event=1)),
    lambda r: end(r).update(revision=[*of_kind(r, Kind.CHANGE)][-1]["revision"] + 1),
    lambda r: [s.update(logprob_diff_max=None) for s in steps(r)[::2]],
    lambda r: r.remove(steps(r)[-1]),
    lambda r: [r.remove(s) for s in steps(r) if s["step"] in (6, 7)] and [
        s.update(groups=[g - 16 for g in s["groups"]]) for s in steps(r) if s["step"] > 7],
], ids=["no end", "nothing observed", "an observer that died", "a record is missing", "the end was not observed",
        "half of the log-probs are not compared", "the last step is missing", "steps are missing"])
def test_log_that_lacks_a_part_of_the_run_makes_it_worth_nothing(change: Edit) -> None:
    found = verdicts(changed(change))
    assert found[RUN].state is State.VIOLATED
    assert [rule for rule, v in found.items() if v.state is State.VIOLATED and rule != RUN] in ([], ["I9"])


def test_whole_record_of_the_run_is_accepted() -> None:
    records = Log().records
    end(records).update(records=Counter(str(e["kind"]) for e in records[1:-1]), problems=[],
                        revision=[*of_kind(records, Kind.CHANGE)][-1]["revision"])
    assert violations(records) == []


# -- gaps --------------------------------------------------------------------------------------------------------------
_LAST = Log().revision


def with_gap(records: list[Record], first: int, last: int) -> list[Record]:
    """The log of an observer that has not seen these revisions."""
    lost = [r for r in records if r["kind"] == Kind.CHANGE and first <= r["revision"] <= last]
    at = records.index(lost[0])
    records[at] = {"at": lost[0]["at"], "kind": Kind.GAP, "first": first, "last": last}
    return [r for r in records if not any(r is one for one in lost)]


def test_gap_is_one_of_the_records_that_were_written() -> None:
    records = with_gap(Log().records, 20, 30)
    end(records).update(records=Counter(str(e["kind"]) for e in records[1:-1]))
    assert violations(records) == []


@given(st.integers(2, _LAST), st.integers(0, 30))
def test_what_was_not_seen_in_a_gap_breaks_no_rule(first: int, more: int) -> None:
    found = violations(with_gap(Log().records, first, min(first + more, _LAST)))
    assert found == []


def test_what_is_broken_after_a_gap_is_found() -> None:
    records = with_gap(Log().records, 20, 30)
    edited(records, KEYS.stream_head("policy"), lambda v: v.update(manifest="other"), -1)
    assert [v.partition(":")[0] for v in violations(records)] == ["I2"]


# -- one bug, one violation --------------------------------------------------------------------------------------------
def replaced(key: str, nth: int, **fields: Any) -> Edit:
    return lambda records: edited(records, key, lambda v: v.update(fields), nth)


def head_goes_back(records: list[Record]) -> None:
    head = [r for r in records if r.get("key") == KEYS.stream_head("policy")]
    records.insert(-1, {**head[-1], "revision": _LAST + 1, "value": head[3]["value"]})


@pytest.mark.parametrize(("change", "rule"), [
    (head_goes_back, "I3"),
    (replaced(KEYS.engine("rollout-1"), 6, version=9, checksum="sum of 9"), "I4"),
    (replaced(KEYS.leader_heartbeat(), 0, term=1), "I1"),
    (replaced(KEYS.leadership(), 0, replica="b"), "I1"),
    (replaced(KEYS.replica_sets("policy", 3), 0, parts=[[]]), "I2"),
    (lambda r: steps(r)[3].update(groups=[0]), "I5"),
    (lambda r: steps(r)[3].update(logprob_diff_max=1.0), "I4"),
    (lambda r: (own_receivers(r), r.__setitem__(slice(None), [e for e in r if e["kind"] != "notification"]),
                r.__setitem__(-1, end(r)), late(r)), "I9"),
    (lambda r: next(of_kind(r, Kind.FAULT)).update(witness="", detected_at=None, healed_at=None, breaks="I1"), "I1"),
    (lambda r: edited(r, KEYS.engine("rollout-1"), lambda v: v.update(state="dead"), 8), "I4"),
    (lambda r: end(r).update(phase="failed", report={"steps": 3}, committed_steps=[]), "I11"),
], ids=["head goes back", "engine ahead of the head", "heartbeat of an old term", "announced by another", "not stored",
        "groups again", "other weights", "no notices", "a stale write was accepted", "dead and ready again",
        "failed"])
def test_one_bug_is_one_violation(change: Edit, rule: str) -> None:
    found = violations(changed(change))
    assert [what.partition(":")[0] for what in found] == [rule], found


# -- alerts ------------------------------------------------------------------------------------------------------------
def late(records: list[Record]) -> None:
    """What is seen of etcd at the end is seen long after the last alert."""
    for record in records[-5:]:
        record["at"] += 300.0


def test_alert_that_fires_while_no_fault_is_under_way_breaks_i9() -> None:
    def observed(records: list[Record], at: float) -> None:
        for record in of_kind(records, Kind.CHANGE):
            if record["key"] == f"{KEYS.alerts_prefix()}engine.dead/rollout-1/e1":
                record["at"] = at

    found = violations(changed(lambda r: observed(r, r[0]["at"] - 5.0)))
    assert any("fired while no fault was under way" in what for what in found)
    base = changed(lambda r: r.__setitem__(slice(None), [e for e in r if e["kind"] != "fault"]))
    base[0].update(baseline=True, schedule={"strikes": []})
    assert [w for w in violations(base) if w.startswith("I9")] == [
        f"I9: {alert} fired while no fault was under way"
        for alert in ("engine.dead of rollout-1", "trainer.dead of trainer")]


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_times_that_a_leader_with_a_wrong_clock_has_written_break_nothing(by_s: float) -> None:
    def wrong(records: list[Record]) -> None:
        for record in of_kind(records, Kind.CHANGE):
            if "/alerts/" in record["key"]:
                value = value_of(record)
                record["value"] = json.dumps(value | {name: value[name] + by_s for name in (
                    "since", "fired_at", "resolved_at") if value.get(name)})
        for record in of_kind(records, Kind.EVENT):
            record.update(seen_at=record["at"], at=record["at"] + by_s)

    assert violations(changed(lambda r: (own_receivers(r), late(r), wrong(r)))) == []


@pytest.mark.parametrize(("times", "at", "losses", "sound"), [
    (12, 5.0, 12, True), (12, 1000.0, 12, False), (2, 1000.0, 12, False), (2, 1000.0, 101, True),
    (3, 1000.0, 101, False)],
    ids=["a loss before each", "the losses were long before", "once more", "a loss between them", "one loss, two more"])
def test_notice_comes_again_for_a_loss_between_the_two_alone(times: int, at: float, losses: int, sound: bool) -> None:
    """``losses``: coordinators that were killed, one each 10 s from the begin on; the 101st is between the notices."""
    killed = [{"kind": Kind.FAULT, "name": "coordinator_killed", "witness": "w", "injected_at": 10.0 * n,
               "healed_at": 10.0 * n + 2.0} for n in (range(losses) if losses < 100 else [100])]
    notices = [{"kind": Kind.NOTIFICATION, "at": at + 10.0 * n, "alert": "engine.dead", "subject": "e", "key": "k",
                "phase": "firing"} for n in range(times)]
    found = broken([*killed, *notices], [Alerts])
    assert [str(violation) for violation in found] == ([] if sound else [
        f"I9: firing of the alert engine.dead of e was notified {times} times"])


@pytest.mark.parametrize(("alert", "target", "found"), [
    ({"id": "e1"}, "one host", True), ({"id": "e1"}, "job j in /runs", True),
    ({"id": "before", "kind": "actor.dead"}, "job j in /runs", False), ({"id": "missed"}, "one host", True),
    ({"id": "e1", "kind": "reward.collapsed"}, "job j in /runs", False),
    ({"id": "e1", "kind": "reward.collapsed"}, "one host", False),
    ({"id": "e1", "severity": "info"}, "one host", False),
], ids=["of the run", "of the run on the cluster of others", "of before it", "of a gap on a cluster of its own",
        "about training, of others", "about training", "of no fault"])
@pytest.mark.parametrize("phase", ["firing", "pending"])
def test_alert_of_a_fault_of_the_run_has_ended_with_it(alert: Record, target: str, found: bool, phase: str) -> None:
    records = Log().records
    records[0]["target"] = target
    end(records)["alerts"].append({"kind": "engine.dead", "subject": "rollout-1", "message": "m", "severity": "error",
                                   "phase": phase, **alert})
    assert any(f"is {phase} at the end" in what for what in violations(records)) == found


def test_each_alert_that_fired_is_notified() -> None:
    records = changed(lambda r: (own_receivers(r), late(r)))
    assert violations(records) == []
    missed = [r for r in records if (r["kind"], r.get("key")) != ("notification", "t1")]
    assert [v for v in violations(missed) if "no receiver got a notice of its begin" in v] != []
    soon = [r for r in changed(own_receivers) if (r["kind"], r.get("key")) != ("notification", "t1")]
    assert violations(soon) == [], "the run ended before its notice was due"


def test_notices_of_a_job_of_others_are_known_by_the_alerts_own_record() -> None:
    def notified(records: list[Record]) -> None:
        for record in of_kind(records, Kind.CHANGE):
            if "/alerts/" in record["key"]:
                record["value"] = json.dumps(value_of(record) | {"notified": ["firing:mail"]})

    def attached(*changes: Edit) -> list[Record]:
        records = changed(lambda r: (own_receivers(r), late(r), [c(r) for c in changes]))
        records[0]["target"] = "job j in /runs"
        return [r for r in records if r["kind"] != Kind.NOTIFICATION]

    assert "job j in /runs" not in OWN_TARGETS
    assert violations(attached(notified)) == []
    assert violations(attached()) == ["I9: 2 alerts fired, and no receiver got a notice"]


# -- steps and groups --------------------------------------------------------------------------------------------------
def test_groups_that_were_left_out_are_missed_unless_they_were_dropped_on_the_record() -> None:
    def later(records: list[Record], dropped: int) -> None:
        for one in steps(records):
            if one["step"] > 6:
                one["groups"] = [group + 3 for group in one["groups"]]
        steps(records)[5]["dropped_groups"] = dropped

    assert violations(changed(lambda r: later(r, 3))) == []
    found = violations(changed(lambda r: later(r, 2)))
    assert [what.partition(":")[0] for what in found] == ["I5"] and "3 prompt groups were not trained on" in found[0]


# -- leaders of a history that begins late -----------------------------------------------------------------------------
def test_leader_of_a_history_that_begins_late_is_known_from_its_own_word_on() -> None:
    def shifted(records: list[Record]) -> list[Record]:
        """Revisions of a cluster that has run for long, observed from the announcement of its leader on."""
        for record in of_kind(records, Kind.CHANGE):
            record["revision"] += 5000
            record["create"] += 5000 if record["create"] else 0
        edited(records, KEYS.leadership(), lambda v: v.update(term=5002))
        edited(records, KEYS.leader_heartbeat(), lambda v: v.update(term=5002))
        return [r for r in records if r.get("key") != CLUSTER.leader("a")]

    assert "1 writes of leaders that were known" in verdicts(shifted(Log().records))["I1"].evidence
    stale = shifted(Log().records)
    edited(stale, KEYS.leader_heartbeat(), lambda v: v.update(replica="b"))
    assert [what.partition(":")[0] for what in violations(stale)] == ["I1"]


# -- versions that are kept --------------------------------------------------------------------------------------------
class _Store(Log):
    """A log whose job has two nodes, and holds its newest version on one or on both."""

    def __init__(self, replicas: int = 2) -> None:
        super().__init__(4, faults=False)
        self._end_of_log, self.records[-5:] = self.records[-5:], []
        self.put((KEYS.dcs_node("node-1"), {"id": "node-1"}))
        self.sets([["node-0", "node-1"][:replicas]])

    def sets(self, parts: list[list[str]]) -> None:
        self.put((KEYS.replica_sets("policy", self._number), {"parts": parts}))

    def node(self, name: str, there: bool) -> None:
        self.put((KEYS.dcs_node(name), {"id": name} if there else None))

    def lost(self) -> list[str]:
        self._end(faults=False)
        return [what for what in violations(self.records) if "has a part that is on no node" in what]


@pytest.mark.parametrize("replicas", [1, 2])
def test_version_whose_part_is_on_no_node_although_none_has_failed_is_lost(replicas: int) -> None:
    log = _Store(replicas)
    log.sets([[]])
    assert len(log.lost()) == 1


def test_one_of_two_nodes_may_fail_and_both_may_not_for_long() -> None:
    log = _Store()
    log.node("node-0", False)
    assert log.lost() == []
    log = _Store()
    log.node("node-0", False)
    log.sets([[]])
    assert len(log.lost()) == 1, "the other node had it"
    log = _Store()
    log.node("node-0", False)
    log.node("node-1", False)
    log.node("node-0", True)
    log.sets([["node-0"]])
    assert log.lost() == [], "as many nodes had failed as had it, and it is found on a disk"


def test_head_that_is_not_found_again_when_as_many_nodes_failed_as_held_it_is_lost() -> None:
    def all_failed() -> _Store:
        log = _Store()
        for node in ("node-0", "node-1"):
            log.node(node, False)
        for node in ("node-0", "node-1"):
            log.node(node, True)
        log.sets([[]])
        return log

    assert "when the job ended" in all_failed().lost()[0]
    log = all_failed()
    log.version(log._number + 1, 5)
    assert log.lost() == [], "it was published again"


def test_version_that_was_lost_before_a_gap_may_have_been_found_in_it() -> None:
    for gap in (False, True):
        log = _Store()
        log.node("node-0", False)
        log.node("node-1", False)
        log.sets([[]])
        if gap:
            log.revision += 1
            log.add(Kind.GAP, first=log.revision, last=log.revision)
        assert len(log.lost()) == (not gap)


def test_version_that_was_released_is_not_lost() -> None:
    log = _Store()
    committed = next(value_of(r) for r in reversed(log.records) if r.get("key") == KEYS.version("policy", 2))
    log.put((KEYS.version("policy", 2), committed | {"state": "gone"}), (KEYS.replica_sets("policy", 2), None))
    log.node("node-0", False)
    assert log.lost() == []


# -- the state machines are those of the product -----------------------------------------------------------------------
def test_states_of_versions_are_those_of_the_product() -> None:
    assert versions.ALLOWED.keys() == {str(state) for state in TRANSITIONS}
    for state, following in TRANSITIONS.items():
        allowed = versions.ALLOWED[str(state)]
        assert {str(each) for each in following} <= allowed
        assert allowed - {str(each) for each in following} <= {str(VersionState.RELEASING)}, "of an older release"


def engine_moves() -> dict[str, set[str]]:
    """Every change of state that the product's lifecycle makes, from all that it reaches."""
    calls: list[Callable[[EngineLifecycle], EngineLifecycle]] = [
        lambda e: e.up(), lambda e: e.begin(e.newest + 1), lambda e: e.verified(e.applying), lambda e: e.routed(),
        lambda e: e.unrouted(), lambda e: e.given_up(), lambda e: e.torn("t"), lambda e: e.released(),
        lambda e: e.resumed(), lambda e: e.drain(), lambda e: e.died("d")]
    found: dict[str, set[str]] = {}
    seen, open_ = set[EngineLifecycle](), [EngineLifecycle()]
    while open_:
        engine = open_.pop()
        if engine in seen or engine.newest > 3:
            continue
        seen.add(engine)
        for call in calls:
            try:
                after = call(engine)
            except IllegalTransition:
                continue
            if after.state is not engine.state:
                found.setdefault(str(engine.state), set()).add(str(after.state))
            open_.append(after)
    return found


def test_states_of_engines_are_those_of_the_product() -> None:
    moves, asked_for = engine_moves(), {str(EngineState.QUARANTINED), str(EngineState.DRAINING)}
    for state, allowed in lifecycles.ENGINE.items():
        made = moves.get(state, set())
        assert made <= allowed, state
        assert allowed - made <= asked_for | {str(EngineState.DEAD)}, f"{state}: more than the product does"
    assert moves.keys() <= lifecycles.ENGINE.keys()
    assert all(str(EngineState.READY) not in allowed for state, allowed in lifecycles.ENGINE.items()
               if state != EngineState.SYNCING)


def test_ends_of_operations_and_jobs_are_those_of_the_product() -> None:
    assert lifecycles.Operations.allowed["running"] == {str(state) for state in OperationState if state.ended}
    ended = {str(phase) for phase in JobPhase} - lifecycles.Jobs.allowed.keys()
    assert ended == {"finished", "failed", "stopped"} and lifecycles.Jobs.allowed["running"] == ended
