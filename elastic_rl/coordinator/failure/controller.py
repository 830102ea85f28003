"""The leader's part of the failure policy: notes faults in the transaction that makes them known, and does what is due.

All of it is in etcd: a leader that takes over finds what was noted, what is pending, and since when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from elastic_rl.config import FailurePolicyConfig
from elastic_rl.coordinator.failure import policy
from elastic_rl.coordinator.failure.policy import Action, Fault, FaultLog
from elastic_rl.coordinator.membership.registry import LastSeen
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.operations.state_machine import JOB
from elastic_rl.coordinator.problems import Problem
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, Severity
from elastic_rl.etcd.transaction import GuardedWrite

log = logging.getLogger(__name__)

BY = "policy"
Writes = tuple[list[Compare], list[Op]]


class _Also:
    """Conditions and writes that go into an operation's first transaction."""

    def __init__(self, compares: list[Compare], ops: list[Op]) -> None:
        self.compares, self._ops = compares, ops

    def ops(self, location: str) -> list[Op]:
        return self._ops


class FailureController:
    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: FailurePolicyConfig, desk: OperationService,
                 guarded: GuardedWrite) -> None:
        self._etcd, self._keys, self._cfg, self._desk, self._guarded = etcd, keys, cfg, desk, guarded

    def note(self, who: LastSeen, fault: Fault, now: float, job: JobStatus | None) -> Writes:
        """What a fault's transaction has to hold besides the fault itself; empty where the policy leaves it alone."""
        rule = policy.rule_for(who.role, fault)
        if rule.action is Action.LEAVE and not rule.counts:
            return [], []
        target = policy.target_of(who.role, who.id)
        known, revision = self._read(target)
        after = policy.record_fault(known, rule, f"{who.role} {who.id} is {fault}", now, policy.progress_of(job),
                                    self._cfg)
        return self._put(after, revision)

    def act(self, logs: Mapping[str, tuple[FaultLog, int]], now: float, job: JobStatus | None) -> None:
        """Does what is due. Raises Fenced and EtcdUnavailable; then the next look does it."""
        for target, (known, revision) in logs.items():
            match policy.due(known, now):
                case Action.RESTART:
                    self._restart(target, known, revision)
                case Action.GLOBAL_RESTART:
                    self._global_restart(known, revision, now, job)
                case Action.STOP:
                    self._stop(known, revision, now, job)

    def _restart(self, target: str, known: FaultLog, revision: int) -> None:
        compares, ops = self._put(policy.acknowledged(known), revision)
        try:
            self._desk.restart(target, reason=known.reason, by=BY, once=_Also(compares, ops))
            log.warning("restarting %s: %s", target, known.reason)
        except Problem as e:
            if e.status == 404:  # it went by itself: whoever runs it has replaced it
                self._guarded(compares, ops)

    def _global_restart(self, known: FaultLog, revision: int, now: float, job: JobStatus | None) -> None:
        cleared = policy.acknowledged(known)
        (of_job, at), (compares, ops) = (
            ((cleared, revision), ([], [])) if known.target == JOB else (self._read(JOB), self._put(cleared, revision)))
        after = policy.restarted(of_job, now, policy.progress_of(job), self._cfg)
        more = self._put(after, at)
        compares, ops = [*compares, *more[0]], [*ops, *more[1]]
        if after.pending is Action.STOP:  # one more would not help either
            self._guarded(compares, ops)
            return
        event = events.build("run.global_restart", self._keys.job, f"global restart: {known.reason}",
                             severity=Severity.ERROR, by=BY)
        try:
            self._desk.restart(JOB, reason=known.reason, by=BY,
                               once=_Also(compares, [*ops, events.put_op(self._keys, event)]))
            log.error("global restart: %s", known.reason)
        except Problem as e:
            log.warning("global restart not begun: %s", e)

    def _stop(self, known: FaultLog, revision: int, now: float, job: JobStatus | None) -> None:
        """Ends the run where it is: its epoch is over, so nothing writes any more, and every version is kept."""
        found = self._etcd.get(self._keys.job_status())
        status = JobStatus.decode(found.value) if found else JobStatus(phase="failed")
        at = f"{status.phase} step {status.step}"
        message = (f"crash loop: {len(known.marks)} restarts without progress at {at}; the last: {known.reason}. "
                   "Everything is kept; see `elastic-rl events`, mend the cause, and train again")
        guard, end = fencing.next_epoch(self._keys, fencing.current_epoch(self._etcd, self._keys), holder="crash loop")
        compares, ops = self._put(policy.acknowledged(known).replace(marks=[]), revision)
        event = events.build("run.crash_loop", self._keys.job, message, severity=Severity.ERROR, by=BY)
        stopped = status.replace(phase="failed", message=message, updated_at=now)
        if self._guarded(
                [*compares, guard, Compare.mod(self._keys.job_status(), "==", found.mod_revision if found else 0)],
                [*ops, end, Op.put(self._keys.job_status(), stopped.encode()), events.put_op(self._keys, event)]):
            log.error("%s", message)

    def _read(self, target: str) -> tuple[FaultLog, int]:
        found = self._etcd.get(self._keys.fault(target))
        return (FaultLog.decode(found.value), found.mod_revision) if found else (FaultLog(target=target), 0)

    def _put(self, record: FaultLog, revision: int) -> Writes:
        key = self._keys.fault(record.target)
        return [Compare.mod(key, "==", revision)], [Op.put(key, record.encode())]
