"""Operations: what takes longer than a request, as a pure state machine over their records. No I/O; the clock is given.

    RUNNING ──▶ SUCCEEDED | FAILED (with the reason) | CANCELLED (on request, or superseded by a later request)

An operation begins in the transaction that writes the request it stands for (a pool's desired number, an engine's
DRAINING, a restart, the registration of an external engine). From then on the leader compares it with each snapshot,
records its progress, and ends it when the request is fulfilled. The leader carries nothing out and keeps nothing in
memory, so the next leader continues from the record. No transition leaves an ended state, and every operation has a
deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import engine_target, name_of
from elastic_rl.etcd.records import WORKING_PHASES, EngineState, Member, Operation, OperationKind, OperationState
from elastic_rl.runtime.words import counted


def advance(op: Operation, snapshot: ClusterSnapshot, group_ranks: Mapping[str, int] = MappingProxyType({})
            ) -> Operation:
    """The operation as it is now; an equal one where nothing has changed. ``group_ranks``: number of ranks of each of
    the job's trainer groups."""
    if op.state is not OperationState.RUNNING or not op.kind.known:  # an unknown kind is a newer release's
        return op
    now = op if op.leader_deadline_s else op.replace(leader_deadline_s=snapshot.leader_time + op.timeout_s)
    match op.kind:
        case OperationKind.SCALE:
            now = _scale(now, snapshot)
        case OperationKind.DRAIN:
            now = _drain(now, snapshot)
        case OperationKind.RESTART:
            now = _restart(now, snapshot, group_ranks)
        case OperationKind.REGISTER:
            now = _register(now, snapshot)
    if not now.state.ended and snapshot.leader_time >= now.leader_deadline_s:
        now = _end(now, OperationState.FAILED, snapshot.now, error=f"not done after {op.timeout_s:.0f} s, in phase "
                   f"{now.phase!r}: {now.message or 'no progress'}")
    return now if now == op else now.replace(updated_at=snapshot.now)


def cancelled(op: Operation, now: float, reason: str) -> Operation:
    """The operation, cancelled. What undoes its request belongs into the same transaction."""
    return _end(op, OperationState.CANCELLED, now, error=reason).replace(updated_at=now)


def failed(op: Operation, now: float, reason: str) -> Operation:
    return _end(op, OperationState.FAILED, now, error=reason).replace(updated_at=now)


def _end(op: Operation, state: OperationState, now: float, *, error: str = "", message: str = "",
         **result: object) -> Operation:
    return op.replace(state=state, ended_at=now, error=error, message=message or op.message,
                      result={**op.result, **result, "seconds": round(now - op.created_at, 3)})


def _scale(op: Operation, snapshot: ClusterSnapshot) -> Operation:
    pool, desired = name_of(op.target), int(op.params["desired"])
    spec = snapshot.specs.get(pool)
    if spec is None or spec.desired != desired:
        now = "is gone" if spec is None else f"has {spec.desired} desired engines"
        return _end(op, OperationState.CANCELLED, snapshot.now, error=f"superseded: pool {pool} {now}")
    status = snapshot.statuses.get(pool)
    starting = status.starting if status else 0
    # An engine that is to leave before it has a record is in the driver's count alone.
    ready, draining = snapshot.ready(pool), max(snapshot.draining(pool), status.draining if status else 0)
    if ready == desired and not draining and not starting:
        return _end(op.replace(done=desired, total=desired), OperationState.SUCCEEDED, snapshot.now,
                    message=f"{counted(ready, 'engine')} ready", ready=ready)
    shrinks = desired <= int(op.params.get("previous", desired))  # else engines that drain are of an earlier request
    phase = "draining" if shrinks and (ready + starting > desired or draining) else "starting"
    message = f"{ready} of {counted(desired, 'engine')} ready" + (f", {draining} draining" if draining else "")
    return op.replace(phase=phase, done=min(ready, desired), total=desired, message=message)


def _drain(op: Operation, snapshot: ClusterSnapshot) -> Operation:
    engine_id, pool = name_of(op.target), str(op.params["pool"])
    engine, spec = snapshot.engines.get(engine_id), snapshot.specs.get(pool)
    total = 2 if op.params["replace"] else 1
    if engine is not None and engine.state.ended:
        return _end(op, OperationState.FAILED, snapshot.now,
                    error=f"engine {engine_id} ended before it was drained ({engine.reason or engine.state}); requests "
                          "in flight went to other engines")
    if engine is not None:
        return op.replace(phase="draining", total=total, message=f"engine {engine_id} finishes its requests")
    desired = spec.desired if spec else 0
    if not op.params["replace"] or snapshot.ready(pool) >= desired:
        return _end(op.replace(done=total, total=total), OperationState.SUCCEEDED, snapshot.now,
                    message=f"engine {engine_id} has left pool {pool}")
    return op.replace(phase="replacing", done=1, total=total,
                      message=f"{snapshot.ready(pool)} of {counted(desired, 'engine')} ready")


def _restart(op: Operation, snapshot: ClusterSnapshot, group_ranks: Mapping[str, int]) -> Operation:
    request = snapshot.restarts.get(op.target)
    generation = int(op.params["generation"])
    if request is None or request.generation < generation:
        return _end(op, OperationState.CANCELLED, snapshot.now, error="the request was withdrawn")
    if request.observed_generation < generation and not _has_ended(op.target, snapshot):
        return op.replace(phase="stopping", total=2, message=f"waiting for {op.target} to be stopped")
    missing = _missing(op, snapshot, group_ranks)
    if missing:
        return op.replace(phase="starting", done=1, total=2, message=missing)
    return _end(op.replace(done=2, total=2), OperationState.SUCCEEDED, snapshot.now, message=f"{op.target} works again")


def _has_ended(target: str, snapshot: ClusterSnapshot) -> bool:
    """Whether the target is an engine that ended by itself, which no driver will stop on request."""
    if not target.startswith(engine_target("")):
        return False
    engine = snapshot.engines.get(name_of(target))
    return engine is None or engine.state.ended


def _register(op: Operation, snapshot: ClusterSnapshot) -> Operation:
    engine_id = name_of(op.target)
    registration = snapshot.external_engines.get(engine_id)
    if registration is None:
        return _end(op, OperationState.CANCELLED, snapshot.now, error="the registration was withdrawn")
    engine = snapshot.engines.get(engine_id)
    ended = registration.ended or (engine.reason or engine.state if engine is not None and engine.state.ended else "")
    if ended:
        return _end(op, OperationState.FAILED, snapshot.now, error=ended)
    if engine is None or engine.state is EngineState.STARTING:
        message = f"probing {registration.url}" if engine else (
            registration.waits_for or "waiting for the driver of the run: a run of the job is needed")
        return op.replace(phase="probing", total=2, message=message)
    if engine.state is not EngineState.READY:
        message = (f"applying version {engine.applying}" if engine.applying else
                   f"version {engine.version} is verified; the router, on the host of the run, does not reach "
                   f"{registration.url} yet" if engine.version else "fetching the newest version")
        return op.replace(phase="syncing", done=1, total=2, message=message)
    return _end(op.replace(phase="ready", done=2, total=2), OperationState.SUCCEEDED, snapshot.now, engine=engine_id,
                version=engine.version, message=f"engine {engine_id} serves version {engine.version}")


def _missing(op: Operation, snapshot: ClusterSnapshot, group_ranks: Mapping[str, int]) -> str:
    """What a restarted part still lacks; empty when it works again."""
    before = {str(i) for i in op.params.get("before", ())}
    match op.target.partition("/")[0]:
        case "engines":
            pool = str(op.params["pool"])
            spec, ready = snapshot.specs.get(pool), snapshot.ready(pool)
            desired = spec.desired if spec else 0
            return "" if ready >= desired and name_of(op.target) not in snapshot.engines else (
                f"{ready} of {counted(desired, 'engine')} of pool {pool} ready")
        case "roles":
            role = name_of(op.target)
            return "" if _started_since(snapshot, role, before) else f"no new replica of {role} yet"
        case group if group in TRAINER_GROUPS:
            return _missing_ranks(snapshot, before, group, group_ranks.get(group, 1))
        case "driver":
            # From the end of its first pass on a driver reports which of its parts fail, if any does.
            works = any("faults" in driver.info for driver in _started_since(snapshot, registry.DRIVER, before))
            return "" if works else "no new driver has made a pass yet"
        case _:
            if snapshot.epoch <= int(op.params["ended"]) + 1:  # the request itself began one; the new driver's is later
                return f"the run is still in epoch {snapshot.epoch}"
            # The status and the operation are compared by revision: their writers' clocks may differ.
            begun = snapshot.revision(snapshot.keys.job_status()) > snapshot.created(snapshot.keys.operation(op.id))
            if snapshot.status is None or snapshot.status.phase not in (*WORKING_PHASES, "finished") or not begun:
                return "the training loop has not begun again"
            return "; ".join(filter(None, (_missing_ranks(snapshot, before, *item) for item in group_ranks.items())))


def _missing_ranks(snapshot: ClusterSnapshot, before: Collection[str], group: str, ranks: int) -> str:
    found = _started_since(snapshot, group, before)
    working = sum(m.info.get("ready") is True for m in found)
    ranks = min(ranks, max((m.info.get("ranks", ranks) for m in found), default=ranks))  # of a group that has shrunk
    return "" if working >= ranks else f"{working} of {ranks} {group} ranks work"


def _started_since(snapshot: ClusterSnapshot, role: str, before: Collection[str]) -> list[Member]:
    """Members of a role but the incarnations ``before``."""
    return [m for m in snapshot.members if m.role == role and m.incarnation not in before]
