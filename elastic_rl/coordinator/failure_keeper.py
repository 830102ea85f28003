"""The leader's part of the failure policy: notes faults in the transaction that makes them known, and does what is due.

All of it is in etcd: a leader that takes over finds what was noted, what is pending, and since when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from elastic_rl.config import PolicyConfig
from elastic_rl.coordinator import epochs, events, policy
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.operation_desk import OperationDesk
from elastic_rl.coordinator.operations import JOB
from elastic_rl.coordinator.policy import Action, Fault, FaultLog
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.records import JobStatus, Severity
from elastic_rl.coordinator.roster import Sighting
from elastic_rl.coordinator.store import Compare, Op, Store

log = logging.getLogger(__name__)

BY = "policy"
Guarded = Callable[[Sequence[Compare], Sequence[Op]], bool]
Writes = tuple[list[Compare], list[Op]]


class _Also:
    """Conditions and writes that go into an operation's first transaction."""

    def __init__(self, compares: list[Compare], ops: list[Op]) -> None:
        self.compares, self._ops = compares, ops

    def ops(self, location: str) -> list[Op]:
        return self._ops


class FailureKeeper:
    def __init__(self, store: Store, keys: Keys, cfg: PolicyConfig, desk: OperationDesk, guarded: Guarded) -> None:
        self._store, self._keys, self._cfg, self._desk, self._guarded = store, keys, cfg, desk, guarded

    def note(self, who: Sighting, fault: Fault, now: float, job: JobStatus | None) -> Writes:
        """What a fault's transaction has to hold besides the fault itself; empty where the policy leaves it alone."""
        rule = policy.rule_for(who.role, fault)
        if rule.action is Action.LEAVE and not rule.counts:
            return [], []
        target = policy.target_of(who.role, who.id)
        known, revision = self._read(target)
        after = policy.noted(known, rule, f"{who.role} {who.id} is {fault}", now, policy.progress_of(job), self._cfg)
        return self._put(after, revision)

    def act(self, logs: Mapping[str, tuple[FaultLog, int]], now: float, job: JobStatus | None) -> None:
        """Does what is due. Raises Fenced and StoreUnavailable; then the next look does it."""
        for target, (known, revision) in logs.items():
            match policy.due(known, now):
                case Action.RESTART:
                    self._restart(target, known, revision)
                case Action.GLOBAL_RESTART:
                    self._global_restart(known, revision, now, job)
                case Action.STOP:
                    self._stop(known, revision, now, job)

    def _restart(self, target: str, known: FaultLog, revision: int) -> None:
        compares, ops = self._put(policy.carried_out(known), revision)
        try:
            self._desk.restart(target, reason=known.reason, by=BY, once=_Also(compares, ops))
            log.warning("restarting %s: %s", target, known.reason)
        except Problem as e:
            if e.status == 404:  # it went by itself: whoever runs it has replaced it
                self._guarded(compares, ops)

    def _global_restart(self, known: FaultLog, revision: int, now: float, job: JobStatus | None) -> None:
        cleared = policy.carried_out(known)
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
        found = self._store.get(self._keys.job_status())
        status = JobStatus.decode(found.value) if found else JobStatus(phase="failed")
        at = f"{status.phase} step {status.step}"
        message = (f"crash loop: {len(known.marks)} restarts without progress at {at}; the last: {known.reason}. "
                   "Everything is kept; see `elastic-rl events`, mend the cause, and train again")
        guard, end = epochs.ending(self._keys, epochs.current_epoch(self._store, self._keys), holder="crash loop")
        compares, ops = self._put(policy.carried_out(known).but(marks=[]), revision)
        event = events.build("run.crash_loop", self._keys.job, message, severity=Severity.ERROR, by=BY)
        stopped = status.but(phase="failed", message=message, updated_at=now)
        if self._guarded(
                [*compares, guard, Compare.mod(self._keys.job_status(), "==", found.mod_revision if found else 0)],
                [*ops, end, Op.put(self._keys.job_status(), stopped.encode()), events.put_op(self._keys, event)]):
            log.error("%s", message)

    def _read(self, target: str) -> tuple[FaultLog, int]:
        found = self._store.get(self._keys.fault(target))
        return (FaultLog.decode(found.value), found.mod_revision) if found else (FaultLog(target=target), 0)

    def _put(self, record: FaultLog, revision: int) -> Writes:
        key = self._keys.fault(record.target)
        return [Compare.mod(key, "==", revision)], [Op.put(key, record.encode())]
