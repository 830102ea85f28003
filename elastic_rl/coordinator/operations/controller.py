"""The leader's part of operations: writes down how far each is, ends it, and forgets those that ended long ago."""

from __future__ import annotations

import logging

from elastic_rl.coordinator.operations import state_machine
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import name_of
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Compare, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Operation, OperationKind, OperationState, Severity
from elastic_rl.etcd.transaction import GuardedWrite

log = logging.getLogger(__name__)

_KEPT = 200
"""Operations that have ended and are kept, for people who look what was done."""
_AT_ONCE = 50
_ENDS = {OperationState.SUCCEEDED: Severity.INFO, OperationState.FAILED: Severity.ERROR,
         OperationState.CANCELLED: Severity.INFO}


class OperationController:
    def __init__(self, keys: Keys, trainer_ranks: int, guarded: GuardedWrite) -> None:
        self._keys, self._trainer_ranks, self._guarded = keys, trainer_ranks, guarded

    def follow(self, snapshot: ClusterSnapshot) -> None:
        """Writes down how far the operations are. Raises Fenced."""
        for op in snapshot.operations.values():
            now = state_machine.settle(op, snapshot, self._trainer_ranks)
            if now == op:
                continue
            ops, compares = [Op.put(self._keys.operation(op.id), now.encode())], list[Compare]()
            if now.state.ended:
                ops += self._end_ops(now)
                compares, more = self._take_back(now, snapshot)
                ops += more
                log.info("operation %s (%s of %s) %s %s", op.id, op.kind, op.target, now.state, now.error)
            self._guarded([snapshot.unchanged(self._keys.operation(op.id)), *compares], ops)

    def trim(self, snapshot: ClusterSnapshot) -> None:
        """Deletes the oldest of those that have ended, beyond what is kept."""
        ended = sorted(op.id for op in snapshot.operations.values() if op.state.ended)
        for start in range(0, max(0, len(ended) - _KEPT), _AT_ONCE):
            batch = ended[start:min(start + _AT_ONCE, len(ended) - _KEPT)]
            self._guarded([], [Op.delete(self._keys.operation(i)) for i in batch])

    def _take_back(self, op: Operation, snapshot: ClusterSnapshot) -> tuple[list[Compare], list[Op]]:
        """What ends the wish of an adoption that failed; one that came true later would surprise."""
        wish = snapshot.external_engines.get(name_of(op.target))
        if op.kind is not OperationKind.ADOPT or op.state is OperationState.SUCCEEDED or wish is None:
            return [], []
        key = self._keys.adoption(wish.url)
        return [snapshot.unchanged(key)], [Op.delete(key)]

    def _end_ops(self, op: Operation) -> list[Op]:
        message = f"{op.kind} of {op.target} {op.state}: {op.error or op.message}"
        event = events.build(f"operation.{op.state}", op.target, message, severity=_ENDS[op.state], operation=op.id,
                             by=op.by)
        ops = [events.put_op(self._keys, event)]
        if op.kind is OperationKind.RESTART and op.target.startswith("engines/"):
            # Its engine has another name now: neither wish nor faults will be looked at again.
            ops += [Op.delete(self._keys.restart(op.target)), Op.delete(self._keys.fault(op.target))]
        return ops
