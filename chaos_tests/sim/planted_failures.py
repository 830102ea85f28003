"""Bugs that are planted into the product's failure policy; see ``planted``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chaos_tests.sim.patch import Patch
from elastic_rl.config import FailurePolicyConfig
from elastic_rl.coordinator.failure import controller, policy
from elastic_rl.coordinator.failure.controller import FailureController
from elastic_rl.coordinator.records import FaultLog, LastSeen, RecoveryAction
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, Op
from elastic_rl.etcd.fencing import FencedWriter


# -- counting ----------------------------------------------------------------------------------------------------------
def steps_end_no_row(patch: Patch) -> None:
    patch.setattr(policy, "_has_stepped", lambda before, progress: False)


def faults_outlive_a_global_restart(patch: Patch) -> None:
    patch.setattr(policy, "of_epoch", lambda log, epoch, ended: log)


def faults_that_come_together_count_each(patch: Patch) -> None:
    record = policy.record_fault

    def each(log: FaultLog, rule: Any, reason: str, now: float, progress: int, cfg: FailurePolicyConfig) -> FaultLog:
        return record(log, rule, reason, now, progress, cfg.model_copy(update={"fault_merge_s": 0.0}))

    patch.setattr(policy, "record_fault", each)


def death_of_what_hung_counts_again(patch: Patch) -> None:
    record = FailureController.record_fault
    patch.setattr(FailureController, "record_fault", lambda self, member, *more: record(
        self, member.replace(hung_at=0.0), *more))


def faults_of_an_older_epoch_count(patch: Patch) -> None:
    patch.setattr(controller, "_is_ended", lambda member, snapshot: False)


def each_leader_counts_a_report(patch: Patch) -> None:
    read = FailureController._read

    def forgetful(self: FailureController, target: str, snapshot: ClusterSnapshot) -> tuple[FaultLog, int]:
        known, revision = read(self, target, snapshot)
        return known.replace(reported_revision=0), revision

    patch.setattr(FailureController, "_read", forgetful)


# -- restarts ----------------------------------------------------------------------------------------------------------
def hangs_are_not_restarted(patch: Patch) -> None:
    patch.setattr(controller, "_needs_restart", lambda target, snapshot: False)


def what_goes_on_is_restarted(patch: Patch) -> None:
    patch.setattr(controller, "_needs_restart", lambda target, snapshot: True)


def failed_restarts_are_ignored(patch: Patch) -> None:
    patch.setattr(policy, "restart_failed", lambda log, *more, **how: log.replace(operation=""))


def budget_without_end(patch: Patch) -> None:
    request = policy._request

    def in_place(log: FaultLog, action: RecoveryAction, *more: Any) -> FaultLog:
        return request(log, min(action, RecoveryAction.RESTART, key=policy._RANK.__getitem__), *more)

    patch.setattr(policy, "_request", in_place)


def global_restart_after_a_step(patch: Patch) -> None:
    patch.setattr(policy, "due", lambda log, now, progress: (
        log.pending if now >= log.due_at else RecoveryAction.NONE))


def needless_global_restart_hides_a_hang(patch: Patch) -> None:
    due = policy.due

    def none(log: FaultLog, now: float, progress: int) -> RecoveryAction:
        action = due(log, now, progress)
        return action if action is log.pending else RecoveryAction.NONE

    patch.setattr(policy, "due", none)


def fault_after_a_step_hides_a_hang(patch: Patch) -> None:
    patch.setattr(policy, "_after_step", lambda log, now: policy.cleared(log))


def decisions_outlive_their_epoch(patch: Patch) -> None:
    update = FailureController._update

    def of_any_epoch(self: FailureController, snapshot: ClusterSnapshot, record: FaultLog) -> Any:
        writes = update(self, snapshot, record)
        writes.compares = [compare for compare in writes.compares if compare.key != snapshot.keys.epoch()]
        return writes

    patch.setattr(FailureController, "_update", of_any_epoch)


def run_that_is_over_is_restarted(patch: Patch) -> None:
    act = FailureController.act

    def whatever_has_ended(self: FailureController, snapshot: ClusterSnapshot) -> None:
        status = snapshot.status.replace(phase="rl") if snapshot.status is not None else None
        act(self, replace(snapshot, status=status, stopped=False))

    patch.setattr(FailureController, "act", whatever_has_ended)


def records_of_engines_are_kept(patch: Patch) -> None:
    patch.setattr(FailureController, "collect_garbage", lambda self, snapshot: None)


# -- the end of a crash loop -------------------------------------------------------------------------------------------
def crash_loop_in_spite_of_progress(patch: Patch) -> None:
    patch.setattr(policy, "_has_progressed", lambda before, progress: False)


def crash_loop_without_end(patch: Patch) -> None:
    patch.setattr(policy, "is_crash_loop", lambda in_a_row, cfg: False)


def end_without_its_epoch(patch: Patch) -> None:
    next_epoch = fencing.next_epoch

    def unless_it_ends(keys: Any, number: int, holder: str) -> tuple[Compare, Op]:
        guard, put = next_epoch(keys, number, holder)
        return guard, Op.get(put.key) if holder == "crash loop" else put

    patch.setattr(fencing, "next_epoch", unless_it_ends)


def leader_writes_without_its_token(patch: Patch) -> None:
    init: Callable[..., None] = FencedWriter.__init__

    def without_token(self: FencedWriter, etcd: Any, keys: Any, token: Callable[[], Sequence[Compare]], holder: str
                      ) -> None:
        init(self, etcd, keys, list, holder)

    patch.setattr(FencedWriter, "__init__", without_token)


def faults_are_written_apart(patch: Patch) -> None:
    """The leader records a fault in another transaction than the one that makes it known."""
    record = FailureController.record_fault

    def in_a_transaction_of_its_own(self: FailureController, member: LastSeen, change: Any, snapshot: ClusterSnapshot,
                                    writes: Any) -> None:
        apart = type(writes)()
        record(self, member, change, snapshot, apart)
        self._guarded(apart.compares, apart.ops)

    patch.setattr(FailureController, "record_fault", in_a_transaction_of_its_own)
