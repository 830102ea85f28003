"""The checkers of the rules: each accepts a log that keeps its rule, and finds one that breaks it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.chaos_log import CLUSTER, JOB, KEYS, START, STEPS, Log, Record, edited, of_kind, value_of

from chaos_tests import validate
from chaos_tests.event_log import Kind, Records
from chaos_tests.validate.attribution import AFTER_S
from chaos_tests.validate.judge import CHECKERS, judge
from chaos_tests.validate.running import RECOVERY_S
from chaos_tests.validate.verdict import MOST_SHOWN, RULES, State, Verdict

Edit = Callable[[list[Record]], object]


def verdicts(log: Iterable[Record], baseline: Iterable[Record] | None = None) -> dict[str, Verdict]:
    return {verdict.rule: verdict for verdict in judge([*log], None if baseline is None else [*baseline])}


def violated(log: Iterable[Record], baseline: Iterable[Record] | None = None) -> list[str]:
    return [rule for rule, verdict in verdicts(log, baseline).items() if verdict.state is State.VIOLATED]


def with_(change: Edit) -> list[Record]:
    records = Log().records
    change(records)
    return records


def first(records: list[Record], kind: Kind) -> Record:
    return next(of_kind(records, kind))


def end(records: list[Record]) -> Record:
    return first(records, Kind.END)


def report(**fields: Any) -> Edit:
    return lambda records: end(records)["report"].update(fields)


def fault(**fields: Any) -> Edit:
    return lambda records: first(records, Kind.FAULT).update(fields)


def step(nth: int, **fields: Any) -> Edit:
    return lambda records: [*of_kind(records, Kind.STEP)][nth].update(fields)


def write(*pairs: tuple[str, Any]) -> Edit:
    """A transaction before the job's end."""
    def change(records: list[Record]) -> None:
        at = next(i for i, r in enumerate(records) if r.get("key") == KEYS.operation("o"))
        revision = records[at]["revision"]
        for record in records[at:]:
            if record["kind"] == "change":
                record["create"] += record["create"] >= revision
                record["revision"] += 1
        records[at:at] = [
            {"at": records[at]["at"], "kind": "change", "revision": revision, "put": value is not None, "key": key,
             "create": created(records, key, revision) if value is not None else 0,
             "value": json.dumps(value) if value is not None else ""} for key, value in pairs]
    return change


def created(records: list[Record], key: str, revision: int) -> int:
    return next((r["create"] for r in records if r.get("key") == key), revision)


def later(seconds: float) -> Edit:
    """All from the end of the job on."""
    def change(records: list[Record]) -> None:
        for record in records[next(i for i, r in enumerate(records) if r.get("key") == KEYS.operation("o")):]:
            record["at"] += seconds
    return change


def both(*edits: Edit) -> Edit:
    return lambda records: [edit(records) for edit in edits]


def without(kind: Kind, key: str = "") -> Edit:
    """Without the records of a kind, or the changes of the keys that begin so."""
    def change(records: list[Record]) -> None:
        records[:] = [r for r in records if r["kind"] != kind or not str(r.get("key", "")).startswith(key)]
    return change


def notified(alert: str, phase: str, times: int) -> Edit:
    def change(records: list[Record]) -> None:
        one = next(r for r in of_kind(records, Kind.NOTIFICATION) if (r["key"], r["phase"]) == (alert, phase))
        at = records.index(one)
        records[at:at + 1] = [one] * times
    return change


def newest(records: list[Record], key: str) -> Record:
    """What the last change of a key has put."""
    return value_of(next(r for r in reversed(records) if r.get("key") == key))


def receivers(records: list[Record]) -> None:
    records[0]["settings"]["alerts"] = {"urls": ["json://localhost"]}


def second_alert(records: list[Record], subject: str = "rollout-1") -> None:
    prefix = f"{KEYS.alerts_prefix()}engine.dead/"
    for record in [r for r in records if r.get("key") == f"{prefix}rollout-1/e1"]:
        again = json.dumps(value_of(record) | {"id": "e2", "subject": subject})
        records.insert(records.index(record), dict(record, key=f"{prefix}{subject}/e2", value=again))


def event(name: str, at: float) -> Edit:
    return lambda records: records.insert(1, {
        "at": at, "kind": "event", "id": "x", "name": name, "subject": "x", "severity": "error", "message": "m"})


def operation(client: str, call: str, argument: Any, began: float, ended: float | None, result: Any) -> Record:
    return {"at": 1.0, "kind": "operation", "model": "number", "client": client, "key": "pool", "call": call,
            "argument": argument, "began_s": began, "ended_s": ended, "result": result}


def test_package_says_where_each_rule_is_judged() -> None:
    index = {rule: " ".join(text.split()) for rule, text in re.findall(r"^- ([^:]+): ((?:.|\n(?!- |\Z))*)",
                                                                    inspect.getdoc(validate) or "", re.MULTILINE)}
    assert {rule for rules in index for rule in rules.split(", ")} == RULES.keys()
    for checker in CHECKERS:
        module = checker.__module__.rpartition(".")[2]
        told = next(text for rules, text in index.items() if checker.rule in rules.split(", "))
        assert f"``{module}``" in told or module in told and f".{checker.__name__}``" in told, checker


def test_sound_run_breaks_no_rule_and_leaves_those_unseen_that_it_has_no_evidence_of() -> None:
    found = verdicts(Log().records, Log(faults=False).records)
    assert [*found] == [*RULES]
    assert {rule: v.violations for rule, v in found.items() if v.state is State.VIOLATED} == {}
    assert [rule for rule, v in found.items() if v.state is State.UNSEEN] == ["I7", "growth"]
    assert all(verdict.evidence for verdict in found.values())


@pytest.mark.parametrize(("change", "rule"), [
    # what makes a run worth nothing
    (lambda r: r.remove(first(r, Kind.FAULT)), "run I9 I14"),
    (fault(witness="", problem="no engine was ready"), "run"),
    (lambda r: r[0].update(floor={"steps": 5}), "run"),
    (lambda r: r[0].update(floor={"answers": 1}), "run"),
    (lambda r: r[0].update(floor={"number": 10**6}), "run"),
    (lambda r: r.pop(), "run"),
    (lambda r: end(r).update(aborted="an operator"), "run"),
    (lambda r: [s.update(logprob_diff_max=None) for s in of_kind(r, Kind.STEP)], "run"),
    (lambda r: r.insert(1, operation("c", "read", None, 1.0, 2.0, [2, 1]) | {"model": "unheard-of"}), "run"),
    # I1
    (write((KEYS.epoch(), {"number": 0})), "I1"),
    (write((KEYS.driver(), None)), "I1"),
    (lambda r: edited(r, KEYS.leader_heartbeat(), lambda v: v.update(term=1)), "I1"),
    (both(write((KEYS.epoch(), {"number": 2})), write((KEYS.version("policy", 99), {"state": "staging", "epoch": 1}))),
     "I1 I3"),
    (lambda r: edited(r, KEYS.leadership(), lambda v: v.update(replica="b")), "I1"),
    (write((KEYS.pool_spec("rollout"), {"name": "rollout", "desired": 0})), "I1"),
    (lambda r: r.insert(1, operation("c", "read", None, 1.0, 2.0, [3, 9])) or r.insert(
        2, operation("d", "read", None, 3.0, 4.0, [2, 1])), "I1"),
    # I2
    (lambda r: edited(r, KEYS.stream_head("policy"), lambda v: v.update(manifest=""), 2), "I2"),
    (lambda r: edited(r, KEYS.replica_sets("policy", 3), lambda v: v.update(parts=[["node-0"], []])), "I2"),
    (without(Kind.CHANGE, KEYS.replica_sets("policy", 3)), "I2"),
    (lambda r: r[0]["settings"].update(dcs={"replicas": 2}), "I2"),
    (lambda r: edited(r, KEYS.engine("rollout-1"), lambda v: v.update(version=5), 6), "I4"),
    (write((KEYS.stream_head("policy"), {"number": 99, "state": "committed", "manifest": "m"})), "I2"),
    # I3
    (report(versions_committed=STEPS), "I3"),
    (lambda r: edited(r, KEYS.version("policy", 4), lambda v: v.update(manifest="other"), 1) or r.insert(
        -3, next(c for c in reversed(r) if c.get("key") == KEYS.version("policy", 4)) | {
            "value": json.dumps({"state": "committed", "manifest": "x", "number": 4}), "revision": 9999}), "run I2 I3"),
    (write((KEYS.version("policy", 3), {"state": "staging", "epoch": 1, "number": 3})), "I3"),
    (write((KEYS.version("policy", STEPS + 2), {"state": "gone", "epoch": 1, "number": STEPS + 2})), "I3"),
    (lambda r: r.insert(1, operation("c", "head", None, 1.0, 2.0, 3) | {"model": "catalog"}), "I3"),
    # I4
    (step(1, logprob_diff_max=0.1), "I4"),
    (step(1, logprob_diff_max=float("nan")), "I4"),
    (step(3, sample_versions=[77]), "I4 I5"),
    (step(3, sample_versions=[5]), "I5"),
    (both(without(Kind.CHANGE, KEYS.engine("rollout-1")), write((KEYS.engine("rollout-1"), {
        "id": "rollout-1", "state": "draining", "version": 1, "incarnation": "i", "epoch": 1}))), "I4"),
    (lambda r: edited(r, KEYS.engine("rollout-1"), lambda v: v.update(applying=0), 5), "I4"),
    (lambda r: edited(r, KEYS.engine("rollout-1"), lambda v: v.update(checksum=""), 6), "I4"),
    (lambda r: r.insert(-1, dict(next(c for c in r if c.get("key") == KEYS.engine("rollout-1") and "sum of 4" in c[
        "value"]), key=KEYS.engine("rollout-2"), revision=9999, create=1, value=json.dumps({
            "id": "rollout-2", "incarnation": "k", "state": "draining", "version": 4, "layout": "float32", "epoch": 1,
            "checksum": "another"}))), "I4"),
    # I5
    (report(groups_lost=1), "I5"),
    (report(groups_duplicated=1), "I5"),
    (report(audit_problems=["p"]), "I5"),
    (step(1, staleness=1), "I5"),
    (step(1, sample_versions=[1]), "I5"),
    (step(9, sample_versions=[1]), "I5"),
    (step(1, sample_versions=[]), "I5"),
    (step(5, policy_version=2), "I5"),
    (step(5, samples=0), "I5"),
    (step(1, groups=[0]), "I5"),
    (step(1, groups=[8, 8]), "I5"),
    # I6
    (both(later(RECOVERY_S * 2), lambda r: edited(r, KEYS.pool_status("rollout"), lambda v: v.update(ready=0), 2)),
     "I6"),
    # I8
    (lambda r: r.insert(-1, {"at": 1.0, "kind": "leftover", "what": "process 1"}), "I8"),
    # I9
    (lambda r: end(r)["alerts"].append(
        {"id": "e1", "kind": "engine.dead", "subject": "e", "message": "m", "severity": "error", "phase": "firing"}),
     "I9"),
    (notified("e1", "firing", 2), "I9"),
    (notified("e1", "firing", 0), "I9"),
    (notified("e1", "resolved", 0), "I9"),
    (second_alert, "I9"),
    (both(receivers, without(Kind.NOTIFICATION)), "I9"),
    (both(receivers, without(Kind.NOTIFICATION), without(Kind.CHANGE, KEYS.alerts_prefix())), "I9"),
    (without(Kind.CHANGE, f"{KEYS.alerts_prefix()}engine.dead"), "I9"),
    # I10
    (fault(detected_at=None), "I10"),
    (fault(detected_at=0.5), "I10"),
    (fault(detected_at=None, healed_at=None, may_go_unnoticed=True), "I10"),
    (both(fault(healed_at=None)), "I10"),
    (fault(healed_at=START + 13.9), "I10"),
    (lambda r: edited(r, KEYS.member("trainer", "trainer-1"), lambda v: v.update(incarnation="trainer-0")), "I10"),
    (lambda r: r.insert(1, operation("c", "create", None, 1.0, 2.0, "a") | {"model": "created"}) or r.insert(
        2, operation("d", "create", None, 3.0, 4.0, "b") | {"model": "created"}), "I10"),
    (both(write((KEYS.operation("p"), {"id": "p", "state": "running"})), later(RECOVERY_S * 2)), "I10"),
    # What makes a run worth nothing
    (lambda r: end(r).update(phase=""), "run"),
    (lambda r: end(r).update(revision=None), "run"),
    (lambda r: r[0].update(traffic=["watches"]), "run"),
    (step(2, loss=float("nan")), "run"),
    (step(2, grad_norm=float("inf")), "run"),
    # I11
    (report(steps=STEPS - 1), "I11"),
    (lambda r: end(r)["committed_steps"].pop(), "I11"),
    (lambda r: end(r)["committed_steps"].insert(1, 1), "I11"),
    (lambda r: end(r)["committed_steps"].pop(0), "I11"),
    (lambda r: end(r)["committed_steps"].append(STEPS + 1), "I11"),
    (lambda r: end(r).update(committed_steps=[]), "I11"),
    (lambda r: (r[0]["settings"].update(coordinator={"max_step_metrics": 6}),
                end(r).update(committed_steps=[1, 4, 8, 10, 12])), "I11"),
    (lambda r: end(r).update(phase="failed"), "I11"),
    (lambda r: end(r).update(phase="failed", report={}, committed_steps=[]), "I11"),
    (lambda r: event("run.crash_loop", first(r, Kind.FAULT)["injected_at"])(r), "I11"),
    # I12
    (both(write((KEYS.member("driver", "driver-0"), None)), later(RECOVERY_S * 2)), "I12"),
    # I13
    (write((KEYS.job_spec(), {"settings": {"seed": 2}})), "I13"),
    # I14
    (event("engine.dead", 1.0), "I14"),
    (event("trainer.restarted", 1.0), "I14"),
    (lambda r: event("trainer.hung", first(r, Kind.FAULT)["injected_at"] + 1.0)(r), "I14"),
    (lambda r: event("trainer.dead", [*of_kind(r, Kind.FAULT)][-1]["healed_at"] + 61.0)(r), "I14"),
    # I15
    (lambda r: r.insert(-1, {"at": r[-1]["at"], "kind": "change", "revision": 9999, "put": False, "create": 0,
                             "key": KEYS.stream_head("policy"), "value": ""}), "I15"),
    (lambda r: r.insert(-1, {"at": r[-1]["at"], "kind": "change", "revision": 9999, "put": False, "create": 0,
                             "key": KEYS.epoch(), "value": ""}), "I15")])
def test_each_broken_rule_is_found(change: Edit, rule: str) -> None:
    """``rule``: those that the log breaks."""
    found = verdicts(with_(change))
    broken = {name: [*map(str, v.violations)] for name, v in found.items() if v.state is State.VIOLATED}
    assert " ".join(broken) == rule, broken
    proved = {name for name in broken if any(violation.records for violation in found[name].violations)}
    named = {name for name, said in broken.items() if any("revision " in each for each in said)}  # by a replay
    of_the_whole_or_the_end = {"run", "I3", "I5", "I11"}
    assert broken.keys() - proved - named <= of_the_whole_or_the_end


@pytest.mark.parametrize("change", [
    pytest.param(step(0, logprob_diff_max=None), id="the loop has ended before it was told"),
    pytest.param(step(1, staleness=0, logprob_diff_max=1e-4), id="log-probs at the limit"),
    pytest.param(lambda r: (r[0]["settings"]["device"].update(dtype="bfloat16"), step(1, logprob_diff_max=0.01)(r)),
                 id="engine and trainer round at other places in bfloat16"),
    pytest.param(lambda r: (r[0]["settings"]["train"].update(max_staleness=1),
                            step(1, staleness=1, sample_versions=[1])(r)), id="staleness within its bound"),
    pytest.param(write((KEYS.epoch(), {"number": 2})), id="a global restart"),
    pytest.param(lambda r: edited(r, KEYS.pool_spec("rollout"), lambda v: v) or write(
        (KEYS.pool_spec("rollout"), {"name": "rollout", "desired": 1}))(r), id="the next driver writes the pool again"),
    pytest.param(both(lambda r: edited(r, KEYS.pool_status("rollout"), lambda v: v.update(ready=0, released=1), 2),
                      later(RECOVERY_S * 2)), id="released engines wait for the phase of the trainer"),
    pytest.param(both(later(RECOVERY_S * 2), lambda r: edited(
        r, KEYS.pool_status("rollout"), lambda v: v.update(ready=0), 2), lambda r: r[0].update(
            target="job j of somebody else", recovery_s=RECOVERY_S * 3)), id="an operator gave recoveries longer"),
    pytest.param(write((KEYS.member("driver", "driver-0"), None)), id="a driver that ended a moment ago"),
    pytest.param(both(lambda r: write((KEYS.version("policy", 2), newest(r, KEYS.version("policy", 2)) | {
        "state": "gone"}), (KEYS.replica_sets("policy", 2), None))(r), write((KEYS.version("policy", 2), None))),
        id="an old version was released"),
    pytest.param(lambda r: event("trainer.dead", [*of_kind(r, Kind.FAULT)][-1]["healed_at"] + AFTER_S - 1)(r),
                 id="a consequence of a fault that is over"),
    pytest.param(lambda r: event("engine.hung", first(r, Kind.FAULT)["injected_at"] + 1.0)(r),
                 id="a loss of the part that a fault strikes"),
    pytest.param(lambda r: event("compute.waiting", first(r, Kind.FAULT)["injected_at"] + 1.0)(r),
                 id="what others see of a fault"),
    pytest.param(lambda r: r[0]["settings"].update(dcs={"replicas": "auto"}), id="one copy is enough to commit"),
    pytest.param(event("responses.truncated", 1.0), id="an event that is about no part"),
    pytest.param(lambda r: (first(r, Kind.FAULT).update(name="coordinator_killed", target="coordinator rollout-1"),
                            r[0]["schedule"]["strikes"][0].update(faults=["coordinator_killed"]),
                            notified("e1", "firing", 2)(r)), id="the leader is lost before it has noted a notice"),
    pytest.param(lambda r: (first(r, Kind.FAULT).update(
        name="all_engines_killed", witness="pid 1 (a) was sent SIGKILL and seen to end; pid 2 (b) was sent SIGKILL"),
        r[0]["schedule"]["strikes"][0].update(faults=["all_engines_killed"]), second_alert(r, "rollout-2")),
        id="one fault that strikes two engines"),
    pytest.param(lambda r: (r[0]["schedule"].update(steps=0, minutes=1.0), end(r)["report"].update(steps=STEPS)),
                 id="a run by time makes as many steps as it does"),
    pytest.param(lambda r: (r[0]["settings"].update(coordinator={"max_step_metrics": 6}),
                            end(r).update(committed_steps=[1, 4, 8, 10, 11, 12])), id="old steps are thinned out"),
    pytest.param(lambda r: r.insert(1, operation("c", "read", None, 1.0, 2.0, [2, 1])),
                 id="a client that read what there is")])
def test_what_keeps_the_rules_is_accepted(change: Edit) -> None:
    assert violated(with_(change)) == []


def test_job_that_goes_on_has_made_further_steps_by_the_time_etcd_is_read() -> None:
    def attached(*committed: int) -> bool:
        records = with_(lambda r: (r[0].update(target="job j in /runs"), end(r).update(committed_steps=[*committed])))
        return "I11" not in violated(records)

    whole = range(1, STEPS + 1)
    assert attached(*whole) and attached(*whole, STEPS + 1)
    assert not attached(*range(1, STEPS)) and not attached(*whole, STEPS + 2) and not attached(*whole[1:])


def test_pause_without_a_word_is_found_and_one_with_words_is_not() -> None:
    def paused(said: str, status: str) -> list[Record]:
        log = Log()
        records = log.records
        records[0]["at"] -= 200.0  # the machine is slow: a start takes as long
        one = first(records, Kind.FAULT)
        one.update(said=said)
        after = [i for i, r in enumerate(records) if r.get("key") == KEYS.pool_status("rollout")][-1]
        for record in records[after:]:
            record["at"] += 300.0
        for other in [*of_kind(records, Kind.FAULT)][1:]:
            other.update({name: other[name] + 300 for name in ("injected_at", "detected_at", "healed_at")})
        for record in records[after:]:
            if "/alerts/" in record.get("key", ""):
                record["value"] = json.dumps(json.loads(record["value"]) | {
                    "since": json.loads(record["value"])["since"] + 300})
        one.update(healed_at=one["healed_at"] + 300)
        for record in records:
            if record.get("key") == KEYS.job_status() and '"engines"' in record["value"]:
                record["value"] = record["value"].replace('"engines"', json.dumps(status))
        return records

    assert violated(paused("", "engines")) == []
    assert violated(paused("", "")) == ["I11"]
    assert violated(paused("host-1 is lost", "")) == ["I11"], "the word of a fault is none of the job"
    missed = paused("", "")
    status = next(n for n, r in enumerate(missed) if r.get("key") == KEYS.job_status() and n > missed.index(
        [r for r in of_kind(missed, Kind.STEP) if r["step"] == STEPS // 3][0]) + 12)
    missed[status] = {"at": missed[status]["at"], "kind": "gap", "first": missed[status]["revision"],
                      "last": missed[status]["revision"]}
    assert "I11" not in violated(missed), "it may have said it where the observer saw nothing"


def test_deterministic_run_is_compared_with_its_baseline() -> None:
    def deterministic(change: Edit = lambda records: None, *, faults: bool = True) -> list[Record]:
        records = Log(faults=faults).records
        records[0]["settings"]["deterministic"] = True
        for one in of_kind(records, Kind.STEP):
            one["reward_mean"] = one["step"] / 100
        change(records)
        return records

    base = deterministic(faults=False)
    same = verdicts(deterministic(), base)
    assert same["I7"].state is State.KEPT and f"{STEPS} steps" in same["I7"].evidence
    assert "after 2 of 2 faults before the next one" in same["I7"].evidence

    def second_at_once(records: list[Record]) -> None:
        first, second = of_kind(records, Kind.FAULT)
        second["injected_at"] = first["healed_at"] + 1e-3

    assert "after 1 of 2 faults" in verdicts(deterministic(second_at_once), base)["I7"].evidence

    def under_way_together(records: list[Record]) -> None:
        first, second = of_kind(records, Kind.FAULT)
        first["injected_at"], first["healed_at"] = second["injected_at"] - 1, second["healed_at"] + 1000

    assert "after 0 of 2 faults" in verdicts(deterministic(under_way_together), base)["I7"].evidence

    def without_steps_of_versions(records: list[Record]) -> None:
        for record in of_kind(records, Kind.CHANGE):
            if '"meta"' in record["value"]:
                record["value"] = json.dumps(value_of(record) | {"meta": {}})

    def unseen(change: Edit) -> bool:
        found = verdicts(deterministic(change), base)
        return not any(v.violations for v in found.values()) and found["I7"].state is State.UNSEEN

    assert unseen(lambda r: [s.pop("tokens") for s in of_kind(r, Kind.STEP)]), "one value of all steps"
    assert unseen(lambda r: [s.update(loss=None) for s in [*of_kind(r, Kind.STEP)][:5]]), "more than faults took"
    assert unseen(without_steps_of_versions), "no weights"
    assert violated(deterministic(step(4, loss=0.5)), base) == ["I7"]
    assert violated(deterministic(step(4, loss=None)), base) == [], "its loop had ended before it was told"
    measured = deterministic(lambda r: [s.update(algorithm={"entropy": 0.5}) for s in of_kind(r, Kind.STEP)],
                             faults=False)
    for lost in ({}, None):
        assert violated(deterministic(step(4, algorithm=lost)), measured) == [], "the same, of what has several numbers"

    def other_weights(records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "change" and '"m7"' in record["value"]:
                record["value"] = record["value"].replace('"m7"', '"other"')
    assert violated(deterministic(other_weights), base) == ["I7"]
    assert verdicts(Log().records, base)["I7"].state is State.UNSEEN


def test_baseline_that_breaks_a_rule_or_is_of_another_run_makes_the_run_worth_nothing() -> None:
    base = Log(faults=False).records
    assert violated(Log().records, base) == []
    step(2, logprob_diff_max=1.0)(base)
    found = verdicts(Log().records, base)
    assert found["run"].state is State.VIOLATED and "the baseline: I4" in str(found["run"].violations[0])
    assert found["I4"].state is State.KEPT
    assert violated(Log().records, Log(faults=False, seed=2).records) == ["run"]
    assert violated(Log().records, Log().records) == ["run"], "it had faults"


def test_slow_baseline_in_which_a_fault_was_found_is_found() -> None:
    base = Log(faults=False).records
    event("trainer.hung", base[5]["at"])(base)
    assert violated(base) == ["I14"]
    assert violated(Log().records, base) == ["run"]


def test_log_without_evidence_keeps_no_rule() -> None:
    only = [Log().records[0], {"at": 1.0, "kind": "end", "phase": "", "report": {}, "alerts": [], "aborted": ""}]
    only[0]["target"] = "a cluster that runs on"
    found = verdicts(only)
    assert {rule for rule, v in found.items() if v.state is not State.UNSEEN} == {"run"}
    assert all(v.evidence for v in found.values()), "each says why"


def test_history_that_begins_late_does_not_know_who_led() -> None:
    records = Log().records
    for record in of_kind(records, Kind.CHANGE):
        record["revision"] += 5000
        record["create"] += 5000 if record["create"] else 0
    records[:] = [r for r in records if r.get("key") != CLUSTER.leader("a")]
    assert violated(records) == []


def test_violations_of_one_checker_are_limited_and_counted() -> None:
    records = Log(steps=60).records
    for one in of_kind(records, Kind.STEP):
        one["logprob_diff_max"] = 1.0
    found = verdicts(records)["I4"]
    assert len(found.violations) == MOST_SHOWN and found.further == 61 - MOST_SHOWN


def test_log_is_judged_from_its_file_without_being_held(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in Log().records), encoding="utf-8")
    from_file = judge(Records(file))
    assert from_file == judge(Log().records) == judge(iter(Log().records))
    assert JOB in {v.rule: v for v in from_file}["I13"].evidence


def test_run_whose_baseline_is_not_there_is_worth_nothing() -> None:
    records = Log().records
    records[0]["compares"] = True
    assert violated(records) == ["run"] and violated(records, Log(faults=False).records) == []


def test_fault_that_may_go_unnoticed_need_not_be_detected() -> None:
    found = verdicts(with_(fault(detected_at=None, may_go_unnoticed=True)))
    assert not [verdict for verdict in found.values() if verdict.state is State.VIOLATED]
