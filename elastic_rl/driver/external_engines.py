"""Engines whose servers someone else runs: starts a runner for each registered server, on its host, and stops it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.coordinator.targets import engine_target
from elastic_rl.driver.host_selection import ExternalPlace, Fate, place_external
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.placement import PlacedActor, Placer, driver_writer, ended
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode_bytes, readable, readable_one
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import host_name
from elastic_rl.runtime.process import SOME_CPU

log = logging.getLogger(__name__)

ENGINE = "elastic_rl.engine.actor:EngineActor"
"""Body of an engine's actor; the driver must not import what it needs, torch above all."""
_END_GRACE_S = 30.0
"""Time for an engine whose drain is over to end its process."""
_KEEP_ENDED_S = 600.0
"""How long an ended registration can be read."""


@dataclass
class _Served:
    """A server with the engine that runs for it."""

    registration: ExternalEngine
    placed: PlacedActor
    draining: bool = False
    ends_because: str = ""
    """Why its registration ends with it although nobody has deregistered it."""
    killed_because: str = ""
    request: RestartRequest | None = None
    """The restart request for which this driver killed it, until it is acknowledged."""


class ExternalEngines:
    """Level-triggered, as the pool. An engine that ends is not replaced: its registration ends with it."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, pool: str, *, unroute: Callable[[str], None],
                 body: type | str = ENGINE) -> None:
        """``unroute(url)``: has the router forget a server whose engine has ended. ``body``: class of an engine's Ray
        actor."""
        self._ctx, self._etcd, self._keys, self._pool, self._unroute = ctx, etcd, ctx.keys, pool, unroute
        self._body, self._kind = body, f"external-engines/{pool}"
        self.run_host = host_name(ctx.config)
        """Name of the host of the driver."""
        self._placer, self._writer = Placer.of(ctx, etcd), driver_writer(ctx, etcd)
        self._served: dict[str, _Served] = {}
        self._waits: dict[str, str] = {}
        """Why servers are not served now, by engine."""

    def take_over(self, records: Mapping[str, Engine]) -> Collection[str]:
        """Adopts the engines of this epoch that run, and ends the registrations of those that have ended while no
        driver ran. Returns the ids of both. ``records``: those of the pool's engines. Raises RayError, Fenced and
        EtcdUnavailable."""
        registrations = self._registrations()
        for placed in self._placer.adopt(self._kind):
            registration = registrations.get(placed.name) or ExternalEngine(engine=placed.name, pool=self._pool, url="")
            self._served.setdefault(placed.name, _Served(registration, placed))
        lost = {engine_id: registration for engine_id, registration in registrations.items()
                if engine_id not in self._served and engine_id in records
                and records[engine_id].epoch == self._ctx.epoch}
        for registration in lost.values():
            self._conclude(registration, "its runner ended while no driver ran")
        return {*self._served, *lost}

    def reconcile(self, restarts: Mapping[str, RestartRequest], records: Mapping[str, Engine],
                  hosts: RayHosts) -> int:
        """One pass; returns how many are ready. ``restarts``: open restart requests, by target. ``records``: the
        records of the pool's engines. Raises Fenced and EtcdUnavailable."""
        for engine_id, served in self._served.items():
            served.placed.enforce()
            if (request := restarts.get(engine_target(engine_id))) is not None and served.request is None:
                served.killed_because = request.reason or f"restart requested by {request.by}"
                served.placed.kill()  # without asking the engine, which may hang
                served.request = request  # after the kill, which etcd may interrupt
        self._reap()
        registrations = {engine_id: self._bound(r) for engine_id, r in self._registrations().items()}
        places = {engine_id: place_external(r.url, r.host, self.run_host, hosts)
                  for engine_id, r in registrations.items()}
        for engine_id, served in list(self._served.items()):
            place, record = places.get(engine_id, ExternalPlace()), records.get(engine_id)
            is_wanted = engine_id in registrations and not place.ends
            if (not is_wanted or place.waits_for) and not served.placed.is_placed():  # nothing has begun
                self._writer.require()
                served.placed.remove()
                del self._served[engine_id]
            elif place.fate is Fate.LOST and not served.placed.stopping:
                served.killed_because = place.reason
                served.placed.kill()
            elif not served.draining and (not is_wanted or (
                    record is not None and record.state is EngineState.DRAINING)):
                served.draining, served.ends_because = True, place.reason if place.ends else ""
                served.placed.ask("drain")
                served.placed.kill_after(self._ctx.pool(self._pool).engine.drain_timeout_s + _END_GRACE_S)
            if served.draining and hosts.is_overdue(served.placed.node):
                served.placed.hurry()
        self._waits = {}
        for engine_id, registration in registrations.items():
            if engine_id not in self._served and not (place := places[engine_id]).ends:
                if not place.waits_for:
                    self._serve(registration)
                self._set_waits_for(registration, place.waits_for)
            elif engine_id not in self._served:
                self._end_unserved(registration, place.reason)
            elif self._served[engine_id].placed.lacks_room():
                self._set_waits_for(registration, f"no room for its runner on host {registration.host}")
            else:
                self._set_waits_for(registration, "")
        return sum(engine_id in self._served and e.state is EngineState.READY for engine_id, e in records.items())

    @property
    def waiting(self) -> str:
        """Which registered servers are not served, and why; empty when all are."""
        return "; ".join(f"external engine {engine_id}: {why}" for engine_id, why in sorted(self._waits.items()))

    @property
    def placed(self) -> list[PlacedActor]:
        """The actors of its engines."""
        return [served.placed for served in self._served.values()]

    def forget(self) -> None:
        """Ends its work once its actors were stopped; the registrations stay, for the next driver."""
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

    def _bound(self, registration: ExternalEngine) -> ExternalEngine:
        """The registration with its host. One that names none is for the host of the run where it is first seen, and
        stays on it: the server does not move when a later driver is elsewhere."""
        if registration.host:
            return registration
        self._change(bound := registration.replace(host=self.run_host), host=bound.host)
        return bound

    def _set_waits_for(self, registration: ExternalEngine, waits_for: str) -> None:
        """Notes, for people, why a server is not served."""
        if waits_for:
            self._waits[registration.engine] = waits_for
        if waits_for != registration.waits_for:
            self._change(registration, waits_for=waits_for)

    def _change(self, registration: ExternalEngine, **changes: Any) -> None:
        """Changes the registration, if it still stands."""
        def change(raw: bytes | None) -> bytes | None:
            now = decode_bytes(raw, ExternalEngine) if raw else None
            return raw if now is None or now.engine != registration.engine else now.replace(**changes).encode()

        self._etcd.update(self._keys.external_engine(registration.url), change, guards=self._writer.guards)

    def _delete(self, kv: KeyValue) -> None:
        self._writer([Compare.mod(kv.key, "==", kv.mod_revision)], [Op.delete(kv.key)])

    # -- one engine ---------------------------------------------------------------------------------------------
    def _serve(self, registration: ExternalEngine) -> None:
        engine_id = registration.engine
        self._writer.require()  # a newer driver may serve it
        self._deregister(engine_id)  # a member of an older epoch has the same name
        placed = self._placer.place(self._kind, engine_id, self._body, self._ctx, engine_id, self._pool,
                                    registration.url, cpus=SOME_CPU, gpus=0,
                                    among=() if registration.host == self.run_host else (registration.host,))
        self._served[engine_id] = _Served(registration, placed)
        self._emit(event_kinds.ENGINE_STARTING, engine_id,
                   f"engine {engine_id} is served by {registration.url} on host {registration.host}")

    def _reap(self) -> None:
        """Removes engines that have ended."""
        by_actor = {served.placed: engine_id for engine_id, served in self._served.items()}
        for placed in ended(by_actor):
            served = self._served[engine_id := by_actor[placed]]
            if served.request is not None:
                acknowledge(self._etcd, self._keys, served.request, *self._writer.guards)
            _, crash = placed.outcome()
            self._conclude(served.registration, crash and (served.killed_because or crash),
                           draining=served.draining and not served.ends_because, reason=served.ends_because)
            placed.remove()
            del self._served[engine_id]  # last, so that a pass that etcd interrupts is repeated

    def _conclude(self, registration: ExternalEngine, crash: str, *, draining: bool = False, reason: str = "") -> None:
        """Ends the registration of an engine that has ended, and removes its record. ``crash``: why its runner has
        ended without being asked; empty when it returned. ``draining``: it was to leave. ``reason``: why it was drained
        although it is registered."""
        if crash:
            self._clean_up_after_crash(registration, crash, is_expected=bool(reason))
        found = self._etcd.get(self._keys.engine(registration.engine))
        if reason:
            self._end_registration(registration, reason)
        elif not draining and (crash or found is not None):  # an engine that drained leaves no record
            record = readable_one(found, Engine)
            self._end_registration(registration, crash or (record.reason if record else "") or "unknown")
        self._writer.write(Op.delete(self._keys.engine(registration.engine)))
        self._unroute(registration.url)

    def _end_unserved(self, registration: ExternalEngine, reason: str) -> None:
        """Ends the registration of a server that has no runner now, with what an earlier epoch has left of it."""
        self._writer.write(Op.delete(self._keys.engine(registration.engine)))
        self._unroute(registration.url)
        self._end_registration(registration, reason)  # last, so that a pass that etcd interrupts is repeated

    def _clean_up_after_crash(self, registration: ExternalEngine, crash: str, *, is_expected: bool) -> None:
        """Does what the runner could not do, and says that it died unless it was to leave with its host. Its server
        lives on, and must get no requests without a runner; the record is deleted and the router's worker removed by
        the caller."""
        engine_id = registration.engine
        found = self._etcd.get(self._keys.engine(engine_id))
        record = readable_one(found, Engine)
        incarnation = record.incarnation if record else ""
        if not is_expected:
            self._emit(event_kinds.ENGINE_DEAD, engine_id, f"engine {engine_id}: {crash}", severity=Severity.ERROR,
                       incarnation=incarnation)
        self._deregister(engine_id)

    def _end_registration(self, registration: ExternalEngine, reason: str) -> None:
        self._change(registration, ended=reason, ended_at=time.time(), waits_for="")
        log.warning("external engine %s ended: %s", registration.engine, reason)
        self._emit(event_kinds.ENGINE_REMOVED, registration.engine, severity=Severity.WARNING, message=
                   f"external engine {registration.engine} ({registration.url}) ended ({reason}); it is not replaced")

    def _deregister(self, engine_id: str) -> None:
        deregister(self._etcd, self._keys, [m for m in members(self._etcd, self._keys, event_kinds.ENGINE)
                                            if m.id == engine_id])

    def _emit(self, kind: EventKind, engine_id: str, message: str, *, severity: Severity = Severity.INFO,
              **data: Any) -> None:
        self._writer.emit(kind, engine_id, message, severity=severity, **data)
