"""The failure policy: which fault leads to which action, how often, and what comes after that. Pure.

Most faults are recovered by the part next to them: the driver replaces engines, torch elastic re-forms the trainer
group, Ray Serve replaces role replicas, the run's process the driver. The leader restarts what hangs, and counts. When
one part has more faults in a row than its budget, without a step of the run in between, or its restart is not carried
out, recovery in place does not help, and the whole compute plane is restarted. Several global restarts that follow one
another closely, without any progress in between, are a crash loop: the run stops, everything is kept, and an alert
fires. The run's process has a rule for the drivers that it starts (``after_driver_ended``), since the leader does not
see one that ends before it has registered.

Times are seconds of the leader clock (``leader_clock``), so that budgets and backoffs hold over a change of leaders
whose wall clocks differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_rl.config import FailurePolicyConfig
from elastic_rl.config.groups import TRAINER_GROUPS, TrainerGroupSpec
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.records import FaultLog, FaultOccurrence, LastSeen, RecoveryAction
from elastic_rl.coordinator.targets import DRIVER, JOB, engine_target, role_target
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import Event, JobStatus
from elastic_rl.runtime.backoff import doubled_s
from elastic_rl.runtime.words import counted


class Fault(StrEnum):
    DEAD = "dead"
    HUNG = "hung"
    BEHIND = "behind"
    """An engine lacks the version that the others serve (``coordinator.stragglers``). No other part has this fault."""


@dataclass(frozen=True)
class FailureRule:
    """One line of the policy. ``counts``: whether the part's faults use up a budget of restarts in place."""

    part: str
    fault: Fault
    action: RecoveryAction
    does: str
    meanwhile: str
    counts: bool = False


ROLE = "role"
"""Stands for every role that Ray Serve deploys."""
_ALL = "everything"
_OTHERS = "engines, within the staleness bound"


def _goes_on(group: TrainerGroupSpec) -> str:
    return f"resumes from {group.state}" if group.trains else "loads the policy again; nothing goes back"


POLICY: tuple[FailureRule, ...] = (
    FailureRule("engine", Fault.DEAD, RecoveryAction.NONE,
                "the driver replaces it; the replacement pulls the weights, is verified, and becomes routable",
                "training and all other engines"),
    FailureRule("engine", Fault.HUNG, RecoveryAction.RESTART, "the driver ends it and replaces it as a dead one",
                "training and all other engines"),
    FailureRule("engine", Fault.BEHIND, RecoveryAction.RESTART,
                "it gets no requests until it has caught up; where it does not, the driver ends it and replaces it as "
                "a dead one", "everything, with the other engines"),
    *(rule for group in TRAINER_GROUPS.values() for rule in (
        FailureRule(group.name, Fault.DEAD, RecoveryAction.NONE,
                    f"torch elastic re-forms the group, which {_goes_on(group)}", _OTHERS, counts=True),
        FailureRule(group.name, Fault.HUNG, RecoveryAction.RESTART,
                    f"the driver restarts the group, which {_goes_on(group)}", _OTHERS, counts=True))),
    FailureRule(ROLE, Fault.DEAD, RecoveryAction.NONE,
                "Ray Serve starts a new replica, which resumes from committed state", _ALL, counts=True),
    FailureRule(ROLE, Fault.HUNG, RecoveryAction.RESTART, "the driver restarts the role's replicas", _ALL, counts=True),
    FailureRule("driver", Fault.DEAD, RecoveryAction.NONE,
                "the run's process starts the next one, which takes over what runs", _ALL, counts=True),
    FailureRule("driver", Fault.HUNG, RecoveryAction.RESTART,
                "the run's process ends it and starts the next one, which takes over what runs", _ALL, counts=True),
    FailureRule("dcs", Fault.DEAD, RecoveryAction.NONE, "its chunks are replicated again; pulls use other nodes", _ALL),
    FailureRule("dcs", Fault.HUNG, RecoveryAction.NONE, "pulls use other nodes", _ALL),
    FailureRule("coordinator", Fault.DEAD, RecoveryAction.NONE, "another replica leads", _ALL),
    FailureRule("coordinator", Fault.HUNG, RecoveryAction.NONE,
                "when its lease ends, or its reconcile passes fail for too long, another replica leads", _ALL),
)
_RULES = {(r.part, r.fault): r for r in POLICY}
_PARTS = {r.part for r in POLICY}
_RANK = {action: rank for rank, action in enumerate(RecoveryAction)}


def rule_for(role: str, fault: Fault) -> FailureRule:
    """The rule for a member of ``role``."""
    return _RULES[role if role in _PARTS else ROLE, fault]


def target_of(role: str, member_id: str) -> str:
    """What is restarted when a member fails; faults of one target are counted together."""
    match role:
        case event_kinds.ENGINE:
            return engine_target(member_id)
        case _ if role in TRAINER_GROUPS:
            return role
        case registry.DRIVER:
            return DRIVER
        case _:
            return role_target(role)


_PIECES = 1_000_000
"""More groups and parts than a step has."""


def progress_of(job: JobStatus | None) -> int:
    """How far a run is, as one number that grows with it: RL steps come after every step of the SFT phase, and finished
    groups and parts of the next step after the last one."""
    if job is None:
        return 0
    step = job.step + 1_000_000_000 if job.phase in ("rl", "finished") else max(job.step, job.sft_step)
    return step * _PIECES + min(job.pieces, _PIECES - 1)


def ended_by_refusal(member: LastSeen, found: Iterable[tuple[int, Event]]) -> bool:
    """Whether a dead rank ended since one of its formation had refused what they were to compute, and left an event.
    ``found``: events with the revisions at which they were written. The ranks of that formation had registered by then;
    those of the next one do so later."""
    kinds = event_kinds.TRAINER_GROUP_EVENTS.get(member.role)
    return kinds is not None and any(
        event.kind == kinds.refused.name and revision > member.registered_revision for revision, event in found)


def of_epoch(log: FaultLog, epoch: int, ended: int) -> FaultLog:
    """The log as it counts in an epoch. ``ended``: epochs up to this one were ended by a global restart, whoever asked
    for it; 0 before there was one. That replaces all parts: what their faults before it had used up, left pending or
    begun is over. A driver that raises the epoch by itself, as on another host, has taken no such decision: the faults
    go on counting. So do global restarts themselves."""
    return log if log.target == JOB or not ended or log.epoch > ended else FaultLog(target=log.target, epoch=epoch)


def record_fault(log: FaultLog, rule: FailureRule, reason: str, now: float, progress: int,
                 cfg: FailurePolicyConfig) -> FaultLog:
    """The log of the present epoch after a fault. Faults of one target that come together (ranks of a group) count
    once. A row of them ends with a step of the run, which recovery in place has led to, and after ``fault_window_s``
    without one."""
    seen = log.occurrences
    if seen and _has_stepped(seen, progress):
        seen, log = [], _after_step(log, now)
    if seen and now - seen[-1].at >= cfg.fault_window_s:
        seen = []
    together = bool(seen) and now - seen[-1].at < cfg.fault_merge_s
    if rule.counts and not together:
        seen = [*seen, FaultOccurrence(at=now, progress=progress)][-(cfg.max_faults + 1):]
    log = log.replace(occurrences=seen)
    if rule.counts and len(seen) > cfg.max_faults:
        reason = f"{counted(len(seen), 'fault')} of {log.target} without a step in between; the last: {reason}"
        return _request(log, RecoveryAction.GLOBAL_RESTART, reason, now, cfg)
    return _request(log, rule.action, reason, now, cfg)


def _after_step(log: FaultLog, now: float) -> FaultLog:
    """The log once the run has made a step: of what was pending, the restart is left of a member that still hangs."""
    if log.pending is RecoveryAction.NONE:
        return log
    return log.replace(pending=RecoveryAction.RESTART, due_at=min(log.due_at, now))


def record_restart(log: FaultLog, now: float, job: JobStatus | None, cfg: FailurePolicyConfig) -> FaultLog:
    """The job's log after a global restart by the policy; STOP is pending after one too many without progress."""
    seen = in_a_row(log.occurrences, now, job, cfg)
    pending = RecoveryAction.STOP if is_crash_loop(seen, cfg) else RecoveryAction.NONE
    return log.replace(occurrences=seen, pending=pending, due_at=now)


def in_a_row(before: Sequence[FaultOccurrence], now: float, job: JobStatus | None, cfg: FailurePolicyConfig
             ) -> list[FaultOccurrence]:
    """The restarts in a row with one more: those ``before``, if the new one comes soon after the last of them and none
    of them found the run as far. Restarts that are hours apart are no loop, however long a step takes."""
    window_s = max(cfg.crash_loop_window_s, cfg.crash_loop_steps * (job.step_s if job is not None else 0.0))
    restart = FaultOccurrence(at=now, progress=progress_of(job))
    if not before or now - before[-1].at > window_s or _has_progressed(before, restart.progress):
        return [restart]
    return [*before, restart]


def _has_stepped(before: Iterable[FaultOccurrence], progress: int) -> bool:
    """Whether the run has made a step since. Groups and parts of a step are no progress of the part that fails: engines
    go on without a trainer, and steps without one replica of a role."""
    return progress // _PIECES > max(o.progress for o in before) // _PIECES


def _has_progressed(before: Iterable[FaultOccurrence], progress: int) -> bool:
    """Whether the run has got further since, be it by a piece of a step."""
    return progress > max(o.progress for o in before)


def is_crash_loop(in_a_row: Sequence[FaultOccurrence], cfg: FailurePolicyConfig) -> bool:
    """Whether there are so many restarts in a row that a further one would not help either."""
    return len(in_a_row) >= cfg.max_global_restarts


def after_driver_ended(ends: Sequence[FaultOccurrence], cfg: FailurePolicyConfig) -> RecoveryAction:
    """What the run's process does after a driver has ended by itself. ``ends``: those in a row without progress.

    NONE: the next driver takes over what runs. That does not help where what runs is what ends the drivers, so the last
    one before a crash loop ends the run rebuilds the compute plane.
    """
    if is_crash_loop(ends, cfg):
        return RecoveryAction.STOP
    last_but_one = max(2, cfg.max_global_restarts - 1)  # never the first: the next driver is to have its chance
    return RecoveryAction.GLOBAL_RESTART if len(ends) == last_but_one else RecoveryAction.NONE


def restart_failed(log: FaultLog, error: str, now: float, cfg: FailurePolicyConfig, *, carried_out: bool) -> FaultLog:
    """The log after a restart that the policy began failed. ``carried_out``: whether the part was stopped for it.

    Where it was, the driver keeps trying to bring it back, and the run's process the driver. Where it was not, they do
    not act: then the whole compute plane is restarted. A restart of the job is not repeated: its request stays open
    until it is carried out, and what runs then recovers by its own rules.
    """
    log = log.replace(operation="")
    if carried_out or log.target == JOB:
        return log
    reason = f"the restart of {log.target} was not carried out: {error}"
    return _request(log, RecoveryAction.GLOBAL_RESTART, reason, now, cfg)


def cleared(log: FaultLog) -> FaultLog:
    """The log once the pending action was taken."""
    return log.replace(pending=RecoveryAction.NONE, due_at=0.0)


def due(log: FaultLog, now: float, progress: int) -> RecoveryAction:
    """The action that is due now about a target. A global restart that faults have led to is none any more once the
    run has made a step since, and the end of a crash loop is none once the run has got any further. What may be left is
    a member that hangs, which is restarted as after a single fault."""
    if now < log.due_at:
        return RecoveryAction.NONE
    match log.pending:
        case RecoveryAction.GLOBAL_RESTART if log.occurrences and _has_stepped(log.occurrences, progress):
            return RecoveryAction.RESTART
        case RecoveryAction.STOP if _has_progressed(log.occurrences, progress):
            return RecoveryAction.RESTART
    return log.pending


def _request(log: FaultLog, action: RecoveryAction, reason: str, now: float, cfg: FailurePolicyConfig) -> FaultLog:
    """The log with an action pending, unless that one or a stronger one is pending already."""
    if _RANK[action] <= _RANK[log.pending]:
        return log
    again = max(0, len(log.occurrences) - 1)
    wait_s = doubled_s(again, cfg.backoff_initial_s, cfg.backoff_max_s) if again else 0.0
    return log.replace(pending=action, due_at=now + (0.0 if action is RecoveryAction.STOP else wait_s), reason=reason)
