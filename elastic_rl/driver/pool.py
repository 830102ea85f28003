"""Makes a pool what its spec says: starts, drains and replaces engines."""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.config import ROLLOUT_POOL, selector_text
from elastic_rl.coordinator.targets import engine_target
from elastic_rl.driver.external_engines import ENGINE, ExternalEngines
from elastic_rl.driver.host_selection import Selection, beyond_every_host, select
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.late_engines import LateEngines
from elastic_rl.driver.left_files import LeftFiles
from elastic_rl.driver.placement import (
    PlacedActor,
    Placer,
    driver_writer,
    ended,
    gpus_per_engine,
    room_needed,
    stop_all,
)
from elastic_rl.driver.plan import Running, StartBudget, plan
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.driver.shared_gpus import SharedGpus, free_gpus
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import decode_bytes, readable, readable_one
from elastic_rl.etcd.device_phase import SeenPhase
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Engine, EngineState, PoolSpec, PoolStatus, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.stacks import HANG_S

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_STACKS_GRACE_S = HANG_S + 2.0
"""Time for an engine that hangs to write its stacks."""
_END_GRACE_S = 30.0
"""Time for an engine whose record says that it has ended, or whose drain is over, to end its process."""
_STABLE_S = 60.0
"""An engine that ends within so long of being ready counts as a start that failed."""
_MAX_PENDING = 64
"""Engines for which Ray looks for room at the same time; with thousands it would be busy with nothing else."""


@dataclass
class _Slot:
    """An engine of the pool, which this driver or one before it has started."""

    placed: PlacedActor
    started_at: float
    begun_at: float
    """When it began, or was adopted, in monotonic seconds."""
    ready_at: float | None = None
    """Monotonic seconds at which the driver first saw it ready."""
    draining: bool = False
    has_record: bool = False
    is_ending: bool = False
    killed_because: str = ""
    """Why this driver killed it."""
    shares: tuple[str, str] = ("", "")
    """The host and the GPUs that it shares with the trainer, as ``free_gpus`` has them."""
    request: RestartRequest | None = None
    """The restart request for which this driver killed it, until it is acknowledged."""
    selection: Selection = Selection()
    """Where it was to be placed when it began."""


def draining(raw: bytes | None) -> bytes | None:
    """The record of an engine that is to leave the pool in the place of this one. An end stays an end, which its runner
    may have written since the driver read the record: no state comes after it."""
    now = decode_bytes(raw, Engine) if raw else None
    if now is None or now.state.ended:
        return raw
    return now.replace(state=EngineState.DRAINING, updated_at=time.time()).encode()


class EnginePool:
    """Level-triggered: each ``reconcile`` reads etcd and Ray again, and keeps only handles in memory. It waits for
    nothing: engines that wait for room, start or end are looked at again in the next pass."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, name: str = ROLLOUT_POOL, *, body: type | str = ENGINE,
                 unroute: Callable[[str], None] = lambda url: None,
                 has_left: Callable[[Engine], bool] = lambda engine: False, shared: SharedGpus | None = None) -> None:
        """``body``: class of an engine's Ray actor. ``unroute(url)``: called for an engine that has ended.
        ``has_left``: whether the router does not have an engine any more that is behind. ``shared``: the GPUs that the
        engines share with the trainer."""
        self.ctx, self.etcd, self.keys, self.name = ctx, etcd, ctx.keys, name
        self._settings, self._cfg = ctx.pool(name), ctx.pool(name).engine
        self._body, self._unroute, self._has_left, self._shared = body, unroute, has_left, shared
        self._placer, self._writer, self._kind = Placer.of(ctx, etcd), driver_writer(ctx, etcd), f"engines/{name}"
        self._late = LateEngines(self._cfg.release_timeout_s) if self._settings.colocated else None
        self._slots: dict[str, _Slot] = {}
        self._budget = StartBudget()
        self._start_error = self._no_gpus = ""
        self._status: PoolStatus | None = None
        self._last_desired = self._settings.engines
        self._external = ExternalEngines(ctx, etcd, name, unroute=unroute, body=body)
        self._selector, self._selection, self._hosts = dict(self._settings.host_selector), Selection(), RayHosts()
        # Shared GPUs are on certain hosts, and so is the folder that is served, unless it is said on which.
        self.may_spread = bool(self._selector) or (self._settings.stream is not None and shared is None)
        """Whether its engines may be on any host of the cluster."""
        self._left_files = LeftFiles(ctx)

    def take_over(self) -> None:
        """Writes the pool's spec, with the desired number that it has already, adopts the engines of this epoch that
        run, and deletes the records of all others. Raises Fenced, EtcdUnavailable and RayError; then it is to be called
        again."""
        self.etcd.update(self.keys.pool_spec(self.name), self._spec, guards=self._writer.guards)
        records = self._records()
        adopted = {placed.name.partition("/")[0]: placed for placed in self._placer.adopt(self._kind)}
        for engine_id, placed in adopted.items():
            if engine_id not in self._slots:
                record = records.get(engine_id)
                serves = record is not None and record.state is EngineState.READY  # not just since now
                self._slots[engine_id] = _Slot(placed, record.started_at if record else time.time(), time.monotonic(),
                                               float("-inf") if serves else None, shares=self._shares(placed.name))
        kept = adopted.keys() | self._external.take_over(records)
        for engine in records.values():
            if engine.id not in kept:
                self._forget(engine)

    def _shares(self, actor: str) -> tuple[str, str]:
        """The host and the GPUs that are part of an actor's name, ``ENGINE/GPUS/HOST``."""
        gpus, _, host = actor.partition("/")[2].partition("/")
        return (host or self._external.run_host, gpus) if gpus else ("", "")

    def _forget(self, engine: Engine) -> None:
        """Removes what is left of an engine that has ended while no driver ran, or with its epoch."""
        if engine.epoch < self.ctx.epoch:
            self._write(Op.delete(self.keys.engine(engine.id)))
        else:
            self._emit(event_kinds.ENGINE_REPLACED, engine.id, f"engine {engine.id} ended while no driver ran "
                       f"({engine.reason or 'unknown'}); replacing it", severity=Severity.WARNING,
                       ops=[Op.delete(self.keys.engine(engine.id))], incarnation=engine.incarnation)
        self._unroute(engine.url)
        self._left_files.note(engine.id, engine.host)

    def _spec(self, raw: bytes | None) -> bytes:
        """The spec in the place of this one: the operator decides about the number, the settings about the rest."""
        before = decode_bytes(raw, PoolSpec) if raw else None
        if raw and before is None:
            return raw  # of a newer release
        settings = self._settings
        return PoolSpec(name=self.name, desired=before.desired if before else settings.engines,
                        model=settings.model_dir, stream=settings.stream or "").encode()

    def reconcile(self, restarts: Mapping[str, RestartRequest], hosts: RayHosts = RayHosts(), *, holds: bool = False,
                  yields: bool = False) -> Collection[Engine]:
        """One pass; ``restarts`` are the open restart requests, by target; ``holds``: whether engines that may be on
        any host are started later; ``yields``: whether a trainer group looks for room, which comes first. Returns the
        records of the pool's engines as they were read. Raises Fenced and EtcdUnavailable."""
        for engine_id, slot in self._slots.items():
            if (request := restarts.get(engine_target(engine_id))) is not None and slot.request is None:
                reason = request.reason or f"restart requested by {request.by}"
                if request.of_failure_policy:
                    self._end_hung(engine_id, slot, reason)
                else:
                    self._kill(engine_id, slot, reason)
                slot.request = request  # after the kill, which etcd may interrupt
        records = self._records()
        self._reap(records)
        for engine_id, slot in self._slots.items():
            self._follow(engine_id, slot, records.get(engine_id))
        self._end_late(records)
        self._give_up(records.values())
        self._hosts, self._selection = hosts, select(self._selector, hosts) if self.may_spread else Selection()
        self._replace_pending(yields)
        running = [self._as_running(i, records.get(i), hosts) for i in self._slots]
        pending = [self._slots[r.id].placed for r in running if not r.placed]
        unplaced = sum(not slot.placed.is_placed() for slot in self._slots.values())
        todo = plan(self._desired(), running, may_start=_MAX_PENDING - unplaced
                    if self._budget.open(time.monotonic()) and not yields and not (holds and self.may_spread)
                    and not self._selection.waits_for else 0)
        self._start(todo.start)
        for engine_id in todo.drain:
            self._drain(engine_id, records.get(engine_id))
        for slot in self._slots.values():
            if slot.draining and hosts.is_overdue(slot.placed.node):
                slot.placed.hurry()
        external = self._external.reconcile(restarts, records, hosts)
        self._left_files.remove()
        self._write_status(running, pending, external)
        return records.values()

    def _end_late(self, records: Mapping[str, Engine]) -> None:
        """Ends colocated engines that do not follow the phases."""
        if self._late is None:
            return
        phase = SeenPhase.of(self.etcd.get(self.keys.device_phase()), self.ctx.epoch)
        late = self._late.observe(phase, records.values(), time.monotonic())
        for engine_id in late.keys() & self._slots.keys():
            if not self._slots[engine_id].placed.stopping:
                self._kill(engine_id, self._slots[engine_id], late[engine_id])

    def _give_up(self, records: Iterable[Engine]) -> None:
        """Says of engines that are behind that the router does not have them any more: only then may a run that needs
        a newer version go on without them."""
        def change(raw: bytes | None) -> bytes | None:
            now = decode_bytes(raw, Engine) if raw else None
            if now is None or now.state is not EngineState.READY or not self._is_out(now):
                return raw
            return now.replace(state=EngineState.SYNCING, updated_at=time.time()).encode()

        for engine in records:
            if engine.state is EngineState.READY and self._is_out(engine):
                self.etcd.update(self.keys.engine(engine.id), change, guards=self._writer.guards)

    def _is_out(self, engine: Engine) -> bool:
        return engine.is_behind and self._has_left(engine)

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes on which the pool has something."""
        return {placed.node for placed in (*(s.placed for s in self._slots.values()), *self._external.placed)}

    @property
    def waiting(self) -> str:
        """What the pool waits for, as its status has it."""
        return self._status.message if self._status else ""

    def end(self) -> None:
        """Asks its engines to end, for ``close``, which waits for them."""
        for placed in (*(slot.placed for slot in self._slots.values()), *self._external.placed):
            placed.end(grace_s=_STOP_TIMEOUT_S)

    def close(self) -> None:
        """Ends every engine, and stops serving external ones."""
        stop_all([*(slot.placed for slot in self._slots.values()), *self._external.placed], timeout_s=_STOP_TIMEOUT_S)
        self._slots.clear()
        self._external.forget()

    # -- one engine ---------------------------------------------------------------------------------------------
    def _start(self, count: int) -> None:
        """Starts engines; an error of Ray's ends the attempt, and counts as a start that failed."""
        for _ in range(count):
            engine_id, now = f"{self.name}-{uuid.uuid4().hex[:6]}", time.monotonic()
            try:
                gpus, host, shared = gpus_per_engine(self.ctx.config.device, self._cfg), "", ""
                among: Collection[str] = self._selection.among or ()
                if self._shared is not None:
                    host, shared = free_gpus(self._shared.gpus(), [s.shares for s in self._slots.values()], gpus)
                    self._no_gpus = "" if shared else (
                        self._shared.waiting or "no GPU of the trainer is without an engine: scale in")
                    if self._no_gpus:
                        return
                    among = () if host == self._external.run_host else (host,)
                placed = self._placer.place(
                    self._kind, f"{engine_id}/{shared}/{host}" if shared else engine_id, self._body, self.ctx,
                    engine_id, self.name, *(("", shared) if shared else ()), cpus=self._cfg.cpus,
                    gpus=0 if shared else gpus, any_host=self.may_spread, avoid=self._selection.avoid, among=among)
            except (Fenced, EtcdUnavailable):
                raise
            except Exception as e:  # Ray raises many kinds, also for a bug of a caller's
                log.exception("engine %s could not be started", engine_id)
                self._failed(f"{type(e).__name__}: {e}", now)
                return
            self._slots[engine_id] = _Slot(placed, time.time(), now, shares=(host, shared), selection=self._selection)
            self._emit(event_kinds.ENGINE_STARTING, engine_id, f"engine {engine_id} is starting")

    def _failed(self, reason: str, started_at: float | None = None) -> None:
        """A start failed. ``started_at``: monotonic seconds."""
        self._start_error = reason[:200]
        self._budget = self._budget.after_failure(time.monotonic(), started_at=started_at, jitter=random.random())

    def _follow(self, engine_id: str, slot: _Slot, record: Engine | None) -> None:
        """Takes what the record says into account, and ends an engine that should have ended or begun by now."""
        slot.placed.enforce()
        if record is None:
            overdue = not slot.has_record and slot.placed.is_placed() and not slot.placed.stopping and (
                time.monotonic() - slot.placed.placed_at > self._cfg.start_timeout_s)
            if overdue:
                self._kill(engine_id, slot, f"it did not report within {self._cfg.start_timeout_s:g} s of its start")
            return
        slot.has_record = True
        if slot.draining and record.state.stays:  # it was asked before it had a record, and may not have heard it
            self.etcd.update(self.keys.engine(engine_id), draining, guards=self._writer.guards)
        if record.state is EngineState.READY and slot.ready_at is None:
            slot.ready_at = time.monotonic()
        elif record.state is EngineState.DRAINING and not slot.draining:
            slot.draining = True  # the leader wrote it into the record, which a starting engine does not read
            slot.placed.ask("drain")
            slot.placed.kill_after(self._cfg.drain_timeout_s + _END_GRACE_S)
        elif record.state.ended and not slot.is_ending:
            slot.is_ending = True
            slot.placed.kill_after(_END_GRACE_S)

    def _drain(self, engine_id: str, record: Engine | None) -> None:
        slot = self._slots[engine_id]
        if not slot.placed.is_placed():  # nothing has begun
            self._emit(event_kinds.ENGINE_CANCELLED, engine_id,
                       f"engine {engine_id} is no longer wanted; it had no room yet")
            slot.placed.remove()
            del self._slots[engine_id]
            return
        self._emit(event_kinds.ENGINE_DRAINING, engine_id, f"engine {engine_id} leaves the pool")
        if record:
            self.etcd.update(self.keys.engine(record.id), draining, guards=self._writer.guards)
        slot.draining = True
        slot.placed.ask("drain")
        slot.placed.kill_after(self._cfg.drain_timeout_s + _END_GRACE_S)

    def _kill(self, engine_id: str, slot: _Slot, reason: str) -> None:
        """Ends an engine without asking it, since it may hang. Its server dies with it, and the router sends its
        requests to other engines."""
        log.warning("ending engine %s: %s", engine_id, reason)
        slot.killed_because = reason
        slot.placed.kill()

    def _end_hung(self, engine_id: str, slot: _Slot, reason: str) -> None:
        """Has an engine that hangs write its stacks before it is killed, which is done in any case."""
        log.warning("ending engine %s, after it has written its stacks: %s", engine_id, reason)
        slot.killed_because = reason
        slot.placed.end(grace_s=_STACKS_GRACE_S, method="kill_hung")

    def _reap(self, records: dict[str, Engine]) -> None:
        """Removes engines that have ended, with their records and the files that a killed one leaves. One that ended
        without being asked to, and soon, counts as a start that failed."""
        by_actor = {slot.placed: engine_id for engine_id, slot in self._slots.items()}
        for placed in ended(by_actor):
            engine_id = by_actor[placed]
            slot, record = self._slots[engine_id], records.get(engine_id)
            _, crash = placed.outcome()
            self._writer.require()
            placed.remove()  # first, since Ray may refuse it: what follows is done, and said, once
            if slot.request is not None:
                deregister(self.etcd, self.keys, [m for m in members(self.etcd, self.keys, event_kinds.ENGINE)
                                                if m.id == engine_id])
                acknowledge(self.etcd, self.keys, slot.request, *self._writer.guards)
            left = slot.draining or (record is None and not crash) or (
                record is not None and record.state is EngineState.DRAINING)
            delete = Op.delete(self.keys.engine(engine_id))
            if left:
                self._write(delete)
            else:
                reason = slot.killed_because or (record and record.reason) or crash or "unknown"
                log.warning("engine %s ended: %s", engine_id, reason)
                self._emit(event_kinds.ENGINE_REPLACED, engine_id, f"engine {engine_id} ended ({reason}); replacing it",
                           severity=Severity.WARNING, ops=[delete], incarnation=record.incarnation if record else "")
                now = time.monotonic()
                if slot.request is None and (slot.ready_at is None or now - slot.ready_at < _STABLE_S):
                    self._failed(reason, slot.begun_at)
            if record:
                self._unroute(record.url)
            self._left_files.note(engine_id, record.host if record is not None else "")
            del self._slots[engine_id]  # last, so that a pass that etcd interrupts is repeated
            records.pop(engine_id, None)

    def _replace_pending(self, yields: bool) -> None:
        """Has engines that have no room yet placed again when they might get it on a host that was closed meanwhile, or
        may be on other hosts now, and later when they would take the room of a trainer group: Ray gives what is free to
        who has waited longest."""
        for engine_id, slot in list(self._slots.items()):
            if (self._selection.allows_more_than(slot.selection) or yields) and not slot.placed.is_placed():
                self._writer.require()
                slot.placed.remove()
                del self._slots[engine_id]

    # -- etcd ---------------------------------------------------------------------------------------------------
    def _write(self, op: Op) -> None:
        """Raises Fenced once a newer driver has begun."""
        self._writer.write(op)

    def _emit(self, kind: EventKind, engine_id: str, message: str, *, severity: Severity = Severity.INFO,
              ops: Collection[Op] = (), **data: Any) -> None:
        self._writer.emit(kind, engine_id, message, severity=severity, ops=list(ops), **data)

    def _records(self) -> dict[str, Engine]:
        items, _ = self.etcd.range(self.keys.engines_of_pool(self.name))
        return {e.id: e for e, _ in readable(items, Engine) if e.pool == self.name}

    def _as_running(self, engine_id: str, record: Engine | None, hosts: RayHosts) -> Running:
        slot = self._slots[engine_id]
        state = EngineState.DEAD if slot.placed.stopping else record.state if record else EngineState.STARTING
        if slot.draining and state.stays:  # its runner, which may still begin, has been asked
            state = EngineState.DRAINING
        behind = record is not None and record.is_behind
        host = hosts.leaving.get(slot.placed.node, "") if self.may_spread else ""
        return Running(engine_id, state, slot.started_at, placed=not slot.placed.lacks_room(), leaves=bool(host),
                       hurries=host in hosts.overdue, behind=behind)

    def _desired(self) -> int:
        found = self.etcd.get(self.keys.pool_spec(self.name))
        spec = readable_one(found, PoolSpec)
        if spec is not None or found is None:
            self._last_desired = spec.desired if spec else self._settings.engines
        return self._last_desired  # of an unreadable record: as it was

    def _write_status(self, running: list[Running], pending: list[PlacedActor], external: int) -> None:
        count = {s: sum(1 for r in running if r.state is s and r.placed) for s in EngineState}
        behind = sum(r.behind and r.placed and r.state is EngineState.SYNCING for r in running)
        starting = count[EngineState.STARTING] + count[EngineState.SYNCING] - behind
        whole = count[EngineState.READY] + count[EngineState.RELEASED] + behind
        unplaced = max(len(pending), self._last_desired - whole - starting) if (
            pending or self._selection.waits_for) else 0
        status = PoolStatus(name=self.name, ready=count[EngineState.READY], draining=count[EngineState.DRAINING],
                            starting=starting, external=external, pending=unplaced,
                            released=count[EngineState.RELEASED], behind=behind,
                            message=self._message(pending, whole),
                            router_url=self.ctx.router_urls.get(self.name, ""))
        if status != self._status:
            self._write(Op.put(self.keys.pool_status(self.name), status.encode()))
            self._status = status

    def _message(self, pending: list[PlacedActor], whole: int) -> str:
        """What the pool waits for; empty when it is whole. It says nothing that changes with the time alone, so that it
        is seldom written."""
        found = []
        if self._selection.waits_for and whole < self._last_desired:
            found.append(self._selection.waits_for)
        elif pending:
            where = f"on hosts with {selector_text(self._selector)}" if self._selector else "in the cluster"
            among = self._selection.among if self.may_spread else set(
                self._shared.gpus() if self._shared is not None else ()) or {self._external.run_host}
            found.append(beyond_every_host(pending[0].bundle, self._hosts, among) or f"no room {where} for engines of "
                         f"{room_needed(pending[:1])}: add a machine or scale in")
        if self._no_gpus and len(self._slots) < self._last_desired:
            found.append(self._no_gpus)
        if whole < self._last_desired and (failures := self._budget.failures(time.monotonic())):
            found.append(f"{failures} starts failed, the last: {self._start_error}")
        if self._external.waiting:
            found.append(self._external.waiting)
        return "; ".join(found)
