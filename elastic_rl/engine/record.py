"""The record of one engine in etcd, as its runner writes it. The driver and the leader write into it too: DRAINING,
QUARANTINED and ``straggler`` are their requests to the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_rl.errors import Conflict, EtcdUnavailable, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode_bytes, readable_one
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.records import Engine, EngineState, Severity
from elastic_rl.etcd.run_context import RunContext


def requested(before: Engine, record: Engine) -> Engine:
    """What is written in the place of ``before`` by a runner that has ``record`` to say: the record, but for what was
    requested in the one before. Pure.

    A runner that is told to leave, or is behind, may be in a pull and not know it. So it cannot take back what it has
    not seen: a record that the driver has set to SYNCING, since the router does not have the engine any more, is never
    READY again by the write of an engine that was READY all the time. An engine that has caught up is written as
    SYNCING once more, and may then join the router (``EngineRunner``). What is declared dead stays so, whatever else
    ends it; what is quarantined may die.
    """
    if before.state is EngineState.DEAD:
        return before
    if record.state.ended:
        return record
    if before.state.ended:
        return before
    state, straggler = record.state, before.straggler
    is_behind = straggler is not None and bool(straggler.needs)
    if before.state is EngineState.DRAINING:
        state = EngineState.DRAINING
    elif is_behind and record.state is EngineState.READY and before.state is EngineState.SYNCING:
        state = EngineState.SYNCING
    if straggler is not None and is_behind:
        straggler = straggler.caught_up(record.version)
    return record.replace(state=state, straggler=straggler)


class EngineRecord:
    """Reads, writes and deletes the record under the epoch, and refuses to once another runner has written it."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, engine_id: str, incarnation: str) -> None:
        """``incarnation``: the runner's; the records with it are its own."""
        self._etcd, self._keys, self._epoch = etcd, ctx.keys, ctx.epoch
        self._id, self._incarnation = engine_id, incarnation
        self._key = ctx.keys.engine(engine_id)
        self._existed = False
        """Whether this runner has seen its record in etcd: one that is missing then was deleted."""
        self._seen: KeyValue | None = None
        """The record as this runner has read or written it last; None also where that is not known."""

    def _is_own(self, record: Engine) -> bool:
        return record.incarnation == self._incarnation

    def _declared_dead(self, record: Engine) -> Fenced:
        """A runner that was stopped, or cut off, for so long that the leader has ended its engine: the driver replaces
        it, and would kill it while it serves."""
        return Fenced(f"engine {self._id} was declared dead meanwhile: {record.reason}")

    def superseded(self) -> bool:
        """Whether another runner of the same engine has written the record; false without etcd."""
        try:
            record = readable_one(self._etcd.get(self._key), Engine)
        except EtcdUnavailable:
            return False
        return record is not None and not self._is_own(record)

    def read(self) -> tuple[bool, Engine | None]:
        """Whether there is a record, and the record, if it can be read. Raises Fenced for one of another runner, and
        for one that the leader has ended."""
        found = self._seen = self._etcd.get(self._key)
        record = readable_one(found, Engine)
        self._existed |= record is not None and self._is_own(record)
        if record is not None and not self._is_own(record):
            raise Fenced(f"another runner has taken over engine {self._id}")
        if record is not None and record.state is EngineState.DEAD:
            raise self._declared_dead(record)
        return found is not None, record

    def write(self, record: Engine, guards: Sequence[Compare] = ()) -> Engine:
        """Writes the record, and returns what is there then (``requested``): in one transaction, unless somebody else
        has changed the record since this runner saw it. Raises EtcdUnavailable, Fenced when the epoch is over, another
        runner has taken over, the leader has declared the engine dead or the record was deleted, and Conflict when one
        of the ``guards`` does not hold."""
        written, superseded = record, False
        seen, self._seen = self._seen, None

        def change(raw: bytes | None) -> bytes:
            nonlocal written, superseded
            written = record
            if raw is None and self._existed:
                superseded = True
                raise Fenced(f"the record of engine {self._id} was deleted: a newer driver has no such engine")
            before = decode_bytes(raw, Engine) if raw else None  # of a record that cannot be read: it is ours to write
            if before and not self._is_own(before):
                if before.epoch >= self._epoch:
                    superseded = True
                    raise Fenced(f"another runner has taken over engine {self._id}")
                before = None  # of the same external engine under an earlier driver
            if before and before.state is EngineState.DEAD and not record.state.ended:
                superseded = True
                raise self._declared_dead(before)
            if before is not None and (written := requested(before, record)) is before:
                return raw or b""
            return written.encode()

        try:
            self._seen = self._etcd.update_from(
                seen or self._etcd.get(self._key), self._key, change,
                guards=[fencing.epoch_guard(self._keys, self._epoch), *guards])
            self._existed = True
        except Fenced:
            if superseded or not guards:
                raise
            fencing.require_epoch(self._etcd, self._keys, self._epoch)
            raise Conflict(f"what engine {self._id} was to write is outdated") from None
        return written

    def delete(self) -> bool:
        """Deletes the record; false when another runner of the same engine wrote it. Raises Fenced."""
        found = self._etcd.get(self._key)
        record = readable_one(found, Engine)
        if record is not None and not self._is_own(record):
            return False
        guards = [fencing.epoch_guard(self._keys, self._epoch),
                  Compare.create(self._key, "==", found.create_revision if found else 0)]
        if not self._etcd.txn(guards, [Op.delete(self._key)]).succeeded:
            fencing.require_epoch(self._etcd, self._keys, self._epoch)
            return False
        return True

    def emit(self, kind: EventKind, message: str, *, severity: Severity = Severity.INFO, **data: Any) -> None:
        """Writes an event about the engine. Raises Fenced and EtcdUnavailable."""
        fencing.emit(self._etcd, self._keys, self._epoch, kind, self._id, message, severity=severity,
                     incarnation=self._incarnation, **data)
