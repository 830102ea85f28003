"""Engines whose servers someone else runs: starts a runner for each registered server, and stops it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from elastic_rl.coordinator.membership.registry import ENGINE
from elastic_rl.coordinator.targets import engine_target
from elastic_rl.driver.placement import PlacedActor, stop_engines
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.engine.actor import EngineActor
from elastic_rl.engine.router import RouterClient
from elastic_rl.errors import DeadlineExceeded, EngineFailed, PreflightFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext

log = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT_S = 10.0
_ROUTER_TIMEOUT_S = 5.0
_KEEP_ENDED_S = 600.0
"""How long an ended registration can be read."""


@dataclass
class _Served:
    """A server with the engine that this driver runs for it. ``done`` resolves when that engine has ended."""

    registration: ExternalEngine
    placed: PlacedActor
    done: ray.ObjectRef
    draining: bool = False
    killed_because: str = ""


class ExternalEngines:
    """Level-triggered, as the pool. An engine that ends is not replaced: its registration ends with it."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: Callable[[str], None], pool: str) -> None:
        self._ctx, self._etcd, self._keys, self._pool = ctx, etcd, ctx.keys, pool
        self._report_phase = report_phase
        self._served: dict[str, _Served] = {}

    def reconcile(self, restarts: Mapping[str, RestartRequest], records: Mapping[str, Engine]) -> int:
        """One pass; returns how many are ready. ``restarts``: open restart requests, by target. ``records``: of the
        pool's engines. Raises Fenced and EtcdUnavailable."""
        for engine_id, served in self._served.items():
            if (request := restarts.get(engine_target(engine_id))) is not None:
                self._kill(served, request)
        self._reap()
        registrations = self._registrations()
        for engine_id, served in self._served.items():
            record = records.get(engine_id)
            leaves = engine_id not in registrations or (
                record is not None and record.state is EngineState.DRAINING)
            if leaves and not served.draining:
                served.draining = True
                served.placed.actor.drain.remote()
        for engine_id, registration in registrations.items():
            if engine_id not in self._served:
                self._serve(registration)
        return sum(engine_id in self._served and e.state is EngineState.READY for engine_id, e in records.items())

    def close(self) -> None:
        """Detaches from every server; the registrations stay, for the next driver."""
        stop_engines(self._served.values())
        self._served.clear()

    def _registrations(self) -> dict[str, ExternalEngine]:
        """Registrations of the pool that have not ended, by engine. Deletes those that ended long ago."""
        found: dict[str, ExternalEngine] = {}
        for registration, kv in readable(self._etcd.range(self._keys.external_engines_prefix())[0], ExternalEngine):
            if registration.pool != self._pool:
                continue
            if not registration.ended:
                found[registration.engine] = registration
            elif time.time() - registration.ended_at > _KEEP_ENDED_S:
                self._delete(kv)
        return found

    def _delete(self, kv: KeyValue) -> None:
        guards = [fencing.epoch_guard(self._keys, self._ctx.epoch), Compare.mod(kv.key, "==", kv.mod_revision)]
        self._etcd.txn(guards, [Op.delete(kv.key)])

    # -- one engine ---------------------------------------------------------------------------------------------
    def _serve(self, registration: ExternalEngine) -> None:
        engine_id = registration.engine
        self._report_phase(PlacedActor.WAITING)
        self._deregister(engine_id)  # a member of an older epoch has the same name
        try:
            placed = PlacedActor(engine_id, EngineActor, self._ctx, engine_id, self._pool, registration.url,
                                 cpus=1.0, gpus=0, timeout_s=_PLACEMENT_TIMEOUT_S)
        except PreflightFailed as e:
            self._end_registration(registration, e.message)
            return
        self._served[engine_id] = _Served(registration, placed, placed.actor.run.remote())
        self._emit("engine.starting", engine_id, f"engine {engine_id} is served by {registration.url}")

    def _kill(self, served: _Served, request: RestartRequest) -> None:
        """Detaches at once, without asking the engine, which may hang."""
        served.killed_because = request.reason or f"restart requested by {request.by}"
        ray.kill(served.placed.actor)
        ray.wait([served.done], timeout=10.0)
        acknowledge(self._etcd, self._keys, request, fencing.epoch_guard(self._keys, self._ctx.epoch))

    def _reap(self) -> None:
        """Removes engines that have ended."""
        by_ref = {served.done: engine_id for engine_id, served in self._served.items()}
        ended, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0) if by_ref else ([], [])
        for ref in ended:
            served = self._served[engine_id := by_ref[ref]]
            crash = ""
            try:
                ray.get(ref, timeout=5.0)
            except RayError as e:
                crash = served.killed_because or str(e).splitlines()[0]
                self._clean_up_after_crash(served.registration, crash)
            found = self._etcd.get(self._keys.engine(engine_id))
            if not served.draining and (crash or found is not None):  # an engine that drained leaves no record
                record = readable_one(found, Engine)
                reason = record.reason if record else ""
                self._end_registration(served.registration, crash or reason or "unknown")
            fencing.write(self._etcd, self._keys, self._ctx.epoch, Op.delete(self._keys.engine(engine_id)))
            served.placed.remove()
            del self._served[engine_id]  # last, so that a pass that etcd interrupts is repeated

    def _clean_up_after_crash(self, registration: ExternalEngine, crash: str) -> None:
        """Does what the runner could not do: its server lives on, and must get no requests without a runner."""
        engine_id = registration.engine
        try:
            RouterClient(self._ctx.router_url).remove(registration.url, timeout_s=_ROUTER_TIMEOUT_S)
        except (EngineFailed, DeadlineExceeded) as e:
            log.warning("engine %s could not be removed from the router: %s", engine_id, e)
        found = self._etcd.get(self._keys.engine(engine_id))
        record = readable_one(found, Engine)
        incarnation = record.incarnation if record else ""
        self._emit("engine.dead", engine_id, f"engine {engine_id}: {crash}", severity=Severity.ERROR,
                   incarnation=incarnation)
        self._deregister(engine_id)

    def _end_registration(self, registration: ExternalEngine, reason: str) -> None:
        def change(raw: bytes | None) -> bytes | None:
            now = ExternalEngine.decode(raw) if raw else None
            if now is None or now.engine != registration.engine:
                return raw
            return now.replace(ended=reason, ended_at=time.time()).encode()

        self._etcd.update(self._keys.external_engine(registration.url), change,
                          guards=[fencing.epoch_guard(self._keys, self._ctx.epoch)])
        log.warning("external engine %s ended: %s", registration.engine, reason)
        self._emit("engine.removed", registration.engine, severity=Severity.WARNING, message=
                   f"external engine {registration.engine} ({registration.url}) ended ({reason}); it is not replaced")

    def _deregister(self, engine_id: str) -> None:
        deregister(self._etcd, self._keys, [m for m in members(self._etcd, self._keys, ENGINE) if m.id == engine_id])

    def _emit(self, kind: str, engine_id: str, message: str, *, severity: Severity = Severity.INFO,
              **data: object) -> None:
        fencing.emit(self._etcd, self._keys, self._ctx.epoch, kind, engine_id, message, severity=severity, **data)
