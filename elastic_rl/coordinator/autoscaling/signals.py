"""What a snapshot says of the load of a pool. Pure.

Whatever is not certain makes the load unknown: engines whose probe was not answered, or that make no progress; a phase
of the run that asks for no samples; a last step that is too old. All ages are differences of one process's clock:
nothing is decided by how two hosts' clocks agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.coordinator.autoscaling.policy import Observation, PoolLoad
from elastic_rl.coordinator.membership.hang_detection import stalled_s
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.targets import DRIVER, JOB, engine_target, name_of, pool_target
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import Engine, EngineState, JobStatus, Operation, StepMetrics
from elastic_rl.runtime.words import counted

KNOWN = 0.8
"""Share of the serving engines whose load must be known."""
_FEW = 0.05
"""Share of a pool's engines that may be missing for it to grow: of thousands some always start or get a version."""
_STALLED_S = 30.0
"""An engine without progress for so long, by its own clock, does not say what its load is."""
_STEP_AGE = 3.0
_MIN_STEP_AGE_S = 300.0
"""The last step is too old after so many times its length, and so many seconds."""
_SAMPLING_PHASES = ("rl", "eval", "rejection_sampling")
_ASKS = ("source", "generate", "groups", "reward", "teacher")
"""Stages of ``train.schedule: sync`` in which engines may be asked."""


@dataclass(frozen=True)
class RunProgress:
    """What the run says of its last step."""

    trainer_idle: float | None = None
    """Share of the step in which the trainer waited for samples; None in a job that does not train."""
    step_s: float = 0.0


def observe(snapshot: ClusterSnapshot, pool: str, step: StepMetrics | None, cfg: Config, *, step_age_s: float = 0.0
            ) -> Observation:
    """What the leader sees of a pool that has a spec. ``step``: the metrics of the run's last step. ``step_age_s``:
    seconds since this leader saw it first."""
    desired, status = snapshot.specs[pool].desired, snapshot.statuses.get(pool)
    ready = snapshot.ready(pool)
    few = int(_FEW * desired)
    waits = status is not None and (status.starting > few or status.pending)
    missing = f"{ready} of {desired} engines are ready" if waits or not desired - few <= ready <= desired else ""
    return Observation(desired, _load(snapshot, pool, step, cfg, step_age_s), missing, _busy(snapshot, pool),
                       status.pending if status is not None else 0, all_ready=ready >= desired)


def _busy(snapshot: ClusterSnapshot, pool: str) -> str:
    for op in snapshot.operations.values():
        if not op.state.ended and _concerns(op, pool, snapshot):
            return f"the {op.kind} of {op.target} is not done"
    draining = snapshot.draining(pool)
    return f"{counted(draining, 'engine')} draining" if draining else ""


def _concerns(op: Operation, pool: str, snapshot: ClusterSnapshot) -> bool:
    if op.target in (pool_target(pool), DRIVER, JOB):
        return True
    if not op.target.startswith(engine_target("")):
        return False
    engine = snapshot.engines.get(name_of(op.target))
    return op.params.get("pool", engine.pool if engine else "") == pool


def _load(snapshot: ClusterSnapshot, pool: str, step: StepMetrics | None, cfg: Config, step_age_s: float
          ) -> PoolLoad | str:
    status = snapshot.status
    if snapshot.stopped:
        return "the run was stopped"
    if status is None or snapshot.run_over or status.phase not in _SAMPLING_PHASES:
        return f"the run is in phase {status.phase}" if status else "no run has begun"
    if not snapshot.has_actor:
        return "no actor process runs"
    if cfg.mode == "rl" and status.stage == "evaluate":
        return "the run evaluates"  # all prompts at once: no load that the pool is sized for
    serving = [e for e in snapshot.engines.values() if e.pool == pool and e.state is EngineState.READY]
    if not serving:
        return "no engine is ready"
    known = with_known_load(snapshot, serving)
    if len(known) < KNOWN * len(serving):
        return f"{len(serving) - len(known)} of {len(serving)} engines have not answered their last probe"
    progress = _progress(status, step, cfg, step_age_s)
    if isinstance(progress, str):
        return progress
    usages = [e.token_usage for e in known if e.token_usage is not None]
    asks = cfg.mode != "rl" or cfg.train.schedule == "fully_async" or status.stage in _ASKS
    return PoolLoad(
        engines=len(known), queued=sum(e.waiting for e in known) / len(known),
        token_usage=sum(usages) / len(usages) if len(usages) == len(known) else None,
        trainer_idle=progress.trainer_idle if pool == ROLLOUT_POOL else None, step_s=progress.step_s, asks=asks,
        waits=bool(status.waiting_kind))


def with_known_load(snapshot: ClusterSnapshot, engines: list[Engine]) -> list[Engine]:
    """The engines of which it is certain that their records have the load of a short time ago."""
    working = {m.id for m in snapshot.members if m.role == event_kinds.ENGINE and stalled_s(m) < _STALLED_S}
    return [e for e in engines if e.load_known and e.id in working]


def _progress(status: JobStatus, step: StepMetrics | None, cfg: Config, step_age_s: float) -> RunProgress | str:
    """What the last step says, or why it says nothing."""
    if cfg.mode != "rl":
        return RunProgress(step_s=step.seconds.get("total", 0.0) if step is not None else 0.0)
    if step is None or step.step != status.step:
        return "the run has not made a step"
    total = step.seconds.get("total", 0.0)
    if total <= 0:
        return "the last step has no duration"
    if step_age_s > max(_MIN_STEP_AGE_S, _STEP_AGE * total):
        return f"the last step ended at least {step_age_s:.0f} s ago"
    # Where generation and training overlap, the stage ``groups`` is the trainer's wait; else it is all of ``generate``.
    waited = step.idle_s["groups"] if "groups" in step.idle_s else step.seconds.get("generate", 0.0)
    return RunProgress(min(1.0, max(0.0, waited / total)), total)
