"""The failure policy in a world that fails: faults that are found and counted, restarts that are asked for and
followed, the budget that leads to a global restart, and the end of a crash loop.

What decides is the product's code, as the leader's loop runs it, on the model of etcd: the snapshot, the leader clock,
the member registry, stragglers, the failure policy, operations. What it decides about is modelled (``compute_plane``),
and an operator restarts, stops and resumes the run. Leaders die before and after any write, lose its answer, are
replaced in the middle of a pass and go on, and have wall clocks that jump; etcd is away for a while. ``failure_oracle``
judges each write.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import TypeVar, cast
from unittest import mock

from chaos_tests.sim.compute_plane import (
    CLUSTER_KEYS,
    ENGINES,
    EPOCH_S,
    KEYS,
    LONGEST_RESTART_S,
    RANKS,
    ROLE,
    TRAINER,
    ComputePlane,
)
from chaos_tests.sim.election import SimulatedEtcd
from chaos_tests.sim.failure_oracle import FailureOracle
from chaos_tests.sim.store import Interference, SimClient
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.config import ROLLOUT_POOL, Config, EngineConfig, FailurePolicyConfig
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.event_reader import EventReader
from elastic_rl.coordinator.failure.controller import FailureController
from elastic_rl.coordinator.failure.statistics import EventCursor
from elastic_rl.coordinator.leader_clock import LeaderClock
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.controller import MembershipController
from elastic_rl.coordinator.operations import service
from elastic_rl.coordinator.operations.controller import OperationController
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.records import FaultLog, LastSeen, RecoveryAction
from elastic_rl.coordinator.snapshot import ClusterSnapshot, SnapshotReader
from elastic_rl.coordinator.stragglers.controller import StragglerController
from elastic_rl.coordinator.targets import DRIVER, JOB, engine_target, role_target
from elastic_rl.errors import EtcdUnavailable, Fenced, OutcomeUnknown
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Operation, PoolSpec, RestartRequest
from elastic_rl.etcd.transaction import Compare, Op, TxnResult

QUIET_S = 3 * LONGEST_RESTART_S + 400.0
"""Nothing fails at the end of a run. Within so many seconds all is settled: time for a restart that is not carried out,
and the global one after it."""
_CALM_S = 60.0
"""The run goes on for so long at least."""
_KEPT_EVENTS = 100
R = TypeVar("R", bound=Record)


@lru_cache
def _config(max_faults: int, fault_window_s: float, max_global_restarts: int, crash_loop_window_s: float) -> Config:
    return Config(job=KEYS.job, cluster="c", failure_policy=FailurePolicyConfig(
        max_faults=max_faults, fault_window_s=fault_window_s, backoff_max_s=30.0,
        max_global_restarts=max_global_restarts, crash_loop_window_s=crash_loop_window_s, crash_loop_steps=5.0),
        engine=EngineConfig(start_timeout_s=60.0, catch_up_timeout_s=40.0))


# -- the leader --------------------------------------------------------------------------------------------------------
class LeaderClient(SimClient):
    """The client of a replica, whose writes are judged, and whose answers may be lost."""

    def __init__(self, world: FailureWorld, leader: SimLeader) -> None:
        super().__init__(world.model, lambda: world.now, world.interference)
        self._world, self._leader = world, leader

    def reach(self) -> None:
        super().reach()
        if self._world.now < self._world.etcd_back_at:
            self._world.counts["call without etcd"] += 1
            raise EtcdUnavailable("no member answers")

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
        if not any(op.writes for op in then):
            return super().txn(compares, then, orelse)
        outcome = self._world.outcome_of_a_write()
        if outcome == "lost before it arrives":
            self.reach()
            raise OutcomeUnknown("the answer was lost")
        before = dict(self.model.keys)
        result = super().txn(compares, then, orelse)
        if result.succeeded:
            self._world.oracle.written(self._leader, before, then, result.revision)
        if outcome == "leader died after a write":
            self.dead = True
            raise EtcdUnavailable("this process was killed")
        if outcome == "answer lost":
            raise OutcomeUnknown("the answer was lost")
        return result


class SimLeader:
    """A replica that leads, or believes it does: the leader's loop of one job, as ``Reconciler`` has it."""

    def __init__(self, world: FailureWorld, name: str) -> None:
        self.world, self.name, self.in_pass = world, name, False
        self.seen = ClusterSnapshot(KEYS.job)
        """What it has read last."""
        self.read_to = 0
        """Revision up to which it has read the events in this pass."""
        self.skew_s, rate, since = 0.0, world.rng.uniform(0.98, 1.02), world.now
        self.etcd = LeaderClient(world, self)
        key = CLUSTER_KEYS.leader(name)
        self.term = world.model.txn((), [Op.put(key, b"")])
        guard = Compare.create(key, "==", self.term)
        writer = FencedWriter(self.etcd, KEYS, lambda: [guard], name)
        self._guarded, cfg = writer, world.cfg
        self.api = OperationService(self.etcd, KEYS, cast(Election, SimpleNamespace(replica=name, writer=writer)), cfg,
                                    clock=self.wall)
        self._operations = OperationController(KEYS, {TRAINER: RANKS}, writer)
        self._failures = FailureController(self.etcd, KEYS, cfg.failure_policy, self.api, writer)
        self._membership = MembershipController(self.etcd, KEYS, cfg, self._failures.record_fault, writer)
        self._stragglers = StragglerController(KEYS, cfg, self._failures.record_straggler, writer)
        self._events = EventReader(self.etcd, KEYS)
        self.clock = LeaderClock(self.etcd, KEYS, writer, lambda: (world.now - since) * rate)
        self._reader = SnapshotReader(self.etcd, KEYS, cfg, self.wall, self.clock.now)
        self._began = False

    def wall(self) -> float:
        return EPOCH_S + self.world.now + self.skew_s

    @property
    def leads(self) -> bool:
        found = self.world.model.keys.get(CLUSTER_KEYS.leader(self.name))
        return found is not None and found.create_revision == self.term

    def run_pass(self) -> bool:
        """A pass; none where the replica was stopped in the middle of one, which then goes on. Returns whether all of
        it was made."""
        if self.in_pass or self.etcd.dead:
            return False
        self.in_pass = True
        try:
            self._run_pass()
        except Fenced:
            if self.leads:
                raise RuleViolated("I1", f"{self.name} leads, and is fenced") from None
            self.world.counts["stale leader fenced"] += 1
            self.etcd.dead = True
            return False
        except EtcdUnavailable:
            self.world.counts["pass ended early"] += 1
            return False
        finally:
            self.in_pass = False
        return True

    def _run_pass(self) -> None:
        if not self._began:
            for part in (self._membership, self._stragglers, self.clock):
                part.begin_term()
            self._began = True
        self.clock.persist()
        batch = self._events.read()
        self.read_to = max((revision for _, revision in batch.events), default=0)
        self._read()
        if self._membership.update(self.seen):
            self._read()
        self._stragglers.update(self.seen)
        self._failures.record_reports(batch.events, self.seen)
        self._failures.act(self.seen)
        self._failures.collect_garbage(self.seen)
        self._operations.update(self.seen)
        self._operations.trim(self.seen)
        if batch.cursor:
            self._guarded([compare for compare, _ in batch.cursor], [op for _, op in batch.cursor])

    def _read(self) -> None:
        self.seen = self._reader.read()


# -- the world ---------------------------------------------------------------------------------------------------------
class FailureWorld:
    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.counts = random.Random(seed), 0.0, Counter[str]()
        self.cfg = _config(self.rng.choice([1, 2, 3]), self.rng.choice([60.0, 300.0]), self.rng.choice([2, 3, 4]),
                           self.rng.choice([100.0, 1000.0]))
        self.model, self.is_quiet, self.etcd_back_at = SimulatedEtcd(), False, 0.0
        often = self.rng.choice([0.01, 0.01, 0.05])
        self.interference = Interference(lambda: not self.is_quiet and self.rng.random() < often, self._anything)
        self.oracle = FailureOracle(KEYS, self.cfg.failure_policy, self.counts)
        self.leader: SimLeader | None = None
        self.stale = list[SimLeader]()
        self.plane = ComputePlane(self)
        self.ends_at = self.rng.choice([200.0, 500.0, 1000.0])
        self._seen_over, self._elections, self._tokens = False, 0, 0

    def outcome_of_a_write(self) -> str:
        """What happens to a write of a leader, and to its answer; mostly nothing."""
        if self.is_quiet or self.rng.random() > 0.02:
            return ""
        outcome = self.rng.choice(["lost before it arrives", "answer lost", "leader died after a write"])
        self.counts[outcome] += 1
        return outcome

    # -- a run ---------------------------------------------------------------------------------------------------------
    def run(self) -> FailureWorld:
        with mock.patch.object(service, "secrets", SimpleNamespace(token_hex=self._token)):
            self.plane.put(CLUSTER_KEYS.job(KEYS.job), JobRecord(submission=1))
            self.plane.put(KEYS.pool_spec(ROLLOUT_POOL), PoolSpec(name=ROLLOUT_POOL, desired=ENGINES))
            self.plane.begin()
            while self.now < self.ends_at:
                self._step(self.rng.choice([0.5, 1.0, 2.0, 4.0]))
                if self.rng.random() < 0.25:
                    with self.interference.quiet():
                        self._anything()
            self.etcd_back_at, self.is_quiet = 0.0, True
            self.plane.end_faults()
            began = self.now
            while (why := self._unsettled()) or self.now < began + _CALM_S:
                if self.now >= began + QUIET_S:
                    raise RuleViolated("I10", f"{why}, {QUIET_S:.0f} s after the last fault")
                for _ in range(5):
                    self._step(4.0)
        return self

    def _token(self, nbytes: int) -> str:
        """Ids of operations are those of the seed."""
        self._tokens += 1
        return f"{self._tokens:06}"

    def _step(self, seconds: float) -> None:
        self.now += seconds
        self.counts["steps"] += 1
        self.plane.tick()
        if self.leader is not None and self.leader.etcd.dead:
            self.leader = None
        if self.leader is None and (self.is_quiet or self.rng.random() < 0.3):
            self._elect()
        if self.leader is not None:
            self._pass(self.leader)
        for leader in [*self.stale]:
            if leader.etcd.dead:
                self.stale.remove(leader)
            elif self.is_quiet or self.rng.random() < 0.3:
                leader.run_pass()
        self._trim_events()

    def _pass(self, leader: SimLeader) -> None:
        if leader.run_pass() and leader is self.leader:
            self.counts["pass"] += 1
            self._seen_over = leader.seen.run_ended
            self.oracle.passed(leader)

    def _elect(self) -> None:
        """The next replica leads, whatever the one before believes."""
        self.counts["elected"] += 1
        if self.leader is not None:
            self.counts["elected beside one that believes it leads"] += 1
            self.stale.append(self.leader)
        for kv in self.model.range(CLUSTER_KEYS.leader_prefix()):
            self.model.txn((), [Op.delete(kv.key)])
        self._elections += 1
        self.leader = SimLeader(self, f"r{self._elections}")

    def _trim_events(self) -> None:
        """The events that the leader has read are kept for a while (``Retention``)."""
        cursor, found = self.plane.read(KEYS.event_cursor(), EventCursor), self.model.range(KEYS.events_prefix())
        if cursor is not None and len(found) > 2 * _KEPT_EVENTS:
            for kv in sorted(found, key=lambda kv: kv.mod_revision)[:-_KEPT_EVENTS]:
                if kv.mod_revision <= cursor.revision:
                    self.model.txn((), [Op.delete(kv.key)])

    # -- what happens --------------------------------------------------------------------------------------------------
    def _anything(self) -> None:
        if self.is_quiet:
            return
        does: tuple[Callable[[], object], ...] = (
            self._pause, self._pause, self._fault, self._fault, self._fault, self._fault, self._fault, self.plane.work,
            self.plane.work, self._change_conditions, self._change_conditions, self._ask, self._ask,
            self._kill_leader, self._take_over, self._lose_etcd, self._set_clock, self._end_or_resume)
        self.rng.choice(does)()

    def _pause(self) -> None:
        """Time passes, as for a leader that has no core."""
        self.now += self.rng.uniform(0.5, 15.0)
        self.plane.tick()

    def _fault(self) -> None:
        if self.plane.is_over or self.plane.is_fenced:
            return
        component = self.rng.choice(self.plane.components)
        match self.rng.randrange(8):
            case 0 | 1 | 2:
                self.plane.die(component)
            case 3 | 4:
                self.plane.hang(component)
            case 5 if not self.plane.trainer.members:
                self.plane.end_agent()
            case 5:
                self.plane.refuse()
            case 6 if self.plane.engines.members:
                engine = self.rng.choice(self.plane.engines.members)
                engine.lags = not engine.lags
                self.counts["engine lags"] += engine.lags
            case 7 if self.rng.random() < 0.2:
                self.counts["driver raised the epoch"] += 1
                self.plane.begin()  # on another host

    def _change_conditions(self) -> None:
        """Another time begins, in which the run makes steps or not, and in which one component fails again and again
        or none does."""
        self.plane.makes_steps = self.rng.random() < 0.4
        self.plane.bad = self.rng.choice(["", "", TRAINER, TRAINER, ROLE, registry.DRIVER])

    def _ask(self) -> None:
        """The operator asks for a restart, or cancels the last one that he asked for."""
        if self.leader is None or self.plane.is_over:
            return
        mine = [op for kv in self.model.range(KEYS.operations_prefix())
                if (op := Operation.decode(kv.value)).by == "operator" and not op.state.ended]
        engines = [engine_target(member.id) for member in self.plane.engines.members]
        with suppress(Problem, EtcdUnavailable):
            if mine and self.rng.random() < 0.5:
                self.leader.api.cancel(mine[-1].id, by="operator")
                self.counts["restart cancelled"] += 1
            else:
                target = self.rng.choice([TRAINER, role_target(ROLE), DRIVER, *engines[:1], JOB])
                self.leader.api.restart(target, by="operator")
                self.counts["restart asked for"] += 1

    def _kill_leader(self) -> None:
        if self.leader is not None:
            self.counts["leader died before a write" if self.leader.in_pass else "leader died"] += 1
            self.leader.etcd.dead = True

    def _take_over(self) -> None:
        """The leader is taken for dead, and another one leads for a while; then the first one goes on."""
        if self.leader is None or self.leader.etcd.dead:
            return
        self._elect()
        for _ in range(self.rng.randrange(3)):
            self._pause()
            if self.leader is not None:
                self._pass(self.leader)

    def _lose_etcd(self) -> None:
        self.counts["etcd lost"] += 1
        self.etcd_back_at = self.now + self.rng.choice([0.5, 5.0, 40.0])

    def _set_clock(self) -> None:
        if self.leader is not None:
            self.counts["clock of the leader set"] += 1
            self.leader.skew_s = self.rng.uniform(-7200.0, 7200.0)

    def _end_or_resume(self) -> None:
        if not self.plane.is_over and self.rng.random() < 0.1:
            self.counts["run stopped by its operator"] += 1
            self.plane.stop()
        elif self.plane.is_over and self._seen_over and self.plane.step < self.plane.steps:
            self.counts["run resumed"] += 1
            self.oracle.resumed()
            self._seen_over = False
            self.plane.resume()

    # -- the end -------------------------------------------------------------------------------------------------------
    def _unsettled(self) -> str:
        """What is still pending, hangs, or is kept of what is gone; empty once nothing is."""
        def records(prefix: str, kind: type[R]) -> list[R]:
            return [kind.decode(kv.value) for kv in self.model.range(prefix)]

        restarts, logs = records(KEYS.restarts_prefix(), RestartRequest), records(KEYS.faults_prefix(), FaultLog)
        over = next((request.epoch for request in restarts if request.target == JOB), 0)
        valid = [log for log in logs if log.target == JOB or not over or log.epoch > over]
        found = [f"operation {op.id} of {op.target} runs" for op in records(KEYS.operations_prefix(), Operation)
                 if not op.state.ended]
        found += [f"{log.pending} of {log.target} is pending" for log in valid
                  if log.pending is not RecoveryAction.NONE]
        found += [f"the end of {log.operation} of {log.target} is not followed" for log in valid if log.operation]
        there = {engine_target(member.id) for member in self.plane.engines.members}
        recorded = [*(request.target for request in restarts), *(log.target for log in logs)]
        found += [f"what is recorded of {target} outlives it" for target in recorded
                  if target.startswith(engine_target("")) and target not in there]
        if not self.plane.is_over:
            found += [f"{member.role} {member.id} hangs" for member in self.plane.members if member.hung]
            found += [f"there are {len(component.members)} of {component.size} {component.role} members"
                      for component in self.plane.components if len(component.members) < component.size]
            alive = {entry.name for entry in records(KEYS.registry_prefix(), LastSeen) if not entry.dead}
            if alive != {(member.role, member.id) for member in self.plane.members}:
                found.append(f"the registry takes {sorted(alive)} for those that live")
        return next(iter(found), "")


KINDS = frozenset({
    "answer lost", "call without etcd", "clock of the leader set", "crash loop ended the run",
    "crash loop that the run has left by itself", "driver raised the epoch", "elected",
    "elected beside one that believes it leads", "end of an agent reported", "engine lags", "etcd lost",
    "fault counted", "faults merged", "global restart asked for", "global restart carried out",
    "global restart for a restart that was not carried out", "global restart for faults in a row",
    "global restart that is late", "hang that ended by itself", "leader died", "leader died after a write",
    "leader died before a write", "lost before it arrives", "pass", "pass ended early", "piece of a step",
    "ranks ended after a refusal", "record of an engine collected", "restart asked for", "restart by the policy",
    "restart cancelled", "restart that is not carried out", "restart whose component does not come back",
    "row ended by a step", "row ended by time", "run finished", "run resumed", "run stopped by its operator",
    "stale leader fenced", "step of the run", "step undone"} | {
        f"{what}: {role}" for what in ("death", "hang", "restart carried out")
        for role in (TRAINER, ROLE, registry.DRIVER, "engine")})


def run(seed: int) -> FailureWorld:
    """The world after the run of a seed. Raises RuleViolated."""
    return FailureWorld(seed).run()
