"""Bugs that are planted into the product, each of which must be caught: the check of the checks.

A planted bug takes one guard of the product away, never one of the world. It is caught by a rule that the world looks
at while it runs, or by the validators of real runs, which are given the event log that the world writes. Either has to
name the rule that the bug breaks: another one, an error of the product or one of the bug itself is no catch. Where a
bug is no longer caught, either the guard has become useless, or the checks do not see any more what they are there for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from chaos_tests.sim import planted_failures as of_failures
from chaos_tests.sim import planted_versions as of_versions
from chaos_tests.sim.logs import LOGS, violated
from chaos_tests.sim.patch import Patch, patched
from chaos_tests.sim.worlds import WORLDS, failures
from elastic_rl.coordinator import cluster_pass
from elastic_rl.coordinator.alerts import receiver_queue
from elastic_rl.coordinator.assignments import state_machine as assignments
from elastic_rl.coordinator.cluster_pass import ClusterWrite
from elastic_rl.coordinator.election.protocol import ElectionProtocol
from elastic_rl.coordinator.hosts import state_machine as hosts
from elastic_rl.coordinator.operations import state_machine as operations
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import ConsumedGroups, GroupLedger
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.driver import plan as driver_plan
from elastic_rl.etcd.cluster_records import Assignment, HostPhase
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.records import OperationState
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.host import job_spec
from elastic_rl.host.agent import duties
from elastic_rl.host.agent.duties import AgentLease
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.flow.group_flow import GroupFlow
from elastic_rl.trainer import progress
from elastic_rl.trainer.service import commands


class Check(StrEnum):
    """What has to catch a bug."""

    WORLD = "world"
    """A rule that the simulated world looks at while it runs."""
    LOG = "log"
    """The validators of real runs, by the event log of the world, and by the rule of the bug."""


@dataclass(frozen=True)
class Caught:
    """``tries``: runs, with this one."""

    seed: int
    tries: int
    why: str


@dataclass(frozen=True)
class Missed:
    """No run has broken the rule of the bug. ``instead``: what went wrong first in its place; "" where nothing did."""

    tries: int
    instead: str


@dataclass(frozen=True)
class Planted:
    """``rule``: that of docs/architecture.md which the bug breaks."""

    name: str
    world: str
    rule: str
    what: str
    plant: Callable[[Patch], None]
    seed: int = 0
    """The seed that is tried first, since it has caught the bug."""
    by: Check = Check.WORLD
    says: str = ""
    """Part of what the check has to say, where the rule may be broken in other ways too."""

    def planted(self) -> AbstractContextManager[None]:
        """Inside, the product has the bug."""
        return patched(self.plant)

    def tried(self, seeds: int) -> Caught | Missed:
        """The first run that breaks the rule of the bug: that of ``seed``, or of so many further ones."""
        instead = ""
        with self.planted():
            for tries, seed in enumerate([self.seed, *range(seeds)], 1):
                found = self.broken(seed)
                if self.rule in found:
                    return Caught(seed, tries, found[self.rule])
                instead = instead or next((f"seed {seed}: {why}" for why in found.values()), "")
        return Missed(1 + seeds, instead)

    def broken(self, seed: int) -> dict[str, str]:
        """Rule → how the run of a seed breaks it; of "", what else has gone wrong in it."""
        out = dict[str, str]()
        for rule, why in self._found(seed):
            out.setdefault(rule if rule != self.rule or self.says in why else "", why)
        return out

    def _found(self, seed: int) -> list[tuple[str, str]]:
        if self.by is Check.WORLD:
            failure = next(failures([self.world], [seed]))
            return [(failure.rule, failure.why)] if failure is not None else []
        try:
            return [(verdict.rule, str(violation)) for verdict in violated(self.world, seed)
                    for violation in verdict.violations]
        except Exception as e:  # the bug may make the product raise anything
            return [("", f"{type(e).__name__}: {e}")]


def _without_step_check(patch: Patch) -> None:
    admit = commands.WriterGate.admit

    def whatever_is_next(self: Any, command: Any, now: Any, rule: Any = None) -> Any:
        if isinstance(command, commands.TrainCommand):
            now = now.replace(phase=command.phase, step=command.step - 1, consumed=ConsumedGroups())
        return admit(self, command, now, rule)

    patch.setattr(commands.WriterGate, "admit", whatever_is_next)


def _without_term_check(patch: Patch) -> None:
    patch.setattr(commands.WriterGate, "claim", lambda self, epoch, term: None)


def _without_group_check(patch: Patch) -> None:
    admit = commands.WriterGate.admit

    def any_group(self: Any, command: Any, now: Any, rule: Any = None) -> Any:
        self.group = command.group
        return admit(self, command, now, rule)

    patch.setattr(commands.WriterGate, "admit", any_group)


def _consumed_not_stored(patch: Patch) -> None:
    to_json = progress.Progress.to_json
    patch.setattr(progress.Progress, "to_json", lambda self: {**to_json(self), "consumed": {}})


def _ledger_starts_behind_what_was_consumed(patch: Patch) -> None:
    init = GroupLedger.__init__
    patch.setattr(GroupLedger, "__init__", lambda self, consumed, *more: init(
        self, type(consumed)(((0, consumed.stop + 1),)), *more))


def _consumed_does_not_grow(patch: Patch) -> None:
    patch.setattr(ConsumedGroups, "add", lambda self, new: self)


def _consumed_not_restored(patch: Patch) -> None:
    from_json = progress.Progress.from_json
    patch.setattr(progress.Progress, "from_json", lambda value: from_json({**value, "consumed": {}}))


def _consumed_again(patch: Patch) -> None:
    """Neither the actor nor the trainer goes by what was trained on."""
    _consumed_groups_stay_in_the_flow(patch)
    patch.setattr(ConsumedGroups, "check", lambda self, new: None)


def _term_is_no_token(patch: Patch) -> None:
    patch.setattr(FencedWriter, "of_term", lambda etcd, keys, epoch, term: FencedWriter.of_epoch(etcd, keys, epoch))


def _settings_are_replaced(patch: Patch) -> None:
    read = job_spec.read
    patch.setattr(job_spec, "read", lambda *asked: replace(read(*asked), committed=False))


def _ended_operations_go_on(patch: Patch) -> None:
    advance = operations.advance
    patch.setattr(operations, "advance", lambda op, *more: advance(op.replace(state=OperationState.RUNNING), *more))


def _one_engine_too_few(patch: Patch) -> None:
    plan = driver_plan.plan
    patch.setattr(driver_plan, "plan", lambda desired, *more, **limits: plan(desired - 1, *more, **limits))


def _dropped_groups_are_forgotten(patch: Patch) -> None:
    def consumption(self: Any, trained: Any) -> Any:
        return commands.Consumption(schedule.IntervalSet.from_values(trained))

    patch.setattr(GroupLedger, "consumption", consumption)


def _state_is_not_saved_at_the_end(patch: Patch) -> None:
    rl = schedule._rl

    def without_save(plan: Any, state: Any, position: Any, flow: Any) -> Any:
        steps, outcome = rl(plan, state, position, flow), None
        while True:
            try:
                effect = steps.send(outcome)
            except StopIteration as e:
                return e.value
            outcome = True if isinstance(effect, schedule.Save) else (yield effect)

    patch.setattr(schedule, "_rl", without_save)


def _any_version_will_do(patch: Patch) -> None:
    lease = GroupFlow.lease
    patch.setattr(GroupFlow, "lease", lambda self: (
        None if (grant := lease(self)) is None else replace(grant, min_version=0)))
    patch.setattr(GroupFlow, "take_stale", lambda self: [])
    patch.setattr(GroupFlow, "has_stale", False)


def _resumed_with_the_first_version(patch: Patch) -> None:
    resume = GroupFlow.resume
    patch.setattr(GroupFlow, "resume", lambda self, step, version, *more: resume(
        self, step, min(1, version), *more))


def _any_staleness(patch: Patch) -> None:
    """The one rule, by which the flow chooses and the trainer refuses."""
    refused = StalenessRule.refused
    patch.setattr(StalenessRule, "refused", lambda self, versions: refused(
        replace(self, max_staleness=1000), versions))


def _leases_without_bound(patch: Patch) -> None:
    lease = GroupFlow.lease

    def any_room(self: Any) -> Any:
        limits, self.limits = self.limits, replace(self.limits, max_staleness=self.limits.max_staleness + 1)
        try:
            return lease(self)
        finally:
            self.limits = limits

    patch.setattr(GroupFlow, "lease", any_room)


def _lost_groups_are_forgotten(patch: Patch) -> None:
    release = GroupLedger.release

    def and_forget(self: Any, ordinal: int, **how: Any) -> None:
        release(self, ordinal, **how)
        self._consumed |= IntervalSet.from_values([ordinal])
        self._find_free()

    patch.setattr(GroupLedger, "release", and_forget)


def _consumed_groups_stay_in_the_flow(patch: Patch) -> None:
    resume = GroupFlow.resume

    def without_consumed(self: Any, step: int, version: int, consumed: IntervalSet, branch: Branch) -> Any:
        return resume(self, step, version, IntervalSet(), branch)

    patch.setattr(GroupFlow, "resume", without_consumed)


def _groups_dropped_during_a_step_are_forgotten(patch: Patch) -> None:
    committed = GroupLedger.commit

    def and_all_dropped(self: Any, consumption: Any) -> None:
        committed(self, consumption)
        self._dropped.clear()

    patch.setattr(GroupLedger, "commit", and_all_dropped)


def _groups_of_abandoned_weights_are_as_new_as_their_number(patch: Patch) -> None:
    patch.setattr(Branch, "abandoned", lambda self, versions: False)


def _self_fence_too_late(patch: Patch) -> None:
    why_over = duties._why_over
    patch.setattr(duties, "_why_over", lambda service, now, lease, known, times: why_over(
        service, now, AgentLease(lease.renewed_at + times.lease_ttl_s + times.lost_s), known, times))


def _leader_ignores_incarnations(patch: Patch) -> None:
    decide = assignments.decide

    def of_any_boot(wanted: Any, now: Assignment, generation: int, known: Any, *more: Any) -> Any:
        return decide(wanted, now, generation, {name: host if name != now.host else replace(
            host, state=host.state.replace(incarnation=now.incarnation)) for name, host in known.items()}, *more)

    patch.setattr(assignments, "decide", of_any_boot)


def _agent_ignores_incarnations(patch: Patch) -> None:
    why_not = duties._why_not
    patch.setattr(duties, "_why_not", lambda name, order, incarnation, *more: why_not(
        name, order, order.assignment.incarnation, *more))


def _released_assignments_are_deleted(patch: Patch) -> None:
    put = ClusterWrite.op
    patch.setattr(ClusterWrite, "op", property(lambda self: (
        Op.delete(self.key) if isinstance(self.record, Assignment) and not self.record.host
        else put.fget(self))))  # type: ignore[attr-defined]


def _start_without_a_lease(patch: Patch) -> None:
    patch.setattr(AgentLease, "allows_start", lambda self, now, times: self.granted_at is not None or now > 0)
    why_not = duties._why_not
    patch.setattr(duties, "_why_not", lambda name, order, incarnation, now, lease, known, *more: why_not(
        name, order, incarnation, now, AgentLease(now, float("-inf")), known, *more))


def _start_of_an_older_generation(patch: Patch) -> None:
    patch.setattr(duties.KnownOrders, "updated", lambda self, read_at, revision, orders: duties.KnownOrders(
        read_at, revision, orders))


def _leader_writes_without_its_guard(patch: Patch) -> None:
    patch.setattr(ElectionProtocol, "guard", property(lambda self: Compare.create(self.key, ">", -1)))


def _recorded_deliveries_are_sent_again(patch: Patch) -> None:
    without = receiver_queue.without_notified
    patch.setattr(receiver_queue, "without_notified", lambda queue, known: without(
        queue, {i: alert.replace(notified=[]) for i, alert in known.items()}))


def _adoption_by_name(patch: Patch) -> None:
    decide = duties.duties

    def of_any_generation(host: str, incarnation: str, now: float, lease: Any, known: Any, here: Any,
                          *more: Any) -> Any:
        def generation(service: Any) -> int:
            order = known.orders.get(service.name)
            return order.generation if order is not None else service.generation

        return decide(host, incarnation, now, lease, known, [
            replace(s, generation=generation(s)) if s.alive else s for s in here], *more)

    patch.setattr(duties, "duties", of_any_generation)


def _restarted_agent_ends_what_runs(patch: Patch) -> None:
    why_over = duties._why_over
    patch.setattr(duties, "_why_over", lambda service, *more: (
        why_over(service, *more) if service.adopted else "started by another agent"))


def _singletons_move_to_idle_hosts(patch: Patch) -> None:
    decide = assignments.decide

    def balanced(wanted: Any, now: Assignment, generation: int, known: Any, *more: Any) -> Any:
        decision, best = decide(wanted, now, generation, known, *more), assignments._best(known, "", ())
        if decision.assignment is None and now.host and best not in (None, now.host):
            return assignments._move(wanted, now, {best: known[best]}, [], "it has less to do", 0.0)
        return decision

    patch.setattr(assignments, "decide", balanced)


def _hosts_of_a_stale_reading(patch: Patch) -> None:
    patch.setattr(cluster_pass, "_host_unchanged", lambda reading, name: ())


def _jobs_of_a_stale_reading(patch: Patch) -> None:
    job_writes = cluster_pass._job_writes
    patch.setattr(cluster_pass, "_job_writes", lambda *given: [
        replace(write, compares=()) for write in job_writes(*given)])


def _assignments_of_a_stale_reading(patch: Patch) -> None:
    """Their other conditions stay: the records of the job and of the hosts that are concerned."""
    writes = cluster_pass._assignment_writes
    patch.setattr(cluster_pass, "_assignment_writes", lambda *given: [
        replace(write, compares=tuple(c for c in write.compares if c.target != "version")) for write in writes(*given)])


def _lost_hosts_that_return_are_ready(patch: Patch) -> None:
    advance = hosts.advance

    def without_joining(before: Any, seen: Any, *more: Any) -> Any:
        after: Any = advance(before, seen, *more)
        joins = before is not None and before.phase is HostPhase.LOST and after.phase is HostPhase.JOINING
        return after.replace(phase=HostPhase.READY) if joins else after

    patch.setattr(hosts, "advance", without_joining)


def _suspected_hosts_are_lost_at_once(patch: Patch) -> None:
    advance = hosts.advance
    patch.setattr(hosts, "advance", lambda before, seen, leader_s, times: advance(
        before, seen, leader_s, SimpleNamespace(lost_s=0.0)))  # type: ignore[arg-type]


PLANTED: tuple[Planted, ...] = (
    Planted("without-step-check", "steps-poison", "I5", "the trainer makes any step that it is sent",
            _without_step_check, 8),
    Planted("without-term-check", "steps", "I1",
            "the trainer takes commands of an actor that was replaced", _without_term_check, 2),
    Planted("without-group-check", "async", "I1",
            "the trainer takes commands for the group before it", _without_group_check),
    Planted("consumed-not-stored", "steps", "I5",
            "the trainer's state has no groups that were trained on", _consumed_not_stored),
    Planted("ledger-starts-behind-what-was-consumed", "steps", "I5",
            "the ledger skips a group at a resume", _ledger_starts_behind_what_was_consumed),
    Planted("dropped-groups-are-forgotten", "steps", "I5",
            "dropped groups are on no record", _dropped_groups_are_forgotten),
    Planted("state-is-not-saved-at-the-end", "steps", "I11",
            "the state is not saved at the end of the run", _state_is_not_saved_at_the_end),
    Planted("any-version-will-do", "steps", "I5", "the actor sends the trainer samples of any age",
            _any_version_will_do),
    Planted("resumed-with-the-first-version", "async", "I5",
            "an actor resumes with the first version, and not that of the trainer",
            _resumed_with_the_first_version, 17),
    Planted("any-staleness", "async", "I5", "groups of any age are trained on", _any_staleness, 2),
    Planted("leases-without-bound", "async", "I5",
            "a step more is generated ahead than the staleness allows", _leases_without_bound),
    Planted("lost-groups-are-forgotten", "async", "I5",
            "a group that the queue has lost is not generated again", _lost_groups_are_forgotten),
    Planted("consumed-groups-stay-in-the-flow", "async", "I11",
            "an actor that resumes sends groups again and again that were trained on, which the trainer refuses",
            _consumed_groups_stay_in_the_flow, 1),
    Planted("groups-dropped-during-a-step-are-forgotten", "async", "I5",
            "groups that were dropped during a step are on no record", _groups_dropped_during_a_step_are_forgotten, 34),
    Planted("groups-of-abandoned-weights-are-as-new-as-their-number", "async", "I5",
            "samples of abandoned weights are trained on", _groups_of_abandoned_weights_are_as_new_as_their_number, 1),
    Planted("self-fence-too-late", "cluster", "I1",
            "an agent without its lease ends its singletons too late", _self_fence_too_late, 1),
    Planted("leader-ignores-incarnations", "cluster", "I12",
            "an assignment to a host that has booted again stands", _leader_ignores_incarnations, 1),
    Planted("agent-ignores-incarnations", "cluster", "I1",
            "an agent carries out what was assigned to its host before it booted", _agent_ignores_incarnations),
    Planted("released-assignments-are-deleted", "cluster", "I1",
            "the generation of an assignment begins again at 1", _released_assignments_are_deleted),
    Planted("start-without-a-lease", "cluster", "I1",
            "an agent without a lease starts what was assigned to it", _start_without_a_lease, 5),
    Planted("start-of-an-older-generation", "cluster", "I1",
            "an agent goes back to an older reading of its assignments", _start_of_an_older_generation, 1),
    Planted("leader-writes-without-its-guard", "cluster", "I1",
            "a leader that was replaced writes", _leader_writes_without_its_guard, 52),
    Planted("leader-writes-without-its-term", "election", "I1",
            "a replica that was replaced writes as the leader", _leader_writes_without_its_guard, 2),
    Planted("recorded-deliveries-are-sent-again", "alerts", "I9",
            "a new leader repeats an alert that was delivered", _recorded_deliveries_are_sent_again, 1),
    Planted("adoption-by-name", "cluster", "I8",
            "a restarted agent keeps a service of an older generation", _adoption_by_name, 1),
    Planted("restarted-agent-ends-what-runs", "cluster", "I12",
            "a restarted agent ends what runs", _restarted_agent_ends_what_runs, 1),
    Planted("singletons-move-to-idle-hosts", "cluster", "I14",
            "a driver that works is moved to a host that has less to do", _singletons_move_to_idle_hosts),
    Planted("hosts-of-a-stale-reading", "cluster", "I12",
            "the leader gives a singleton to a host that is gone, by a stale reading", _hosts_of_a_stale_reading, 9),
    Planted("jobs-of-a-stale-reading", "cluster", "I11",
            "the leader writes the states of jobs by a stale reading", _jobs_of_a_stale_reading, 1),
    Planted("lost-hosts-that-return-are-ready", "cluster", "I1",
            "a lost host that returns has not given up what it held", _lost_hosts_that_return_are_ready),
    Planted("suspected-hosts-are-lost-at-once", "cluster", "I14",
            "a host that is away for a moment is lost", _suspected_hosts_are_lost_at_once),
    Planted("checksum-unchecked", "versions", "I2", "a reader does not compare the digest of what it was sent",
            of_versions.checksum_unchecked, 5),
    Planted("absent-manifest-stops-the-drops", "versions-disks", "I3",
            "a node drops nothing while it lacks the manifest of some version",
            of_versions.absent_manifest_stops_the_drops, 1),
    Planted("pins-are-not-read", "versions", "I3", "the garbage collector does not read the pins",
            of_versions.pins_are_not_read, 1),
    Planted("formation-ignored", "versions", "I1", "a rank publishes whose formation is over",
            of_versions.formation_ignored, 1),
    Planted("stale-driver-writes", "engines", "I1", "a driver writes although another has begun",
            of_versions.stale_driver_writes),
    Planted("take-over-raises-the-epoch", "engines", "I12", "a driver that takes over ends all engines",
            of_versions.take_over_raises_the_epoch),
    Planted("engines-of-any-epoch-are-adopted", "engines", "I1", "a driver adopts the engine of another epoch",
            of_versions.engines_of_any_epoch_are_adopted),
    Planted("drain-that-does-not-wait", "engines", "I6", "an engine leaves with requests in flight",
            of_versions.drain_that_does_not_wait),
    Planted("steps-end-no-row", "failures", "I9", "faults count on though the run made a step between them",
            of_failures.steps_end_no_row),
    Planted("faults-outlive-a-global-restart", "failures", "I9", "faults of before a global restart count after it",
            of_failures.faults_outlive_a_global_restart),
    Planted("faults-that-come-together-count-each", "failures", "I9", "each rank of a group that dies is a fault",
            of_failures.faults_that_come_together_count_each),
    Planted("death-of-what-hung-counts-again", "failures", "I9", "the end of a member that hung is a second fault",
            of_failures.death_of_what_hung_counts_again),
    Planted("faults-are-written-apart", "failures", "I9", "a leader that dies leaves a fault known, and not counted",
            of_failures.faults_are_written_apart),
    Planted("faults-of-an-older-epoch-count", "failures", "I9", "what is left of an epoch that is over has faults",
            of_failures.faults_of_an_older_epoch_count),
    Planted("each-leader-counts-a-report", "failures", "I9", "the next leader counts a reported fault again",
            of_failures.each_leader_counts_a_report, 30),
    Planted("hangs-are-not-restarted", "failures", "I10", "what hangs is left so",
            of_failures.hangs_are_not_restarted),
    Planted("what-goes-on-is-restarted", "failures", "I14", "a part is restarted that makes progress again",
            of_failures.what_goes_on_is_restarted, 26),
    Planted("failed-restarts-are-ignored", "failures", "I10", "a restart that is not carried out has no consequence",
            of_failures.failed_restarts_are_ignored, 5),
    Planted("budget-without-end", "failures", "I10", "a part that fails again and again is restarted in place for ever",
            of_failures.budget_without_end, 3),
    Planted("global-restart-after-a-step", "failures", "I11",
            "all is restarted although the run has made a step since", of_failures.global_restart_after_a_step, 57),
    Planted("needless-global-restart-hides-a-hang", "failures", "I10",
            "what hangs is left so once a step made the global restart needless",
            of_failures.needless_global_restart_hides_a_hang, 17),
    Planted("fault-after-a-step-hides-a-hang", "failures", "I10",
            "what hangs is left so once the run has made a step and the part has another fault",
            of_failures.fault_after_a_step_hides_a_hang, 1438),
    Planted("decisions-outlive-their-epoch", "failures", "I10",
            "a second global restart begins while one is under way", of_failures.decisions_outlive_their_epoch, 374),
    Planted("run-that-is-over-is-restarted", "failures", "I11", "what was pending when the run ended is carried out",
            of_failures.run_that_is_over_is_restarted, 34),
    Planted("records-of-engines-are-kept", "failures", "I10", "what is recorded of an engine outlives it",
            of_failures.records_of_engines_are_kept, says="outlives it"),
    Planted("crash-loop-in-spite-of-progress", "failures", "I11", "a run that gets on is ended as a crash loop",
            of_failures.crash_loop_in_spite_of_progress, 2),
    Planted("crash-loop-without-end", "failures", "I11", "a run that gets no further is restarted for ever",
            of_failures.crash_loop_without_end, 2),
    Planted("end-without-its-epoch", "failures", "I1", "what runs may write after a crash loop has ended the run",
            of_failures.end_without_its_epoch, 2),
    Planted("leader-writes-without-its-token", "failures", "I1", "a leader that was replaced writes faults",
            of_failures.leader_writes_without_its_token),
    # -- by the event log ----------------------------------------------------------------------------------------------
    Planted("committed-before-sealed", "versions", "I2", "a version is committed before its parts are sealed",
            of_versions.committed_before_sealed, by=Check.LOG),
    Planted("committed-after-its-lease", "versions", "I2", "a version is committed after its publisher's lease",
            of_versions.committed_after_its_lease, 52, by=Check.LOG),
    Planted("committed-on-lost-nodes", "versions", "I2", "a version is committed on nodes that were lost",
            of_versions.committed_on_lost_nodes, 23, by=Check.LOG),
    Planted("number-taken-again", "versions", "I3", "a publisher that starts takes the last number again",
            of_versions.number_taken_again, by=Check.LOG),
    Planted("older-version-becomes-the-head", "versions", "I3", "an older version becomes the head",
            of_versions.older_version_becomes_the_head, by=Check.LOG),
    Planted("pinned-versions-are-released", "versions", "I3", "a version is released that was pinned just now",
            of_versions.pinned_versions_are_released, 46, by=Check.LOG),
    Planted("pin-of-any-state", "versions", "I3", "a version is pinned that is released",
            of_versions.pin_of_any_state, 23, by=Check.LOG),
    Planted("no-epoch-guard", "versions", "I1", "a publisher of an epoch that is over publishes",
            of_versions.no_epoch_guard, by=Check.LOG),
    Planted("routable-before-verified", "engines", "I4", "an engine is ready with weights that nobody verified",
            of_versions.routable_before_verified, by=Check.LOG),
    Planted("ready-after-its-epoch", "engines", "I1", "an engine becomes ready after its epoch",
            of_versions.no_epoch_guard, 1, by=Check.LOG),
    Planted("assignment-is-no-token", "engines", "I1", "a host writes the run's status that holds it no more",
            of_versions.assignment_is_no_token, by=Check.LOG),
    Planted("stale-leader-writes", "election", "I1", "a replica that was replaced writes as the leader",
            _leader_writes_without_its_guard, 2, by=Check.LOG),
    Planted("delivered-alert-is-repeated", "alerts", "I9", "a new leader repeats an alert that was delivered",
            _recorded_deliveries_are_sent_again, 1, by=Check.LOG),
    Planted("groups-are-trained-on-again", "async", "I5", "after a resume nobody goes by what was trained on",
            _consumed_again, 1, by=Check.LOG, says="was trained on in step"),
    Planted("consumed-not-restored", "steps", "I5", "the trainer comes back without the groups that it was trained on",
            _consumed_not_restored, by=Check.LOG, says="lacks the groups"),
    Planted("consumed-does-not-grow", "steps", "I5", "the set of groups that were trained on stays as it is",
            _consumed_does_not_grow, by=Check.LOG, says="groups_lost"),
    Planted("dropped-groups-are-on-no-record", "steps", "I5", "dropped groups are on no record",
            _dropped_groups_are_forgotten, by=Check.LOG, says="dropped on the record"),
    Planted("lost-groups-are-on-no-record", "async", "I5", "a group that the queue has lost is not generated again",
            _lost_groups_are_forgotten, by=Check.LOG, says="groups_lost"),
    Planted("staleness-without-bound", "async", "I5", "groups of any age are trained on",
            _any_staleness, 1, by=Check.LOG, says="staleness"),
    Planted("term-is-no-token", "steps", "I5", "an actor that was replaced leases groups",
            _term_is_no_token, by=Check.LOG, says="was written under term"),
    Planted("settings-of-a-job-that-has-begun-are-replaced", "steps", "I13",
            "a start replaces the settings of a job that has versions", _settings_are_replaced, by=Check.LOG),
    Planted("assignments-are-deleted", "cluster", "I1", "the generation of an assignment begins again at 1",
            _released_assignments_are_deleted, by=Check.LOG),
    Planted("assignments-of-a-stale-reading", "cluster", "I1",
            "the leader replaces an assignment that it does not know", _assignments_of_a_stale_reading, 9, by=Check.LOG,
            says="no order of these operations"),
    Planted("write-of-a-term-that-is-over", "election", "I1", "clients see that a replica that was replaced writes",
            _leader_writes_without_its_guard, 8, by=Check.LOG, says="no order of these operations"),
    Planted("ended-jobs-go-on", "cluster", "I11", "the leader writes the states of jobs by a stale reading",
            _jobs_of_a_stale_reading, 1, by=Check.LOG),
    Planted("ended-operations-go-on", "engines", "I10", "an operation that has ended is followed, and ends again",
            _ended_operations_go_on, by=Check.LOG),
    Planted("one-engine-too-few", "engines", "I6", "a pool is content with one engine fewer than it is to have",
            _one_engine_too_few, by=Check.LOG),
)
assert all(bug.world in (LOGS if bug.by is Check.LOG else WORLDS) for bug in PLANTED)
