"""Operations: what takes longer than a request, as a pure state machine over their records. No I/O; the clock is given.

    RUNNING ──▶ SUCCEEDED | FAILED (why is said) | CANCELLED (by somebody, or by a later wish for the same thing)

An operation begins in the transaction that writes the wish it stands for (a pool's desired number, an engine's
DRAINING, a restart, an adoption). From then on the leader looks at the world, writes down how far it is, and ends it
when the wish has come true. It carries nothing out and keeps nothing in memory, so the next leader goes on from the
record. There is no way out of an end, and no operation without a deadline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.coordinator.membership import registry
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    ExternalEngine,
    JobStatus,
    Member,
    Operation,
    OperationKind,
    OperationState,
    PoolSpec,
    PoolStatus,
    RestartRequest,
)

TRAINER, JOB = "trainer", "job"
_WORKING = ("sft", "rl", "finished")


def pool_target(name: str) -> str:
    return f"pools/{name}"


def engine_target(engine_id: str) -> str:
    return f"engines/{engine_id}"


def role_target(name: str) -> str:
    return f"roles/{name}"


def name_of(target: str) -> str:
    """``rollout`` of ``pools/rollout``; a target without a name is its own."""
    return target.partition("/")[2] or target


@dataclass(frozen=True)
class View:
    """What the store says of the parts that operations are about."""

    now: float
    specs: Mapping[str, PoolSpec] = field(default_factory=dict)
    statuses: Mapping[str, PoolStatus] = field(default_factory=dict)
    engines: Mapping[str, Engine] = field(default_factory=dict)
    restarts: Mapping[str, RestartRequest] = field(default_factory=dict)
    """By target."""
    adoptions: Mapping[str, tuple[ExternalEngine, int]] = field(default_factory=dict)
    """By the id of the engine, with their mod revisions."""
    members: Sequence[Member] = ()
    job: JobStatus | None = None
    epoch: int = 0
    trainer_ranks: int = 1

    def ready(self, pool: str) -> int:
        """Engines of its own, as those below: adopted ones are extra."""
        return self._count(pool, EngineState.READY)

    def leaving(self, pool: str) -> int:
        return self._count(pool, EngineState.DRAINING)

    def _count(self, pool: str, state: EngineState) -> int:
        return sum(e.pool == pool and e.state is state and not e.adopted for e in self.engines.values())

    def incarnations(self, role: str) -> list[str]:
        """Of the processes of a role that are alive, sorted."""
        return sorted(m.incarnation for m in self.members if m.role == role)


def settle(op: Operation, view: View) -> Operation:
    """The operation as it is now; the same object's equal where nothing has changed."""
    if op.state.ended:
        return op
    match op.kind:
        case OperationKind.SCALE:
            now = _scale(op, view)
        case OperationKind.DRAIN:
            now = _drain(op, view)
        case OperationKind.RESTART:
            now = _restart(op, view)
        case OperationKind.ADOPT:
            now = _adopt(op, view)
    if not now.state.ended and view.now >= op.deadline_at:
        waited = op.deadline_at - op.created_at
        now = _end(now, OperationState.FAILED, view.now,
                   error=f"not done after {waited:.0f} s, in phase {now.phase!r}: {now.message or 'nothing moved'}")
    return now if now == op else now.replace(updated_at=view.now)


def cancelled(op: Operation, now: float, why: str) -> Operation:
    """The operation, cancelled. What undoes its wish belongs into the same transaction."""
    return _end(op, OperationState.CANCELLED, now, error=why).replace(updated_at=now)


def _end(op: Operation, state: OperationState, now: float, *, error: str = "", message: str = "",
         **result: object) -> Operation:
    return op.replace(state=state, ended_at=now, error=error, message=message or op.message,
                  result={**op.result, **result, "seconds": round(now - op.created_at, 3)})


def _scale(op: Operation, view: View) -> Operation:
    pool, wanted = name_of(op.target), int(op.params["desired"])
    spec = view.specs.get(pool)
    if spec is None or spec.desired != wanted:
        now = "gone" if spec is None else f"wanted at {spec.desired} engines"
        return _end(op, OperationState.CANCELLED, view.now, error=f"superseded: pool {pool} is {now}")
    ready, leaving = view.ready(pool), view.leaving(pool)
    status = view.statuses.get(pool)
    starting = status.starting if status else 0
    if ready == wanted and not leaving and not starting:
        return _end(op.replace(done=wanted, total=wanted), OperationState.SUCCEEDED, view.now,
                    message=f"{ready} engines are ready", ready=ready)
    phase = "draining" if ready + starting > wanted or leaving else "starting"
    told = f"{ready} of {wanted} engines ready" + (f", {leaving} draining" if leaving else "")
    return op.replace(phase=phase, done=min(ready, wanted), total=wanted, message=told)


def _drain(op: Operation, view: View) -> Operation:
    engine_id, pool = name_of(op.target), str(op.params["pool"])
    engine, spec = view.engines.get(engine_id), view.specs.get(pool)
    total = 2 if op.params["replace"] else 1
    if engine is not None and engine.state in (EngineState.DEAD, EngineState.QUARANTINED):
        return _end(op, OperationState.FAILED, view.now,
                    error=f"engine {engine_id} ended before it was drained ({engine.reason or engine.state}); requests "
                          "in flight went to other engines")
    if engine is not None:
        return op.replace(phase="draining", total=total, message=f"engine {engine_id} finishes its requests")
    wanted = spec.desired if spec else 0
    if not op.params["replace"] or view.ready(pool) >= wanted:
        return _end(op.replace(done=total, total=total), OperationState.SUCCEEDED, view.now,
                    message=f"engine {engine_id} has left pool {pool}")
    return op.replace(phase="replacing", done=1, total=total, message=f"{view.ready(pool)} of {wanted} engines ready")


def _restart(op: Operation, view: View) -> Operation:
    wish = view.restarts.get(op.target)
    number = int(op.params["number"])
    if wish is None or wish.wanted < number:
        return _end(op, OperationState.CANCELLED, view.now, error="the wish was taken back")
    if wish.done < number:
        return op.replace(phase="stopping", total=2, message=f"waiting for whoever runs {op.target} to take it down")
    missing = _not_back(op, view)
    if missing:
        return op.replace(phase="starting", done=1, total=2, message=missing)
    return _end(op.replace(done=2, total=2), OperationState.SUCCEEDED, view.now, message=f"{op.target} works again")


def _adopt(op: Operation, view: View) -> Operation:
    engine_id = name_of(op.target)
    wish, _ = view.adoptions.get(engine_id, (None, 0))
    if wish is None:
        return _end(op, OperationState.CANCELLED, view.now, error="the wish was taken back")
    engine = view.engines.get(engine_id)
    ended = wish.ended or (engine.reason or engine.state if engine is not None and engine.state in (
        EngineState.DEAD, EngineState.QUARANTINED) else "")
    if ended:
        return _end(op, OperationState.FAILED, view.now, error=ended)
    if engine is None or engine.state is EngineState.STARTING:
        told = f"asking {wish.url} whether it fits" if engine else "waiting for the driver of the run"
        return op.replace(phase="probing", total=2, message=told)
    if engine.state is not EngineState.READY:
        told = f"version {engine.applying} is applied" if engine.applying else "the newest version is fetched"
        return op.replace(phase="syncing", done=1, total=2, message=told)
    return _end(op.replace(phase="ready", done=2, total=2), OperationState.SUCCEEDED, view.now, engine=engine_id,
                version=engine.version, message=f"engine {engine_id} serves version {engine.version}")


def _not_back(op: Operation, view: View) -> str:
    """What a restarted part still lacks, or nothing."""
    before = {str(i) for i in op.params.get("before", ())}
    match op.target.partition("/")[0]:
        case "engines":
            pool = str(op.params["pool"])
            spec, ready = view.specs.get(pool), view.ready(pool)
            wanted = spec.desired if spec else 0
            return "" if ready >= wanted and name_of(op.target) not in view.engines else (
                f"{ready} of {wanted} engines of pool {pool} ready")
        case "roles":
            return "" if _fresh(view, name_of(op.target), before) else f"no new replica of {name_of(op.target)} yet"
        case "trainer":
            return _trainer_not_back(view, before)
        case _:
            if view.epoch <= int(op.params["ended"]) + 1:  # the wish itself began one; the new driver's is a later one
                return f"the run is still in epoch {view.epoch}"
            if view.job is None or view.job.phase not in _WORKING or view.job.updated_at <= op.created_at:
                return "the training loop has not begun again"
            return _trainer_not_back(view, before)


def _trainer_not_back(view: View, before: Collection[str]) -> str:
    ranks = [m for m in _fresh(view, registry.TRAINER, before) if m.phase in (*_WORKING, "train")]
    return "" if len(ranks) >= view.trainer_ranks else f"{len(ranks)} of {view.trainer_ranks} trainer ranks work"


def _fresh(view: View, role: str, before: Collection[str]) -> list[Member]:
    return [m for m in view.members if m.role == role and m.incarnation not in before]
