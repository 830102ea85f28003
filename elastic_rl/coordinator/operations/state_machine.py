"""Operations: what takes longer than a request, as a pure state machine over their records. No I/O; the clock is given.

    RUNNING ──▶ SUCCEEDED | FAILED (why is said) | CANCELLED (by somebody, or by a later wish for the same thing)

An operation begins in the transaction that writes the wish it stands for (a pool's desired number, an engine's
DRAINING, a restart, an adoption). From then on the leader looks at the world, writes down how far it is, and ends it
when the wish has come true. It carries nothing out and keeps nothing in memory, so the next leader goes on from the
record. There is no way out of an end, and no operation without a deadline.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import name_of
from elastic_rl.etcd.records import EngineState, Member, Operation, OperationKind, OperationState

_WORKING = ("sft", "rl", "finished")


def settle(op: Operation, snapshot: ClusterSnapshot, trainer_ranks: int = 1) -> Operation:
    """The operation as it is now; the same object's equal where nothing has changed."""
    if op.state.ended:
        return op
    match op.kind:
        case OperationKind.SCALE:
            now = _scale(op, snapshot)
        case OperationKind.DRAIN:
            now = _drain(op, snapshot)
        case OperationKind.RESTART:
            now = _restart(op, snapshot, trainer_ranks)
        case OperationKind.ADOPT:
            now = _adopt(op, snapshot)
    if not now.state.ended and snapshot.now >= op.deadline_at:
        waited = op.deadline_at - op.created_at
        now = _end(now, OperationState.FAILED, snapshot.now,
                   error=f"not done after {waited:.0f} s, in phase {now.phase!r}: {now.message or 'nothing moved'}")
    return now if now == op else now.replace(updated_at=snapshot.now)


def cancelled(op: Operation, now: float, why: str) -> Operation:
    """The operation, cancelled. What undoes its wish belongs into the same transaction."""
    return _end(op, OperationState.CANCELLED, now, error=why).replace(updated_at=now)


def _end(op: Operation, state: OperationState, now: float, *, error: str = "", message: str = "",
         **result: object) -> Operation:
    return op.replace(state=state, ended_at=now, error=error, message=message or op.message,
                  result={**op.result, **result, "seconds": round(now - op.created_at, 3)})


def _scale(op: Operation, snapshot: ClusterSnapshot) -> Operation:
    pool, wanted = name_of(op.target), int(op.params["desired"])
    spec = snapshot.specs.get(pool)
    if spec is None or spec.desired != wanted:
        now = "gone" if spec is None else f"wanted at {spec.desired} engines"
        return _end(op, OperationState.CANCELLED, snapshot.now, error=f"superseded: pool {pool} is {now}")
    ready, leaving = snapshot.ready(pool), snapshot.draining(pool)
    status = snapshot.statuses.get(pool)
    starting = status.starting if status else 0
    if ready == wanted and not leaving and not starting:
        return _end(op.replace(done=wanted, total=wanted), OperationState.SUCCEEDED, snapshot.now,
                    message=f"{ready} engines are ready", ready=ready)
    phase = "draining" if ready + starting > wanted or leaving else "starting"
    told = f"{ready} of {wanted} engines ready" + (f", {leaving} draining" if leaving else "")
    return op.replace(phase=phase, done=min(ready, wanted), total=wanted, message=told)


def _drain(op: Operation, snapshot: ClusterSnapshot) -> Operation:
    engine_id, pool = name_of(op.target), str(op.params["pool"])
    engine, spec = snapshot.engines.get(engine_id), snapshot.specs.get(pool)
    total = 2 if op.params["replace"] else 1
    if engine is not None and engine.state in (EngineState.DEAD, EngineState.QUARANTINED):
        return _end(op, OperationState.FAILED, snapshot.now,
                    error=f"engine {engine_id} ended before it was drained ({engine.reason or engine.state}); requests "
                          "in flight went to other engines")
    if engine is not None:
        return op.replace(phase="draining", total=total, message=f"engine {engine_id} finishes its requests")
    wanted = spec.desired if spec else 0
    if not op.params["replace"] or snapshot.ready(pool) >= wanted:
        return _end(op.replace(done=total, total=total), OperationState.SUCCEEDED, snapshot.now,
                    message=f"engine {engine_id} has left pool {pool}")
    return op.replace(phase="replacing", done=1, total=total,
                      message=f"{snapshot.ready(pool)} of {wanted} engines ready")


def _restart(op: Operation, snapshot: ClusterSnapshot, trainer_ranks: int) -> Operation:
    wish = snapshot.restarts.get(op.target)
    number = int(op.params["number"])
    if wish is None or wish.wanted < number:
        return _end(op, OperationState.CANCELLED, snapshot.now, error="the wish was taken back")
    if wish.done < number:
        return op.replace(phase="stopping", total=2, message=f"waiting for whoever runs {op.target} to take it down")
    missing = _not_back(op, snapshot, trainer_ranks)
    if missing:
        return op.replace(phase="starting", done=1, total=2, message=missing)
    return _end(op.replace(done=2, total=2), OperationState.SUCCEEDED, snapshot.now, message=f"{op.target} works again")


def _adopt(op: Operation, snapshot: ClusterSnapshot) -> Operation:
    engine_id = name_of(op.target)
    wish = snapshot.external_engines.get(engine_id)
    if wish is None:
        return _end(op, OperationState.CANCELLED, snapshot.now, error="the wish was taken back")
    engine = snapshot.engines.get(engine_id)
    ended = wish.ended or (engine.reason or engine.state if engine is not None and engine.state in (
        EngineState.DEAD, EngineState.QUARANTINED) else "")
    if ended:
        return _end(op, OperationState.FAILED, snapshot.now, error=ended)
    if engine is None or engine.state is EngineState.STARTING:
        told = f"asking {wish.url} whether it fits" if engine else "waiting for the driver of the run"
        return op.replace(phase="probing", total=2, message=told)
    if engine.state is not EngineState.READY:
        told = f"version {engine.applying} is applied" if engine.applying else "the newest version is fetched"
        return op.replace(phase="syncing", done=1, total=2, message=told)
    return _end(op.replace(phase="ready", done=2, total=2), OperationState.SUCCEEDED, snapshot.now, engine=engine_id,
                version=engine.version, message=f"engine {engine_id} serves version {engine.version}")


def _not_back(op: Operation, snapshot: ClusterSnapshot, trainer_ranks: int) -> str:
    """What a restarted part still lacks, or nothing."""
    before = {str(i) for i in op.params.get("before", ())}
    match op.target.partition("/")[0]:
        case "engines":
            pool = str(op.params["pool"])
            spec, ready = snapshot.specs.get(pool), snapshot.ready(pool)
            wanted = spec.desired if spec else 0
            return "" if ready >= wanted and name_of(op.target) not in snapshot.engines else (
                f"{ready} of {wanted} engines of pool {pool} ready")
        case "roles":
            return "" if _fresh(snapshot, name_of(op.target), before) else f"no new replica of {name_of(op.target)} yet"
        case "trainer":
            return _trainer_not_back(snapshot, before, trainer_ranks)
        case _:
            if snapshot.epoch <= int(op.params["ended"]) + 1:  # the request itself began one; the new driver's is later
                return f"the run is still in epoch {snapshot.epoch}"
            status = snapshot.status
            if status is None or status.phase not in _WORKING or status.updated_at <= op.created_at:
                return "the training loop has not begun again"
            return _trainer_not_back(snapshot, before, trainer_ranks)


def _trainer_not_back(snapshot: ClusterSnapshot, before: Collection[str], trainer_ranks: int) -> str:
    ranks = [m for m in _fresh(snapshot, registry.TRAINER, before) if m.phase in (*_WORKING, "train")]
    return "" if len(ranks) >= trainer_ranks else f"{len(ranks)} of {trainer_ranks} trainer ranks work"


def _fresh(snapshot: ClusterSnapshot, role: str, before: Collection[str]) -> list[Member]:
    return [m for m in snapshot.members if m.role == role and m.incarnation not in before]
