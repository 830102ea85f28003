"""I14: which losses are those of injected faults, and how long the run would have told any other."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chaos_log import Log, of_kind

from chaos_tests.event_log import Kind
from chaos_tests.faults.catalogue import FAULTS
from chaos_tests.validate.attribution import AFTER_S
from chaos_tests.validate.faults import SlowWork, unexcused_s
from chaos_tests.validate.judge import judge, show
from chaos_tests.validate.verdict import State

KILLED = "pid 1 (x) was sent SIGKILL and seen to end"
START = 1000.0
BEGIN = {"name": "run.started", "subject": "job", "at": START}


def event(name: str, subject: str, at: float) -> dict[str, Any]:
    return {"name": name, "subject": subject, "at": START + at}


def fault(name: str, began: float, healed: float | None, target: str = "", witness: str = KILLED) -> dict[str, Any]:
    return {"kind": Kind.FAULT, "at": START + began, "name": name, "target": target, "witness": witness,
            "injected_at": START + began, "healed_at": None if healed is None else START + healed}


def judged(*records: dict[str, Any]) -> SlowWork:
    checker = SlowWork()
    show([{"kind": Kind.EVENT, "message": "m", **record} for record in (BEGIN, *records)], [checker])
    return checker


def found(*records: dict[str, Any]) -> list[str]:
    return [violation.what.partition(",")[0] for violation in judged(*records).violations]


def test_loss_of_another_engine_than_the_one_that_was_killed_is_found() -> None:
    ready = [event("engine.ready", name, 1.0) for name in ("rollout-1", "rollout-2")]
    killed = fault("engine_killed", 10.0, 20.0, "rollout-1")
    assert found(*ready, event("engine.dead", "rollout-1", 11.0), killed) == []
    assert found(*ready, event("engine.hung", "rollout-2", 11.0), killed) == ["engine.hung of rollout-2"]
    assert found(*ready, event("engine.starting", "rollout-3", 12.0), event("engine.dead", "rollout-3", 15.0),
                 killed) == [], "its successor"
    both = [killed, fault("engine_killed", 30.0, 40.0, "rollout-2")]
    assert found(*ready, event("engine.dead", "rollout-2", 31.0), *both) == []


@pytest.mark.parametrize(("name", "target", "kind", "subject"), [
    ("all_engines_killed", "every engine", "engine.dead", "rollout-2"),
    ("engine_terminated", "engine (pid 12)", "engine.dead", "rollout-2"),
    ("trainer_rank_killed", "trainer rank-0", "trainer.dead", "rank-1"),
    ("etcd_stopped", "etcd-0", "engine.dead", "rollout-2"),
    ("driver_terminated", "driver-1", "engine.dead", "rollout-2"),
    ("holder_host_cut", "holder on host-1, rollout-1", "engine.dead", "rollout-2")])
def test_loss_is_told_by_its_part_where_the_fault_names_no_victim_of_it(name: str, target: str, kind: str, subject: str
                                                                       ) -> None:
    ready = [event("engine.ready", engine, 1.0) for engine in ("rollout-1", "rollout-2")] + [
        event("trainer.alive", f"rank-{n}", 1.0) for n in range(2)]
    assert found(*ready, event(kind, subject, 11.0), fault(name, 10.0, 20.0, target)) == []


def test_loss_of_another_coordinator_than_the_leader_that_was_killed_is_found() -> None:
    known = [event("coordinator.alive", f"coordinator-{n}", 1.0) for n in range(2)]
    killed = fault("coordinator_killed", 10.0, 20.0, "coordinator coordinator-0")
    assert found(*known, event("coordinator.dead", "coordinator-0", 12.0), killed) == []
    assert found(*known, event("coordinator.dead", "coordinator-1", 12.0), killed) == [
        "coordinator.dead of coordinator-1"]


def test_global_restart_after_one_fault_is_found_and_after_several_in_a_row_is_not() -> None:
    restart = event("run.global_restart", "job", 25.0)
    ranks = [fault("trainer_rank_killed", 10.0, 20.0, "trainer rank-0"),
             fault("trainer_rank_killed", 22.0, 30.0, "trainer rank-0")]
    step = {"kind": Kind.STEP, "at": START + 21.0, "step": 1}
    assert found(restart, ranks[0]) == ["run.global_restart of job"]
    assert found(restart, *ranks) == []
    assert found(step, restart, *ranks) == ["run.global_restart of job"]
    assert found(restart, fault("gcs_killed", 10.0, 20.0)) == []


# -- the evidence ------------------------------------------------------------------------------------------------------
def test_rule_is_unseen_where_every_loss_would_have_been_excused() -> None:
    lasts = fault("etcd_stopped", -1.0, None, "etcd-0")
    last = event("run.finished", "job", 50.0)
    assert judged(last, lasts).evidence() == ""
    assert "50 s in which" in judged(last).evidence()
    assert "1 faults that slow" in judged(last, lasts, fault("etcd_slow", 5.0, 10.0, "etcd-0")).evidence()
    assert "0 faults that slow" in judged(last, fault("etcd_slow", 5.0, 10.0, "etcd-0", witness="")).evidence()
    assert judged().evidence() == "", "one event is no time"


def test_rule_without_evidence_says_why() -> None:
    records = [record for record in Log().records if record["kind"] != Kind.EVENT]
    verdict = next(verdict for verdict in judge(records) if verdict.rule == "I14")
    assert verdict.state is State.UNSEEN and "no events of the product" in verdict.evidence
    assert next(of_kind(Log().records, Kind.EVENT))


def test_time_in_which_some_loss_is_not_excused() -> None:
    def seconds(*faults: dict[str, Any]) -> float:
        return unexcused_s(faults, START, START + 1000.0)

    assert seconds() == seconds(fault("engine_killed", 10.0, 20.0)) == 1000.0, "of other parts"
    assert seconds(fault("etcd_stopped", 10.0, 20.0)) == 1000.0 - 11.0 - AFTER_S
    assert seconds(fault("etcd_stopped", 10.0, 20.0), fault("etcd_stopped", 15.0, 40.0)) == 1000.0 - 31.0 - AFTER_S
    assert seconds(fault("etcd_stopped", 10.0, None)) == 9.0
    assert seconds(fault("etcd_stopped", -500.0, -400.0)) == 1000.0
    assert unexcused_s([], START, START - 1.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(-80, 100), st.integers(0, 50) | st.none()),
                max_size=6))
def test_time_without_an_excuse_is_a_part_of_the_run(times: list[tuple[str, int, int | None]]) -> None:
    of = [fault(name, begin, None if length is None else begin + length) for name, begin, length in times]
    assert 0.0 <= unexcused_s(of, START, START + 100.0) <= 100.0
    assert unexcused_s(of, START, START + 100.0) <= unexcused_s(of[1:], START, START + 100.0) + 1e-6


def test_log_of_many_losses_is_judged_in_a_time_that_grows_with_its_length() -> None:
    def took(count: int) -> float:
        records = [each for n in range(count) for each in (
            fault("engine_killed", 100.0 * n, 100.0 * n + 10.0, f"e{n}"), event("engine.dead", f"e{n}", 100.0 * n + 1))]
        began = time.process_time()
        assert found(*records) == []
        return time.process_time() - began

    took(10)
    assert took(4000) < 40.0 * max(took(400), 0.005), "ten times as many; a hundred times the time were quadratic"
