"""Engines that others run: attaches to their servers as long as somebody wishes it, and lets go of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from elastic_rl.coordinator.membership.registry import ENGINE
from elastic_rl.coordinator.targets import engine_target
from elastic_rl.driver.placement import PlacedActor
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.engine.actor import EngineActor
from elastic_rl.engine.router import RouterClient
from elastic_rl.errors import DeadlineExceeded, EngineFailed, PreflightFailed
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext

log = logging.getLogger(__name__)

_ROOM_S = 10.0
_ROUTER_S = 5.0
_KEPT_S = 600.0
"""How long it can be read why an adopted engine ended."""


@dataclass
class _Held:
    """A server that this driver's engine is attached to. ``done`` resolves when that engine's life is over."""

    wish: ExternalEngine
    placed: PlacedActor
    done: ray.ObjectRef
    told_to_drain: bool = False
    ended_for: str = ""


class AdoptedEngines:
    """Level-triggered, as the pool. An engine that ends is not started again: its wish is over then."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, sign: Callable[[str], None], pool: str) -> None:
        self._ctx, self._etcd, self._keys, self._sign, self._pool = ctx, etcd, ctx.keys, sign, pool
        self._held: dict[str, _Held] = {}

    def reconcile(self, restarts: Mapping[str, RestartRequest], records: Mapping[str, Engine]) -> int:
        """One look; how many are ready. ``records``: of the pool's engines, as they are now."""
        for engine_id, held in self._held.items():
            if (restart := restarts.get(engine_target(engine_id))) is not None:
                self._end(held, restart)
        self._reap()
        wishes = self._wishes()
        for engine_id, held in self._held.items():
            record = records.get(engine_id)
            leaves = engine_id not in wishes or (record is not None and record.state is EngineState.DRAINING)
            if leaves and not held.told_to_drain:
                held.told_to_drain = True
                held.placed.actor.drain.remote()
        for engine_id, wish in wishes.items():
            if engine_id not in self._held:
                self._attach(wish)
        return sum(engine_id in self._held and e.state is EngineState.READY for engine_id, e in records.items())

    def close(self) -> None:
        """Lets go of all of them; the wishes stay."""
        for held in self._held.values():
            held.placed.actor.stop.remote()
        if self._held:
            ray.wait([h.done for h in self._held.values()], num_returns=len(self._held), timeout=10.0)
        for held in self._held.values():
            held.placed.remove()
        self._held.clear()

    def _wishes(self) -> dict[str, ExternalEngine]:
        """Those that stand, by engine."""
        found: dict[str, ExternalEngine] = {}
        for kv in self._etcd.range(self._keys.external_engines_prefix())[0]:
            wish = ExternalEngine.decode(kv.value)
            if wish.pool == self._pool and not wish.ended:
                found[wish.engine] = wish
            elif wish.pool == self._pool and time.time() - wish.ended_at > _KEPT_S:
                self._forget(kv)
        return found

    def _forget(self, kv: KeyValue) -> None:
        guards = [fencing.epoch_guard(self._keys, self._ctx.epoch), Compare.mod(kv.key, "==", kv.mod_revision)]
        self._etcd.txn(guards, [Op.delete(kv.key)])

    # -- one engine ---------------------------------------------------------------------------------------------
    def _attach(self, wish: ExternalEngine) -> None:
        self._sign(PlacedActor.WAITING)
        self._deregister(wish.engine)  # of an older epoch: it has the same name
        try:
            placed = PlacedActor(wish.engine, EngineActor, self._ctx, wish.engine, self._pool, wish.url, cpus=1.0,
                                 gpus=0,
                            timeout_s=_ROOM_S)
        except PreflightFailed as e:
            self._over(wish, e.message)
            return
        self._held[wish.engine] = _Held(wish, placed, placed.actor.run.remote())
        events.emit(self._etcd, self._keys, "engine.starting", wish.engine,
                    f"engine {wish.engine} attaches to {wish.url}")

    def _end(self, held: _Held, restart: RestartRequest) -> None:
        """Lets go at once of an engine that may hang: it is not asked."""
        held.ended_for = restart.reason or f"restart wanted by {restart.by}"
        ray.kill(held.placed.actor)
        ray.wait([held.done], timeout=10.0)
        acknowledge(self._etcd, self._keys, restart, fencing.epoch_guard(self._keys, self._ctx.epoch))

    def _reap(self) -> None:
        by_ref = {held.done: engine_id for engine_id, held in self._held.items()}
        ended, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0) if by_ref else ([], [])
        for ref in ended:
            held = self._held.pop(engine_id := by_ref[ref])
            crash = ""
            try:
                ray.get(ref, timeout=5.0)
            except RayError as e:
                crash = held.ended_for or str(e).splitlines()[0]
                self._let_go(held.wish, crash)
            found = self._etcd.get(self._keys.engine(engine_id))
            if not held.told_to_drain and (crash or found is not None):  # one that was drained leaves no record
                reason = Engine.decode(found.value).reason if found else ""
                self._over(held.wish, crash or reason or "unknown")
            held.placed.remove()
            fencing.write(self._etcd, self._keys, self._ctx.epoch, Op.delete(self._keys.engine(engine_id)))

    def _let_go(self, wish: ExternalEngine, crash: str) -> None:
        """After a runner that could not do it: its server goes on, and must get no requests that nobody looks after."""
        try:
            RouterClient(self._ctx.router_url).remove(wish.url, timeout_s=_ROUTER_S)
        except (EngineFailed, DeadlineExceeded) as e:
            log.warning("engine %s could not be taken out of the router: %s", wish.engine, e)
        events.emit(self._etcd, self._keys, "engine.dead", wish.engine, severity=Severity.ERROR,
                    message=f"engine {wish.engine}: {crash}")
        self._deregister(wish.engine)

    def _over(self, wish: ExternalEngine, why: str) -> None:
        """Ends the wish, and tells why."""
        def change(raw: bytes | None) -> bytes | None:
            now = ExternalEngine.decode(raw) if raw else None
            return now.replace(ended=why, ended_at=time.time()).encode() if now and now.engine == wish.engine else raw

        self._etcd.update(self._keys.external_engine(wish.url), change,
                           guards=[fencing.epoch_guard(self._keys, self._ctx.epoch)])
        log.warning("adopted engine %s ended: %s", wish.engine, why)
        events.emit(self._etcd, self._keys, "engine.removed", wish.engine, severity=Severity.WARNING,
                    message=f"adopted engine {wish.engine} ({wish.url}) ended ({why}); it is not replaced")

    def _deregister(self, engine_id: str) -> None:
        deregister(self._etcd, self._keys, [m for m in members(self._etcd, self._keys, ENGINE) if m.id == engine_id])
