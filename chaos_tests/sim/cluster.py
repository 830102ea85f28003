"""The cluster in a world that fails: coordinators, host agents, the singletons that they start, an operator with jobs,
and a model of etcd, all under one virtual clock and one seed (``election``). What decides is the product's
own code: the election, ``cluster_pass`` and the state machines behind it, ``duties``, the restart policy.

Processes are killed and stopped, hosts are cut off, lose power and are taken back after a notice, services end again
and again, etcd has no quorum, and messages are lost, late and overtake each other. ``RuleViolated`` is raised at the
step at which a rule is broken.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from chaos_tests.sim.election import CALL_KINDS, TTL_S, ElectionWorld, Node, Process, Replica, SimulatedEtcd
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.coordinator import cluster_pass
from elastic_rl.coordinator.assignments.state_machine import AssignmentLimits
from elastic_rl.coordinator.cluster_pass import ClusterLimits, ClusterReading, ClusterWrite
from elastic_rl.coordinator.election.protocol import leading
from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.etcd.cluster_records import (
    Assignment,
    ClusterSpec,
    Drain,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    JobPhase,
    JobRecord,
    JobState,
    PreemptionNotice,
    RunState,
    RunStatus,
    ServiceStatus,
    driver_of,
)
from elastic_rl.etcd.decoding import RangeDecoder
from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.transaction import Compare, KeyValue, Op
from elastic_rl.host.agent import duties, restart_policy
from elastic_rl.host.agent.duties import Adopt, AgentLease, KnownOrders, LocalSingleton, Order, Start, Stop
from elastic_rl.host.agent.restart_policy import Phase, RestartLimits, ServiceState

KEYS = ClusterKeys()
CLOCK_ERROR = 0.2
TIMES = HostTimes(lease_ttl_s=TTL_S, lost_s=3.5, agent_pass_s=0.25, stop_s=1.0, start_margin_s=1.0,
                  clock_error=CLOCK_ERROR)
RESTARTS = RestartLimits(backoff_initial_s=0.3, backoff_max_s=3.0, stable_s=6.0, budget=8, refill_s=3.0)
LIMITS = ClusterLimits(TIMES, AssignmentLimits(move_backoff_initial_s=8.0, move_backoff_max_s=30.0, remember_s=60.0),
                       stop_run_s=4.0)
CALM_FROM, CALM_UNTIL, QUIET_AT, END = 20.0, 52.0, 70.0, 125.0
"""Between the first two no fault begins, and some of those before last on. From the third on nothing fails."""
CARRIED_OUT_S = 22.0
"""An assignment is carried out within so many seconds without a new fault, while a healthy host and replica live."""
CHECK_S = 0.4
"""Pause between two looks at all hosts."""
ENDED_S = 6.0
"""A process of an older generation has ended when its host's agent has been healthy for so long."""

_LONG = ("job0", "job1")
"""Jobs that run for most of the time."""

_FAULTS = ("agent", "agent", "pause", "pause", "cut", "cut", "power", "service", "bad", "replica", "pause replica",
           "cut replica", "etcd")

_HOST_EDGES = {
    (None, HostPhase.JOINING),
    *((before, HostPhase.SUSPECTED) for before in (
        HostPhase.JOINING, HostPhase.READY, HostPhase.CORDONED, HostPhase.DRAINING, HostPhase.LOST)),
    (HostPhase.SUSPECTED, HostPhase.LOST),
    *((before, after) for before in (HostPhase.JOINING, HostPhase.SUSPECTED, HostPhase.DRAINING) for after in (
        HostPhase.READY, HostPhase.CORDONED)),
    *((before, after) for before in HostPhase for after in (HostPhase.DRAINING, HostPhase.LEFT)
      if before not in (HostPhase.LOST, after)),
    *((before, HostPhase.JOINING) for before in HostPhase),
    (HostPhase.READY, HostPhase.CORDONED), (HostPhase.CORDONED, HostPhase.READY),
}
_JOB_EDGES = {
    (None, JobPhase.QUEUED), (JobPhase.QUEUED, JobPhase.STARTING), (JobPhase.STARTING, JobPhase.RUNNING),
    (JobPhase.QUEUED, JobPhase.STOPPED),
    *((live, end) for live in (JobPhase.STARTING, JobPhase.RUNNING)
      for end in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.STOPPED)),
}


R = TypeVar("R", bound=Record)


@lru_cache(10_000)
def _decoded(kind: type[R], raw: bytes) -> R:
    """A record of its bytes. The rules look at the same ones all the time."""
    return kind.decode(raw)


@dataclass(eq=False)
class SimProcess(Node):
    """A process of a singleton."""

    pid: int = 0
    host: SimHost | None = None
    incarnation: str = ""
    generation: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)
    ending: bool = False
    completed: bool = False
    over_since: float | None = None
    """Since when its generation is over and its host's agent healthy."""


@dataclass(eq=False)
class SimAgent(Node):
    """A process of a host's agent."""

    lease: AgentLease = AgentLease(0.0)
    lease_id: int = 0
    registration: int = 0
    renewed_at: float = float("-inf")
    """When the last answered keep-alive was sent, in seconds of the simulation."""
    disturbed_at: float = 0.0
    """When it was started, or went on after it had been stopped."""
    known: KnownOrders = KnownOrders()
    adopted: set[int] = field(default_factory=set)
    restarts: dict[tuple[str, int], ServiceState] = field(default_factory=dict)


@dataclass(eq=False)
class SimHost:
    """A machine. What it holds outlives its agent, and ends with its power."""

    name: str
    rate: float
    boot: int = 0
    powered: bool = False
    cut_until: float = 0.0
    agent: SimAgent | None = None
    processes: list[SimProcess] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    """Newest generation of each singleton that an agent of this host has seen."""
    bad_until: float = 0.0
    """Until then whatever is started here ends at once."""
    preemption: PreemptionNotice | None = None

    @property
    def incarnation(self) -> str:
        return f"{self.name}-boot{self.boot}"

    @property
    def alive(self) -> list[SimProcess]:
        return [p for p in self.processes if not p.ended]


class ClusterWorld(ElectionWorld):
    """Runs a cluster until ``END``; everything is healed at ``QUIET_AT``."""

    def __init__(self, seed: int, parallel: int = 1, etcd: SimulatedEtcd | None = None) -> None:
        super().__init__(seed, QUIET_AT, KEYS.leader_prefix())
        self.etcd = etcd or self.etcd
        self.limits, self.parallel = LIMITS, parallel
        self.disturbed_at = 0.0
        self._pids = itertools.count(1)
        self._effects: dict[tuple[str, int], str] = {}
        """Which incarnation of which host wrote under each generation."""
        self._missing: dict[str, float] = {}
        """Since when each singleton that is wanted has not been carried out."""
        self._away: dict[str, float] = {}
        """The time from which on each host was seen not to be registered."""
        self._steps: dict[str, int] = {}
        """Steps that each job takes."""
        self.etcd_away_until = 0.0
        self.etcd.txn([], [Op.put(KEYS.spec(), ClusterSpec(parallel_jobs=parallel).encode())])
        self.replicas = [self._start_replica(f"r{i}") for i in range(2 + seed % 2)]
        self.hosts = [SimHost(f"h{i}", self._rate()) for i in range(2 + seed % 3)]
        self.spared: set[Any] = {self.rng.choice(self.hosts).name, self.rng.choice(self.replicas).name}
        """A host and a replica that are healthy while it is calm."""
        for host in self.hosts:
            self._power_on(host)
        self.spawn(self._operate())
        self.spawn(self._disturb())
        self.spawn(self._check())
        if seed % 3 == 0:
            self.spawn(self._take_back(random.Random(seed)))

    def run(self) -> ClusterWorld:
        self.advance(END)
        for name in self._jobs():
            state = self._job_state(name)
            if state is None or not state.phase.ended:
                raise RuleViolated("I11", f"job {name} is {state} at the end")
        return self

    def _rate(self) -> float:
        return self.rng.uniform(1 - CLOCK_ERROR, 1 + CLOCK_ERROR)

    def _fail(self, rule: str, what: str) -> None:
        raise RuleViolated(rule, f"{self.now:.2f} s: {what}")

    # -- coordinators --------------------------------------------------------------------------------------------------
    def _start_replica(self, name: str) -> Replica:
        replica = Replica(name, self._rate())
        self.spawn(self._replica(replica), replica)
        self.spawn(self._lead(replica), replica)
        return replica

    def _lead(self, r: Replica) -> Process:
        """Reconciles while the replica leads, as far as it can know."""
        term, base_s, began_at, persisted = 0, 0.0, 0.0, float("-inf")
        decoders: dict[str, RangeDecoder[Any]] = {}
        while True:
            yield self.rng.uniform(0.1, 0.4) / r.rate
            if r.protocol is None or not r.protocol.leads:
                continue
            found = yield from self._call(r, lambda: (self.etcd.range(ROOT), self.etcd.revision))
            if not found or r.protocol is None or not r.protocol.leads:
                continue
            kvs, revision = found[0]
            if r.protocol.revision != term:
                term, began_at, persisted = r.protocol.revision, self._clock(r), float("-inf")
                base_s = next((float(kv.value) for kv in kvs if kv.key == KEYS.leader_clock()), 0.0)
            leader_s = base_s + self._clock(r) - began_at
            reading = self._reading(kvs, revision, leader_s, decoders)
            for write in cluster_pass.cluster_pass(reading, self.limits):
                guard = self._guard(r)
                if guard is None:
                    break
                yield from self._send(r, reading, write, guard)
            if leader_s - persisted >= 3.0 and (guard := self._guard(r)) is not None:
                persisted = leader_s
                put = Op.put(KEYS.leader_clock(), str(leader_s).encode())
                yield from self._call(r, lambda g=guard, p=put: self._txn_of(r, g, p))  # type: ignore[misc]

    def _reading(self, kvs: list[KeyValue], revision: int, leader_s: float,
                 decoders: dict[str, RangeDecoder[Any]]) -> ClusterReading:
        return ClusterReading.of(KEYS, kvs, revision, leader_s, {}, decoders)

    def _guard(self, r: Replica) -> list[Compare] | None:
        """The fencing token of a replica; None when it does not lead."""
        return [r.protocol.guard] if r.protocol is not None and r.protocol.leads else None

    def _send(self, r: Replica, reading: ClusterReading, write: ClusterWrite, guard: list[Compare]) -> Process:
        """Sends etcd a write of a leader that has decided by ``reading``."""
        yield from self._call(r, lambda: self._apply(r, write, guard))

    def _apply(self, r: Replica, write: ClusterWrite, guard: list[Compare]) -> bool:
        """A write of a leader as it arrives at etcd, and whether etcd takes it."""
        before = self.etcd.keys.get(write.key)
        if not self._txn_of(r, [*guard, *write.compares], write.op, *write.also):
            self.counts["refused"] += 1
            return False
        raw = before.value if before is not None else None
        match write.record:
            case HostState():
                self._host_written(write.key, _decoded(HostState, raw) if raw else None, write.record)
            case Assignment():
                self._assignment_written(write.key, _decoded(Assignment, raw) if raw else Assignment(), write.record)
            case JobState():
                self._job_written(write.key, _decoded(JobState, raw) if raw else None, write.record)
        return True

    def _txn_of(self, r: Replica, compares: list[Compare], *ops: Op) -> int:
        """A transaction of a leader. Only the one that leads by etcd's word may change anything (I1)."""
        first = leading(self.etcd.range(self.candidates))
        written = self.etcd.txn(compares, list(ops))
        if written and (first is None or first.key != self.candidates + r.name):
            self._fail("I1", f"{r.name} wrote {ops[0].key} while {first.key if first else 'nobody'} led")
        return written

    # -- rules about what leaders write --------------------------------------------------------------------------------
    def _host_written(self, key: str, before: HostState | None, after: HostState) -> None:
        name = key.removeprefix(KEYS.host_states_prefix())
        self.counts[f"host {after.phase}"] += before is None or before.phase is not after.phase
        if before is not None and before.phase is after.phase and before.incarnation == after.incarnation:
            return
        if (before.phase if before else None, after.phase) not in _HOST_EDGES:
            self._fail("I1", f"host {name} went from {before and before.phase} to {after.phase}")
        registered = KEYS.host(name) in self.etcd.keys
        if after.phase in (HostPhase.SUSPECTED, HostPhase.LOST) and registered:
            self._fail("I14", f"host {name} is {after.phase} and registered")
        away_s = self.now - self._away.get(name, self.now)
        if after.phase is HostPhase.LOST and away_s < TIMES.lost_s / (1 + CLOCK_ERROR) - CHECK_S:
            self._fail("I14", f"host {name} is lost {away_s:.1f} s after it was registered")
        if self.now > QUIET_AT + 30:
            self._fail("I14", f"host {name} became {after.phase} without a cause")
        drain = self._spec(name).drain
        if after.phase in (HostPhase.DRAINING, HostPhase.LEFT) and drain is not None and drain.incarnation not in (
                "", after.incarnation):
            self._fail("I14", f"host {name} is {after.phase} for the notice of {drain.incarnation}")

    def _assignment_written(self, key: str, before: Assignment, after: Assignment) -> None:
        name = key.removeprefix(KEYS.assignments_prefix())
        self.counts["moves"] += bool(before.host and after.host)
        if before.host and after.host and self.now > QUIET_AT + 40:
            self._fail("I14", f"{name} was moved without a cause: {after.reason}")
        if len(after.failed) > 1 and after.failed[:-1] == before.failed[-len(after.failed) + 1:]:
            gap_s = after.failed[-1].at_s - after.failed[-2].at_s
            if gap_s < self.limits.assignments.move_backoff_initial_s:
                self._fail("I10", f"{name} was moved again {gap_s:.1f} s after a failure")
        if after.host:
            self._new_holder_fits(name, after)
        host = self._host(before.host)
        if host is not None and self._host_phase(host.name) is HostPhase.LOST:
            self._older_is_fenced(name, host)

    def _new_holder_fits(self, name: str, after: Assignment) -> None:
        spec = self._spec(after.host)
        if spec.cordoned or spec.drain is not None and spec.drain.incarnation in ("", after.incarnation):
            self._fail("I12", f"{name} was assigned to {after.host}, which takes nothing more")
        registered = self.etcd.keys.get(KEYS.host(after.host))
        if registered is None or _decoded(Host, registered.value).incarnation != after.incarnation:
            self._fail("I12", f"{name} was assigned to {after.incarnation}, which is not registered")

    def _older_is_fenced(self, name: str, host: SimHost) -> None:
        """An agent that ran all the time has ended what its host, which was lost, held."""
        agent = host.agent
        if agent is None or agent.ended or agent.paused_until > self.now or agent.disturbed_at >= agent.renewed_at:
            return  # only the generation fences the processes of an agent that was killed or stopped
        self.counts["self-fenced"] += 1
        for process in host.alive:
            if process.name == name:
                self._fail("I1", f"{name} was assigned elsewhere while generation {process.generation} runs on "
                                 f"{host.name}")

    def _job_written(self, key: str, before: JobState | None, after: JobState) -> None:
        name = key.removeprefix(KEYS.job_states_prefix())
        again = before is not None and not before.phase.live and after.submission > before.submission
        phase = None if before is None or again else before.phase
        self.counts[f"job {after.phase}"] += phase is not after.phase
        if phase is not after.phase and (phase, after.phase) not in _JOB_EDGES:
            self._fail("I11", f"job {name} went from {phase} to {after.phase}")
        live = [n for n in self._jobs() if (state := self._job_state(n)) is not None and state.phase.live]
        if len(live) > self.parallel:
            self._fail("I11", f"jobs {live} are live at once")
        if after.phase is JobPhase.FINISHED and self._run_phase(name, after.submission) is not after.phase:
            self._fail("I11", f"job {name} is finished, its driver did not say so")

    # -- hosts ---------------------------------------------------------------------------------------------------------
    def _host(self, name: str) -> SimHost | None:
        return next((h for h in self.hosts if h.name == name), None)

    def _spec(self, name: str) -> HostSpec:
        found = self.etcd.keys.get(KEYS.host_spec(name))
        return _decoded(HostSpec, found.value) if found is not None else HostSpec()

    def _host_phase(self, name: str) -> HostPhase | None:
        found = self.etcd.keys.get(KEYS.host_state(name))
        return _decoded(HostState, found.value).phase if found is not None else None

    def _power_on(self, host: SimHost) -> None:
        host.boot, host.powered, host.processes, host.newest = host.boot + 1, True, [], {}
        self._start_agent(host)

    def _power_off(self, host: SimHost) -> None:
        host.powered = False
        self._kill_agent(host)
        for process in host.alive:
            process.ended = True

    def _start_agent(self, host: SimHost) -> None:
        if not host.powered or host.agent is not None and not host.agent.ended:
            return
        agent = SimAgent(host.name, host.rate, cut_until=host.cut_until, disturbed_at=self.now)
        agent.lease = AgentLease(renewed_at=self._clock(agent))
        host.agent = agent
        for work in (self._keep_registered, self._read_orders, self._look, self._report):
            self.spawn(work(host, agent), agent)

    def _kill_agent(self, host: SimHost) -> None:
        if host.agent is not None:
            host.agent.ended = True

    def _cut(self, host: SimHost, until: float) -> None:
        host.cut_until = until
        for node in (*host.alive, *([host.agent] if host.agent else [])):
            node.cut_until = until

    def _pause(self, node: Node, until: float) -> None:
        node.paused_until = max(node.paused_until, until)
        if isinstance(node, SimAgent):
            node.disturbed_at = node.paused_until

    # -- the agent -----------------------------------------------------------------------------------------------------
    def _keep_registered(self, host: SimHost, agent: SimAgent) -> Process:
        while True:
            yield 0.05
            asked, asked_at = self._clock(agent), self.now
            granted = yield from self._call(agent, lambda: self.etcd.grant(self.now))
            found = yield from self._call(agent, lambda: self.etcd.keys.get(
                KEYS.host_registration(host.name)))
            if not granted or not found:
                continue
            lease = granted[0]
            unchanged = Compare.mod(KEYS.host_registration(host.name), "==", found[0].mod_revision if found[0] else 0)
            record = Host(id=host.name, incarnation=host.incarnation)
            puts = [Op.put(KEYS.host(host.name), record.encode(), lease),
                    Op.put(KEYS.host_registration(host.name), record.encode())]
            written = yield from self._call(
                agent, lambda u=unchanged, p=puts: self.etcd.txn([u], p))  # type: ignore[misc]
            if not written or not written[0]:
                continue
            agent.lease_id, agent.registration, agent.renewed_at = lease, written[0], asked_at
            agent.lease = AgentLease(asked, self._clock(agent))
            yield from self._renew(agent)
            agent.lease = AgentLease(agent.lease.renewed_at)
            self.counts["leases lost"] += 1

    def _renew(self, agent: SimAgent) -> Process:
        """Returns when the lease is lost."""
        lease = agent.lease_id
        while not agent.lease.ended(self._clock(agent), TIMES):
            sent, sent_at = self._clock(agent), self.now
            kept = yield from self._call(agent, lambda: self.etcd.keep_alive(lease, self.now))
            if kept and not kept[0]:
                return
            if kept:
                agent.renewed_at, agent.lease = sent_at, AgentLease(sent, agent.lease.granted_at)
            yield (TTL_S / 3 if kept else 0.05) / agent.rate

    def _read_orders(self, host: SimHost, agent: SimAgent) -> Process:
        """Requests the assignments again and again; answers may overtake each other."""
        while True:
            self.spawn(self._one_reading(host, agent))
            yield self.rng.uniform(0.2, 0.6)

    def _one_reading(self, host: SimHost, agent: SimAgent) -> Process:
        asked = self._clock(agent)
        yield self._latency(agent)
        if self.rng.random() < self._loss():
            return
        kvs, revision = self.etcd.range(KEYS.assignments_prefix()), self.etcd.revision
        yield self._latency(agent)
        orders = {kv.key.removeprefix(KEYS.assignments_prefix()): Order(_decoded(Assignment, kv.value), kv.version)
                  for kv in kvs}

        def arrive() -> Process:
            self._orders_read(host, agent, asked, revision, orders)
            return
            yield

        self.spawn(arrive(), agent)

    def _orders_read(self, host: SimHost, agent: SimAgent, asked: float, revision: int, orders: dict[str, Order]
                     ) -> None:
        """A reading of the assignments has arrived, which the agent requested when its clock was ``asked``."""
        agent.known = agent.known.updated(asked, revision, orders)
        for name, order in orders.items():
            host.newest[name] = max(host.newest.get(name, 0), order.generation)

    def _look(self, host: SimHost, agent: SimAgent) -> Process:
        """The agent's passes over its services."""
        while True:
            yield self.rng.uniform(0.5, 1.0) * TIMES.agent_pass_s / agent.rate
            now = self._clock(agent)
            self._note_restarts(host, agent, now)
            here = [LocalSingleton(p.name, p.generation, not p.ended, p.pid in agent.adopted, p.completed)
                    for p in host.processes]
            not_before = {key: s.start_at for key, s in agent.restarts.items() if s.phase is Phase.ENDED}
            seen = dict(host.newest)  # what arrives during the pass is for the next one
            for action in duties.duties(host.name, host.incarnation, now, agent.lease, agent.known, here, not_before,
                                        TIMES):
                match action:
                    case Stop(name, generation):
                        self._stop(host, agent, name, generation)
                    case Adopt(name, generation):
                        self.counts["adopted"] += 1
                        agent.adopted |= {p.pid for p in host.alive if (p.name, p.generation) == (name, generation)}
                    case Start(name, generation, arguments):
                        if generation < seen.get(name, 0):
                            self._fail("I1", f"{host.name} starts generation {generation} of {name} after it saw "
                                       f"{seen[name]}")
                        yield 0.02  # it may be stopped between the decision and the start
                        self._start(host, agent, name, generation, dict(arguments))
            host.processes = [p for p in host.processes if not p.ended or p.generation == self._newest_here(agent, p)]

    def _newest_here(self, agent: SimAgent, process: SimProcess) -> int:
        order = agent.known.orders.get(process.name)
        return order.generation if order is not None else process.generation

    def _note_restarts(self, host: SimHost, agent: SimAgent, now: float) -> None:
        for key in {(p.name, p.generation) for p in host.processes}:
            mine = [p for p in host.processes if (p.name, p.generation) == key]
            state = agent.restarts.get(key) or ServiceState.running(now, RESTARTS)
            if any(not p.ended for p in mine):
                agent.restarts[key] = restart_policy.on_running(state, now, RESTARTS)
            elif not mine[-1].completed:
                agent.restarts[key] = restart_policy.on_ended(state, now, RESTARTS, jitter=self.rng.random())

    def _report(self, host: SimHost, agent: SimAgent) -> Process:
        """Reports what runs, under the registration."""
        while True:
            yield self.rng.uniform(0.2, 0.8)
            if agent.lease.granted_at is None:
                continue
            here = [LocalSingleton(p.name, p.generation, not p.ended) for p in host.processes]
            services = {p.name: self._service(agent, p) for p in sorted(host.processes, key=lambda p: p.pid)}
            status = HostStatus(registration=agent.registration, observed_revision=agent.known.revision,
                                services=services, not_ready=duties.why_not_ready(agent.lease, agent.known, here),
                                preemption=host.preemption)
            guard = Compare.mod(KEYS.host(host.name), "==", agent.registration)
            put = Op.put(KEYS.host_status(host.name), status.encode(), agent.lease_id)
            yield from self._call(agent, lambda g=guard, p=put: self.etcd.txn([g], [p]))  # type: ignore[misc]

    def _service(self, agent: SimAgent, process: SimProcess) -> ServiceStatus:
        state = agent.restarts.get((process.name, process.generation))
        restarts = max(0, state.ends - (state.phase is Phase.ENDED)) if state is not None else 0
        run_state = (RunState.RUNNING if not process.ended else RunState.COMPLETED if process.completed
                     else RunState.ENDED)
        return ServiceStatus(state=run_state, pid=process.pid, generation=process.generation, restarts=restarts)

    # -- processes of singletons, and the rules about them ------------------------------------------------------------
    def _start(self, host: SimHost, agent: SimAgent, name: str, generation: int, arguments: dict[str, Any]) -> None:
        beside = [p for h in self.hosts for p in h.alive if p.name == name and (
            h is host or p.generation == generation)]
        if beside:
            self._fail("I1", f"{name} of generation {generation} was started on {host.name} beside generation "
                       f"{beside[0].generation} on {beside[0].host and beside[0].host.name}")
        lost = self._host_phase(host.name) is HostPhase.LOST and KEYS.host(host.name) not in self.etcd.keys
        if lost and agent.disturbed_at < self.now - 2 * TTL_S:
            self._fail("I1", f"{name} was started on {host.name}, which is lost")
        assigned = self.etcd.keys.get(KEYS.assignment(name))
        if assigned is not None and assigned.version == generation:
            now = _decoded(Assignment, assigned.value)
            if (now.host, now.incarnation) != (host.name, host.incarnation):
                self._fail("I1", f"{name} of generation {generation} was started on {host.incarnation}, for {now}")
        process = SimProcess(name, host.rate, cut_until=host.cut_until, pid=next(self._pids), host=host,
                             incarnation=host.incarnation, generation=generation, arguments=arguments)
        host.processes.append(process)
        agent.adopted.add(process.pid)
        now_s, key = self._clock(agent), (name, generation)
        state = agent.restarts.get(key)
        agent.restarts[key] = (ServiceState.running(now_s, RESTARTS) if state is None
                               else restart_policy.on_started(state, now_s, RESTARTS))
        self.counts["starts"] += 1
        self.spawn(self._work(process), process)

    def _stop(self, host: SimHost, agent: SimAgent, name: str, generation: int) -> None:
        assigned = self.etcd.keys.get(KEYS.assignment(name))
        if (assigned is not None and assigned.version == generation
                and not agent.lease.ended(self._clock(agent), TIMES)):
            self._fail("I12", f"{name} was stopped on {host.name}, which holds it")
        for process in host.alive:
            if (process.name, process.generation) == (name, generation) and not process.ending:
                process.ending = True
                self.counts["stops"] += 1
                self.spawn(self._end(process, self.rng.uniform(0.1, TIMES.stop_s) / host.rate))

    def _end(self, process: SimProcess, after_s: float) -> Process:
        yield after_s
        process.ended = True

    def _work(self, process: SimProcess) -> Process:
        """Carries out a job under its generation, as a run does; one that is fenced hangs until it is ended."""
        assert process.host is not None
        job, said, step = str(process.arguments["job"]), JobPhase.QUEUED, -1
        guard = Compare.version(KEYS.assignment(process.name), "==", process.generation)
        while said is not JobPhase.FINISHED and said is not JobPhase.STOPPED:
            yield self.rng.uniform(0.2, 0.7)
            if process.host.bad_until > self.now:
                process.ended = True
                return
            found = yield from self._call(process, lambda: (
                _decoded(JobRecord, self.etcd.keys[KEYS.job(job)].value), self.etcd.keys.get(_progress(job))))
            if not found:
                continue
            record, progress = found[0]
            step = step if step >= 0 else int(progress.value) if progress is not None else 0
            phase = (JobPhase.STOPPED if record.stopped and self.rng.random() < 0.5 else  # else it hangs for a while
                     JobPhase.FINISHED if step >= self._steps[job] else JobPhase.RUNNING)
            if said is not phase:
                said = yield from self._say(process, guard, phase, said)
            else:
                put = Op.put(_progress(job), str(step + 1).encode())
                step += bool((yield from self._call(
                    process, lambda p=put: self._effect(process, [guard], p))))  # type: ignore[misc]
        process.completed = process.ended = True

    def _say(self, process: SimProcess, guard: Compare, phase: JobPhase, said: JobPhase) -> Process:
        """Writes how the run goes; returns what etcd then has of it, as far as the process knows. The condition keeps a
        late message from undoing a later one."""
        key, submission = KEYS.run_status(process.arguments["job"]), process.arguments["submission"]
        found = yield from self._call(process, lambda: self.etcd.keys.get(key))
        if not found:
            return said
        before = _decoded(RunStatus, found[0].value) if found[0] is not None else None
        if before is not None and before.submission == submission and (before.phase.ended or before.phase is phase):
            return before.phase
        compares = [guard, Compare.mod(key, "==", found[0].mod_revision if found[0] is not None else 0)]
        put = Op.put(key, RunStatus(submission=submission, phase=phase).encode())
        written = yield from self._call(process, lambda: self._effect(process, compares, put))
        return phase if written and written[0] else said

    def _effect(self, process: SimProcess, compares: list[Compare], put: Op) -> int:
        written = self.etcd.txn(compares, [put])
        if not written:
            assigned = self.etcd.keys.get(KEYS.assignment(process.name))
            self.counts["fenced"] += assigned is None or assigned.version != process.generation
            return 0
        holder = self._effects.setdefault((process.name, process.generation), process.incarnation)
        if holder != process.incarnation:
            self._fail("I1", f"{holder} and {process.incarnation} wrote as generation {process.generation} of "
                                 f"{process.name}")
        return written

    # -- the operator --------------------------------------------------------------------------------------------------
    def _jobs(self) -> list[str]:
        return [kv.key.removeprefix(KEYS.jobs_prefix()) for kv in self.etcd.range(KEYS.jobs_prefix())]

    def _job_state(self, name: str) -> JobState | None:
        found = self.etcd.keys.get(KEYS.job_state(name))
        return _decoded(JobState, found.value) if found is not None else None

    def _submit(self, name: str, record: JobRecord) -> None:
        self.etcd.txn([], [Op.put(KEYS.job(name), record.encode())])

    def _operate(self) -> Process:
        """Submits jobs, stops and resumes some, cordons and drains hosts."""
        for number in range(4):
            name = f"job{number}"
            self._steps[name] = self.rng.choice([5, 15, 40]) if name not in _LONG else 110
            self._submit(name, JobRecord(submission=1, priority=self.rng.randrange(2)))
            yield self.rng.uniform(0.0, 12.0)
        while self.now < QUIET_AT:
            yield self.rng.uniform(3.0, 12.0)
            if not CALM_FROM - 5 < self.now < CALM_UNTIL:
                self.disturbed_at = self.now
                self._change_job(self.rng.choice(self._jobs()))
                self._change_host(self.rng.choice(self.hosts))
        for host in self.hosts:
            self.etcd.txn([], [Op.delete(KEYS.host_spec(host.name))])

    def _change_job(self, name: str) -> None:
        record, state = _decoded(JobRecord, self.etcd.keys[KEYS.job(name)].value), self._job_state(name)
        if state is not None and state.phase.ended and state.submission == record.submission:
            self._steps[name] += self.rng.choice([3, 10])
            self.counts["submitted again"] += 1
            self._submit(name, record.replace(submission=record.submission + 1, stopped=False))
        elif self.rng.random() < 0.3 and name not in _LONG:
            self.counts["stopped by the operator"] += not record.stopped
            self._submit(name, record.replace(stopped=True))

    def _change_host(self, host: SimHost) -> None:
        spec = self.rng.choice([HostSpec(), HostSpec(cordoned=True), HostSpec(drain=Drain(within_s=4.0))])
        if host.name not in self.spared:
            self.counts[f"host spec {'drain' if spec.drain else 'cordon' if spec.cordoned else 'of nothing'}"] += 1
            self.etcd.txn([], [Op.put(KEYS.host_spec(host.name), spec.encode())])

    # -- faults --------------------------------------------------------------------------------------------------------
    def _disturb(self) -> Process:
        while self.now < QUIET_AT:
            yield self.rng.expovariate(1 / 2.5)
            if CALM_FROM < self.now < CALM_UNTIL:
                yield CALM_UNTIL - self.now
            if self.now < QUIET_AT:
                self.spawn(self._fault())

    def _until(self, name: str) -> float:
        """When a fault ends: soon, in the middle of the calm for what is not spared, or when it is quiet."""
        longest = 1.0 if name in self.spared and self.now < CALM_UNTIL else 3.0
        until = self.now + self.rng.choice([0.5, 2.0, 6.0, 10.0 * longest])
        return min(until, CALM_FROM if name in self.spared and self.now < CALM_FROM else QUIET_AT)

    def _fault(self) -> Process:
        holders = [h for h in self.hosts if h.alive]
        host = self.rng.choice(holders if holders and self.rng.random() < 0.6 else self.hosts)
        replica = self.rng.randrange(len(self.replicas))
        until = self._until(host.name)
        kind = self.rng.choice(_FAULTS)
        self.counts[kind] += 1
        self.disturbed_at = self.now
        match kind:
            case "agent":
                self._kill_agent(host)
                yield self.rng.choice([0.0, until - self.now])
                self._start_agent(host)
            case "pause" if host.agent is not None:
                self._pause(host.agent, until)
                yield until - self.now
            case "cut":
                self._cut(host, until)
                yield until - self.now
            case "power":
                self._power_off(host)
                yield until - self.now
                if not host.powered:
                    self._power_on(host)
            case "service" if host.alive:
                self.rng.choice(host.alive).ended = True
            case "bad":
                host.bad_until = until
                yield until - self.now
            case "etcd":
                yield from self._without_quorum(min(until, self.now + 8.0))
            case _ if kind.endswith("replica"):
                yield from self._replica_fault(kind, replica)
        self.disturbed_at = self.now

    def _take_back(self, rng: random.Random) -> Process:
        """The provider takes machines back after a notice, and gives others with their names."""
        others = [host for host in self.hosts if host.name not in self.spared]
        while True:
            yield rng.uniform(2.0, 8.0)
            if CALM_FROM - 6 < self.now < CALM_UNTIL:
                yield CALM_UNTIL - self.now
            if self.now > QUIET_AT - 13:
                return
            host = rng.choice(others)
            if host.powered:
                self.counts["taken back"] += 1
                self.disturbed_at, host.preemption = self.now, PreemptionNotice(reason="spot", warning_s=6.0)
                yield 6.0
                self._power_off(host)
                host.preemption = None
                yield rng.uniform(0.5, 6.0)
                if not host.powered:
                    self._power_on(host)
                self.disturbed_at = self.now

    def _replica_fault(self, kind: str, number: int) -> Process:
        replica = self.replicas[number]
        until = self._until(replica.name)
        match kind:
            case "replica":
                replica.ended = True
                yield until - self.now
                if replica is self.replicas[number]:
                    self.replicas[number] = self._start_replica(replica.name)
            case "pause replica":
                self._pause(replica, until)
                yield until - self.now
            case "cut replica":
                replica.cut_until = until
                yield until - self.now

    def _without_quorum(self, until: float) -> Process:
        """etcd answers nothing for a while; then each lease gets its whole time to live, as from a new leader."""
        self.etcd_away_until = until
        while self.now < until:
            self.etcd.leases = {n: max(end, until + TTL_S) for n, end in self.etcd.leases.items()}
            yield 0.2
        self.etcd.leases = {n: self.now + TTL_S for n in self.etcd.leases}

    def _latency(self, node: Node) -> float:
        return max(0.0, self.etcd_away_until - self.now) + super()._latency(node)

    # -- rules that are looked at all the time -------------------------------------------------------------------------
    def _healthy(self, host: SimHost) -> bool:
        agent = host.agent
        return (host.powered and agent is not None and not agent.ended and agent.paused_until <= self.now
                and host.cut_until <= self.now and self.etcd_away_until <= self.now)

    def _check(self) -> Process:
        while True:
            yield CHECK_S
            self._away = {host.name: self._away.get(host.name, self.now) for host in self.hosts
                          if KEYS.host(host.name) not in self.etcd.keys}
            for host in self.hosts:
                for process in host.alive:
                    self._check_over(host, process)
            self._check_carried_out()

    def _check_over(self, host: SimHost, process: SimProcess) -> None:
        assigned = self.etcd.keys.get(KEYS.assignment(process.name))
        over = assigned is None or assigned.version > process.generation
        if not over or not self._healthy(host):
            process.over_since = None
        elif process.over_since is None:
            process.over_since = self.now
            self.counts["over"] += 1
        elif self.now - process.over_since > ENDED_S + (6.0 if self.now < QUIET_AT else 0.0):  # a late message
            self._fail("I8", f"generation {process.generation} of {process.name} still runs on {host.name}")

    def _check_carried_out(self) -> None:
        spared = [h for h in self.hosts if h.name in self.spared or self.now > QUIET_AT]
        leads = any(not r.ended and r.paused_until <= self.now and r.cut_until <= self.now for r in self.replicas)
        undisturbed = leads and self.etcd_away_until <= self.now and any(
            self._healthy(h) and h.bad_until <= self.now for h in spared)
        if not undisturbed:
            self.disturbed_at = self.now
        wanted = {driver_of(name) for name in self._jobs() if self._wants_driver(name)}
        self._missing = {name: self._missing.get(name, self.now) for name in wanted if not self._carried_out(name)}
        for name, since in self._missing.items():
            if self.now - max(since, self.disturbed_at) > CARRIED_OUT_S:
                held = self.etcd.keys.get(KEYS.assignment(name))
                self._fail("I12", f"{name} is not carried out: {held}")

    def _wants_driver(self, name: str) -> bool:
        state = self._job_state(name)
        record = _decoded(JobRecord, self.etcd.keys[KEYS.job(name)].value)
        return (state is not None and state.phase.live and not record.stopped
                and self._run_phase(name, state.submission) is not JobPhase.FINISHED)

    def _run_phase(self, name: str, submission: int) -> JobPhase | None:
        """The phase that the run of a submission has written."""
        found = self.etcd.keys.get(KEYS.run_status(name))
        status = _decoded(RunStatus, found.value) if found is not None else None
        return status.phase if status is not None and status.submission == submission else None

    def _carried_out(self, name: str) -> bool:
        assigned = self.etcd.keys.get(KEYS.assignment(name))
        return assigned is not None and any(p.name == name and p.generation == assigned.version
                                            for h in self.hosts for p in h.alive)


def _progress(job: str) -> str:
    return f"{Keys(job).root}progress"


# -- a run -------------------------------------------------------------------------------------------------------------
KINDS = CALL_KINDS | frozenset(_FAULTS) | {f"host {phase}" for phase in HostPhase} | {
    f"job {phase}" for phase in JobPhase} | {
    "adopted", "fenced", "host spec cordon", "host spec drain", "host spec of nothing", "leases lost", "moves", "over",
    "refused", "self-fenced", "starts", "stopped by the operator", "stops", "submitted again", "taken back"}


def run(seed: int) -> ClusterWorld:
    """The world of a seed after its run. Raises RuleViolated where a rule was broken."""
    return ClusterWorld(seed, parallel_jobs(seed)).run()


def parallel_jobs(seed: int) -> int:
    return 4 if seed % 5 == 4 else 3
