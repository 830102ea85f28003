"""The leader's part of the failure policy on a model of etcd. The world of failures (``chaos_tests/sim/failures.py``)
has it fail in every order; here is one case for each bug that it has found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chaos_tests.sim.election import SimulatedEtcd
from chaos_tests.sim.store import SimClient
from elastic_rl.config import Config, FailurePolicyConfig
from elastic_rl.coordinator.failure.controller import FailureController
from elastic_rl.coordinator.membership.registry import Transition
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.records import FaultLog, FaultOccurrence, LastSeen, RecoveryAction
from elastic_rl.coordinator.snapshot import ClusterSnapshot, SnapshotReader
from elastic_rl.coordinator.targets import JOB
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.event_kinds import TRAINER_GROUP_EVENTS
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Event, JobStatus, RestartRequest

KEYS = Keys("j")
CFG = Config(job="j", failure_policy=FailurePolicyConfig(max_faults=2))
DUE = FaultLog(target="trainer", occurrences=[FaultOccurrence(at=0.0, progress=0)], reason="r",
               pending=RecoveryAction.GLOBAL_RESTART)


class Etcd:
    def __init__(self) -> None:
        self.client = SimClient(SimulatedEtcd(), lambda: 0.0)
        fencing.raise_epoch(self.client, KEYS, "driver")
        self.reader, self.now = SnapshotReader(self.client, KEYS, CFG, lambda: 1.0, lambda: self.now), 100.0

    def leader(self) -> FailureController:
        writer = FencedWriter(self.client, KEYS, list, "r0")
        election: Any = SimpleNamespace(replica="r0", writer=writer)
        return FailureController(self.client, KEYS, CFG.failure_policy,
                                 OperationService(self.client, KEYS, election, CFG), writer)

    def put(self, key: str, record: Record) -> int:
        return self.client.put(key, record.encode())

    def read(self) -> ClusterSnapshot:
        return self.reader.read()

    def report(self) -> tuple[Event, int]:
        """The driver says that the trainer's agent ended."""
        event = events.build(TRAINER_GROUP_EVENTS["trainer"].agent_ended, "trainer", "m")
        return event, self.client.txn((), [events.put_op(KEYS, event)]).revision


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


def test_reported_end_of_an_agent_counts_once_whichever_leaders_read_it(etcd: Etcd) -> None:
    first, second = etcd.report(), etcd.report()
    etcd.leader().record_reports([first], etcd.read())
    etcd.now += 60.0  # the first leader died before its cursor had moved
    etcd.leader().record_reports([first, second], etcd.read())
    etcd.leader().record_reports([first, second], etcd.read())
    assert [fault.at for fault in etcd.read().faults["trainer"].occurrences] == [100.0, 160.0]


def test_reported_end_of_an_agent_does_not_count_in_a_later_epoch(etcd: Etcd) -> None:
    report = etcd.report()
    fencing.raise_epoch(etcd.client, KEYS, fencing.GLOBAL_RESTART)
    etcd.leader().record_reports([report], etcd.read())
    assert "trainer" not in etcd.read().faults


@pytest.mark.parametrize("phase", ["finished", "failed", "stopped"])
def test_run_that_is_over_is_not_restarted_and_begins_without_faults_when_it_is_resumed(etcd: Etcd, phase: str) -> None:
    etcd.put(KEYS.fault("trainer"), DUE)
    etcd.put(KEYS.job_status(), JobStatus(phase=phase))
    leader, snapshot = etcd.leader(), etcd.read()
    leader.act(snapshot)
    leader.collect_garbage(snapshot)
    after = etcd.read()
    assert not after.operations and not after.faults and after.epoch == 1


def test_global_restart_is_not_begun_by_what_was_read_before_another_one(etcd: Etcd) -> None:
    etcd.put(KEYS.fault("trainer"), DUE)
    leader, before = etcd.leader(), etcd.read()
    leader._operations.restart(JOB, by="operator")
    leader.act(before)
    after = etcd.read()
    assert [op.by for op in after.operations.values()] == ["operator"] and after.epoch == 2
    leader.act(after)
    assert len(etcd.read().operations) == 1, "what was counted before it is over"


def test_member_that_hangs_is_restarted_though_a_step_made_the_global_restart_needless(etcd: Etcd) -> None:
    etcd.put(KEYS.fault("trainer"), DUE)
    etcd.put(KEYS.job_status(), JobStatus(phase="rl", step=1))
    hung = LastSeen(role="trainer", id="rank-0", incarnation="i", first_seen=1.0, hung_at=1.0)
    etcd.put(KEYS.registry_entry("trainer", "rank-0"), hung)
    etcd.leader().act(etcd.read())
    [op] = etcd.read().operations.values()
    assert op.target == "trainer" and etcd.read().faults["trainer"].operation == op.id


def test_needless_global_restart_is_not_pending_for_ever(etcd: Etcd) -> None:
    etcd.put(KEYS.fault("trainer"), DUE)
    etcd.put(KEYS.job_status(), JobStatus(phase="rl", step=1))
    etcd.leader().act(etcd.read())
    assert not etcd.read().operations and etcd.read().faults["trainer"].pending is RecoveryAction.NONE


@pytest.mark.parametrize("pieces, ends", [(0, True), (1, False)])
def test_crash_loop_ends_the_run_unless_it_has_got_further_meanwhile(etcd: Etcd, pieces: int, ends: bool) -> None:
    etcd.put(KEYS.fault(JOB), DUE.replace(target=JOB, pending=RecoveryAction.STOP))
    etcd.put(KEYS.job_status(), JobStatus(phase="sft", pieces=pieces))
    etcd.leader().act(etcd.read())
    after = etcd.read()
    assert after.status is not None and (after.status.phase == "failed") == ends == (after.epoch == 2)
    assert after.faults[JOB].pending is RecoveryAction.NONE


def test_end_of_a_crash_loop_says_why_and_leaves_the_restart_pending_until_then(etcd: Etcd) -> None:
    rows = [FaultOccurrence(at=float(n), progress=0) for n in range(CFG.failure_policy.max_global_restarts - 1)]
    etcd.put(KEYS.fault(JOB), FaultLog(target=JOB, occurrences=rows))
    etcd.put(KEYS.fault("trainer"), DUE.replace(reason="rank-0 is dead"))
    leader = etcd.leader()
    leader.act(etcd.read())
    assert {log.pending for log in etcd.read().faults.values()} == {RecoveryAction.STOP, RecoveryAction.GLOBAL_RESTART}
    leader.act(etcd.read())
    status = etcd.read().status
    assert status is not None and "the last: rank-0 is dead." in status.message


@pytest.mark.parametrize("epoch, counts", [(1, False), (2, True)])
def test_member_of_an_epoch_that_is_over_has_no_faults(etcd: Etcd, epoch: int, counts: bool) -> None:
    fencing.raise_epoch(etcd.client, KEYS, fencing.GLOBAL_RESTART)
    hung = LastSeen(role="engine", id="e", incarnation="i", epoch=epoch, first_seen=1.0, hung_at=1.0)
    writes = WriteSet()
    etcd.leader().record_fault(hung, Transition.HUNG, etcd.read(), writes)
    assert bool(writes.ops) == counts


def test_records_of_an_engine_that_is_gone_are_deleted_in_a_fixed_order(etcd: Etcd) -> None:
    for name in ("b", "a"):
        etcd.put(KEYS.fault(f"engines/{name}"), FaultLog(target=f"engines/{name}", epoch=1))
        etcd.put(KEYS.restart(f"engines/{name}"), RestartRequest(target=f"engines/{name}", generation=1))
    deleted = list[str]()
    leader, snapshot = etcd.leader(), etcd.read()
    leader._guarded = lambda compares, ops: bool(deleted.extend(op.key for op in ops if op.kind == "delete"))
    leader.collect_garbage(snapshot)
    assert deleted == [key(f"engines/{name}") for name in ("a", "b") for key in (KEYS.fault, KEYS.restart)]
