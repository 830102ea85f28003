"""The leader's part of the failure policy: records faults in the transaction that makes them known, and takes the
actions that are due.

All of it is in etcd: a leader that takes over finds what was recorded, what is pending, and since when.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from elastic_rl.config import FailurePolicyConfig
from elastic_rl.coordinator.failure import policy
from elastic_rl.coordinator.failure.policy import Fault
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.registry import Transition
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.records import FaultLog, LastSeen, RecoveryAction
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import JOB, engine_target, name_of
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import decode, readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    FAILURE_POLICY,
    Engine,
    Event,
    JobStatus,
    OperationState,
    Severity,
    ended,
)
from elastic_rl.etcd.transaction import GuardedWrite
from elastic_rl.runtime.words import counted

log = logging.getLogger(__name__)

_AGENT_ENDED = {kinds.agent_ended.name: group for group, kinds in event_kinds.TRAINER_GROUP_EVENTS.items()}
_EVENTS_READ = 100
"""The last events, among which a refusal is looked for when a rank has died."""
_FAULTS = {Transition.DIED: Fault.DEAD, Transition.HUNG: Fault.HUNG}


class FailureController:
    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: FailurePolicyConfig, operations: OperationService,
                 guarded: GuardedWrite) -> None:
        self._etcd, self._keys, self._cfg, self._operations, self._guarded = etcd, keys, cfg, operations, guarded

    def record_fault(self, member: LastSeen, change: Transition, snapshot: ClusterSnapshot, writes: WriteSet) -> None:
        """Adds a fault to the log of its target, where the policy counts it or acts on it. The death of a member that
        hung adds none: its hang was recorded, and it was ended for that. Nor does the end of ranks of which one has
        refused what it was to compute: it would end them again, until what is to blame is dropped. Nor does a fault of
        a member whose epoch or run is over: the restart would be that of its successor, or of none."""
        if _is_ended(member, snapshot) or change is Transition.DIED and (
                member.hung_at or self._ended_by_refusal(member)):
            return
        fault = _FAULTS[change]
        rule = policy.rule_for(member.role, fault)
        if rule.action is RecoveryAction.NONE and not rule.counts:
            return
        target = policy.target_of(member.role, member.id)
        known, revision = self._read(target, snapshot)
        reason = f"{member.role} {member.id} is {fault}"
        writes.put(self._keys.fault(target), revision, policy.record_fault(
            known, rule, reason, snapshot.leader_time, policy.progress_of(snapshot.status), self._cfg))

    def _ended_by_refusal(self, member: LastSeen) -> bool:
        if member.role not in event_kinds.TRAINER_GROUP_EVENTS:
            return False
        found, _ = self._etcd.range(self._keys.events_prefix(), limit=_EVENTS_READ, newest_first=True)
        return policy.ended_by_refusal(member, ((kv.create_revision, event) for event, kv in readable(found, Event)))

    def record_straggler(self, engine: Engine, why: str, snapshot: ClusterSnapshot) -> None:
        """Adds to the log of an engine that it did not catch up, unless it is being restarted already. Raises Fenced
        and EtcdUnavailable."""
        target = engine_target(engine.id)
        known, revision = self._read(target, snapshot)
        if known.operation or known.pending is not RecoveryAction.NONE:
            return
        writes, rule = WriteSet(), policy.rule_for(event_kinds.ENGINE, Fault.BEHIND)
        writes.put(self._keys.fault(target), revision, policy.record_fault(
            known, rule, f"engine {engine.id} {why}", snapshot.leader_time, policy.progress_of(snapshot.status),
            self._cfg))
        self._guarded(writes.compares, writes.ops)

    def record_reports(self, reported: Iterable[tuple[Event, int]], snapshot: ClusterSnapshot) -> None:
        """Adds the ends of a trainer group's agent that the driver reported: one that ends before its ranks have
        registered is no member's death. ``reported``: events with the revisions at which they were written, the oldest
        first. Each counts once, whichever leaders read it, and none of an earlier epoch: that group is gone."""
        for event, written_at in reported:
            if event.kind not in _AGENT_ENDED or snapshot.run_ended:
                continue
            group = _AGENT_ENDED[event.kind]
            known, revision = self._read(group, snapshot)
            if written_at <= max(known.reported_revision, snapshot.revision(self._keys.epoch())):
                continue
            writes, rule = WriteSet(), policy.rule_for(group, Fault.DEAD)
            writes.put(self._keys.fault(group), revision, policy.record_fault(
                known, rule, event.message, snapshot.leader_time, policy.progress_of(snapshot.status),
                self._cfg).replace(reported_revision=written_at))
            self._guarded(writes.compares, writes.ops)

    def act(self, snapshot: ClusterSnapshot) -> None:
        """Takes the actions that are due; none of a run that is over. Raises Fenced and EtcdUnavailable; then the next
        pass takes them."""
        if snapshot.run_ended:
            return
        progress = policy.progress_of(snapshot.status)
        for target, found in snapshot.faults.items():
            known = _in_this_epoch(found, snapshot)
            if known.operation and self._follow(known, snapshot):
                continue  # the next pass acts on what it wrote
            match policy.due(known, snapshot.leader_time, progress):
                case RecoveryAction.RESTART if not _needs_restart(target, snapshot):
                    self._store(snapshot, policy.cleared(known))  # it goes on by itself, or has ended
                case RecoveryAction.RESTART:
                    self._restart(target, known, snapshot)
                case RecoveryAction.GLOBAL_RESTART:
                    self._global_restart(known, snapshot)
                case RecoveryAction.STOP:
                    self._stop(known, snapshot)

    def collect_garbage(self, snapshot: ClusterSnapshot) -> None:
        """Deletes the fault logs and restart requests of engines that are gone, and all fault logs of a run that is
        over, which nothing else would: one that is resumed begins without faults."""
        running = {op.target for op in snapshot.operations.values() if not op.state.ended}
        for target in sorted({*snapshot.faults, *snapshot.restarts}):
            known = _in_this_epoch(snapshot.faults.get(target) or FaultLog(target=target), snapshot)
            is_gone = (target.startswith(engine_target("")) and name_of(target) not in snapshot.engines
                       and target not in running and not known.operation)
            keys = [self._keys.fault(target)] if is_gone or snapshot.run_ended else []
            for key in [*keys, self._keys.restart(target)] if is_gone else keys:
                if snapshot.revision(key):
                    self._guarded([snapshot.unchanged(key)], [Op.delete(key)])

    def _follow(self, known: FaultLog, snapshot: ClusterSnapshot) -> bool:
        """Takes the end of the operation into account that the policy began; whether there was one."""
        op = snapshot.operations.get(known.operation)
        if op is not None and not op.state.ended:
            return False
        after = known.replace(operation="")
        if op is not None and op.state is OperationState.FAILED:
            after = policy.restart_failed(known, op.error, snapshot.leader_time, self._cfg, carried_out=op.done > 0)
        self._store(snapshot, after)
        return True

    def _restart(self, target: str, known: FaultLog, snapshot: ClusterSnapshot) -> None:
        cleared = policy.cleared(known)
        try:
            self._operations.restart(target, reason=known.reason, by=FAILURE_POLICY,
                                     also=lambda op: self._update(snapshot, cleared.replace(operation=op.id)))
            log.warning("restarting %s: %s", target, known.reason)
        except Problem as e:
            if e.status == 404:  # it ended by itself and was replaced
                self._store(snapshot, cleared)
            else:
                log.warning("%s not restarted: %s", target, e)

    def _global_restart(self, known: FaultLog, snapshot: ClusterSnapshot) -> None:
        job = snapshot.faults.get(JOB, FaultLog(target=JOB)).replace(reason=known.reason)
        if job.pending is RecoveryAction.STOP:
            return  # it stays pending: the run may get further before it is ended
        after = policy.record_restart(job, snapshot.leader_time, snapshot.status, self._cfg)
        if after.pending is RecoveryAction.STOP:  # one more restart would not help either
            self._store(snapshot, after)
            return
        writes = self._update(snapshot, policy.cleared(known))
        writes.merge(self._update(snapshot, after))
        writes.add(events.put_op(self._keys, events.build(
            event_kinds.RUN_GLOBAL_RESTART, self._keys.job, f"global restart: {known.reason}",
            severity=Severity.ERROR, by=FAILURE_POLICY)))
        try:
            self._operations.restart(JOB, reason=known.reason, by=FAILURE_POLICY, also=lambda op: writes)
            log.error("global restart: %s", known.reason)
        except Problem as e:
            log.warning("global restart not started: %s", e)

    def _stop(self, known: FaultLog, snapshot: ClusterSnapshot) -> None:
        """Ends the run where it is: its epoch is over, so nothing writes any more, and every version is kept."""
        status = snapshot.status or JobStatus(phase="failed")
        at = f"{status.phase} step {status.step}"
        message = (f"crash loop: {counted(len(known.occurrences), 'restart')} without progress at {at}; the last: "
                   f"{known.reason}. Everything is kept; see `elastic-rl events`, fix the cause, and train again")
        writes = self._update(snapshot, policy.cleared(known).replace(occurrences=[]))
        _, end = fencing.next_epoch(self._keys, snapshot.epoch, holder="crash loop")
        key = self._keys.job_status()
        writes.put(key, snapshot.revision(key), ended(status, "failed", message, snapshot.now))
        writes.add(end, events.put_op(self._keys, events.build(
            event_kinds.RUN_CRASH_LOOP, self._keys.job, message, severity=Severity.ERROR, by=FAILURE_POLICY)))
        if self._guarded(writes.compares, writes.ops):
            log.error("%s", message)

    def _read(self, target: str, snapshot: ClusterSnapshot) -> tuple[FaultLog, int]:
        """The log as it is now: faults of the same pass may have changed it since the snapshot. One that cannot be read
        is replaced."""
        found = self._etcd.get(self._keys.fault(target))
        known = decode(found, FaultLog, {}) if found else None
        return _in_this_epoch(known or FaultLog(target=target), snapshot), found.mod_revision if found else 0

    def _store(self, snapshot: ClusterSnapshot, log: FaultLog) -> None:
        """Writes a log, unless it was changed since the snapshot."""
        writes = self._update(snapshot, log)
        self._guarded(writes.compares, writes.ops)

    def _update(self, snapshot: ClusterSnapshot, record: FaultLog) -> WriteSet:
        """A log, and what was decided by it: of no epoch but that of the snapshot. Who has ended that meanwhile, as a
        global restart that the operator asked for does, has all parts replaced, whatever was pending of them."""
        writes, key = WriteSet(), self._keys.fault(record.target)
        writes.require(fencing.epoch_guard(self._keys, snapshot.epoch))
        writes.put(key, snapshot.revision(key), record)
        return writes


def _needs_restart(target: str, snapshot: ClusterSnapshot) -> bool:
    """Whether there still is a reason for the restart of a target: a member of it hangs, or the engine is behind."""
    engine = snapshot.engines.get(name_of(target)) if target.startswith(engine_target("")) else None
    return (engine is not None and engine.is_behind) or any(
        member.hung_at and not member.dead and policy.target_of(member.role, member.id) == target
        and not _is_ended(member, snapshot) for member in snapshot.registry.values())


def _is_ended(member: LastSeen, snapshot: ClusterSnapshot) -> bool:
    return registry.end_expected(member, epoch=snapshot.epoch, run_over=snapshot.run_ended,
                                 ended_epoch=snapshot.ended_epoch)


def _in_this_epoch(log: FaultLog, snapshot: ClusterSnapshot) -> FaultLog:
    return policy.of_epoch(log, snapshot.epoch, snapshot.ended_epoch)
