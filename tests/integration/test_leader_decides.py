"""Operations and the failure policy on a real etcd, carried on by leaders that come and go. The compute plane's records
are written by the tests, as its driver, engines and ranks would write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic_rl.config import Config, parse
from elastic_rl.coordinator import epochs, events
from elastic_rl.coordinator.election import Election
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.membership import Membership
from elastic_rl.coordinator.notify import Notifier
from elastic_rl.coordinator.operation_desk import OperationDesk
from elastic_rl.coordinator.policy import Action, FaultLog
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.reconcile import Reconciler
from elastic_rl.coordinator.records import (
    Engine,
    EngineState,
    Event,
    JobStatus,
    Operation,
    OperationState,
    PoolSpec,
    PoolStatus,
    Restart,
)
from elastic_rl.coordinator.store import Compare, Op, Store
from elastic_rl.driver.wishes import carried_out, open_wishes
from elastic_rl.errors import Fenced
from elastic_rl.processes import wait_until

pytestmark = pytest.mark.timeout(60)
POOL = "rollout"


class Leader:
    """The deciding part of a replica, in this process."""

    def __init__(self, store: Store, keys: Keys, cfg: Config, name: str) -> None:
        self.notifier = Notifier(keys.job, cfg.alerts)
        self.election = Election(store, keys, name, f"http://{name}", cfg.coordinator.lease_ttl_s).start()
        wait_until(lambda: self.election.is_leader, timeout_s=20, what=f"leadership of {name}")
        self.desk = OperationDesk(store, keys, self.election, cfg)
        self.reconciler = Reconciler(store, keys, cfg, self.election, self.notifier)
        self.reconciler.start()

    def close(self) -> None:
        self.reconciler.stop()
        self.election.stop()
        self.notifier.close()


@pytest.fixture
def cfg(keys: Keys) -> Config:
    return parse({"job": "x", "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1, "hang_floor_s": 1.0,
                                              "hang_ceiling_s": 2.0, "hang_factor": 2.0},
                  "trainer": {"tensor_parallel": 1},
                  "policy": {"budget": 1, "settle_s": 0.1, "backoff_s": 0.1, "stop_after": 2}})


@pytest.fixture
def lead(store: Store, keys: Keys, cfg: Config) -> Iterator[Callable[[str], Leader]]:
    made: list[Leader] = []

    def make(name: str) -> Leader:
        made.append(Leader(store, keys, cfg, name))
        return made[-1]

    store.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=1).encode())
    yield make
    for leader in made:
        leader.close()


class Plane:
    """What driver, engines and trainer write."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self.store, self.keys, self.members = store, keys, []

    def engine(self, engine_id: str, state: EngineState = EngineState.READY) -> None:
        self.store.put(self.keys.engine(engine_id), Engine(id=engine_id, pool=POOL, state=state, epoch=1).encode())

    def status(self, ready: int, starting: int = 0) -> None:
        self.store.put(self.keys.pool_status(POOL),
                       PoolStatus(name=POOL, ready=ready, starting=starting, draining=0).encode())

    def member(self, role: str, member_id: str, phase: str = "rl", epoch: int = 0) -> Membership:
        member = Membership(self.store, self.keys, role, member_id, ttl_s=2, epoch=epoch).start()
        self.members.append(member)
        member.progress(1, phase)
        return member

    def close(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture
def plane(store: Store, keys: Keys) -> Iterator[Plane]:
    made = Plane(store, keys)
    yield made
    made.close()


def told(store: Store, keys: Keys, kind: str) -> list[Event]:
    return [e for e in events.recent(store, keys, 1000) if e.kind == kind]


def until(desk: OperationDesk, op: Operation, check: Callable[[Operation], Any]) -> Operation:
    seen: list[Operation] = []

    def look() -> bool:
        seen[:] = [desk.get(op.id)]
        return bool(check(seen[0]))

    wait_until(look, timeout_s=20, what=f"operation {op.kind} of {op.target}")
    return seen[0]


def ended(op: Operation) -> bool:
    return op.state.ended


def test_a_scale_out_survives_a_leader_and_ends_with_the_last_engine(lead: Any, plane: Plane, store: Store, keys: Keys
                                                                     ) -> None:
    first = lead("a")
    plane.engine("e0")
    op = first.desk.scale(POOL, 3, by="ann")
    assert PoolSpec.decode(store.get(keys.pool_spec(POOL)).value).desired == 3
    plane.engine("e1")
    plane.status(2, starting=1)
    until(first.desk, op, lambda o: (o.phase, o.done, o.total) == ("starting", 2, 3))
    first.close()
    second = lead("b")
    assert second.desk.get(op.id).state is OperationState.RUNNING
    plane.engine("e2")
    plane.status(3)
    done = until(second.desk, op, ended)
    assert (done.state, done.result["ready"]) == (OperationState.SUCCEEDED, 3)
    assert [e.data["operation"] for e in told(store, keys, "operation.succeeded")] == [op.id]
    assert len(told(store, keys, "pool.scaled")) == 1


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(lead: Any, store: Store, keys: Keys) -> None:
    leader = lead("a")
    op = leader.desk.scale(POOL, 4, by="ann", dry_run=True)
    assert "1 → 4" in op.message
    assert PoolSpec.decode(store.get(keys.pool_spec(POOL)).value).desired == 1
    assert store.count(keys.operations_prefix()) == 0 and not told(store, keys, "pool.scaled")


def test_a_cancelled_scale_puts_the_old_number_back_and_a_later_one_supersedes_an_earlier(
        lead: Any, plane: Plane, store: Store, keys: Keys) -> None:
    leader = lead("a")
    plane.engine("e0")
    plane.status(1)
    op = leader.desk.scale(POOL, 3, by="ann")
    over = leader.desk.cancel(op.id, by="bob")
    assert over.state is OperationState.CANCELLED and "bob" in over.error
    assert PoolSpec.decode(store.get(keys.pool_spec(POOL)).value).desired == 1
    assert leader.desk.cancel(op.id, by="bob") == over, "cancelling twice is harmless"
    earlier, later = leader.desk.scale(POOL, 3, by="ann"), leader.desk.scale(POOL, 2, by="ann")
    assert "superseded" in until(leader.desk, earlier, ended).error
    assert not leader.desk.get(later.id).state.ended


def test_a_drain_marks_the_engine_and_waits_for_its_replacement(lead: Any, plane: Plane, store: Store, keys: Keys
                                                                ) -> None:
    leader = lead("a")
    plane.engine("e0")
    with pytest.raises(Problem, match="last engine"):
        leader.desk.drain("e0", replace=False, by="ann")
    op = leader.desk.drain("e0", by="ann")
    assert Engine.decode(store.get(keys.engine("e0")).value).state is EngineState.DRAINING
    with pytest.raises(Problem, match="draining already"):
        leader.desk.drain("e0", by="ann")
    with pytest.raises(Problem, match="no engine"):
        leader.desk.drain("e9", by="ann")
    until(leader.desk, op, lambda o: o.phase == "draining")
    store.delete(keys.engine("e0"))
    until(leader.desk, op, lambda o: (o.phase, o.done) == ("replacing", 1))
    with pytest.raises(Problem, match="taken out of the router|started anew"):
        leader.desk.cancel(op.id, by="ann")
    plane.engine("e1")
    assert until(leader.desk, op, ended).state is OperationState.SUCCEEDED


def test_an_adoption_that_nobody_carries_out_is_taken_back_at_its_deadline_and_a_drain_of_it_replaces_nothing(
        lead: Any, plane: Plane, store: Store, keys: Keys, cfg: Config) -> None:
    quick = cfg.model_copy(update={"engine": cfg.engine.model_copy(update={"start_timeout_s": 0.5})})
    leader, url = lead("a"), "http://10.0.0.9:30000"
    hasty = OperationDesk(store, keys, leader.election, quick)
    lost = until(leader.desk, hasty.adopt(url, POOL, by="ann"), ended)
    assert lost.state is OperationState.FAILED and "waiting for the driver" in lost.error
    assert store.get(keys.adoption(url)) is None
    op = leader.desk.adopt(url, POOL, by="ann")
    engine_id = op.target.removeprefix("engines/")
    with pytest.raises(Problem, match=engine_id):
        leader.desk.adopt(url, POOL, by="ann")
    store.put(keys.engine(engine_id), Engine(id=engine_id, pool=POOL, state=EngineState.READY, epoch=1, url=url,
                                             version=3, adopted=True).encode())
    assert until(leader.desk, op, ended).result["version"] == 3
    assert store.get(keys.adoption(url)) is not None, "it stays until it is drained"
    op = leader.desk.drain(engine_id, by="ann")
    assert store.get(keys.adoption(url)) is None
    assert PoolSpec.decode(store.get(keys.pool_spec(POOL)).value).desired == 1
    until(leader.desk, op, lambda o: o.phase == "draining")
    store.delete(keys.engine(engine_id))
    assert until(leader.desk, op, ended).state is OperationState.SUCCEEDED, "although the pool has no engine at all"


def test_a_request_that_counts_once_is_refused_when_it_was_carried_out_already(lead: Any, store: Store, keys: Keys
                                                                               ) -> None:
    leader = lead("a")

    class Once:
        compares = [Compare.absent(keys.idempotency("k"))]

        def ops(self, location: str) -> list[Op]:
            return [Op.put(keys.idempotency("k"), location.encode())]

    op = leader.desk.scale(POOL, 2, by="ann", once=Once())
    assert store.get(keys.idempotency("k")).value == f"/v1/operations/{op.id}".encode()
    with pytest.raises(Problem, match="faster"):
        leader.desk.scale(POOL, 5, by="ann", once=Once())
    assert PoolSpec.decode(store.get(keys.pool_spec(POOL)).value).desired == 2


def test_a_replica_that_does_not_lead_begins_and_cancels_nothing(lead: Any, store: Store, keys: Keys, cfg: Config
                                                                 ) -> None:
    leader = lead("a")
    op = leader.desk.scale(POOL, 2, by="ann")
    follower = OperationDesk(store, keys, Election(store, keys, "b", "http://b", 2), cfg)
    for act in (lambda: follower.scale(POOL, 5, by="x"), lambda: follower.cancel(op.id, by="x")):
        with pytest.raises((Problem, Fenced)):
            act()
    assert PoolSpec.decode(store.get(keys.pool_spec(POOL)).value).desired == 2


def test_a_trainer_that_beats_without_working_is_restarted_and_the_operation_waits_until_it_works(
        lead: Any, plane: Plane, store: Store, keys: Keys) -> None:
    leader = lead("a")
    hung = plane.member("trainer", "rank-0", "train")
    wish = wait_until(lambda: open_wishes(store, keys).get("trainer"), timeout_s=20, what="the wish to restart it")
    assert wish.by == "policy" and "hung" in wish.reason
    assert [e.subject for e in told(store, keys, "trainer.hung")] == ["rank-0"]
    op = Operation.decode(store.range(keys.operations_prefix())[0][0].value)
    assert (op.target, op.by, op.state) == ("trainer", "policy", OperationState.RUNNING)
    hung.close()
    carried_out(store, keys, wish)
    until(leader.desk, op, lambda o: o.phase == "starting")
    back = plane.member("trainer", "rank-0", "rl")

    def over(now: Operation) -> bool:
        back.progress(2, "rl")  # it gives signs of life
        return now.state.ended

    assert until(leader.desk, op, over).state is OperationState.SUCCEEDED
    assert not open_wishes(store, keys)


def test_a_restart_that_was_not_begun_can_be_taken_back(lead: Any, plane: Plane, store: Store, keys: Keys) -> None:
    leader = lead("a")
    op = leader.desk.restart("trainer", by="ann", reason="new driver")
    assert open_wishes(store, keys)["trainer"].reason == "new driver"
    assert leader.desk.cancel(op.id, by="ann").state is OperationState.CANCELLED
    assert not open_wishes(store, keys)
    again = leader.desk.restart("trainer", by="ann")
    carried_out(store, keys, open_wishes(store, keys)["trainer"])
    with pytest.raises(Problem, match="taken out of the router|started anew"):
        leader.desk.cancel(again.id, by="ann")
    with pytest.raises(Problem, match="target must be"):
        leader.desk.restart("everything", by="ann")
    with pytest.raises(Problem, match="no role"):
        leader.desk.restart("roles/genrm", by="ann")


def test_a_global_restart_ends_the_epoch_and_waits_for_a_later_one(lead: Any, plane: Plane, store: Store, keys: Keys
                                                                   ) -> None:
    leader = lead("a")
    epoch = epochs.raise_epoch(store, keys, "driver-1").number
    op = leader.desk.restart("job", by="ann")
    with pytest.raises(Fenced):
        epochs.require_epoch(store, keys, epoch)
    carried_out(store, keys, open_wishes(store, keys)["job"])
    until(leader.desk, op, lambda o: o.phase == "starting")
    epochs.raise_epoch(store, keys, "driver-2")
    plane.member("trainer", "rank-0", "rl")
    assert leader.desk.get(op.id).state is OperationState.RUNNING
    store.put(keys.job_status(), JobStatus(phase="rl", updated_at=time.time()).encode())
    assert until(leader.desk, op, ended).state is OperationState.SUCCEEDED


def test_a_part_that_dies_again_and_again_leads_to_a_global_restart_and_then_to_the_end_of_the_run(
        lead: Any, plane: Plane, store: Store, keys: Keys) -> None:
    """Budget 1, crash loop after 2: two deaths are a global restart, two more the end, over a change of leaders."""
    leader = lead("a")
    store.put(keys.job_status(), JobStatus(phase="rl", step=7).encode())
    epochs.raise_epoch(store, keys, "driver-1")

    def die(n: int) -> None:
        member = plane.member("advantages", f"advantages-{n}", "idle")
        wait_until(lambda: store.get(keys.roster("advantages", f"advantages-{n}")), timeout_s=20, what="its sighting")
        store.delete(keys.member("advantages", f"advantages-{n}"))  # its lease has ended, and nobody said good-bye
        member.replaced.set()
        wait_until(lambda: any(e.subject == f"advantages-{n}" for e in told(store, keys, "advantages.dead")),
                   timeout_s=20, what="the death to be told")

    def pause() -> None:
        """Faults within ``settle_s`` are one."""
        marked = FaultLog.decode(store.get(keys.fault("roles/advantages")).value).marks[-1].at
        wait_until(lambda: time.time() > marked + 0.2, timeout_s=5, what="the faults to be apart")

    die(0)
    assert not open_wishes(store, keys)
    pause()
    die(1)
    wish = wait_until(lambda: open_wishes(store, keys).get("job"), timeout_s=20, what="the global restart")
    assert "2 faults of roles/advantages" in wish.reason
    assert len(told(store, keys, "run.global_restart")) == 1
    carried_out(store, keys, wish)
    leader.close()
    lead("b")
    die(2)
    pause()
    die(3)
    job = wait_until(lambda: (s := JobStatus.decode(store.get(keys.job_status()).value)).phase == "failed" and s,
                     timeout_s=20, what="the end of the run")
    assert "crash loop" in job.message and job.step == 7
    assert len(told(store, keys, "run.crash_loop")) == 1
    assert len(told(store, keys, "run.global_restart")) == 1, "the second one would not have helped"
    assert FaultLog.decode(store.get(keys.fault("job")).value).pending is Action.LEAVE


def test_a_wish_counts_once_however_often_it_is_carried_out(store: Store, keys: Keys) -> None:
    store.put(keys.restart("trainer"), Restart(target="trainer", wanted=1).encode())
    wish = open_wishes(store, keys)["trainer"]
    store.put(keys.restart("trainer"), Restart(target="trainer", wanted=2).encode())
    carried_out(store, keys, wish)
    assert open_wishes(store, keys)["trainer"].done == 1, "the second wish is open still"
    epochs.raise_epoch(store, keys, "driver-1")
    with pytest.raises(Fenced):
        carried_out(store, keys, wish, epochs.epoch_guard(keys, 7))
