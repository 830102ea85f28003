"""Makes a pool what its spec says: starts, drains and replaces engines."""

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
from elastic_rl.driver.external_engines import ExternalEngines
from elastic_rl.driver.placement import PlacedActor, gpus_per_engine, stop_engines
from elastic_rl.driver.plan import Running, StartBudget, plan
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.engine.actor import EngineActor
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, PoolSpec, PoolStatus, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.leftovers import file_tag, remove_files

log = logging.getLogger(__name__)


@dataclass
class _Slot:
    """An engine that this driver started. ``done`` resolves when the engine's runner returned or its process died."""

    placed: PlacedActor
    done: ray.ObjectRef
    started_at: float
    was_ready: bool = False
    draining: bool = False
    killed_because: str = ""
    """Reason of the restart request for which this driver killed it."""


class EnginePool:
    """Level-triggered: each ``reconcile`` reads etcd and Ray again, and keeps only handles in memory."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: Callable[[str], None],
                 name: str = "rollout") -> None:
        self.ctx, self.etcd, self.keys, self.name, self._report_phase = ctx, etcd, ctx.keys, name, report_phase
        self._slots: dict[str, _Slot] = {}
        self._budget = StartBudget()
        self._status: PoolStatus | None = None
        self._last_desired = ctx.config.rollout.engines
        self._external = ExternalEngines(ctx, etcd, report_phase, name)

    def take_over(self) -> None:
        """Writes the pool's spec if there is none, and deletes the records of engines of older epochs, which died with
        their driver. Raises Fenced."""
        key = self.keys.pool_spec(self.name)
        spec = PoolSpec(name=self.name, desired=self.ctx.config.rollout.engines)
        self.etcd.txn([Compare.absent(key), fencing.epoch_guard(self.keys, self.ctx.epoch)],
                      [Op.put(key, spec.encode())])
        for engine in self._records().values():
            if engine.epoch < self.ctx.epoch:
                self._write(Op.delete(self.keys.engine(engine.id)))

    def reconcile(self, restarts: Mapping[str, RestartRequest]) -> None:
        """One pass; ``restarts`` are the open restart requests, by target. Raises Fenced and EtcdUnavailable."""
        for engine_id, slot in self._slots.items():
            if (request := restarts.get(engine_target(engine_id))) is not None:
                self._kill(slot, engine_id, request)
        self._reap()
        records = self._records()
        running = [self._as_running(i, records.get(i)) for i in self._slots]
        for engine_id, slot in self._slots.items():
            state = records[engine_id].state if engine_id in records else None
            if state is EngineState.READY and not slot.was_ready:
                slot.was_ready = True
                self._budget = self._budget.after_success()
            if state is EngineState.DRAINING and not slot.draining:
                slot.draining = True  # the leader wrote it into the record, which a starting engine does not read
                slot.placed.actor.drain.remote()
        todo = plan(self._desired(), running, may_start=self.ctx.config.coordinator.max_engines
                    if self._budget.open(time.monotonic()) else 0)
        for _ in range(todo.start):
            self._start()
        for engine_id in todo.drain:
            self._drain(engine_id, records.get(engine_id))
        self._write_status(running, self._external.reconcile(restarts, records))

    def close(self) -> None:
        """Ends every engine that this driver started, and stops serving external ones."""
        self._external.close()
        stop_engines(self._slots.values())
        self._slots.clear()

    # -- one engine ---------------------------------------------------------------------------------------------
    def _start(self) -> None:
        engine_id = f"{self.name}-{uuid.uuid4().hex[:6]}"
        self._report_phase(PlacedActor.WAITING)
        placed = PlacedActor(engine_id, EngineActor, self.ctx, engine_id, cpus=1.0,
                             gpus=gpus_per_engine(self.ctx.config), timeout_s=self.ctx.config.engine.start_timeout_s)
        self._slots[engine_id] = _Slot(placed, placed.actor.run.remote(), time.time())
        self._emit("engine.starting", engine_id, f"engine {engine_id} is starting")

    def _drain(self, engine_id: str, record: Engine | None) -> None:
        self._emit("engine.draining", engine_id, f"engine {engine_id} leaves the pool")
        slot = self._slots[engine_id]
        slot.draining = True
        slot.placed.actor.drain.remote()
        if record:
            self._set_state(record, EngineState.DRAINING)

    def _kill(self, slot: _Slot, engine_id: str, request: RestartRequest) -> None:
        """Ends an engine without asking it, since it may hang. Its server dies with it, and the router sends its
        requests to other engines."""
        slot.killed_because = request.reason or f"restart requested by {request.by}"
        log.warning("ending engine %s: %s", engine_id, slot.killed_because)
        ray.kill(slot.placed.actor)
        ray.wait([slot.done], timeout=10.0)
        deregister(self.etcd, self.keys, [m for m in members(self.etcd, self.keys, ENGINE) if m.id == engine_id])
        acknowledge(self.etcd, self.keys, request, fencing.epoch_guard(self.keys, self.ctx.epoch))

    def _set_state(self, record: Engine, state: EngineState) -> None:
        def change(raw: bytes | None) -> bytes | None:
            return Engine.decode(raw).replace(state=state, updated_at=time.time()).encode() if raw else None

        self.etcd.update(self.keys.engine(record.id), change,
                         guards=[fencing.epoch_guard(self.keys, self.ctx.epoch)])

    def _reap(self) -> None:
        """Removes engines that have ended, with the files that a killed one leaves. An engine that ended without a
        request counts as a failure."""
        if not self._slots:
            return
        by_ref = {slot.done: engine_id for engine_id, slot in self._slots.items()}
        ended, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        for ref in ended:
            engine_id = by_ref[ref]
            slot = self._slots[engine_id]
            try:
                ray.get(ref, timeout=5.0)
                crash = ""
            except RayError as e:
                crash = str(e).splitlines()[0]
            record = self._records().get(engine_id)
            drained = record is None or record.state is EngineState.DRAINING
            if not drained:
                log.warning("engine %s ended: %s %s", engine_id, record and record.reason, crash)
                reason = slot.killed_because or (record and record.reason) or crash or "unknown"
                self._emit("engine.replaced", engine_id, f"engine {engine_id} ended ({reason}); replacing it",
                           severity=Severity.WARNING, incarnation=record.incarnation if record else "")
                if not slot.was_ready and not slot.killed_because:
                    self._budget = self._budget.after_failure(time.monotonic())
            self._write(Op.delete(self.keys.engine(engine_id)))
            slot.placed.remove()
            remove_files(file_tag(self.ctx.config.cluster_dir, engine_id))
            del self._slots[engine_id]  # last, so that a pass that etcd interrupts is repeated

    # -- etcd ---------------------------------------------------------------------------------------------------
    def _write(self, op: Op) -> None:
        """Raises Fenced once a newer driver has raised the epoch."""
        fencing.write(self.etcd, self.keys, self.ctx.epoch, op)

    def _emit(self, kind: str, engine_id: str, message: str, *, severity: Severity = Severity.INFO,
              **data: object) -> None:
        fencing.emit(self.etcd, self.keys, self.ctx.epoch, kind, engine_id, message, severity=severity, **data)

    def _records(self) -> dict[str, Engine]:
        items, _ = self.etcd.range(self.keys.engines_prefix())
        return {e.id: e for e, _ in readable(items, Engine) if e.pool == self.name}

    def _as_running(self, engine_id: str, record: Engine | None) -> Running:
        state = record.state if record else EngineState.STARTING
        return Running(engine_id, state, self._slots[engine_id].started_at)

    def _desired(self) -> int:
        found = self.etcd.get(self.keys.pool_spec(self.name))
        spec = readable_one(found, PoolSpec)
        if spec is not None or found is None:
            self._last_desired = spec.desired if spec else self.ctx.config.rollout.engines
        return self._last_desired  # of an unreadable record: as it was

    def _write_status(self, running: list[Running], external: int) -> None:
        count = {s: sum(1 for r in running if r.state is s) for s in EngineState}
        status = PoolStatus(name=self.name, ready=count[EngineState.READY], draining=count[EngineState.DRAINING],
                            starting=count[EngineState.STARTING] + count[EngineState.SYNCING], external=external)
        if status != self._status:
            self._write(Op.put(self.keys.pool_status(self.name), status.encode()))
            self._status = status
