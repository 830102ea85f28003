"""The leader's part of operations: writes down how far each is, ends it, and forgets those that ended long ago."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from elastic_rl.coordinator.operations import state_machine
from elastic_rl.coordinator.operations.state_machine import View
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
    def __init__(self, keys: Keys, guarded: GuardedWrite) -> None:
        self._keys, self._guarded = keys, guarded

    def follow(self, known: Mapping[str, tuple[Operation, int]], view: View) -> None:
        """One look at the operations that go on. ``known``: by id, with their mod revisions. Raises Fenced."""
        for op, revision in known.values():
            now = state_machine.settle(op, view)
            if now == op:
                continue
            ops, compares = [Op.put(self._keys.operation(op.id), now.encode())], list[Compare]()
            if now.state.ended:
                ops += self._end_ops(now)
                compares, more = self._take_back(now, view)
                ops += more
                log.info("operation %s (%s of %s) %s %s", op.id, op.kind, op.target, now.state, now.error)
            self._guarded([Compare.mod(self._keys.operation(op.id), "==", revision), *compares], ops)

    def trim(self, known: Mapping[str, tuple[Operation, int]]) -> None:
        """Deletes the oldest of those that have ended, beyond what is kept."""
        ended = sorted(op.id for op, _ in known.values() if op.state.ended)
        for start in range(0, max(0, len(ended) - _KEPT), _AT_ONCE):
            batch = ended[start:min(start + _AT_ONCE, len(ended) - _KEPT)]
            self._guarded([], [Op.delete(self._keys.operation(i)) for i in batch])

    def _take_back(self, op: Operation, view: View) -> tuple[list[Compare], list[Op]]:
        """What ends the wish of an adoption that failed; one that came true later would surprise."""
        wish, revision = view.adoptions.get(state_machine.name_of(op.target), (None, 0))
        if op.kind is not OperationKind.ADOPT or op.state is OperationState.SUCCEEDED or wish is None:
            return [], []
        key = self._keys.adoption(wish.url)
        return [Compare.mod(key, "==", revision)], [Op.delete(key)]

    def _end_ops(self, op: Operation) -> list[Op]:
        message = f"{op.kind} of {op.target} {op.state}: {op.error or op.message}"
        event = events.build(f"operation.{op.state}", op.target, message, severity=_ENDS[op.state], operation=op.id,
                             by=op.by)
        ops = [events.put_op(self._keys, event)]
        if op.kind is OperationKind.RESTART and op.target.startswith("engines/"):
            # Its engine has another name now: neither wish nor faults will be looked at again.
            ops += [Op.delete(self._keys.restart(op.target)), Op.delete(self._keys.fault(op.target))]
        return ops
