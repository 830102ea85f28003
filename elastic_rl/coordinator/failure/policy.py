"""The failure policy: what failed → what is done, how often, and what comes after that. Pure.

A fault is mended by whoever is nearest: the driver replaces engines, torch elastic re-forms the trainer group, Ray
Serve starts replicas, ``train`` starts the driver. The leader restarts what hangs, and counts. More faults of one part
than its budget within its window mean that mending in place does not help: then the whole compute plane starts anew.
Several global restarts without a step of progress in between are a crash loop: the run stops, everything is kept, and
somebody is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_rl.config import FailurePolicyConfig
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.operations.state_machine import JOB, TRAINER, engine_target, role_target
from elastic_rl.etcd.records import JobStatus, Record


class Fault(StrEnum):
    DEAD = "dead"
    HUNG = "hung"


class Action(StrEnum):
    LEAVE = "leave"
    """Somebody nearer mends it, or nothing has to be mended at once."""
    RESTART = "restart"
    """Start the part anew where it is."""
    GLOBAL_RESTART = "global restart"
    """Raise the epoch, tear the compute plane down, and go on from the last committed state."""
    STOP = "stop"
    """End the run, keep everything, and alert."""


@dataclass(frozen=True)
class Rule:
    """One line of the policy. ``counts``: whether the part's faults use up a budget of restarts in place."""

    part: str
    fault: Fault
    action: Action
    does: str
    meanwhile: str
    counts: bool = False


ROLE = "role"
DRIVER = "driver"
_ALL = "everything"
_OTHERS = "engines go on within the staleness bound"

POLICY: tuple[Rule, ...] = (
    Rule("engine", Fault.DEAD, Action.LEAVE, "the driver replaces it; the new one pulls, is verified, becomes routable",
         "training and all other engines"),
    Rule("engine", Fault.HUNG, Action.RESTART, "it is ended, then replaced as a dead one",
         "training and all other engines"),
    Rule("trainer", Fault.DEAD, Action.LEAVE, "torch elastic re-forms the group, which resumes from trainer_state",
         _OTHERS, counts=True),
    Rule("trainer", Fault.HUNG, Action.RESTART, "the group is ended and started, and resumes from trainer_state",
         _OTHERS, counts=True),
    Rule(ROLE, Fault.DEAD, Action.LEAVE, "Ray Serve starts a new replica, which goes on from committed state", _ALL,
         counts=True),
    Rule(ROLE, Fault.HUNG, Action.RESTART, "the role is deployed anew", _ALL, counts=True),
    Rule(DRIVER, Fault.DEAD, Action.LEAVE, "`train` starts it again: a global restart, since it raises the epoch",
         "the durable plane", counts=True),
    Rule(DRIVER, Fault.HUNG, Action.GLOBAL_RESTART, "the epoch is raised and the compute plane rebuilt",
         "the durable plane"),
    Rule("dcs", Fault.DEAD, Action.LEAVE, "its chunks are replicated again; pulls go to other nodes", _ALL),
    Rule("dcs", Fault.HUNG, Action.LEAVE, "pulls go to other nodes", _ALL),
    Rule("coordinator", Fault.DEAD, Action.LEAVE, "another replica leads", _ALL),
    Rule("coordinator", Fault.HUNG, Action.LEAVE, "its lease ends if it hangs as a whole; another replica leads", _ALL),
)
_RULES = {(r.part, r.fault): r for r in POLICY}
_PARTS = {r.part for r in POLICY}


def rule_for(role: str, fault: Fault) -> Rule:
    """The line for a member of ``role``; every role that Ray Serve deploys has the same."""
    return _RULES[role if role in _PARTS else ROLE, fault]


def target_of(role: str, member_id: str) -> str:
    """What is restarted when a member fails; faults of one target are counted together."""
    match role:
        case registry.ENGINE:
            return engine_target(member_id)
        case registry.TRAINER:
            return TRAINER
        case "driver":
            return JOB
        case _:
            return role_target(role)


class FaultOccurrence(Record):
    """A fault that was counted: when, and how far the run had come."""

    at: float
    progress: int


class FaultLog(Record):
    """What is remembered of a target's faults, and what is still to be done about them."""

    target: str
    marks: list[FaultOccurrence] = []
    """Of the faults that count, the oldest first."""
    pending: Action = Action.LEAVE
    due_at: float = 0.0
    reason: str = ""


def progress_of(job: JobStatus | None) -> int:
    """How far a run is, as one number that grows with it: RL steps come after every step of the SFT phase."""
    if job is None:
        return 0
    return job.step + (1_000_000_000 if job.phase in ("rl", "finished") else 0)


def record_fault(log: FaultLog, rule: Rule, reason: str, now: float, progress: int,
                 cfg: FailurePolicyConfig) -> FaultLog:
    """The log after a fault. Faults of one target that come together (ranks of a group) are one."""
    marks = [m for m in log.marks if log.target == JOB or now - m.at < cfg.fault_window_s]
    together = bool(marks) and now - marks[-1].at < cfg.fault_merge_s
    if rule.counts and not together:
        marks = [*marks, FaultOccurrence(at=now, progress=progress)][-max(cfg.max_faults + 1, cfg.max_global_restarts):]
    log = log.replace(marks=marks)
    if log.target == JOB:
        return _ask(log, Action.STOP if is_crash_loop(marks, cfg) else rule.action, reason, now, cfg)
    if rule.counts and len(marks) > cfg.max_faults:
        return _ask(log, Action.GLOBAL_RESTART, f"{len(marks)} faults of {log.target} within "
                    f"{cfg.fault_window_s:.0f} s; the last: {reason}", now, cfg)
    return _ask(log, rule.action, reason, now, cfg)


def restarted(log: FaultLog, now: float, progress: int, cfg: FailurePolicyConfig) -> FaultLog:
    """The job's log after a global restart by the policy; STOP is pending if it was one too many without progress."""
    marks = [*log.marks, FaultOccurrence(at=now, progress=progress)][-cfg.max_global_restarts:]
    pending = Action.STOP if is_crash_loop(marks, cfg) else Action.LEAVE
    return log.replace(marks=marks, pending=pending, due_at=now)


def is_crash_loop(marks: list[FaultOccurrence], cfg: FailurePolicyConfig) -> bool:
    """Whether the last ``max_global_restarts`` restarts found the run no further than the first of them did."""
    last = marks[-cfg.max_global_restarts:]
    return len(last) >= cfg.max_global_restarts and max(m.progress for m in last) <= last[0].progress


def acknowledged(log: FaultLog) -> FaultLog:
    """The log once what was pending is done. A budget that led to a global restart is whole again after it."""
    return log.replace(pending=Action.LEAVE, due_at=0.0,
                       marks=[] if log.pending is Action.GLOBAL_RESTART else log.marks)


def due(log: FaultLog, now: float) -> Action:
    """What is to be done now about a target; LEAVE for nothing."""
    return log.pending if now >= log.due_at else Action.LEAVE


def _ask(log: FaultLog, action: Action, reason: str, now: float, cfg: FailurePolicyConfig) -> FaultLog:
    if action is Action.LEAVE or log.pending is action:
        return log
    again = max(0, len(log.marks) - 1)
    wait_s = 0.0 if again == 0 else min(cfg.backoff_max_s, cfg.backoff_initial_s * 2.0 ** min(again - 1, 16))
    return log.replace(pending=action, due_at=now + (0.0 if action is Action.STOP else wait_s), reason=reason)
