"""Begins and cancels operations: each in one transaction with the request that it stands for, under the leader's
fencing token. From then on the leader's loop follows them (``state_machine.advance``)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from elastic_rl.config import ROLLOUT_POOL, Config, EngineConfig
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator import autoscalers, etags, pools
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.leader_transaction import IdempotencyClaim, LeaderTransaction
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.operations import external_engines, state_machine
from elastic_rl.coordinator.problems import Problem, concurrent_modification, no_pool, not_found
from elastic_rl.coordinator.targets import DRIVER, JOB, engine_target, name_of, pool_target
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    Event,
    ExternalEngine,
    Operation,
    OperationKind,
    PoolSpec,
    Record,
    RestartRequest,
)
from elastic_rl.runtime.words import counted

R = TypeVar("R", bound=Record)

_TRIES = 8
_MAX_OPERATIONS = 1000
"""Operations in etcd beyond which none is begun. The leader keeps 200 that have ended; the others run."""
_ENGINE_GRACE_S = 30.0
"""Time for an engine to end, on top of what its replacement may take to start."""
_ROLE_RESTART_S = 120.0
_TRAINER_GRACE_S = 60.0
_DRIVER_RESTART_S = 120.0
"""Time for a driver to end and for the next one to import what it needs, to connect, and to make a pass."""
_EVENT_KINDS = {OperationKind.SCALE: event_kinds.POOL_SCALED, OperationKind.DRAIN: event_kinds.ENGINE_DRAINING,
                OperationKind.RESTART: event_kinds.RESTART_REQUESTED,
                OperationKind.REGISTER: event_kinds.ENGINE_REGISTERING}
_TARGETS = f"engines/ID, roles/NAME, {', '.join(TRAINER_GROUPS)}, driver or job"


Draft = tuple[Operation, WriteSet, Event]
"""An operation that is about to begin, what its transaction holds besides it, and its event."""


class OperationService:
    """Begins and cancels operations. Every method but ``get`` needs the leadership, and raises a 503 problem without.

    ``dry_run`` returns the operation that would begin, and writes nothing. Beginning one raises problems also: 409 when
    records keep changing, when the ``claim`` was used already or when too many operations run; 504 when the answer of
    etcd was lost.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, election: Election, cfg: Config, *,
                 clock: Callable[[], float] = time.time) -> None:
        self._etcd, self._keys, self._election, self._cfg, self._clock = etcd, keys, election, cfg, clock

    # -- beginning ----------------------------------------------------------------------------------------------
    def scale(self, pool: str, desired: int, *, by: str, reason: str = "", if_revision: int | None = None,
              dry_run: bool = False, claim: IdempotencyClaim | None = None,
              also: Callable[[Operation], WriteSet] | None = None) -> Operation:
        """Scales a pool to ``desired`` engines. ``reason``: for the event. ``also``: what else the operation's
        transaction holds. Raises problems: 404; 422 for a number out of range; 409 for one beyond the bounds of the
        pool's autoscaling; 412 when the pool was changed since ``if_revision``."""
        pools.check_desired(desired, self._cfg.coordinator.max_engines)

        def draft() -> Draft:
            key, writes = self._keys.pool_spec(pool), WriteSet()
            found = self._etcd.get(key)
            if found is None:
                raise no_pool(pool)
            etags.check_revision(found.mod_revision, if_revision, "pool")
            writes.require(autoscalers.require_within(self._etcd, self._keys, self._cfg, pool, desired))
            old = _decode(found, PoolSpec)
            if old.desired == desired:
                writes.require(Compare.mod(key, "==", found.mod_revision))  # its ETag does not change
            else:
                writes.put(key, found.mod_revision, old.replace(desired=desired))
            engine = self._engine_config(pool)
            op = self._operation(OperationKind.SCALE, pool_target(pool), by,
                                 engine.start_timeout_s + engine.drain_timeout_s, desired=desired,
                                 previous=old.desired)
            if also is not None:
                writes.merge(also(op))
            because = f": {reason}" if reason else ""
            return op.replace(total=desired), writes, self._event(
                op, pool, f"{pool}: {old.desired} → {counted(desired, 'engine')}, by {by}{because}",
                previous=old.desired, desired=desired)

        return self._begin(draft, dry_run, claim)

    def drain(self, engine_id: str, *, replace: bool = True, by: str, dry_run: bool = False,
              claim: IdempotencyClaim | None = None) -> Operation:
        """Has an engine finish its requests and leave. Without ``replace`` the pool's desired number is lowered by one;
        an external engine is deregistered and never replaced, and its server runs on. Raises problems: 404; 409 for an
        engine that is leaving or has ended, or that is its pool's last."""

        def draft() -> Draft:
            writes = WriteSet()
            registration = external_engines.registration_of(self._etcd, self._keys, engine_id)
            if registration is not None and self._etcd.get(self._keys.engine(engine_id)) is None:
                pool, external = _decode(registration, ExternalEngine).pool, True  # it waits for its host
                writes.require(Compare.absent(self._keys.engine(engine_id)))
            else:
                found, engine = self._engine(engine_id)
                if not engine.state.stays:
                    raise Problem(409, "conflict", "The engine cannot be drained",
                                  f"engine {engine_id} is {engine.state} already")
                writes.put(found.key, found.mod_revision,
                           engine.replace(state=EngineState.DRAINING, updated_at=self._clock()))
                pool, external = engine.pool, engine.external
            if registration is not None:
                writes.delete(registration.key, registration.mod_revision)
            elif not replace and not external:
                self._shrink(pool, writes)
            cfg, replaced = self._engine_config(pool), replace and not external
            op = self._operation(OperationKind.DRAIN, engine_target(engine_id), by, cfg.drain_timeout_s +
                                 (cfg.start_timeout_s if replaced else _ENGINE_GRACE_S), pool=pool, replace=replaced)
            return op, writes, self._event(op, engine_id, f"engine {engine_id} leaves pool {pool}, by {by}" +
                                           ("" if replaced else "; it is not replaced"))

        return self._begin(draft, dry_run, claim)

    def register(self, url: str, pool: str, *, host: str = "", by: str, dry_run: bool = False,
                 claim: IdempotencyClaim | None = None) -> Operation:
        """Registers a server that someone else runs as an engine of a pool, beyond the pool's desired number. ``host``:
        name of the host that it is on; empty: that of the run. Raises problems: 422 for what is no URL of a server; 404
        for the pool and the host; 409 for a server that is registered already, and for a host that takes nothing more.
        """
        url = external_engines.normalized_url(url)

        def draft() -> Draft:
            writes = WriteSet()
            if self._etcd.get(self._keys.pool_spec(pool)) is None:
                raise no_pool(pool)
            if host:
                external_engines.require_open_host(self._etcd, ClusterKeys(self._cfg.cluster_name), host)
            found = external_engines.free_registration(self._etcd, self._keys, url, self._cfg.coordinator.max_engines)
            engine_id = f"{pool}-external-{secrets.token_hex(3)}"
            writes.put(self._keys.external_engine(url), _revision(found),
                       ExternalEngine(engine=engine_id, pool=pool, url=url, host=host, by=by, at=self._clock()))
            op = self._operation(OperationKind.REGISTER, engine_target(engine_id), by,
                                 self._engine_config(pool).start_timeout_s, pool=pool, url=url,
                                 **({"host": host} if host else {}))
            where = f" on host {host}" if host else ""
            return op.replace(total=2), writes, self._event(
                op, engine_id, f"{url}{where} joins pool {pool} as engine {engine_id}, by {by}", url=url)

        return self._begin(draft, dry_run, claim)

    def restart(self, target: str, *, reason: str = "", by: str, dry_run: bool = False,
                claim: IdempotencyClaim | None = None,
                also: Callable[[Operation], WriteSet] | None = None) -> Operation:
        """Restarts ``engines/ID``, ``roles/NAME``, a trainer group by its name, ``driver`` (the next one takes over
        what runs), or ``job`` (the whole compute plane). ``also``: what else the operation's transaction holds. Raises
        problems: 404 for an engine, role or group that is not there; 422 for another target."""

        def draft() -> Draft:
            writes = WriteSet()
            params, timeout_s = self._restart_params(target, writes)
            key = self._keys.restart(target)
            found = self._etcd.get(key)
            before = _decode(found, RestartRequest) if found else RestartRequest(target=target, generation=0)
            generation = before.generation + 1
            writes.put(key, _revision(found), before.replace(
                generation=generation, reason=reason, by=by, at=self._clock(),
                epoch=int(params.get("ended", before.epoch))))
            op = self._operation(OperationKind.RESTART, target, by, timeout_s, generation=generation, reason=reason,
                                 **params)
            if also is not None:
                writes.merge(also(op))
            because = f": {reason}" if reason else ""
            return op, writes, self._event(op, target, f"restart of {target} requested by {by}{because}", reason=reason)

        return self._begin(draft, dry_run, claim)

    def _restart_params(self, target: str, writes: WriteSet) -> tuple[dict[str, Any], float]:
        """What the operation needs to see that the part is back, and the longest time for it. A restart of the job ends
        its epoch in the same transaction: from then on nothing of the old one can write."""
        kind, _, name = target.partition("/")
        groups = {group.name: self._cfg.of_group(group).trainer for group in self._cfg.trainer_groups}
        if kind == "engines" and name:
            pool = self._engine(name)[1].pool
            return {"pool": pool}, self._engine_config(pool).start_timeout_s + _ENGINE_GRACE_S
        if kind == "roles" and name:
            replicas = self._incarnations(name)
            if not replicas:
                raise not_found("role", name)
            return {"before": replicas}, _ROLE_RESTART_S
        if target in groups:
            return {"before": self._incarnations(target)}, groups[target].start_timeout_s + _TRAINER_GRACE_S
        if target == DRIVER:
            return {"before": self._incarnations(registry.DRIVER)}, _DRIVER_RESTART_S
        if target == JOB:
            epoch = fencing.current_epoch(self._etcd, self._keys)
            guard, put = fencing.next_epoch(self._keys, epoch, holder=fencing.GLOBAL_RESTART)
            writes.require(guard)
            writes.add(put)
            return ({"before": [i for group in groups for i in self._incarnations(group)], "ended": epoch},
                    max((t.start_timeout_s for t in groups.values()), default=0.0) + _TRAINER_GRACE_S + max(
                        self._engine_config(pool).start_timeout_s for pool in (ROLLOUT_POOL, *self._cfg.pools)))
        if target in TRAINER_GROUPS:
            raise Problem(404, "not-found", "Not found",
                          f"this job has no group {target}; it has {', '.join(groups) or 'none'}")
        raise Problem(422, "invalid", "The request is not valid", f"target must be {_TARGETS}, not {target!r}",
                      errors=[{"pointer": "/target", "detail": _TARGETS}])

    def _engine_config(self, pool: str) -> EngineConfig:
        """Settings of a pool's engines."""
        settings = self._cfg.pool_settings("").get(pool)
        return settings.engine if settings else self._cfg.engine

    def _incarnations(self, role: str) -> list[str]:
        return [m.incarnation for m in members(self._etcd, self._keys, role)]

    def _engine(self, engine_id: str) -> tuple[KeyValue, Engine]:
        found = self._etcd.get(self._keys.engine(engine_id))
        if found is None:
            raise not_found("engine", engine_id)
        return found, _decode(found, Engine)

    def _shrink(self, pool: str, writes: WriteSet) -> None:
        key = self._keys.pool_spec(pool)
        found = self._etcd.get(key)
        spec = _decode(found, PoolSpec) if found else None
        if spec is not None:
            writes.require(autoscalers.require_within(self._etcd, self._keys, self._cfg, pool, spec.desired - 1))
        if spec is None or spec.desired <= 1:
            raise Problem(409, "conflict", "The pool would be empty",
                          f"it is the last engine of pool {pool}; drain it with a replacement")
        writes.put(key, _revision(found), spec.replace(desired=spec.desired - 1))

    # -- cancelling ---------------------------------------------------------------------------------------------
    def cancel(self, operation_id: str, *, by: str, dry_run: bool = False) -> Operation:
        """Withdraws an operation's request. One that has ended is returned as it is. Raises problems: 404; 409 for one
        that cannot be withdrawn any more (an engine that drains; a restart that was carried out)."""
        for _ in range(_TRIES):
            found = self._etcd.get(self._keys.operation(operation_id))
            if found is None:
                raise not_found("operation", operation_id)
            op = _decode(found, Operation)
            if op.state.ended:
                return op
            writes = self._withdrawal(op)
            ended = state_machine.cancelled(op, self._clock(), f"cancelled by {by}")
            if dry_run:
                return ended
            writes.put(found.key, found.mod_revision, ended)
            event = events.build(event_kinds.OPERATION_CANCELLED, op.target,
                                 f"{op.kind} of {op.target} cancelled by {by}", operation=op.id, by=by)
            if self._commit(writes, event, None, ""):
                return ended
        raise concurrent_modification()

    def _withdrawal(self, op: Operation) -> WriteSet:
        writes = WriteSet()
        match op.kind:
            case OperationKind.SCALE:
                key = self._keys.pool_spec(name_of(op.target))
                found = self._etcd.get(key)
                spec = _decode(found, PoolSpec) if found else None
                if spec is not None and spec.desired == op.params["desired"]:
                    writes.put(key, _revision(found), spec.replace(desired=int(op.params["previous"])))
            case OperationKind.RESTART:
                key = self._keys.restart(op.target)
                found = self._etcd.get(key)
                request = _decode(found, RestartRequest) if found else None
                generation = int(op.params["generation"])
                if op.target == JOB:
                    raise Problem(409, "conflict", "It is too late to cancel", "the epoch of the run is over already")
                if request is None or request.observed_generation >= generation or request.generation != generation:
                    raise Problem(409, "conflict", "It is too late to cancel", f"{op.target} is being restarted")
                if request.observed_generation == generation - 1:  # else an earlier request is still to be carried out
                    writes.put(key, _revision(found), request.observed(generation))
            case OperationKind.REGISTER:
                found = self._etcd.get(self._keys.external_engine(str(op.params["url"])))
                if found is not None and _decode(found, ExternalEngine).engine == name_of(op.target):
                    writes.delete(found.key, found.mod_revision)
            case OperationKind.DRAIN:
                raise Problem(409, "conflict", "It is too late to cancel",
                              "an engine that drains has been removed from the router; scale the pool instead")
        return writes

    # -- transactions -------------------------------------------------------------------------------------------
    def _operation(self, kind: OperationKind, target: str, by: str, timeout_s: float, **params: object) -> Operation:
        now = self._clock()
        return Operation(id=f"op-{int(now * 1000):013d}-{secrets.token_hex(3)}", kind=kind, target=target, by=by,
                         params=params, created_at=now, updated_at=now, timeout_s=timeout_s,
                         deadline_at=now + timeout_s)

    def _event(self, op: Operation, subject: str, message: str, **data: Any) -> Event:
        return events.build(_EVENT_KINDS[op.kind], subject, message, operation=op.id, by=op.by,
                            replica=self._election.replica, **data)

    def _begin(self, draft: Callable[[], Draft], dry_run: bool, claim: IdempotencyClaim | None) -> Operation:
        for _ in range(_TRIES):
            op, writes, event = draft()
            if dry_run:
                return op.replace(message=event.message)
            if self._etcd.count(self._keys.operations_prefix()) >= _MAX_OPERATIONS:
                raise Problem(409, "conflict", "There are too many operations",
                              f"{_MAX_OPERATIONS} operations run or ended lately; wait for them, or cancel some")
            writes.put(self._keys.operation(op.id), 0, op)
            if self._commit(writes, event, claim, job_path(self._keys.job, "operations", op.id)):
                return op
        raise concurrent_modification()

    def _commit(self, writes: WriteSet, event: Event, claim: IdempotencyClaim | None, location: str) -> bool:
        """Whether the transaction was applied; false when a record changed meanwhile. Raises problems: 503 when this
        replica does not lead; 409 when the ``claim`` was used already; 504 when the outcome is unknown."""
        change = LeaderTransaction.with_event(self._keys, event, writes.compares, writes.ops)
        return bool(change.commit(self._etcd, self._election.writer, claim, location))


def _revision(found: KeyValue | None) -> int:
    return found.mod_revision if found else 0


def _decode(found: KeyValue, kind: type[R]) -> R:
    """Raises a 409 problem for a record that this release cannot read, and so must not replace."""
    unreadable: dict[str, str] = {}
    record = decode(found, kind, unreadable)
    if record is None:
        raise Problem(409, "conflict", "The record cannot be read", f"{found.key}: {unreadable[found.key]}")
    return record
