"""The leader's part of operations: records the progress of each, ends it, and deletes those that ended long ago."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from elastic_rl.coordinator.operations import state_machine
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import JOB, name_of
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event, Operation, OperationKind, OperationState, Severity
from elastic_rl.etcd.transaction import GuardedWrite, batches

log = logging.getLogger(__name__)

_MAX_WRITES = 400
"""Operations that one pass writes; the next pass writes the others."""
_KEPT = 200
"""Operations that have ended and are kept, for people."""
_ENDS = {OperationState.SUCCEEDED: (event_kinds.OPERATION_SUCCEEDED, Severity.INFO),
         OperationState.FAILED: (event_kinds.OPERATION_FAILED, Severity.ERROR),
         OperationState.CANCELLED: (event_kinds.OPERATION_CANCELLED, Severity.INFO)}


class OperationController:
    def __init__(self, keys: Keys, group_ranks: Mapping[str, int], guarded: GuardedWrite) -> None:
        self._keys, self._group_ranks, self._guarded = keys, group_ranks, guarded

    def update(self, snapshot: ClusterSnapshot) -> None:
        """Records the progress of the operations. Raises Fenced."""
        self._acknowledge_job_restart(snapshot)
        written = 0
        for op in snapshot.operations.values():
            try:
                now = state_machine.advance(op, snapshot, self._group_ranks)
            except (KeyError, TypeError, ValueError) as e:  # parameters that this release does not understand
                now = state_machine.failed(op, snapshot.now, f"its parameters cannot be read: {type(e).__name__}: {e}")
            if now == op or written >= _MAX_WRITES:
                continue
            written += 1
            writes, key = WriteSet(), self._keys.operation(op.id)
            writes.put(key, snapshot.revision(key), now)
            if now.state.ended:
                self._end(now, snapshot, writes)
            if self._guarded(writes.compares, writes.ops) and now.state.ended:
                log.info("operation %s (%s of %s) %s %s", op.id, op.kind, op.target, now.state, now.error)

    def trim(self, snapshot: ClusterSnapshot) -> None:
        """Deletes the oldest of those that have ended, beyond what is kept. Raises Fenced."""
        ended = sorted(op.id for op in snapshot.operations.values() if op.state.ended)
        for batch in batches(ended[:max(0, len(ended) - _KEPT)]):
            self._guarded([], [Op.delete(self._keys.operation(i)) for i in batch])

    def _acknowledge_job_restart(self, snapshot: ClusterSnapshot) -> None:
        """Closes the request to restart the job once a driver has started after it, which is the restart: a supervisor
        that died before it acknowledged the request must not carry it out again."""
        request, key = snapshot.restarts.get(JOB), self._keys.restart(JOB)
        if request is not None and request.open and request.has_newer_driver(snapshot.epoch):
            observed = request.observed(request.generation)
            self._guarded([snapshot.unchanged(key)], [Op.put(key, observed.encode())])

    def _end(self, op: Operation, snapshot: ClusterSnapshot, writes: WriteSet) -> None:
        writes.add(events.put_op(self._keys, _ended_event(op)))
        if op.state is OperationState.SUCCEEDED:
            return
        # A request that was carried out after its operation had failed would be a surprise.
        registration, request = snapshot.external_engines.get(name_of(op.target)), snapshot.restarts.get(op.target)
        if op.kind is OperationKind.REGISTER and registration is not None:
            key = self._keys.external_engine(registration.url)
            writes.delete(key, snapshot.revision(key))
        elif op.kind is OperationKind.RESTART and op.target != JOB and request is not None:
            # That of the job stays open: its epoch is over, and nothing runs before it is carried out.
            generation = op.params.get("generation")  # of any type: the operation may have failed because of it
            withdrawn = request.observed(generation) if isinstance(generation, int) else request
            if withdrawn != request:
                key = self._keys.restart(op.target)
                writes.put(key, snapshot.revision(key), withdrawn)


def _ended_event(op: Operation) -> Event:
    message = f"{op.kind} of {op.target} {op.state}: {op.error or op.message}"
    kind, severity = _ENDS[op.state]
    return events.build(kind, op.target, message, severity=severity, operation=op.id, by=op.by)
