"""Where operations begin and are cancelled: each in one transaction with the wish that it stands for, under the
leader's fencing token. From there on the leader's loop follows them (``operations.settle``)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from elastic_rl.config import Config
from elastic_rl.coordinator import pools
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.operations import external_engines, state_machine
from elastic_rl.coordinator.problems import Problem, no_leader, not_found
from elastic_rl.coordinator.targets import JOB, TRAINER, engine_target, name_of, pool_target
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.errors import OutcomeUnknown
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    Event,
    ExternalEngine,
    Operation,
    OperationKind,
    PoolSpec,
    RestartRequest,
)

_TRIES = 8
_TURN = {OperationKind.SCALE: "pool.scaled", OperationKind.DRAIN: "engine.draining",
         OperationKind.RESTART: "restart.wanted", OperationKind.ADOPT: "engine.adopting"}


class Once(Protocol):
    """What makes a request count once: conditions and writes of the transaction that carries it out."""

    @property
    def compares(self) -> list[Compare]: ...

    def ops(self, location: str) -> list[Op]: ...


class OperationService:
    """Begins and cancels operations. Every method but ``get`` needs the leadership: it raises a 503 problem without."""

    def __init__(self, etcd: EtcdClient, keys: Keys, election: Election, cfg: Config, *,
                 clock: Callable[[], float] = time.time) -> None:
        self._etcd, self._keys, self._election, self._cfg, self._clock = etcd, keys, election, cfg, clock

    def get(self, operation_id: str) -> Operation:
        """Raises a 404 problem."""
        found = self._etcd.get(self._keys.operation(operation_id))
        if found is None:
            raise not_found("operation", operation_id)
        return Operation.decode(found.value)

    # -- beginning ----------------------------------------------------------------------------------------------
    def scale(self, pool: str, desired: int, *, by: str, if_revision: int | None = None, dry_run: bool = False,
              once: Once | None = None) -> Operation:
        """Brings a pool to ``desired`` engines. Raises problems: 404; 422 for a number that makes no sense; 412 when
        the pool is not the one of ``if_revision`` any more; and those of every beginning (409, 503, 504)."""
        pools.check_desired(desired, self._cfg.coordinator.max_engines)

        def wish() -> tuple[Operation, WriteSet, Event]:
            key, made = self._keys.pool_spec(pool), WriteSet()
            found = self._etcd.get(key)
            if found is None:
                raise not_found("pool", pool)
            pools.check_revision(found, if_revision)
            old = PoolSpec.decode(found.value)
            if old.desired == desired:
                made.compares.append(Compare.mod(key, "==", found.mod_revision))  # its ETag stays as it is
            else:
                made.put(key, _revision(found), old.replace(desired=desired))
            engine = self._cfg.engine
            op = self._operation(OperationKind.SCALE, pool_target(pool), by,
                                 engine.start_timeout_s + engine.drain_timeout_s, desired=desired,
                                 previous=old.desired)
            return op.replace(total=desired), made, self._event(
                op, pool, f"{pool}: {old.desired} → {desired} engines, by {by}", previous=old.desired, desired=desired)

        return self._begin(wish, dry_run, once)

    def drain(self, engine_id: str, *, replace: bool = True, by: str, dry_run: bool = False,
              once: Once | None = None) -> Operation:
        """Lets an engine finish its requests and leave. Without ``replace`` the pool is wanted one smaller from then
        on; an adopted engine is never replaced, and its server goes on. Raises problems: 404; 409 for an engine that is
        leaving or has ended, or that is its pool's last."""

        def wish() -> tuple[Operation, WriteSet, Event]:
            made = WriteSet()
            found, engine = self._engine(engine_id)
            if engine.state not in (EngineState.STARTING, EngineState.SYNCING, EngineState.READY):
                raise Problem(409, "conflict", "The engine cannot be drained",
                              f"engine {engine_id} is {engine.state} already")
            made.put(found.key, found.mod_revision,
                     engine.replace(state=EngineState.DRAINING, updated_at=self._clock()))
            if engine.adopted:
                if (wish := external_engines.wish_of(self._etcd, self._keys, engine)) is not None:
                    made.delete(wish.key, wish.mod_revision)
            elif not replace:
                self._shrink(made, engine.pool)
            cfg, replaced = self._cfg.engine, replace and not engine.adopted
            op = self._operation(OperationKind.DRAIN, engine_target(engine_id), by, cfg.drain_timeout_s +
                                 (cfg.start_timeout_s if replaced else 30.0), pool=engine.pool, replace=replaced)
            return op, made, self._event(op, engine_id, f"engine {engine_id} leaves pool {engine.pool}, by {by}" +
                                         ("" if replaced else "; it is not replaced"))

        return self._begin(wish, dry_run, once)

    def adopt(self, url: str, pool: str, *, by: str, dry_run: bool = False, once: Once | None = None) -> Operation:
        """Has a server that somebody else runs take part in a pool, beyond the number that is wanted of it. Raises
        problems: 422 for what is no URL of a server; 404 for the pool; 409 for a server that takes part already."""
        url = external_engines.check_url(url)

        def wish() -> tuple[Operation, WriteSet, Event]:
            made = WriteSet()
            if self._etcd.get(self._keys.pool_spec(pool)) is None:
                raise not_found("pool", pool)
            found = external_engines.vacant(self._etcd, self._keys, url, self._cfg.coordinator.max_engines)
            engine_id = f"{pool}-adopted-{secrets.token_hex(3)}"
            made.put(self._keys.adoption(url), _revision(found),
                     ExternalEngine(engine=engine_id, pool=pool, url=url, by=by, at=self._clock()))
            op = self._operation(OperationKind.ADOPT, engine_target(engine_id), by,
                                 self._cfg.engine.start_timeout_s, pool=pool, url=url)
            return op.replace(total=2), made, self._event(
                op, engine_id, f"{url} joins pool {pool} as engine {engine_id}, by {by}", url=url)

        return self._begin(wish, dry_run, once)

    def restart(self, target: str, *, reason: str = "", by: str, dry_run: bool = False,
                once: Once | None = None, also: WriteSet | None = None) -> Operation:
        """Starts ``engines/ID``, ``roles/NAME``, ``trainer`` or ``job`` (the whole compute plane) anew. Raises
        problems: 404 for an engine or role that is not there; 422 for another target."""

        def wish() -> tuple[Operation, WriteSet, Event]:
            made = WriteSet()
            if also is not None:
                made.merge(also)
            facts, timeout_s = self._facts(target, made)
            key = self._keys.restart(target)
            found = self._etcd.get(key)
            before = RestartRequest.decode(found.value) if found else RestartRequest(target=target, wanted=0)
            number = before.wanted + 1
            made.put(key, _revision(found), before.replace(wanted=number, reason=reason, by=by, at=self._clock(),
                                            epoch=int(facts.get("ended", before.epoch))))
            op = self._operation(OperationKind.RESTART, target, by, timeout_s, number=number, reason=reason, **facts)
            because = f": {reason}" if reason else ""
            return op, made, self._event(op, target, f"{target} is to start anew, by {by}{because}", reason=reason)

        return self._begin(wish, dry_run, once)

    def _facts(self, target: str, made: WriteSet) -> tuple[dict[str, Any], float]:
        """What tells later that a restarted part is back, and the longest time for it. To start the job anew ends its
        epoch in the same transaction: from then on nothing of the old one can write."""
        kind, _, name = target.partition("/")
        engine, trainer = self._cfg.engine, self._cfg.trainer
        incarnations = {m.incarnation: m.role for m in members(self._etcd, self._keys)}
        if kind == "engines" and name:
            return {"pool": self._engine(name)[1].pool}, engine.start_timeout_s + 30.0
        if kind == "roles" and name:
            before = [i for i, role in incarnations.items() if role == name]
            if not before:
                raise not_found("role", name)
            return {"before": before}, 120.0
        ranks = [i for i, role in incarnations.items() if role == TRAINER]
        if target == TRAINER:
            return {"before": ranks}, trainer.start_timeout_s + 60.0
        if target == JOB:
            epoch = fencing.current_epoch(self._etcd, self._keys)
            guard, put = fencing.ending(self._keys, epoch, holder="global restart")
            made.compares.append(guard)
            made.ops.append(put)
            return ({"before": ranks, "ended": epoch},
                    trainer.start_timeout_s + engine.start_timeout_s + 60.0)
        raise Problem(422, "invalid", "The request is not valid",
                      f"target must be engines/ID, roles/NAME, trainer or job, not {target!r}",
                      errors=[{"pointer": "/target", "detail": "engines/ID, roles/NAME, trainer or job"}])

    def _engine(self, engine_id: str) -> tuple[KeyValue, Engine]:
        found = self._etcd.get(self._keys.engine(engine_id))
        if found is None:
            raise not_found("engine", engine_id)
        return found, Engine.decode(found.value)

    def _shrink(self, made: WriteSet, pool: str) -> None:
        key = self._keys.pool_spec(pool)
        found = self._etcd.get(key)
        spec = PoolSpec.decode(found.value) if found else None
        if spec is None or spec.desired <= 1:
            raise Problem(409, "conflict", "The pool would be empty",
                          f"it is the last engine of pool {pool}; drain it with a replacement")
        made.put(key, _revision(found), spec.replace(desired=spec.desired - 1))

    # -- cancelling ---------------------------------------------------------------------------------------------
    def cancel(self, operation_id: str, *, by: str, dry_run: bool = False) -> Operation:
        """Takes an operation's wish back. One that has ended is returned as it is. Raises problems: 404; 409 for one
        that cannot be taken back any more (an engine that drains; a restart that has begun)."""
        for _ in range(_TRIES):
            found = self._etcd.get(self._keys.operation(operation_id))
            if found is None:
                raise not_found("operation", operation_id)
            op = Operation.decode(found.value)
            if op.state.ended:
                return op
            made = self._undo(op, by)
            over = state_machine.cancelled(op, self._clock(), f"cancelled by {by}")
            if dry_run:
                return over
            made.put(found.key, found.mod_revision, over)
            event = events.build("operation.cancelled", op.target, f"{op.kind} of {op.target} cancelled by {by}",
                                 operation=op.id, by=by)
            if self._commit(made, event, None, ""):
                return over
        raise _busy()

    def _undo(self, op: Operation, by: str) -> WriteSet:
        made = WriteSet()
        match op.kind:
            case OperationKind.SCALE:
                found = self._etcd.get(self._keys.pool_spec(name_of(op.target)))
                spec = PoolSpec.decode(found.value) if found else None
                if spec is not None and spec.desired == op.params["desired"]:
                    made.put(self._keys.pool_spec(spec.name), _revision(found),
                             spec.replace(desired=int(op.params["previous"])))
            case OperationKind.RESTART:
                key = self._keys.restart(op.target)
                found = self._etcd.get(key)
                wish = RestartRequest.decode(found.value) if found else None
                if wish is None or wish.done >= op.params["number"] or wish.wanted != op.params["number"]:
                    raise Problem(409, "conflict", "It is too late to cancel", f"{op.target} is being started anew")
                made.put(key, _revision(found), wish.replace(wanted=wish.wanted - 1, by=by, at=self._clock()))
            case OperationKind.ADOPT:
                found = self._etcd.get(self._keys.adoption(str(op.params["url"])))
                if found is not None and ExternalEngine.decode(found.value).engine == name_of(op.target):
                    made.delete(found.key, found.mod_revision)
            case OperationKind.DRAIN:
                raise Problem(409, "conflict", "It is too late to cancel",
                              "an engine that drains has been taken out of the router; scale the pool instead")
        return made

    # -- transactions -------------------------------------------------------------------------------------------
    def _operation(self, kind: OperationKind, target: str, by: str, timeout_s: float, **params: object) -> Operation:
        now = self._clock()
        return Operation(id=f"op-{int(now * 1000):013d}-{secrets.token_hex(3)}", kind=kind, target=target, by=by,
                         params=params, created_at=now, updated_at=now, deadline_at=now + timeout_s)

    def _event(self, op: Operation, subject: str, message: str, **data: Any) -> Event:
        return events.build(_TURN[op.kind], subject, message, operation=op.id, by=op.by,
                            replica=self._election.replica, **data)

    def _begin(self, wish: Callable[[], tuple[Operation, WriteSet, Event]], dry_run: bool,
               once: Once | None) -> Operation:
        for _ in range(_TRIES):
            op, made, event = wish()
            if dry_run:
                return op.replace(message=event.message)
            key = self._keys.operation(op.id)
            made.compares.append(Compare.absent(key))
            made.ops.append(Op.put(key, op.encode()))
            if self._commit(made, event, once, f"/v1/operations/{op.id}"):
                return op
        raise _busy()

    def _commit(self, made: WriteSet, event: Event, once: Once | None, location: str) -> bool:
        """Whether the transaction went through; false when a record changed under it. Raises problems: 503 when this
        replica does not lead; 409 when ``once`` says that the same request is carried out already; 504 when nobody can
        tell whether it was applied."""
        if not self._election.is_leader:
            raise no_leader(f"{self._election.replica} does not lead")
        guard: Sequence[Compare] = self._election.guard
        compares, ops = [*guard, *made.compares], [*made.ops, events.put_op(self._keys, event)]
        if once is not None:
            compares, ops = [*compares, *once.compares], [*ops, *once.ops(location)]
        try:
            if self._etcd.txn(compares, ops).succeeded:
                return True
        except OutcomeUnknown:
            if self._etcd.get(self._keys.event(event.id)) is not None:  # the event is the token of this change
                return True
            raise
        if not self._etcd.txn(guard, []).succeeded:
            raise no_leader(f"{self._election.replica} no longer leads")
        if once is not None and not self._etcd.txn(once.compares, []).succeeded:
            raise Problem(409, "conflict", "The same request is being carried out",
                          "a request with this Idempotency-Key was faster; send it again to get its answer")
        return False


def _revision(found: KeyValue | None) -> int:
    return found.mod_revision if found else 0


def _busy() -> Problem:
    return Problem(409, "conflict", "Somebody else changes the same thing all the time", "try again")
