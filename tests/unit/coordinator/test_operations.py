"""The state machine of operations, under a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.coordinator.operations.controller import OperationController
from elastic_rl.coordinator.operations.state_machine import advance, cancelled
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.client import KeyValue, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    ExternalEngine,
    JobStatus,
    Member,
    Operation,
    OperationKind,
    OperationState,
    PoolSpec,
    PoolStatus,
    RestartRequest,
)

SEEDS = seeds(40)
POOL = "rollout"
URL = "http://10.0.0.9:30000"


def scale(desired: int, previous: int = 1) -> Operation:
    return Operation(id="op-1", kind=OperationKind.SCALE, target=f"pools/{POOL}", created_at=0.0, timeout_s=100.0,
                     params={"desired": desired, "previous": previous})


def restart(target: str, **params: object) -> Operation:
    return Operation(id="op-2", kind=OperationKind.RESTART, target=target, created_at=10.0, timeout_s=90.0,
                     params={"generation": 1, **params})


def drain(replace: bool) -> Operation:
    return Operation(id="op-3", kind=OperationKind.DRAIN, target="engines/e0", created_at=0.0, timeout_s=100.0,
                     params={"pool": POOL, "replace": replace})


def register() -> Operation:
    return Operation(id="op-4", kind=OperationKind.REGISTER, target="engines/a0", created_at=0.0, timeout_s=100.0,
                     params={"pool": POOL, "url": URL})


def registering(now: float, state: EngineState | None = None, ended: str = "", waits_for: str = "", **more: object
                ) -> ClusterSnapshot:
    """A snapshot with the registration of ``register`` and its engine, once that has a record."""
    request = ExternalEngine(engine="a0", pool=POOL, url=URL, ended=ended, waits_for=waits_for)
    there = [Engine(id="a0", pool=POOL, state=state, epoch=1, url=URL, external=True, **more)] if state else []
    return ClusterSnapshot("j", now=now, leader_time=now, external_engines={"a0": request},
                           engines={e.id: e for e in there})


def engine(n: int, state: EngineState = EngineState.READY) -> Engine:
    return Engine(id=f"e{n}", pool=POOL, state=state, epoch=1)


def with_pool(now: float, desired: int, *engines: Engine, starting: int = 0, **more: object) -> ClusterSnapshot:
    status = PoolStatus(name=POOL, ready=0, starting=starting, draining=0)
    return ClusterSnapshot("j", now=now, leader_time=now, specs={POOL: PoolSpec(name=POOL, desired=desired)},
                           statuses={POOL: status}, engines={e.id: e for e in engines},
                           **more)  # type: ignore[arg-type]


def test_restart_of_an_ended_engine_waits_only_for_its_replacement() -> None:
    op, request = restart("engines/e0", pool=POOL), RestartRequest(target="engines/e0", generation=1)

    def state(*engines: Engine) -> tuple[OperationState, str]:
        now = advance(op, with_pool(20.0, 2, *engines, restarts={"engines/e0": request}), {"trainer": 2})
        return now.state, now.phase

    assert state(engine(0), engine(1)) == (OperationState.RUNNING, "stopping")
    assert state(engine(0, EngineState.DEAD), engine(1)) == (OperationState.RUNNING, "starting")
    assert state(engine(1)) == (OperationState.RUNNING, "starting")
    assert state(engine(1), engine(2))[0] is OperationState.SUCCEEDED


def test_operation_with_unreadable_parameters_fails_and_the_others_continue() -> None:
    written: dict[str, Operation] = {}

    def guarded(compares: object, ops: Sequence[Op]) -> bool:
        written.update({op.key: Operation.decode(op.data) for op in ops if "/operations/" in op.key})
        return True

    bad = restart("engines/e0", pool=POOL).replace(params={"pool": POOL, "generation": "many"})
    good = scale(1)
    snapshot = with_pool(20.0, 1, engine(0), operations={bad.id: bad, good.id: good},
                         restarts={bad.target: RestartRequest(target=bad.target, generation=1)})
    OperationController(Keys("j"), {"trainer": 2}, guarded).update(snapshot)
    assert written[Keys("j").operation(bad.id)].state is OperationState.FAILED
    assert written[Keys("j").operation(good.id)].state is OperationState.SUCCEEDED


def test_scale_out_succeeds_when_all_engines_are_ready() -> None:
    op = advance(scale(3), with_pool(1.0, 3, engine(0), starting=2))
    assert (op.state, op.phase, op.done, op.total) == (OperationState.RUNNING, "starting", 1, 3)
    op = advance(op, with_pool(2.0, 3, engine(0), engine(1), engine(2)))
    assert (op.state, op.done, op.result["ready"]) == (OperationState.SUCCEEDED, 3, 3)


def test_scale_in_waits_for_the_last_draining_engine() -> None:
    op = advance(scale(1, 2), with_pool(1.0, 1, engine(0), engine(1, EngineState.DRAINING)))
    assert (op.state, op.phase) == (OperationState.RUNNING, "draining")
    begins = with_pool(1.5, 1, engine(0))
    begins = replace(begins, statuses={POOL: begins.statuses[POOL].replace(draining=1)})
    assert advance(op, begins).state is OperationState.RUNNING, "it was drained before it had a record"
    assert advance(op, with_pool(2.0, 1, engine(0))).state is OperationState.SUCCEEDED


def test_later_request_for_the_same_pool_supersedes_a_scale() -> None:
    op = advance(scale(3), with_pool(1.0, 5, engine(0)))
    assert op.state is OperationState.CANCELLED
    assert "superseded" in op.error and "5" in op.error


def test_drain_waits_for_the_replacement() -> None:
    op = advance(drain(replace=True), with_pool(1.0, 2, engine(0, EngineState.DRAINING), engine(1)))
    assert op.phase == "draining"
    op = advance(op, with_pool(2.0, 2, engine(1), engine(2, EngineState.STARTING)))
    assert (op.phase, op.done, op.total) == ("replacing", 1, 2)
    assert advance(op, with_pool(3.0, 2, engine(1), engine(2))).state is OperationState.SUCCEEDED
    assert advance(drain(replace=False), with_pool(2.0, 1, engine(1))).state is OperationState.SUCCEEDED


def test_drain_fails_when_its_engine_dies() -> None:
    op = advance(drain(replace=True), with_pool(1.0, 2, engine(0, EngineState.DEAD), engine(1)))
    assert op.state is OperationState.FAILED
    assert "e0" in op.error


def test_restart_waits_until_the_part_works_again() -> None:
    old = Member(role="trainer", id="rank-0", pid=1, host="h", incarnation="old", info={"ready": True})
    new = old.replace(incarnation="new", info={})
    request = RestartRequest(target="trainer", generation=1)
    op = restart("trainer", before=["old"])

    def at(now: float, request: RestartRequest, member: Member) -> Operation:
        return advance(op, ClusterSnapshot("j", now=now, restarts={"trainer": request}, members=[member]))

    assert at(11.0, request, old).phase == "stopping"
    done = request.replace(observed_generation=1)
    assert at(12.0, done, old).phase == "starting"
    assert at(13.0, done, new).phase == "starting", "it still takes up its state"
    assert at(14.0, done, new.replace(info={"ready": True})).state is OperationState.SUCCEEDED


def test_restart_of_the_driver_waits_for_the_first_pass_of_the_next_one() -> None:
    old = Member(role="driver", id="d1", pid=1, host="h", incarnation="old", epoch=3, info={"faults": {}})
    new = old.replace(id="d2", incarnation="new", info={})
    request = RestartRequest(target="driver", generation=1)
    op = restart("driver", before=["old"])

    def at(request: RestartRequest, *drivers: Member, epoch: int = 3) -> Operation:
        return advance(op, ClusterSnapshot("j", now=12.0, restarts={"driver": request}, members=drivers, epoch=epoch))

    assert at(request, old).phase == "stopping"
    done = request.replace(observed_generation=1)
    assert at(done, old).phase == "starting", "its entry is there until its lease ends"
    assert at(done, new).phase == "starting"
    works = new.replace(info={"faults": {"router": "it ended"}})
    assert at(done, works).state is OperationState.SUCCEEDED
    assert at(done, works.replace(epoch=5), epoch=5).state is OperationState.SUCCEEDED, "all was restarted meanwhile"


def test_global_restart_waits_for_epoch_loop_and_every_trainer_group() -> None:
    ranks = [Member(role=role, id="rank-0", pid=1, host="h", incarnation=f"new-{role}", info={"ready": True})
             for role in ("trainer", "critic")]
    op = restart("job", before=["old"], ended=2)
    done = {"job": RestartRequest(target="job", generation=1, observed_generation=1)}
    job = JobStatus(phase="rl")

    def state(epoch: int, written_at: int, status: JobStatus = job, groups: int = 2) -> OperationState:
        """``written_at``: revision of the job's status; the operation began at revision 30."""
        keys = Keys("j")
        return advance(op, ClusterSnapshot(
            "j", now=21.0, restarts=done, members=ranks[:groups], status=status, epoch=epoch, revisions={
                keys.operation(op.id): KeyValue("", b"", 30, 40, 1, 0),
                keys.job_status(): KeyValue("", b"", 2, written_at, 1, 0)}), {"trainer": 1, "critic": 1}).state

    assert state(epoch=3, written_at=50) is OperationState.RUNNING
    assert state(epoch=4, written_at=29) is OperationState.RUNNING, "the status of the old epoch"
    assert state(epoch=4, written_at=50, status=job.replace(phase="starting")) is OperationState.RUNNING
    assert state(epoch=4, written_at=31, groups=1) is OperationState.RUNNING, "no rank of the critic works"
    assert state(epoch=4, written_at=31) is OperationState.SUCCEEDED


def test_withdrawn_request_cancels_its_restart() -> None:
    op = advance(restart("trainer"), ClusterSnapshot(
        "j", now=11.0, restarts={"trainer": RestartRequest(target="trainer", generation=0)}))
    assert op.state is OperationState.CANCELLED


def test_registration_is_probed_and_synced_until_the_engine_is_ready() -> None:
    op = advance(register(), registering(1.0))
    assert op.phase == "probing" and "driver" in op.message
    op = advance(op, registering(1.5, waits_for="its host b has not joined the run"))
    assert op.phase == "probing" and op.message == "its host b has not joined the run"
    op = advance(op, registering(2.0, EngineState.STARTING))
    assert op.phase == "probing" and URL in op.message
    op = advance(op, registering(3.0, EngineState.SYNCING))
    assert (op.phase, op.done, op.total) == ("syncing", 1, 2)
    op = advance(op, registering(4.0, EngineState.READY, version=7))
    assert (op.state, op.phase, op.done) == (OperationState.SUCCEEDED, "ready", 2)
    assert (op.result["engine"], op.result["version"]) == ("a0", 7)


def test_registration_fails_with_the_reason_of_its_engine() -> None:
    refused = advance(register(), registering(1.0, ended="it was started without the loader"))
    assert (refused.state, refused.error) == (OperationState.FAILED, "it was started without the loader")
    dead = advance(register(), registering(1.0, EngineState.DEAD, reason="its process died"))
    assert (dead.state, dead.error) == (OperationState.FAILED, "its process died")
    assert advance(register(), ClusterSnapshot("j", now=1.0)).state is OperationState.CANCELLED
    assert "waiting for the driver" in advance(advance(register(), registering(1.0)), registering(101.0)).error


def test_external_engine_does_not_count_for_the_desired_number() -> None:
    extra = engine(9).replace(external=True)
    assert advance(scale(2), with_pool(1.0, 2, engine(0), extra, starting=1)).state is OperationState.RUNNING
    assert advance(scale(1, 2), with_pool(1.0, 1, engine(0), extra)).state is OperationState.SUCCEEDED
    assert advance(drain(replace=True), with_pool(2.0, 2, engine(1), extra)).phase == "replacing"


def test_operation_fails_at_its_deadline_with_what_was_missing() -> None:
    op = advance(scale(3), with_pool(5.0, 3, engine(0)))
    assert op.leader_deadline_s == 105.0
    assert advance(op, with_pool(104.9, 3, engine(0))).state is OperationState.RUNNING
    op = advance(op, with_pool(105.0, 3, engine(0)))
    assert op.state is OperationState.FAILED
    assert "1 of 3 engines" in op.error


@pytest.mark.parametrize("skew_s", [3600.0, -3600.0, 1e9])
def test_wall_clock_of_another_leader_neither_ends_an_operation_nor_keeps_it(skew_s: float) -> None:
    op = advance(scale(3), with_pool(5.0, 3, engine(0)))

    def under_another_leader(leader_time: float) -> Operation:
        return advance(op, replace(with_pool(leader_time, 3, engine(0)), now=leader_time + skew_s))

    assert under_another_leader(60.0).state is OperationState.RUNNING
    assert under_another_leader(105.0).state is OperationState.FAILED


@pytest.mark.parametrize("state", [s for s in OperationState if s.ended])
def test_ended_state_is_final(state: OperationState) -> None:
    op = scale(3).replace(state=state, ended_at=5.0)
    assert advance(op, with_pool(1e9, 3, engine(0))) == op


def test_cancelled_operation_has_reason_and_time() -> None:
    op = cancelled(scale(3), 7.0, "cancelled by ann")
    assert (op.state, op.ended_at, op.error) == (OperationState.CANCELLED, 7.0, "cancelled by ann")


@settings(max_examples=SEEDS)
@given(seed=st.integers(0, 2**32))
def test_operation_ends_once_and_in_time_under_changing_leaders(seed: int) -> None:
    """A pool that gains and loses engines at random, under leaders that come and go and whose wall clocks differ by
    hours: the record alone carries the operation, it ends at its deadline at the latest, and an end never changes."""
    rng = random.Random(seed)
    desired = rng.randint(1, 5)
    kind = rng.choice([scale(desired), drain(True), drain(False)])
    states: dict[int, EngineState] = {0: EngineState.READY}
    op, ended, now, first_at = kind, None, 0.0, None
    while now < 240.0:
        now += rng.uniform(0.1, 8.0)
        first_at = first_at or now
        change = rng.random()
        if change < 0.4 and len(states) < 6:
            states[max(states, default=0) + 1] = EngineState.STARTING
        elif states and change < 0.9:
            n = rng.choice(list(states))
            states[n] = rng.choice(list(EngineState))
        elif states:
            states.pop(rng.choice(list(states)))
        raw = op.encode()  # nothing but the record survives a leader
        op = advance(Operation.decode(raw), replace(with_pool(
            now, desired, *(engine(n, s) for n, s in states.items()),
            starting=sum(s is EngineState.STARTING for s in states.values())), now=now + rng.uniform(-1e4, 1e4)))
        if ended is not None:
            assert op == ended
        elif op.state.ended:
            ended = op
            assert now <= first_at + 100.0 + 8.0
            assert "not done" not in op.error or now >= first_at + 100.0
    assert op.state.ended


def test_scale_out_is_starting_whatever_is_counted_meanwhile() -> None:
    """A status of before counts an engine as starting that is ready by now, and one of an earlier request may drain."""
    counted_twice = with_pool(1.0, 3, engine(0), engine(1), engine(2), starting=2)
    drains = with_pool(1.0, 3, engine(0), engine(1, EngineState.DRAINING))
    assert [advance(scale(3, 1), seen).phase for seen in (counted_twice, drains)] == ["starting", "starting"]
    assert advance(scale(3, 4), counted_twice).phase == "draining"
