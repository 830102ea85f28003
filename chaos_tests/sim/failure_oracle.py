"""What the failure policy may do and has to, reckoned from what etcd holds: the judge of the world of failures.

It sees each write that etcd has taken of a leader, with all that was there before, and what that leader had read. Its
own account of faults is by the member registry and the reported ends of agents, and knows nothing of the policy's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from chaos_tests.sim.violation import RuleViolated
from elastic_rl.config import FailurePolicyConfig
from elastic_rl.coordinator.leader_clock import LeaderClock
from elastic_rl.coordinator.records import FaultLog, LastSeen, RecoveryAction
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import (
    FAILURE_POLICY,
    JobStatus,
    Operation,
    OperationKind,
    OperationState,
    RestartRequest,
)
from elastic_rl.etcd.transaction import KeyValue, Op

R = TypeVar("R", bound=Record)
Before = Mapping[str, KeyValue]
SLACK_S = 20.0
"""Seconds of the leader clock, on top of the longest backoff, after which what is due counts as late."""
_LATE_PASSES = 3
"""Whole passes in a row at which something has to be late: what one begins, the next ones see."""


class Leader(Protocol):
    """The oracle knows this of the replica whose write it judges."""

    name: str
    seen: ClusterSnapshot
    read_to: int
    clock: LeaderClock

    @property
    def leads(self) -> bool: ...


class Progress(NamedTuple):
    """How far the run is. RL comes after the supervised phase."""

    in_rl: bool
    step: int
    pieces: int

    @classmethod
    def of(cls, status: JobStatus | None) -> Progress:
        if status is None:
            return cls(False, 0, 0)
        in_rl = status.phase in ("rl", "finished")
        return cls(in_rl, status.step if in_rl else max(status.step, status.sft_step), status.pieces)

    @property
    def whole(self) -> tuple[bool, int]:
        """The same without pieces of a step."""
        return self.in_rl, self.step


class Counted(NamedTuple):
    at: float
    progress: Progress


@dataclass
class Account:
    """The faults of one target since the last global restart."""

    row: list[Counted] = field(default_factory=list)
    """The faults in a row: the run has made no step in between."""
    over_since: float | None = None
    """When the row became longer than the budget allows; None once that was acted on."""
    has_failed: bool = False
    """Whether the last restart of it was not carried out."""
    failed_since: float | None = None
    """When that failure became known; None once the run has made a step."""
    operation: str = ""
    """The operation that the policy began last."""

    def has_stepped(self, progress: Progress) -> bool:
        return bool(self.row) and progress.whole > max(fault.progress.whole for fault in self.row)


@dataclass
class Report:
    """The reported end of an agent, which the leader's events have not been read past yet."""

    target: str
    counted: bool = False


class FailureOracle:
    def __init__(self, keys: Keys, cfg: FailurePolicyConfig, counts: Counter[str]) -> None:
        self._keys, self._cfg, self._counts = keys, cfg, counts
        self._accounts: dict[str, Account] = {}
        self._reports: dict[int, Report] = {}
        """The reported ends of agents, by the revision of the event."""
        self._refused_at = 0
        self._restarted_at = 0
        """Revision of the last global restart, whoever asked for it."""
        self._restarts: list[Counted] = []
        """Global restarts by the policy in a row, without any progress in between."""
        self._ends_since: float | None = None
        """When the policy decided to end the run; None while it has not."""
        self.ended_at = 0
        """Revision at which the policy has ended the run; 0 while it has not."""
        self._running: dict[str, str] = {}
        """Operation → its target."""
        self._hangs: dict[tuple[str, str, str], float] = {}
        """Role, id and incarnation of members that hang → since when that is known, or a restart for it has ended."""
        self._late = Counter[str]()

    # -- the environment -----------------------------------------------------------------------------------------------
    def reported(self, target: str, revision: int) -> None:
        """The driver has reported the end of the agent of a trainer group."""
        self._reports[revision] = Report(target)

    def refused(self, revision: int) -> None:
        """A rank has refused what its group was to compute: the end of its ranks is no fault."""
        self._refused_at = revision

    def resumed(self) -> None:
        """The operator goes on with a run that has ended: what was before counts no more."""
        self._forget()
        self._restarts, self._ends_since, self.ended_at = [], None, 0

    def _forget(self) -> None:
        self._accounts.clear()
        self._hangs.clear()

    def _account(self, target: str) -> Account:
        return self._accounts.setdefault(target, Account())

    # -- a write of a leader -------------------------------------------------------------------------------------------
    def written(self, leader: Leader, before: Before, ops: Sequence[Op], revision: int) -> None:
        if not leader.leads:
            raise RuleViolated("I1", f"{leader.name} has written {ops[0].key}, and leads no more")
        write = _Write(self._keys, before, ops)
        self._judge_deletes(write, leader)
        counted = self._judge_transitions(write, leader)
        self._judge_logs(write, leader, counted)
        for op in write.begun:
            self._judge_begun(op, write, leader, revision)
        for op in write.ended:
            self._note_end(op, write, leader)
        if not write.begun and (self._keys.epoch() in write.puts or write.fails_run):
            self._judge_end_of_run(write, leader, revision)

    def _judge_deletes(self, write: _Write, leader: Leader) -> None:
        """Nothing of the job is deleted but what is known of members and engines that are gone, and of operations."""
        keys = self._keys
        allowed = (keys.registry_prefix(), keys.evidence_prefix(), keys.fault("engines/"), keys.restart("engines/"),
                   keys.operations_prefix(), *([keys.faults_prefix()] if leader.seen.run_ended else []))
        for key in write.deletes:
            if not key.startswith(allowed):
                raise RuleViolated("I15", f"the leader has deleted {key}")
            if leader.seen.run_ended and key.startswith(keys.faults_prefix()):
                self._accounts.pop(key.removeprefix(keys.faults_prefix()), None)
            if key.startswith((keys.fault("engines/"), keys.restart("engines/"))) and not leader.seen.run_ended:
                self._counts["record of an engine collected"] += 1
                if keys.engine(key.rpartition("/")[2]) in write.before:
                    raise RuleViolated("I15", f"the leader has deleted {key}, and the engine is there")

    # -- faults --------------------------------------------------------------------------------------------------------
    def _judge_transitions(self, write: _Write, leader: Leader) -> set[str]:
        """Targets of which the write has to count a fault."""
        counted, concerned = set[str](), set[str]()
        for old, new in write.members:
            name = (new.role, new.id, new.incarnation)
            if _is_ended(new, leader.seen):
                continue
            if new.hung_at and not (old is not None and old.incarnation == new.incarnation and old.hung_at):
                concerned.add(target := _target_of(new))
                self._hangs[name] = leader.clock.now()
            elif new.dead and not (old is not None and old.dead):
                was_known = new.hung_at or new.role == "engine" or (
                    new.role == "trainer" and new.registered_revision < self._refused_at)
                self._hangs.pop(name, None)
                if was_known:
                    continue
                concerned.add(target := _target_of(new))
            else:
                if not new.hung_at:
                    self._hangs.pop(name, None)
                continue
            if new.role != "engine":
                counted.add(target)
        for target in concerned - write.logs.keys():
            raise RuleViolated("I9", f"a fault of {target} became known, and was not recorded in the same transaction")
        if write.members and (more := write.logs.keys() - concerned):
            raise RuleViolated("I9", f"a fault of {', '.join(more)} was recorded that is none")
        return counted

    def _judge_logs(self, write: _Write, leader: Leader, counted: set[str]) -> None:
        for target, (old, new) in write.logs.items():
            if target == "job":
                ends = new.pending is RecoveryAction.STOP
                if ends and self._ends_since is None:
                    self._judge_decision_to_end(leader)
                elif self._ends_since is not None and not ends and not write.fails_run:
                    self._judge_recovery(leader)
                continue
            if target.startswith("engines/") or leader.seen.read_at < self._restarted_at:
                continue  # what was read before a global restart counts no more
            account = self._account(target)
            reports = new.reported_revision > (old.reported_revision if old is not None else 0)
            if reports:
                self._note_report(target, new.reported_revision, leader)
            if reports or target in counted:
                self._count(target, leader)
            if [o.at for o in new.occurrences] != self._times(account):
                raise RuleViolated("I9", f"{target} has the faults {[o.at for o in new.occurrences]} in its log, and "
                                         f"those in a row are {self._times(account)}")

    def _note_report(self, target: str, revision: int, leader: Leader) -> None:
        report = self._reports.get(revision)
        if report is None or report.target != target or report.counted:
            raise RuleViolated("I9", f"the end of an agent of {target} is counted that was not reported, or once more")
        if revision < leader.seen.revision(self._keys.epoch()):
            raise RuleViolated("I9", f"the end of an agent of {target} is counted in a later epoch")
        report.counted = True

    def _times(self, account: Account) -> list[float]:
        return [fault.at for fault in account.row[-(self._cfg.max_faults + 1):]]

    def _count(self, target: str, leader: Leader) -> None:
        """One more fault: those that come together are one, and a row of them ends with a step, and with time."""
        account, cfg = self._account(target), self._cfg
        now, progress = leader.seen.leader_time, Progress.of(leader.seen.status)
        if account.has_stepped(progress):
            self._counts["row ended by a step"] += 1
            account.row, account.over_since, account.failed_since = [], None, None
        elif account.row and now - account.row[-1].at >= cfg.fault_window_s:
            self._counts["row ended by time"] += 1
            account.row = []
        if account.row and now - account.row[-1].at < cfg.fault_merge_s:
            self._counts["faults merged"] += 1
        else:
            self._counts["fault counted"] += 1
            account.row.append(Counted(now, progress))
        if len(account.row) > cfg.max_faults:
            account.over_since = now

    # -- restarts ------------------------------------------------------------------------------------------------------
    def _judge_begun(self, op: Operation, write: _Write, leader: Leader, revision: int) -> None:
        by_policy = op.by == FAILURE_POLICY
        if by_policy and self.ended_at:
            raise RuleViolated("I11", f"{op.target} is restarted, and a crash loop has ended the run")
        if by_policy and leader.seen.run_ended:
            raise RuleViolated("I11", f"{op.target} is restarted, and the run is over")
        self._running[op.id] = op.target
        if op.target == "job":
            self._judge_global_restart(op, write, leader)
            self._forget()
            self._restarted_at = revision
        elif by_policy:
            self._counts["restart by the policy"] += 1
            account = self._account(op.target)
            account.operation, account.has_failed, account.failed_since = op.id, False, None
            if not _needs_restart(op.target, leader.seen):
                raise RuleViolated("I14", f"{op.target} is restarted, and nothing of it hangs or is behind")

    def _judge_global_restart(self, op: Operation, write: _Write, leader: Leader) -> None:
        if op.by != FAILURE_POLICY:
            self._counts["global restart asked for"] += 1
            return
        request, epoch = write.was(self._keys.restart("job"), RestartRequest), write.epoch
        if request is not None and request.open and epoch <= request.epoch + 1:
            raise RuleViolated("I10", f"a second global restart begins, and that of epoch {request.epoch} is under way")
        self._require_cause(leader)
        self._add_restart(leader)
        if len(self._restarts) >= self._cfg.max_global_restarts:
            raise RuleViolated("I11", f"{len(self._restarts)} global restarts in a row without progress, and the run "
                                      "is not ended")

    def _require_cause(self, leader: Leader) -> None:
        """A global restart needs more faults in a row than are allowed, or a restart that was not carried out."""
        progress = Progress.of(leader.seen.status)
        if any((len(account.row) > self._cfg.max_faults or account.over_since is not None)
               and not account.has_stepped(progress) for account in self._accounts.values()):
            self._counts["global restart for faults in a row"] += 1
        elif any(account.has_failed for account in self._accounts.values()):
            self._counts["global restart for a restart that was not carried out"] += 1
        else:
            rows = {target: len(account.row) for target, account in self._accounts.items()}
            raise RuleViolated("I11", f"a global restart without a cause: faults in a row {rows}")

    def _add_restart(self, leader: Leader) -> None:
        status, now = leader.seen.status, leader.seen.leader_time
        progress, last = Progress.of(status), self._restarts[-1:]
        soon_s = max(self._cfg.crash_loop_window_s, self._cfg.crash_loop_steps * (status.step_s if status else 0.0))
        if last and (now - last[0].at > soon_s or progress > max(r.progress for r in self._restarts)):
            self._restarts = []
        self._restarts.append(Counted(now, progress))

    def _note_end(self, op: Operation, write: _Write, leader: Leader) -> None:
        target = self._running.pop(op.id, op.target)
        for name, since in self._hangs.items():
            if _target_of_name(name) == target:
                self._hangs[name] = max(since, leader.clock.now())
        request = write.was(self._keys.restart(target), RestartRequest)
        account = self._accounts.get(target)
        if (account is not None and account.operation == op.id and op.state is OperationState.FAILED
                and not _has_ended(target, leader.seen)
                and request is not None and request.observed_generation < int(op.params["generation"])):
            account.has_failed, account.failed_since = True, leader.seen.leader_time

    # -- the end of the run --------------------------------------------------------------------------------------------
    def _judge_decision_to_end(self, leader: Leader) -> None:
        self._require_cause(leader)
        self._add_restart(leader)
        if len(self._restarts) < self._cfg.max_global_restarts:
            raise RuleViolated("I11", f"the run is to end after {len(self._restarts)} global restarts in a row")
        self._ends_since = leader.seen.leader_time

    def _judge_recovery(self, leader: Leader) -> None:
        """The run goes on after all, since it has got further before it was ended."""
        if Progress.of(leader.seen.status) <= max(restart.progress for restart in self._restarts):
            raise RuleViolated("I11", "the run was to be ended as a crash loop, has got no further, and goes on")
        self._counts["crash loop that the run has left by itself"] += 1
        self._ends_since = None

    def _judge_end_of_run(self, write: _Write, leader: Leader, revision: int) -> None:
        """The policy ends the run: after a crash loop alone, with its epoch, and says why."""
        status = write.status
        if self._keys.epoch() not in write.puts:
            raise RuleViolated("I1", "the run was ended, and what runs may go on to write: its epoch is not over")
        if status is None or status.phase != "failed" or not status.message:
            raise RuleViolated("I11", "the epoch was ended, and the job's status does not say why")
        if self._ends_since is None or len(self._restarts) < self._cfg.max_global_restarts:
            raise RuleViolated("I11", f"the run was ended after {len(self._restarts)} global restarts in a row")
        if Progress.of(leader.seen.status) > max(restart.progress for restart in self._restarts):
            raise RuleViolated("I11", "the run was ended as a crash loop, and has got further")
        self._counts["crash loop ended the run"] += 1
        self._forget()
        self._ends_since, self.ended_at = None, revision

    # -- what has to happen --------------------------------------------------------------------------------------------
    def passed(self, leader: Leader) -> None:
        """A leader has made a whole pass."""
        self._judge_reports(leader)
        late, now = set[str](), leader.seen.leader_time
        limit_s = self._cfg.backoff_max_s + SLACK_S
        for op in leader.seen.operations.values():
            if not op.state.ended and now > op.leader_deadline_s + SLACK_S:
                late.add(f"I10 operation {op.id} of {op.target} has not ended")
        request = leader.seen.restarts.get("job")
        if not leader.seen.run_ended and not (request is not None and request.open):
            progress = Progress.of(leader.seen.status)
            for target, account in self._accounts.items() if self._ends_since is None else ():
                if account.has_stepped(progress):  # also where that step is undone later
                    account.over_since = account.failed_since = None
                since = account.over_since if account.over_since is not None else account.failed_since
                if since is not None and now - since > limit_s:
                    late.add(f"I10 {target} needs a global restart, and there was none")
            for name, since in self._hangs.items():
                target = _target_of_name(name)
                if now - since > limit_s and not self._is_being_restarted(target) and _hangs(name, leader.seen):
                    late.add(f"I10 {name[0]} {name[1]} hangs, and {target} is not restarted")
            if self._ends_since is not None and now - self._ends_since > SLACK_S:
                late.add("I11 the run is in a crash loop, and is not ended")
        self._late = Counter({what: self._late[what] + 1 for what in sorted(late)})
        for what, passes in self._late.items():
            if passes > _LATE_PASSES:
                rule, _, text = what.partition(" ")
                raise RuleViolated(rule, text)

    def _is_being_restarted(self, target: str) -> bool:
        return any(of in (target, "job") for of in self._running.values())

    def _judge_reports(self, leader: Leader) -> None:
        """Each report that was read has been counted, but those of an earlier epoch or of a run that is over."""
        for revision in [at for at in self._reports if at <= leader.read_to]:
            report = self._reports.pop(revision)
            earlier = revision < max(self._restarted_at, leader.seen.revision(self._keys.epoch()))
            if not (report.counted or earlier or leader.seen.run_ended):
                raise RuleViolated("I9", f"the end of an agent of {report.target} was not counted")


class _Write:
    """A transaction of a leader, decoded."""

    def __init__(self, keys: Keys, before: Before, ops: Sequence[Op]) -> None:
        self._keys, self.before = keys, before
        self.puts = {op.key: op.data for op in ops if op.kind == "put"}
        self.deletes = [op.key for op in ops if op.kind == "delete" and op.key in before]
        self.members = [(self.was(key, LastSeen), LastSeen.decode(data))
                        for key, data in self._under(keys.registry_prefix())]
        self.logs = {new.target: (self.was(key, FaultLog), new) for key, data in self._under(keys.faults_prefix())
                     for new in [FaultLog.decode(data)]}
        operations = [(self.was(key, Operation), Operation.decode(data))
                      for key, data in self._under(keys.operations_prefix())]
        self.begun = [new for old, new in operations if old is None and new.kind is OperationKind.RESTART]
        self.ended = [new for old, new in operations if old is not None and new.state.ended and not old.state.ended]

    def _under(self, prefix: str) -> list[tuple[str, bytes]]:
        return [(key, data) for key, data in self.puts.items() if key.startswith(prefix)]

    def was(self, key: str, kind: type[R]) -> R | None:
        found = self.before.get(key)
        return kind.decode(found.value) if found is not None else None

    @property
    def epoch(self) -> int:
        """The epoch before it."""
        found = self.before.get(self._keys.epoch())
        return found.version if found is not None else 0

    @property
    def status(self) -> JobStatus | None:
        data = self.puts.get(self._keys.job_status())
        return JobStatus.decode(data) if data is not None else None

    @property
    def fails_run(self) -> bool:
        return self.status is not None and self.status.phase == "failed"


def _target_of(entry: LastSeen) -> str:
    return _target_of_name((entry.role, entry.id, entry.incarnation))


def _target_of_name(name: tuple[str, str, str]) -> str:
    role, member_id, _ = name
    if role == "engine":
        return f"engines/{member_id}"
    return role if role in ("trainer", "driver") else f"roles/{role}"


def _needs_restart(target: str, seen: ClusterSnapshot) -> bool:
    """Whether something of a target hangs, or is an engine that did not catch up."""
    engine = seen.engines.get(target.removeprefix("engines/"))
    return (engine is not None and engine.is_behind) or any(
        entry.hung_at and not entry.dead and _target_of(entry) == target and not _is_ended(entry, seen)
        for entry in seen.registry.values())


def _has_ended(target: str, seen: ClusterSnapshot) -> bool:
    """Whether it is an engine that has ended by itself, which nobody can stop on request."""
    engine = seen.engines.get(target.removeprefix("engines/"))
    return target.startswith("engines/") and (engine is None or engine.state.ended)


def _is_ended(entry: LastSeen, seen: ClusterSnapshot) -> bool:
    """Whether a member is of an epoch, or of a run, that is over. A driver's epoch is when a global restart has ended
    it, since its death may be why the next one has begun another epoch."""
    over = entry.epoch <= seen.ended_epoch if entry.role == "driver" else entry.epoch < seen.epoch
    return seen.run_ended or over


def _hangs(name: tuple[str, str, str], seen: ClusterSnapshot) -> bool:
    entry = seen.registry.get(name[:2])
    return (entry is not None and entry.incarnation == name[2] and entry.hung_at > 0 and not entry.dead
            and not _is_ended(entry, seen))
