"""The failure policy under a clock of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.config import FailurePolicyConfig
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.failure import policy
from elastic_rl.coordinator.failure.policy import POLICY, FailureRule, Fault
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.records import FaultLog, FaultOccurrence, LastSeen, RecoveryAction
from elastic_rl.coordinator.targets import DRIVER, JOB
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import Event, JobStatus

SEEDS = seeds(40)
CFG = FailurePolicyConfig(max_faults=3, fault_window_s=100.0, backoff_initial_s=2.0, backoff_max_s=16.0,
                          fault_merge_s=5.0, max_global_restarts=3)
TRAINER_DEAD = policy.rule_for("trainer", Fault.DEAD)
TRAINER_HUNG = policy.rule_for("trainer", Fault.HUNG)
DRIVER_DEAD = policy.rule_for("driver", Fault.DEAD)
DRIVER_HUNG = policy.rule_for("driver", Fault.HUNG)


def rl(step: int, pieces: int = 0) -> JobStatus:
    return JobStatus(phase="rl", step=step, pieces=pieces)


def after(rule: FailureRule, times: list[float], progress: int = 0, log: FaultLog | None = None) -> FaultLog:
    log = log or FaultLog(target="trainer")
    for at in times:
        log = policy.record_fault(log, rule, "it is gone", at, progress, CFG)
    return log


def test_every_part_has_a_rule_for_each_fault() -> None:
    parts = {r.part for r in POLICY}
    assert {(r.part, r.fault) for r in POLICY} == {
        *((p, f) for p in parts for f in (Fault.DEAD, Fault.HUNG)), (event_kinds.ENGINE, Fault.BEHIND)}
    assert {event_kinds.ENGINE, *TRAINER_GROUPS, registry.DCS, registry.COORDINATOR, "driver", "role"} == parts
    assert all(r.does and r.meanwhile for r in POLICY)
    assert policy.rule_for("genrm", Fault.DEAD).part == "role"


def test_deaths_within_the_budget_need_no_action_of_the_leader() -> None:
    log = after(TRAINER_DEAD, [0, 10, 20])
    assert policy.due(log, 20, 0) is RecoveryAction.NONE
    log = after(TRAINER_DEAD, [30], log=log)
    assert log.pending is RecoveryAction.GLOBAL_RESTART
    assert "4 faults" in log.reason


def steps(count: int, pieces: int = 0) -> int:
    return policy.progress_of(rl(count, pieces))


def test_faults_with_steps_between_them_are_recovered_in_place() -> None:
    log = FaultLog(target="trainer")
    for n in range(20):
        log = after(TRAINER_DEAD, [10.0 * n], progress=steps(n), log=log)
        assert (len(log.occurrences), log.pending) == (1, RecoveryAction.NONE)
    log = after(TRAINER_DEAD, [200.0, 210.0, 220.0], progress=steps(18), log=log)
    assert log.pending is RecoveryAction.GLOBAL_RESTART, "steps that are done again are no progress"


def test_groups_of_engines_that_go_on_do_not_hide_that_the_trainer_never_works() -> None:
    log, waits = FaultLog(target="trainer"), []
    for n in range(4):
        log = after(TRAINER_HUNG, [20.0 * n], progress=steps(7, pieces=n), log=policy.cleared(log))
        waits.append(log.due_at - 20.0 * n)
    assert log.pending is RecoveryAction.GLOBAL_RESTART and waits[:3] == [0.0, 2.0, 4.0]


def test_backoff_begins_anew_once_the_run_has_made_a_step() -> None:
    log = policy.cleared(after(TRAINER_HUNG, [0.0, 10.0]))
    log = after(TRAINER_HUNG, [20.0], progress=steps(1), log=log)
    assert (log.pending, log.due_at) == (RecoveryAction.RESTART, 20.0)


def test_global_restart_is_not_carried_out_once_the_run_has_made_a_step() -> None:
    log = after(TRAINER_DEAD, [0, 10, 20, 30], progress=steps(0))
    assert policy.due(log, 99.0, steps(0)) is RecoveryAction.GLOBAL_RESTART
    assert policy.due(log, 99.0, steps(0, pieces=9)) is RecoveryAction.GLOBAL_RESTART
    assert policy.due(log, 99.0, steps(1)) is RecoveryAction.RESTART, "of a member that hangs, if there is one"
    again = after(TRAINER_DEAD, [40.0], progress=steps(1), log=log)
    assert (len(again.occurrences), again.pending) == (1, RecoveryAction.RESTART), "it has begun a new row"
    stuck = policy.restart_failed(FaultLog(target="trainer"), "e", 60.0, CFG, carried_out=False)
    assert policy.due(stuck, 60.0, steps(1)) is RecoveryAction.GLOBAL_RESTART, "no fault has led to it"


def test_global_restart_ends_what_was_counted_and_pending_of_a_part_but_not_of_the_job() -> None:
    """Two parts use up their budgets together: one global restart helps both, whichever of them asked for it."""
    before = after(TRAINER_DEAD, [0, 10, 20, 30], log=FaultLog(target="trainer", epoch=1))
    assert policy.of_epoch(before, 1, 0) == before and before.pending is RecoveryAction.GLOBAL_RESTART
    assert policy.of_epoch(before.replace(operation="op-1"), 2, 1) == FaultLog(target="trainer", epoch=2)
    assert after(TRAINER_DEAD, [40], log=policy.of_epoch(before, 2, 1)).pending is RecoveryAction.NONE
    assert policy.of_epoch(before, 2, 0) == before, "a driver has raised the epoch by itself"
    assert policy.of_epoch(before.replace(epoch=0), 0, 0) == before.replace(epoch=0), "before the first epoch"
    job = policy.record_restart(FaultLog(target=JOB), 0.0, rl(7), CFG)
    assert policy.of_epoch(job, 2, 1) == job


def test_faults_that_are_apart_are_no_row_and_those_that_are_not_are_one_however_long() -> None:
    assert after(TRAINER_DEAD, [n * 100.0 for n in range(20)]).pending is RecoveryAction.NONE
    slow = after(TRAINER_DEAD, [n * 99.0 for n in range(4)])
    assert slow.pending is RecoveryAction.GLOBAL_RESTART, "a part that takes a while to fail again"


def test_faults_of_one_target_that_come_together_count_once() -> None:
    assert len(after(TRAINER_DEAD, [0, 0, 1, 3]).occurrences) == 1
    assert len(after(TRAINER_DEAD, [0, 3, 6, 9, 12]).occurrences) == 3, "a target that never settles counts too"


def test_hung_part_is_restarted_with_exponential_backoff() -> None:
    log, waits = FaultLog(target="trainer"), []
    for at in (0.0, 20.0, 40.0):
        log = after(TRAINER_HUNG, [at], log=log)
        assert log.pending is RecoveryAction.RESTART
        waits.append(log.due_at - at)
        assert policy.due(log, log.due_at - 0.01 if waits[-1] else -0.01, 0) is RecoveryAction.NONE
        assert policy.due(log, log.due_at, 0) is RecoveryAction.RESTART
        log = policy.cleared(log)
    assert waits == [0.0, 2.0, 4.0]


def test_restart_that_is_not_carried_out_leads_to_a_global_restart() -> None:
    log = policy.cleared(after(TRAINER_HUNG, [0.0])).replace(operation="op-1")
    stuck = policy.restart_failed(log, "waiting for trainer to be stopped", 60.0, CFG, carried_out=False)
    assert (stuck.pending, stuck.operation) == (RecoveryAction.GLOBAL_RESTART, "")
    assert policy.due(stuck, 60.0, 0) is RecoveryAction.GLOBAL_RESTART and "not carried out" in stuck.reason
    slow = policy.restart_failed(log, "0 of 2 ranks work", 60.0, CFG, carried_out=True)
    assert (slow.pending, slow.operation) == (RecoveryAction.NONE, "")
    job = FaultLog(target=JOB, operation="op-2")
    assert policy.restart_failed(job, "e", 60.0, CFG, carried_out=False).pending is RecoveryAction.NONE


def test_weaker_action_does_not_replace_a_pending_one() -> None:
    log = after(TRAINER_DEAD, [0, 10, 20, 30])
    assert log.pending is RecoveryAction.GLOBAL_RESTART
    later = policy.record_fault(log, replace(TRAINER_HUNG, counts=False), "r", 200.0, 0, CFG)
    assert later.pending is RecoveryAction.GLOBAL_RESTART


def test_driver_is_taken_over_within_its_budget_and_then_all_is_restarted() -> None:
    assert policy.target_of("driver", "driver-1") == policy.target_of("driver", "driver-2") == DRIVER
    log = after(DRIVER_DEAD, [0, 10, 20], log=FaultLog(target=DRIVER))
    assert log.pending is RecoveryAction.NONE, "the next driver takes over"
    assert after(DRIVER_DEAD, [30], log=log).pending is RecoveryAction.GLOBAL_RESTART
    hung = after(DRIVER_HUNG, [30], log=FaultLog(target=DRIVER))
    assert hung.pending is RecoveryAction.RESTART


def test_steps_repeated_after_a_rewind_are_no_progress() -> None:
    log = FaultLog(target=JOB)
    for at, step in ((0, 23), (10, 21), (20, 22)):
        log = policy.record_restart(log, at, rl(step), CFG)
    assert log.pending is RecoveryAction.STOP


@settings(max_examples=SEEDS)
@given(progress=st.lists(st.booleans(), max_size=40), limit=st.integers(2, 6))
def test_drivers_that_end_without_progress_stop_the_run_after_one_global_restart(progress: list[bool], limit: int
                                                                                ) -> None:
    """``progress``: whether the job moved before each end. The ends in a row are kept as the run's process does."""
    cfg = FailurePolicyConfig(max_global_restarts=limit)
    ends, step, in_a_row, actions = list[FaultOccurrence](), 0, 0, list[RecoveryAction]()
    for moved in progress:
        step, in_a_row = step + moved, 1 if moved else in_a_row + 1
        if moved:
            ends = []
        ends.append(FaultOccurrence(at=float(step), progress=step))
        actions.append(policy.after_driver_ended(ends, cfg))
        assert (actions[-1] is RecoveryAction.STOP) == (in_a_row >= limit)
        if actions[-1] is RecoveryAction.STOP:
            last_but_one = [RecoveryAction.GLOBAL_RESTART] if limit > 2 else []
            assert actions[-limit:-1] == [*[RecoveryAction.NONE] * (limit - 1 - len(last_but_one)), *last_but_one]
            break


def test_global_restarts_count_for_the_crash_loop() -> None:
    log = FaultLog(target=JOB)
    for n in range(2):
        log = policy.record_restart(log, n * 50.0, rl(7), CFG)
    assert log.pending is RecoveryAction.NONE
    assert policy.record_restart(log, 100.0, rl(7), CFG).pending is RecoveryAction.STOP


@pytest.mark.parametrize(("step_s", "apart_s", "stops"), [
    (0.0, 3600.0, True), (60.0, 3600.0, True), (60.0, 3601.0, False), (7200.0, 5 * 3600.0, True),
    (7200.0, 21 * 3600.0, False)])
def test_restarts_count_as_a_loop_while_they_are_closer_together_than_some_usual_steps(
        step_s: float, apart_s: float, stops: bool) -> None:
    log, job, cfg = FaultLog(target=JOB), rl(7).replace(step_s=step_s), FailurePolicyConfig()
    ends = list[FaultOccurrence]()
    for n in range(cfg.max_global_restarts + 2):
        log = policy.record_restart(log, n * apart_s, job, cfg)
        ends = policy.in_a_row(ends, n * apart_s, job, cfg)
    assert (log.pending is RecoveryAction.STOP) == stops
    assert (policy.after_driver_ended(ends, cfg) is RecoveryAction.STOP) == stops


def test_step_and_another_fault_do_not_end_the_restart_of_what_hangs() -> None:
    log = after(DRIVER_DEAD, [30.0], progress=steps(1), log=after(DRIVER_HUNG, [0.0, 20.0]))
    assert (len(log.occurrences), log.pending, log.due_at) == (1, RecoveryAction.RESTART, 0.0)


def test_crash_loop_ends_no_run_that_has_got_further_meanwhile() -> None:
    log = FaultLog(target=JOB)
    for n in range(3):
        log = policy.record_restart(log, n * 50.0, rl(7), CFG)
    assert policy.due(log, 100.0, policy.progress_of(rl(7))) is RecoveryAction.STOP
    assert policy.due(log, 900.0, policy.progress_of(rl(7, pieces=1))) is not RecoveryAction.STOP


def test_one_restart_long_after_the_others_begins_a_new_row() -> None:
    log, cfg = FaultLog(target=JOB), FailurePolicyConfig(max_global_restarts=3)
    for at in (0.0, 60.0, 10_000.0, 10_060.0):
        log = policy.record_restart(log, at, rl(7), cfg)
        assert log.pending is RecoveryAction.NONE
    assert policy.record_restart(log, 10_120.0, rl(7), cfg).pending is RecoveryAction.STOP


def test_finished_groups_and_parts_of_a_step_are_progress() -> None:
    log, cfg = FaultLog(target=JOB), FailurePolicyConfig(max_global_restarts=3)
    for n in range(20):
        log = policy.record_restart(log, n * 60.0, rl(7, pieces=n), cfg)
        assert log.pending is RecoveryAction.NONE
    for n in (0, 18):
        log = policy.record_restart(log, 1200.0 + n, rl(7, pieces=n), cfg)
    assert log.pending is RecoveryAction.STOP, "the same groups again and again are none"
    assert policy.progress_of(rl(7, pieces=10**9)) < policy.progress_of(rl(8))


@pytest.mark.parametrize(("phase", "step", "more"), [("sft", 3000, "rl"), ("rl", 5, "rl"), ("sft", 5, "sft")])
def test_progress_grows_from_sft_into_rl(phase: str, step: int, more: str) -> None:
    later = JobStatus(phase=more, step=step + 1)
    assert policy.progress_of(JobStatus(phase=phase, step=step)) < policy.progress_of(later)
    assert policy.progress_of(JobStatus(phase="sft", sft_step=3)) == policy.progress_of(
        JobStatus(phase="sft", step=3)), "before RL, whose step is 0 until then"
    assert policy.progress_of(JobStatus(phase="sft", step=3000)) < policy.progress_of(JobStatus(phase="rl", step=0))


@pytest.mark.parametrize(("dead", "hung"), [(TRAINER_DEAD, TRAINER_HUNG), (DRIVER_DEAD, DRIVER_HUNG)],
                         ids=["trainer", "driver"])
@settings(max_examples=SEEDS)
@given(seed=st.integers(0, 2**32))
def test_run_without_progress_is_stopped_and_one_with_progress_never(dead: FailureRule, hung: FailureRule, seed: int
                                                                    ) -> None:
    """A part that fails at random times, with leaders that carry out late; only the log survives a leader. ``moving``:
    the run gets further after each global restart, and no restart in place helps."""
    rng = random.Random(seed)
    moving, epoch = rng.random() < 0.5, 1
    part, job = FaultLog(target=dead.part, epoch=1), FaultLog(target=JOB)
    now, progress, restarts, stopped = 0.0, 0, 0, False
    for _ in range(400):
        now += rng.uniform(6.0, 20.0)
        rule = hung if rng.random() < 0.3 else dead
        part = policy.of_epoch(FaultLog.decode(part.encode()), epoch, epoch - 1)
        part = policy.record_fault(part, rule, "r", now, steps(progress), CFG)
        now += rng.uniform(0.0, 3.0)
        action = policy.due(part, now, steps(progress))
        if action is RecoveryAction.GLOBAL_RESTART:
            restarts += 1
            progress += moving
            job = policy.record_restart(job, now, rl(progress), CFG)
            epoch += 1
        elif action is RecoveryAction.RESTART:
            part = policy.cleared(part)
        if policy.due(job, now, steps(progress)) is RecoveryAction.STOP:
            stopped = True
            break
    assert stopped != moving
    if stopped:
        assert restarts == CFG.max_global_restarts


def test_manual_shows_the_policy() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "operating" / "failures.md").read_text()
    table = [f"| {r.part} | {r.fault} | {r.does} | {r.meanwhile} |" for r in POLICY]
    assert "\n".join(table) in manual


@pytest.mark.parametrize(("role", "registered", "excused"), [
    ("trainer", 10, True), ("trainer", 30, False), ("critic", 10, False), ("engine", 10, False)])
def test_end_of_the_formation_that_has_refused_a_step_is_no_fault(role: str, registered: int, excused: bool) -> None:
    member = LastSeen(role=role, id="rank-1", incarnation="i", first_seen=1.0, registered_revision=registered)
    found = [(20, Event(id="1", at=1.0, kind="trainer.refused", subject="trainer", message="no memory")),
             (40, Event(id="2", at=2.0, kind="trainer.started", subject="trainer", message="it works"))]
    assert policy.ended_by_refusal(member, found) is excused
