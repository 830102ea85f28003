"""Carries out a pool's spec: starts, drains and replaces engines until the pool is what the operator asked for."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from elastic_rl.coordinator.membership.registry import ENGINE
from elastic_rl.coordinator.targets import engine_target
from elastic_rl.driver.external_engines import AdoptedEngines
from elastic_rl.driver.placement import PlacedActor, gpus_per_engine
from elastic_rl.driver.plan import Running, StartBudget, plan
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.engine.actor import EngineActor
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, PoolSpec, PoolStatus, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext

log = logging.getLogger(__name__)


@dataclass
class _Slot:
    """An engine this driver started. ``done`` resolves when the engine's runner returned or its process died."""

    placed: PlacedActor
    done: ray.ObjectRef
    started_at: float
    was_ready: bool = False
    told_to_drain: bool = False
    ended_for: str = ""
    """Why this driver ended it, where it did."""


class EnginePool:
    """Level-triggered: each ``reconcile`` looks at etcd and at Ray anew, and keeps only handles in memory."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, sign: Callable[[str], None], name: str = "rollout") -> None:
        self.ctx, self.etcd, self.keys, self.name, self._sign = ctx, etcd, ctx.keys, name, sign
        self._slots: dict[str, _Slot] = {}
        self._budget = StartBudget()
        self._status: PoolStatus | None = None
        self._adopted = AdoptedEngines(ctx, etcd, sign, name)

    def adopt(self) -> None:
        """Writes the first spec if there is none and forgets engines of older epochs: they died with their driver."""
        key = self.keys.pool_spec(self.name)
        spec = PoolSpec(name=self.name, desired=self.ctx.config.rollout.engines)
        self.etcd.txn([Compare.absent(key), fencing.epoch_guard(self.keys, self.ctx.epoch)],
                       [Op.put(key, spec.encode())])
        for engine in self._records().values():
            if engine.epoch < self.ctx.epoch:
                self._write(Op.delete(self.keys.engine(engine.id)))

    def reconcile(self, wishes: Mapping[str, RestartRequest]) -> None:
        """One look; ``wishes`` are the open restarts, by target."""
        for engine_id, slot in self._slots.items():
            if (wish := wishes.get(engine_target(engine_id))) is not None:
                self._end(slot, engine_id, wish)
        self._reap()
        records = self._records()
        running = [self._as_running(i, records.get(i)) for i in self._slots]
        for engine_id, slot in self._slots.items():
            state = records[engine_id].state if engine_id in records else None
            if state is EngineState.READY and not slot.was_ready:
                slot.was_ready = True
                self._budget = self._budget.after_success()
            if state is EngineState.DRAINING and not slot.told_to_drain:
                slot.told_to_drain = True  # somebody wrote it into the record; a server that starts does not look there
                slot.placed.actor.drain.remote()
        todo = plan(self._desired(), running, may_start=self.ctx.config.coordinator.max_engines
                    if self._budget.open(time.time()) else 0)
        for _ in range(todo.start):
            self._start()
        for engine_id in todo.drain:
            self._drain(engine_id, records.get(engine_id))
        self._write_status(running, self._adopted.reconcile(wishes, records))

    def close(self) -> None:
        self._adopted.close()
        for slot in self._slots.values():
            slot.placed.actor.stop.remote()
        if self._slots:
            ray.wait([s.done for s in self._slots.values()], num_returns=len(self._slots), timeout=10.0)
        for slot in self._slots.values():
            slot.placed.remove()
        self._slots.clear()

    # -- one engine ---------------------------------------------------------------------------------------------
    def _start(self) -> None:
        engine_id = f"{self.name}-{uuid.uuid4().hex[:6]}"
        self._sign(PlacedActor.WAITING)
        placed = PlacedActor(engine_id, EngineActor, self.ctx, engine_id, cpus=1.0,
                             gpus=gpus_per_engine(self.ctx.config),
                        timeout_s=self.ctx.config.engine.start_timeout_s)
        self._slots[engine_id] = _Slot(placed, placed.actor.run.remote(), time.time())
        events.emit(self.etcd, self.keys, "engine.starting", engine_id, f"engine {engine_id} is starting")

    def _drain(self, engine_id: str, record: Engine | None) -> None:
        events.emit(self.etcd, self.keys, "engine.draining", engine_id, f"engine {engine_id} leaves the pool")
        slot = self._slots[engine_id]
        slot.told_to_drain = True
        slot.placed.actor.drain.remote()
        if record:
            self._set_state(record, EngineState.DRAINING)

    def _end(self, slot: _Slot, engine_id: str, wish: RestartRequest) -> None:
        """Ends an engine that may hang: it is not asked. Its server dies with it, and the router's other workers take
        its requests."""
        slot.ended_for = wish.reason or f"restart wanted by {wish.by}"
        log.warning("ending engine %s: %s", engine_id, slot.ended_for)
        ray.kill(slot.placed.actor)
        ray.wait([slot.done], timeout=10.0)
        deregister(self.etcd, self.keys, [m for m in members(self.etcd, self.keys, ENGINE) if m.id == engine_id])
        acknowledge(self.etcd, self.keys, wish, fencing.epoch_guard(self.keys, self.ctx.epoch))

    def _set_state(self, record: Engine, state: EngineState) -> None:
        def change(raw: bytes | None) -> bytes | None:
            return Engine.decode(raw).replace(state=state, updated_at=time.time()).encode() if raw else None
        self.etcd.update(self.keys.engine(record.id), change,
                          guards=[fencing.epoch_guard(self.keys, self.ctx.epoch)])

    def _reap(self) -> None:
        """Takes away what has ended; an engine that ended without being asked to counts as a failure."""
        if not self._slots:
            return
        by_ref = {slot.done: engine_id for engine_id, slot in self._slots.items()}
        ended, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        for ref in ended:
            engine_id = by_ref[ref]
            slot = self._slots.pop(engine_id)
            try:
                ray.get(ref, timeout=5.0)
                reason = ""
            except RayError as e:
                reason = str(e).splitlines()[0]
            record = self._records().get(engine_id)
            drained = record is None or record.state is EngineState.DRAINING
            if not drained:
                log.warning("engine %s ended: %s %s", engine_id, record and record.reason, reason)
                why = slot.ended_for or (record and record.reason) or reason or "unknown"
                events.emit(self.etcd, self.keys, "engine.replaced", engine_id, severity=Severity.WARNING,
                            message=f"engine {engine_id} ended ({why}); replacing it")
                if not slot.was_ready and not slot.ended_for:
                    self._budget = self._budget.after_failure(time.time())
            slot.placed.remove()
            self._write(Op.delete(self.keys.engine(engine_id)))

    # -- etcd ---------------------------------------------------------------------------------------------------
    def _write(self, op: Op) -> None:
        """Raises Fenced once a newer driver has begun its epoch: this one then ends and touches nothing more."""
        fencing.write(self.etcd, self.keys, self.ctx.epoch, op)

    def _records(self) -> dict[str, Engine]:
        items, _ = self.etcd.range(self.keys.engines_prefix())
        return {e.id: e for e in (Engine.decode(kv.value) for kv in items) if e.pool == self.name}

    def _as_running(self, engine_id: str, record: Engine | None) -> Running:
        state = record.state if record else EngineState.STARTING
        return Running(engine_id, state, self._slots[engine_id].started_at)

    def _desired(self) -> int:
        found = self.etcd.get(self.keys.pool_spec(self.name))
        return PoolSpec.decode(found.value).desired if found else self.ctx.config.rollout.engines

    def _write_status(self, running: list[Running], adopted: int) -> None:
        count = {s: sum(1 for r in running if r.state is s) for s in EngineState}
        status = PoolStatus(name=self.name, ready=count[EngineState.READY], draining=count[EngineState.DRAINING],
                            starting=count[EngineState.STARTING] + count[EngineState.SYNCING], external=adopted)
        if status != self._status:
            self._write(Op.put(self.keys.pool_status(self.name), status.encode()))
            self._status = status
