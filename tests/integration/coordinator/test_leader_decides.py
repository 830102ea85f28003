"""Operations and the failure policy on a real etcd, under leaders that come and go. The tests write the records of the
compute plane as its driver, engines and ranks would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.leader import Leader
from support.tiers import parametrize
from support.waiting import wait_until

from elastic_rl.config import Config, parse
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.failure.statistics import EventCursor
from elastic_rl.coordinator.leader_clock import LeaderTime
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.records import FaultLog, LastSeen, RecoveryAction
from elastic_rl.coordinator.targets import JOB
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.errors import Fenced
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    Event,
    JobStatus,
    Member,
    Operation,
    OperationState,
    PoolSpec,
    PoolStatus,
    RestartRequest,
    Severity,
    StatedWork,
)

POOL = "rollout"


@pytest.fixture
def cfg(keys: Keys) -> Config:
    cfg = parse({"job": "x", "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1, "host_lost_s": 0.2},
                 "trainer": {"tensor_parallel": 1, "data_parallel": 1},
                 "failure_policy": {"max_faults": 1, "fault_merge_s": 0.1, "backoff_initial_s": 0.1,
                                    "max_global_restarts": 2}})
    # Not validated: nothing works here, so no wait of the work bounds these from below.
    return cfg.model_copy(update={"coordinator": cfg.coordinator.model_copy(
        update={"hang_min_s": 1.0, "hang_max_s": 2.0, "hang_factor": 2.0})})


@pytest.fixture
def lead(etcd: EtcdClient, keys: Keys, cfg: Config) -> Iterator[Callable[..., Leader]]:
    made: list[Leader] = []

    def make(name: str, **more: Any) -> Leader:
        made.append(Leader(etcd, keys, more.pop("config", cfg), name, **more))
        return made[-1]

    etcd.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=1).encode())
    yield make
    for leader in made:
        leader.close()


class Plane:
    """What driver, engines and trainer write."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self.etcd, self.keys, self.members = etcd, keys, []

    def engine(self, engine_id: str, state: EngineState = EngineState.READY) -> None:
        self.etcd.put(self.keys.engine(engine_id), Engine(id=engine_id, pool=POOL, state=state, epoch=1).encode())

    def status(self, ready: int, starting: int = 0) -> None:
        self.etcd.put(self.keys.pool_status(POOL),
                       PoolStatus(name=POOL, ready=ready, starting=starting, draining=0).encode())

    def member(self, role: str, member_id: str, phase: str = "rl", epoch: int = 0) -> Membership:
        member = Membership(self.etcd, self.keys, role, member_id, ttl_s=2, epoch=epoch).start()
        self.members.append(member)
        member.progress(1, phase, ready=True)
        return member

    def close(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture
def plane(etcd: EtcdClient, keys: Keys) -> Iterator[Plane]:
    made = Plane(etcd, keys)
    yield made
    made.close()


def end_heartbeats(member: Membership) -> None:
    """Ends a member's heartbeats as if its process hung; ``close`` still ends the lease."""
    member._stopping.set()
    member._changed.set()
    member._thread.join(20)
    assert not member._thread.is_alive()
    member._stopping.clear()


def events_of(etcd: EtcdClient, keys: Keys, kind: str) -> list[Event]:
    return [e for e in events.recent(etcd, keys, 1000) if e.kind == kind]


def until(leader: Leader, op: Operation, check: Callable[[Operation], Any]) -> Operation:
    seen: list[Operation] = []

    def look() -> bool:
        seen[:] = [leader.operation(op.id)]
        return bool(check(seen[0]))

    wait_until(look, what=f"operation {op.kind} of {op.target}")
    return seen[0]


def ended(op: Operation) -> bool:
    return op.state.ended


def test_scale_out_continues_under_the_next_leader(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    first = lead("a")
    plane.engine("e0")
    op = first.operations.scale(POOL, 3, by="ann")
    assert PoolSpec.decode(etcd.get(keys.pool_spec(POOL)).value).desired == 3
    plane.engine("e1")
    plane.status(2, starting=1)
    until(first, op, lambda o: (o.phase, o.done, o.total) == ("starting", 2, 3))
    first.close()
    second = lead("b")
    assert second.operation(op.id).state is OperationState.RUNNING
    plane.engine("e2")
    plane.status(3)
    done = until(second, op, ended)
    assert (done.state, done.result["ready"]) == (OperationState.SUCCEEDED, 3)
    assert [e.data["operation"] for e in events_of(etcd, keys, "operation.succeeded")] == [op.id]
    assert len(events_of(etcd, keys, "pool.scaled")) == 1


def test_dry_run_changes_nothing(lead: Any, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead("a")
    op = leader.operations.scale(POOL, 4, by="ann", dry_run=True)
    assert "1 → 4" in op.message
    assert PoolSpec.decode(etcd.get(keys.pool_spec(POOL)).value).desired == 1
    assert etcd.count(keys.operations_prefix()) == 0 and not events_of(etcd, keys, "pool.scaled")


def test_cancelled_scale_restores_the_number_and_a_later_scale_supersedes(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead("a")
    plane.engine("e0")
    plane.status(1)
    op = leader.operations.scale(POOL, 3, by="ann")
    over = leader.operations.cancel(op.id, by="bob")
    assert over.state is OperationState.CANCELLED and "bob" in over.error
    assert PoolSpec.decode(etcd.get(keys.pool_spec(POOL)).value).desired == 1
    assert leader.operations.cancel(op.id, by="bob") == over, "cancelling twice is harmless"
    earlier, later = leader.operations.scale(POOL, 3, by="ann"), leader.operations.scale(POOL, 2, by="ann")
    assert "superseded" in until(leader, earlier, ended).error
    assert not leader.operation(later.id).state.ended


def test_drain_marks_the_engine_and_waits_for_its_replacement(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys
                                                                ) -> None:
    leader = lead("a")
    plane.engine("e0")
    with pytest.raises(Problem, match="last engine"):
        leader.operations.drain("e0", replace=False, by="ann")
    op = leader.operations.drain("e0", by="ann")
    assert Engine.decode(etcd.get(keys.engine("e0")).value).state is EngineState.DRAINING
    with pytest.raises(Problem, match="draining already"):
        leader.operations.drain("e0", by="ann")
    with pytest.raises(Problem, match="no engine"):
        leader.operations.drain("e9", by="ann")
    until(leader, op, lambda o: o.phase == "draining")
    etcd.delete(keys.engine("e0"))
    until(leader, op, lambda o: (o.phase, o.done) == ("replacing", 1))
    with pytest.raises(Problem, match="removed from the router"):
        leader.operations.cancel(op.id, by="ann")
    plane.engine("e1")
    assert until(leader, op, ended).state is OperationState.SUCCEEDED


def test_registration_is_withdrawn_at_its_deadline_and_its_drain_replaces_nothing(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys, cfg: Config) -> None:
    quick = cfg.model_copy(update={"engine": cfg.engine.model_copy(update={"start_timeout_s": 0.5})})
    leader, url = lead("a"), "http://10.0.0.9:30000"
    short = OperationService(etcd, keys, leader.election, quick)
    lost = until(leader, short.register(url, POOL, by="ann"), ended)
    assert lost.state is OperationState.FAILED and "waiting for the driver" in lost.error
    assert etcd.get(keys.external_engine(url)) is None
    op = leader.operations.register(url, POOL, by="ann")
    engine_id = op.target.removeprefix("engines/")
    with pytest.raises(Problem, match=engine_id):
        leader.operations.register(url, POOL, by="ann")
    etcd.put(keys.engine(engine_id), Engine(id=engine_id, pool=POOL, state=EngineState.READY, epoch=1, url=url,
                                             version=3, external=True).encode())
    assert until(leader, op, ended).result["version"] == 3
    assert etcd.get(keys.external_engine(url)) is not None, "it stays until it is drained"
    op = leader.operations.drain(engine_id, by="ann")
    assert etcd.get(keys.external_engine(url)) is None
    assert PoolSpec.decode(etcd.get(keys.pool_spec(POOL)).value).desired == 1
    until(leader, op, lambda o: o.phase == "draining")
    etcd.delete(keys.engine(engine_id))
    assert until(leader, op, ended).state is OperationState.SUCCEEDED, "the pool has no engine"


def test_used_idempotency_claim_is_refused(lead: Any, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead("a")

    class Claim:
        compares = [Compare.absent(keys.idempotency("k"))]

        def ops(self, location: str) -> list[Op]:
            return [Op.put(keys.idempotency("k"), location.encode())]

    op = leader.operations.scale(POOL, 2, by="ann", claim=Claim())
    assert etcd.get(keys.idempotency("k")).value == job_path(keys.job, "operations", op.id).encode()
    with pytest.raises(Problem, match="faster"):
        leader.operations.scale(POOL, 5, by="ann", claim=Claim())
    assert PoolSpec.decode(etcd.get(keys.pool_spec(POOL)).value).desired == 2


def test_follower_begins_and_cancels_nothing(lead: Any, etcd: EtcdClient, keys: Keys, cfg: Config) -> None:
    leader = lead("a")
    op = leader.operations.scale(POOL, 2, by="ann")
    follower = OperationService(etcd, keys, Election(etcd, ClusterKeys(keys.job), "b", "http://b", 2), cfg)
    for act in (lambda: follower.scale(POOL, 5, by="x"), lambda: follower.cancel(op.id, by="x")):
        with pytest.raises((Problem, Fenced)):
            act()
    assert PoolSpec.decode(etcd.get(keys.pool_spec(POOL)).value).desired == 2


def test_late_rank_is_shown_with_what_was_expected_and_left_alone(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    """A sequence that is expected to take 10 s, where 2 s without progress are a hang of other work."""
    lead("a")
    rank = Member(role="trainer", id="rank-0", pid=1, host="h", incarnation="i", phase="micro-batches",
                  progress_at=100.0, beat_at=112.0, work=StatedWork(flops=1e12, s_per_flop=1e-11))
    etcd.put(keys.member("trainer", "rank-0"), rank.encode())

    def entry() -> LastSeen | None:
        return readable_one(etcd.get(keys.registry_entry("trainer", "rank-0")), LastSeen)

    wait_until(lambda: (found := entry()) is not None and found.late_at > 0, what="that it is late")
    [event] = events_of(etcd, keys, "trainer.late")
    assert event.severity is Severity.INFO and event.message.endswith(
        "is late in step 0, micro-batches: 12 s without progress, of 10 s that were expected; it counts as hung after "
        "14 s"), "at most twice hang_max_s more than expected"
    etcd.put(keys.member("trainer", "rank-0"), rank.replace(progress_at=118.0, beat_at=119.0).encode())
    wait_until(lambda: (found := entry()) is not None and not found.late_at, what="that it makes progress")
    assert not events_of(etcd, keys, "trainer.hung") and not open_requests(etcd, keys)


def test_hung_trainer_is_restarted_and_the_operation_waits_until_it_works(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead("a")
    hung = plane.member("trainer", "rank-0", "train")
    request = wait_until(lambda: open_requests(etcd, keys).get("trainer"), what="the restart request")
    assert request.by == "failure_policy" and "hung" in request.reason
    assert [e.subject for e in events_of(etcd, keys, "trainer.hung")] == ["rank-0"]
    op = Operation.decode(etcd.range(keys.operations_prefix())[0][0].value)
    assert (op.target, op.by, op.state) == ("trainer", "failure_policy", OperationState.RUNNING)
    hung.close()
    acknowledge(etcd, keys, request)
    until(leader, op, lambda o: o.phase == "starting")
    back = plane.member("trainer", "rank-0", "rl")

    def over(now: Operation) -> bool:
        back.progress(2, "rl")  # it gives signs of life
        return now.state.ended

    assert until(leader, op, over).state is OperationState.SUCCEEDED
    assert not open_requests(etcd, keys)


def test_driver_that_hangs_is_restarted_alone_and_its_alert_ends_with_the_next_one(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead("a")
    epoch = fencing.raise_epoch(etcd, keys, "driver-1").number
    hung = plane.member("driver", "driver-1", epoch=epoch)
    request = wait_until(lambda: open_requests(etcd, keys).get("driver"), what="the restart request")
    assert request.by == "failure_policy" and "hung" in request.reason
    op = next(op for kv in etcd.range(keys.operations_prefix())[0] if (op := Operation.decode(kv.value)).by != "ann")
    alerts: dict[str, str] = {}

    def firing() -> bool:
        found = [Alert.decode(kv.value) for kv in etcd.range(keys.alerts_prefix())[0]]
        about_driver = [a for a in found if a.kind.startswith(("driver.", "run.")) and a.open]
        alerts.update({a.id: a.key for a in about_driver})
        return bool(about_driver)

    wait_until(firing, what="the alert")
    end_heartbeats(hung)
    etcd.delete(keys.member("driver", "driver-1"))  # it was killed
    acknowledge(etcd, keys, request)
    until(leader, op, lambda o: firing() and o.phase == "starting")
    back = plane.member("driver", "driver-2", epoch=epoch)

    def is_over(now: Operation) -> bool:
        back.progress(2, "rl", faults={})  # it gives signs of life
        return now.state.ended and not firing()

    assert until(leader, op, is_over).state is OperationState.SUCCEEDED
    assert list(alerts.values()) == ["driver.hung/driver-1"] and fencing.current_epoch(etcd, keys) == epoch
    assert [len(events_of(etcd, keys, kind)) for kind in ("driver.hung", "driver.dead", "driver.recovered")] == [1] * 3
    log = FaultLog.decode(etcd.get(keys.fault("driver")).value)
    assert (len(log.occurrences), log.pending) == (1, RecoveryAction.NONE), "it died of its restart"


def test_restart_can_be_cancelled_until_it_was_carried_out(lead: Any, etcd: EtcdClient, keys: Keys) -> None:
    leader = lead("a")
    op = leader.operations.restart("trainer", by="ann", reason="new driver")
    assert open_requests(etcd, keys)["trainer"].reason == "new driver"
    assert leader.operations.cancel(op.id, by="ann").state is OperationState.CANCELLED
    assert not open_requests(etcd, keys)
    again = leader.operations.restart("trainer", by="ann")
    acknowledge(etcd, keys, open_requests(etcd, keys)["trainer"])
    with pytest.raises(Problem, match="is being restarted"):
        leader.operations.cancel(again.id, by="ann")
    with pytest.raises(Problem, match="target must be"):
        leader.operations.restart("everything", by="ann")
    with pytest.raises(Problem, match="no role"):
        leader.operations.restart("roles/genrm", by="ann")
    with pytest.raises(Problem, match="this job has no group critic; it has trainer") as refused:
        leader.operations.restart("critic", by="ann")
    assert refused.value.status == 404


def test_global_restart_ends_the_epoch_and_waits_for_a_later_one(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys
                                                                   ) -> None:
    leader = lead("a")
    epoch = fencing.raise_epoch(etcd, keys, "driver-1").number
    op = leader.operations.restart("job", by="ann")
    with pytest.raises(Fenced):
        fencing.require_epoch(etcd, keys, epoch)
    with pytest.raises(Problem, match="epoch of the run is over"):
        leader.operations.cancel(op.id, by="ann")
    acknowledge(etcd, keys, open_requests(etcd, keys)["job"])
    until(leader, op, lambda o: o.phase == "starting")
    fencing.raise_epoch(etcd, keys, "driver-2")
    plane.member("trainer", "rank-0", "rl")
    assert leader.operation(op.id).state is OperationState.RUNNING
    etcd.put(keys.job_status(), JobStatus(phase="rl", updated_at=time.time()).encode())
    assert until(leader, op, ended).state is OperationState.SUCCEEDED


def test_repeated_deaths_cause_a_global_restart_and_then_end_the_run(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    """Budget 1, crash loop after 2: two deaths are a global restart, two more the end, over a change of leaders."""
    leader = lead("a")
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=7).encode())
    fencing.raise_epoch(etcd, keys, "driver-1")

    def die(n: int) -> None:
        member = plane.member("advantages", f"advantages-{n}", "idle")
        wait_until(lambda: etcd.get(keys.registry_entry("advantages", f"advantages-{n}")),
                   what="its registry entry")
        end_heartbeats(member)
        etcd.delete(keys.member("advantages", f"advantages-{n}"))  # its lease has ended, and it did not deregister
        wait_until(lambda: any(e.subject == f"advantages-{n}" for e in events_of(etcd, keys, "advantages.dead")),
                   what="the event of the death")

    def pause() -> None:
        """Faults within ``fault_merge_s`` count once."""
        seen = time.monotonic()
        wait_until(lambda: time.monotonic() > seen + 0.2, what="the faults to be apart")

    die(0)
    assert not open_requests(etcd, keys)
    pause()
    die(1)
    request = wait_until(lambda: open_requests(etcd, keys).get("job"), what="the global restart")
    assert "2 faults of roles/advantages" in request.reason
    assert len(events_of(etcd, keys, "run.global_restart")) == 1
    acknowledge(etcd, keys, request)
    leader.close()
    lead("b")
    die(2)
    pause()
    die(3)
    job = wait_until(lambda: (s := JobStatus.decode(etcd.get(keys.job_status()).value)).phase == "failed" and s,
                     what="the end of the run")
    assert "crash loop" in job.message and job.step == 7
    assert len(events_of(etcd, keys, "run.crash_loop")) == 1
    assert len(events_of(etcd, keys, "run.global_restart")) == 1, "the second one would not have helped"
    assert FaultLog.decode(etcd.get(keys.fault("job")).value).pending is RecoveryAction.NONE


def test_one_global_restart_is_that_of_all_parts_that_had_one_pending(lead: Any, etcd: EtcdClient, keys: Keys) -> None:
    fencing.raise_epoch(etcd, keys, "driver-1")
    for target, due_at in (("trainer", 0.0), ("driver", 0.5)):
        log = FaultLog(target=target, epoch=1, pending=RecoveryAction.GLOBAL_RESTART, due_at=due_at, reason=target)
        etcd.put(keys.fault(target), log.encode())
    leader = lead("a")
    request = wait_until(lambda: open_requests(etcd, keys).get("job"), what="the global restart")
    assert request.reason == "trainer"
    acknowledge(etcd, keys, request)
    wait_until(lambda: LeaderTime.decode(etcd.get(keys.leader_clock()).value).seconds > 1.0, what="the leader clock")
    op = leader.operations.scale(POOL, 2, by="ann")
    until(leader, op, lambda o: o.phase != "accepted")
    assert len(events_of(etcd, keys, "run.global_restart")) == 1 and not open_requests(etcd, keys).get("job")
    assert len(FaultLog.decode(etcd.get(keys.fault("job")).value).occurrences) == 1, "it is no crash loop"


def test_agent_that_ends_before_its_ranks_have_registered_uses_up_the_trainers_budget(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys) -> None:
    """Budget 1. No member dies: the driver's reports are all that the leader sees."""
    leader = lead("a")
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=7).encode())
    fencing.raise_epoch(etcd, keys, "driver-1")

    def agent_ends() -> None:
        revision = log_revision()
        events.emit(etcd, keys, event_kinds.TRAINER_GROUP_EVENTS["trainer"].agent_ended, "trainer",
                    "the trainer agent ended (exit code 2)")
        wait_until(lambda: log_revision() > revision, what="the fault in the log")

    def log_revision() -> int:
        found = etcd.get(keys.fault("trainer"))
        return found.mod_revision if found else 0

    agent_ends()
    seen = time.monotonic()
    wait_until(lambda: time.monotonic() > seen + 0.5, what="further passes, and the faults to be apart")
    assert not open_requests(etcd, keys), "one report counts once, in however many passes"
    agent_ends()
    request = wait_until(lambda: open_requests(etcd, keys).get("job"), what="the global restart")
    assert "2 faults of trainer" in request.reason
    leader.close()


@parametrize("skew_s", [3600.0, -3600.0],
             proved_in="tests/unit/coordinator/test_leader_clock.py",
             why="a clock that is behind")
def test_skewed_clock_of_the_next_leader_neither_ends_an_operation_nor_keeps_it(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys, cfg: Config, skew_s: float) -> None:
    short = cfg.model_copy(update={"engine": cfg.engine.model_copy(update={"start_timeout_s": 2.0,
                                                                           "drain_timeout_s": 2.0})})
    plane.engine("e0")
    first = lead("a")
    long_op = first.operations.scale(POOL, 3, by="ann")
    short_op = OperationService(etcd, keys, first.election, short).drain("e0", by="ann")
    until(first, short_op, lambda o: o.phase == "draining")
    first.close()
    second = lead("b", skew_s=skew_s)
    failed = until(second, short_op, ended)
    assert failed.state is OperationState.FAILED and "not done after 4 s" in failed.error
    assert second.operation(long_op.id).state is OperationState.RUNNING


def test_backoff_goes_by_the_leader_clock_whatever_wall_clocks_say(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys
                                                                   ) -> None:
    log = FaultLog(target="trainer", pending=RecoveryAction.GLOBAL_RESTART, due_at=60.0, reason="r")
    etcd.put(keys.fault("trainer"), log.encode())

    def await_pass(leader: Leader) -> None:
        """Until a whole pass has seen an operation that was begun now."""
        op = leader.operations.scale(POOL, 2, by="ann")
        until(leader, op, lambda o: o.phase != "accepted")
        leader.operations.cancel(op.id, by="ann")

    def await_leader_time(seconds: float) -> None:
        def reached() -> bool:
            found = etcd.get(keys.leader_clock())
            return found is not None and LeaderTime.decode(found.value).seconds == seconds

        wait_until(reached, what="the leader clock")

    plane.engine("e0")
    first_clock, second_clock = [500.0], [9.0]
    first = lead("a", monotonic=lambda: first_clock[0])
    await_leader_time(0.0)
    first_clock[0] += 50.0
    await_leader_time(50.0)
    await_pass(first)
    assert JOB not in open_requests(etcd, keys)
    first.close()
    second = lead("b", skew_s=3600.0, monotonic=lambda: second_clock[0])
    await_pass(second)
    assert JOB not in open_requests(etcd, keys), "10 s of the backoff are left"
    second_clock[0] += 10.5
    wait_until(lambda: JOB in open_requests(etcd, keys), what="the restart request")


def test_restart_that_waited_is_not_made_of_a_part_that_goes_on(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys
                                                               ) -> None:
    """It hung, and went on while its restart had a backoff, or nobody led."""
    plane.member("trainer", "rank-0")
    hung = FaultLog(target="trainer", pending=RecoveryAction.RESTART, reason="it hung")
    etcd.put(keys.fault("trainer"), hung.encode())
    lead("a")

    def pending() -> RecoveryAction:
        found = readable_one(etcd.get(keys.fault("trainer")), FaultLog)
        assert found is not None
        return found.pending

    wait_until(lambda: pending() is RecoveryAction.NONE, what="the end of the pending restart")
    assert open_requests(etcd, keys) == {}


def test_failed_restart_withdraws_its_request(lead: Any, etcd: EtcdClient, keys: Keys, cfg: Config,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.coordinator.operations.service._TRAINER_GRACE_S", 0.0)
    trainer = cfg.trainer.model_copy(update={"start_timeout_s": 0.5})
    leader = lead("a")
    short = OperationService(etcd, keys, leader.election, cfg.model_copy(update={"trainer": trainer}))
    lost = until(leader, short.restart("trainer", by="ann"), ended)
    assert lost.state is OperationState.FAILED and "to be stopped" in lost.error
    request = RestartRequest.decode(etcd.get(keys.restart("trainer")).value)
    assert not request.open and request.generation == 1, "no driver carries it out later"
    again = leader.operations.restart("trainer", by="ann")
    assert open_requests(etcd, keys)["trainer"].generation == 2
    assert leader.operation(again.id).state is OperationState.RUNNING


def test_policy_restart_that_no_driver_carries_out_becomes_a_global_restart(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys, cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.coordinator.operations.service._TRAINER_GRACE_S", 0.0)
    trainer = cfg.trainer.model_copy(update={"start_timeout_s": 0.5})
    fencing.raise_epoch(etcd, keys, "driver-1")
    plane.member("trainer", "rank-0", epoch=1)  # which makes no progress, and is found to hang
    engine = cfg.engine.model_copy(update={"start_timeout_s": 0.5})
    leader = lead("a", config=cfg.model_copy(update={"trainer": trainer, "engine": engine}))
    request = wait_until(lambda: open_requests(etcd, keys).get("job"), what="the global restart")
    assert "was not carried out" in request.reason and request.by == "failure_policy"
    assert "trainer" not in open_requests(etcd, keys)
    operations = [Operation.decode(kv.value) for kv in etcd.range(keys.operations_prefix())[0]]
    job = next(op for op in operations if op.target == "job")
    assert until(leader, job, ended).state is OperationState.FAILED
    assert open_requests(etcd, keys)["job"].open, "nothing of the run works before it is carried out"


def test_engine_that_is_behind_is_given_up_and_replaced_by_whichever_leader_there_is(
        lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys, cfg: Config) -> None:
    epoch = fencing.raise_epoch(etcd, keys, "driver").number
    quick = cfg.model_copy(update={"engine": cfg.engine.model_copy(update={
        "follow_timeout_s": 0.2, "catch_up_timeout_s": 1.0})})
    etcd.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=3, stream="policy").encode())

    def record(engine_id: str) -> Engine:
        return Engine.decode(etcd.get(keys.engine(engine_id)).value)

    for engine_id, version in (("e0", 5), ("e1", 5), ("slow", 4)):
        etcd.put(keys.engine(engine_id), Engine(id=engine_id, pool=POOL, state=EngineState.READY, epoch=epoch,
                                                version=version, host="h").encode())
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=4).encode())
    first = lead("a", config=quick)
    passes_of(first, 3)
    assert record("slow").straggler is None, "the run needs nothing that it lacks"
    etcd.put(keys.job_status(), JobStatus(phase="rl", step=4, needs_version=5).encode())
    wait_until(lambda: record("slow").is_behind, what="that it is given up")
    assert record("slow").state is EngineState.READY, "whether the router has it is for the driver to say"
    first.close()
    second = lead("b", config=quick)
    wait_until(lambda: keys.restart("engines/slow") in {kv.key for kv in etcd.range(keys.restarts_prefix())[0]},
               what="the request to replace it")
    [op] = [Operation.decode(kv.value) for kv in etcd.range(keys.operations_prefix())[0]]
    assert op.by == "failure_policy" and "others serve version 5" in str(op)
    passes_of(second, 3)
    assert len(events_of(etcd, keys, "engine.behind")) == 1 and etcd.count(keys.operations_prefix()) == 1
    assert record("e0").straggler is record("e1").straggler is None


def passes_of(leader: Leader, count: int) -> None:
    """Waits until the leader has made so many more passes."""
    reconciler, made = leader.reconciler, []
    once = reconciler.reconcile_once

    def counted() -> None:
        once()
        made.append(1)

    reconciler.reconcile_once = counted  # type: ignore[method-assign]
    reconciler.wake()
    wait_until(lambda: len(made) > count, what=f"{count} passes")
    reconciler.reconcile_once = once  # type: ignore[method-assign]


def test_fault_logs_and_requests_of_engines_that_are_gone_are_deleted(lead: Any, plane: Plane, etcd: EtcdClient,
                                                                      keys: Keys) -> None:
    for name in ("e0", "e1"):
        etcd.put(keys.fault(f"engines/{name}"), FaultLog(target=f"engines/{name}").encode())
        etcd.put(keys.restart(f"engines/{name}"), RestartRequest(target=f"engines/{name}", generation=1).encode())
    etcd.put(keys.fault("trainer"), FaultLog(target="trainer").encode())
    plane.engine("e0")
    lead("a")
    wait_until(lambda: etcd.get(keys.fault("engines/e1")) is None and etcd.get(keys.restart("engines/e1")) is None,
               what="the end of what is left of e1")
    assert all(map(etcd.get, (keys.fault("engines/e0"), keys.restart("engines/e0"), keys.fault("trainer"))))


def test_driver_that_starts_after_a_restart_of_the_job_is_that_restart(lead: Any, etcd: EtcdClient, keys: Keys) -> None:
    """The supervisor that started it died before it acknowledged the request."""
    leader = lead("a")
    fencing.raise_epoch(etcd, keys, "driver-1")
    op = leader.operations.restart("job", by="ann")
    until(leader, op, lambda o: o.phase == "stopping")
    assert open_requests(etcd, keys)["job"].open
    fencing.raise_epoch(etcd, keys, "driver-2")
    until(leader, op, lambda o: o.phase == "starting")
    assert not open_requests(etcd, keys), "the next supervisor does not restart the driver once more"
    leader.operations.restart("job", by="ann")
    assert open_requests(etcd, keys)["job"].generation == 2, "a later request is another one"


def test_late_report_about_an_earlier_incarnation_changes_nothing(lead: Any, plane: Plane, etcd: EtcdClient, keys: Keys
                                                                  ) -> None:
    leader = lead("a")
    member = plane.member("engine", "e1", "follow")
    etcd.put(keys.engine("e1"), Engine(id="e1", pool=POOL, state=EngineState.READY, epoch=1,
                                       incarnation=member.incarnation).encode())

    def entry() -> LastSeen | None:
        found = etcd.get(keys.registry_entry("engine", "e1"))
        return LastSeen.decode(found.value) if found else None

    def counted() -> int:
        found = etcd.get(keys.event_cursor())
        return EventCursor.decode(found.value).statistics.events.get("engine.dead", 0) if found else 0

    wait_until(entry, what="the registry entry")
    events.emit(etcd, keys, event_kinds.ENGINE_DEAD, "e1", "its server died", severity=Severity.ERROR,
                incarnation="earlier")
    wait_until(lambda: counted() == 1, what="the leader to have read the event")
    assert entry() is not None and not entry().dead
    events.emit(etcd, keys, event_kinds.ENGINE_DEAD, "e1", "its server died", severity=Severity.ERROR,
                incarnation=member.incarnation)
    wait_until(lambda: entry() and entry().reported, what="the death of the registered incarnation")
    assert leader.health.problem() == ""


def test_death_of_an_earlier_runner_leaves_the_record_of_the_next_one_alone(lead: Any, plane: Plane, etcd: EtcdClient,
                                                                            keys: Keys) -> None:
    lead("a")
    for name, incarnation in (("e1", "of the next runner"), ("e2", "")):
        member = plane.member("engine", name, "follow")
        wait_until(lambda n=name: etcd.get(keys.registry_entry("engine", n)), what="the registry entry")
        etcd.put(keys.engine(name), Engine(id=name, pool=POOL, state=EngineState.READY, epoch=1,
                                           incarnation=incarnation or member.incarnation).encode())
        end_heartbeats(member)
        etcd.delete(keys.member("engine", name))  # its lease has ended, and it did not deregister
        wait_until(lambda n=name: [e for e in events_of(etcd, keys, "engine.dead") if e.subject == n],
                   what="the event of the death")
    states = {n: Engine.decode(etcd.get(keys.engine(n)).value).state for n in ("e1", "e2")}
    assert states == {"e1": EngineState.READY, "e2": EngineState.DEAD}


def test_acknowledged_request_leaves_a_later_one_open(etcd: EtcdClient, keys: Keys) -> None:
    etcd.put(keys.restart("trainer"), RestartRequest(target="trainer", generation=1).encode())
    request = open_requests(etcd, keys)["trainer"]
    etcd.put(keys.restart("trainer"), RestartRequest(target="trainer", generation=2).encode())
    acknowledge(etcd, keys, request)
    assert open_requests(etcd, keys)["trainer"].observed_generation == 1, "the second request is still open"
    fencing.raise_epoch(etcd, keys, "driver-1")
    with pytest.raises(Fenced):
        acknowledge(etcd, keys, request, fencing.epoch_guard(keys, 7))
