"""The compute plane of the world of failures: the run of a job with what it runs on. Members die and hang, alone and
together; components come back by themselves, as Ray Serve and torch elastic have it, or by the driver; requests to
restart them are carried out, late, or never. It knows nothing of the failure policy, which decides about it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from chaos_tests.sim.election import SimulatedEtcd
from chaos_tests.sim.failure_oracle import FailureOracle
from chaos_tests.sim.store import SimClient
from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.targets import DRIVER, JOB, engine_target, role_target
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.event_kinds import TRAINER_GROUP_EVENTS, EventKind
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import (
    ENDED_PHASES,
    Engine,
    EngineState,
    Evidence,
    JobStatus,
    Member,
    ProcessFinding,
    RestartRequest,
    ended,
)
from elastic_rl.etcd.transaction import Op

KEYS, CLUSTER_KEYS = Keys("j"), ClusterKeys("c")
TRAINER, ROLE = "trainer", "genrm"
RANKS, REPLICAS, ENGINES = 2, 2, 3
EPOCH_S = 1_700_000_000.0
"""Unix seconds at which the world begins."""
LONGEST_RESTART_S = 180.0
"""Longest time-out of the restart of a component."""
_HANGS_S = 10_000.0
"""Time without progress of a member that hangs."""
R = TypeVar("R", bound=Record)


class World(Protocol):
    """What the run is in."""

    rng: random.Random
    now: float
    counts: Counter[str]
    model: SimulatedEtcd
    oracle: FailureOracle
    is_quiet: bool
    """Whether nothing fails any more."""


@dataclass(eq=False)
class SimMember:
    role: str
    id: str
    incarnation: str
    hung: bool = False
    goes_on_at: float = float("inf")
    """When one that hangs makes progress again by itself."""
    lags: bool = False
    """Whether it is an engine that gets no newer version."""

    @property
    def target(self) -> str:
        return {event_kinds.ENGINE: engine_target(self.id), TRAINER: TRAINER, registry.DRIVER: DRIVER}.get(
            self.role, role_target(self.role))


@dataclass(eq=False)
class Component:
    """Members that one component of the system brings back."""

    role: str
    size: int
    members: list[SimMember] = field(default_factory=list)
    back_at: float = 0.0
    """From when on those that are missing are brought back."""

    @property
    def works(self) -> bool:
        return len(self.members) == self.size and not any(member.hung for member in self.members)


class ComputePlane:
    """The run of the job, with what it runs on: its supervisor, its driver, and the components that come back without
    it."""

    def __init__(self, world: World) -> None:
        self.world, self.rng, self.model = world, world.rng, world.model
        self.epoch, self.step, self.pieces, self._numbers = 0, 0, 0, 0
        self.sft_steps, self.steps = self.rng.choice([0, 0, 3]), self.rng.choice([12, 10**6, 10**6])
        self.driver, self.trainer = Component(registry.DRIVER, 1), Component(TRAINER, RANKS)
        self.role, self.engines = Component(ROLE, REPLICAS), Component(event_kinds.ENGINE, ENGINES)
        self.makes_steps, self.bad = True, ""
        """Whether the run makes steps, and the role of a component that fails whenever it has come back."""
        self._carried_out_at = dict[tuple[str, int], float]()
        """When a request is carried out, by its target and generation."""
        self._stops_at = float("inf")

    @property
    def components(self) -> Sequence[Component]:
        return self.driver, self.trainer, self.role, self.engines

    @property
    def members(self) -> list[SimMember]:
        return [member for component in self.components for member in component.members]

    @property
    def newest_epoch(self) -> int:
        found = self.model.keys.get(KEYS.epoch())
        return found.version if found is not None else 0

    @property
    def is_fenced(self) -> bool:
        """Whether its epoch is over: it runs on, and can write nothing."""
        return self.epoch != self.newest_epoch

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, in whatever way."""
        status = self.read(KEYS.job_status(), JobStatus)
        return status is not None and status.phase in ENDED_PHASES

    def read(self, key: str, kind: type[R]) -> R | None:
        found = self.model.keys.get(key)
        return kind.decode(found.value) if found is not None else None

    def put(self, key: str, record: Record) -> None:
        self.model.txn((), [Op.put(key, record.encode())])

    # -- begin and end -------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A driver begins an epoch of its own, in which every component is started."""
        self._numbers += 1
        self.epoch = fencing.raise_epoch(SimClient(self.model, lambda: self.world.now), KEYS,
                                         f"driver-{self._numbers}").number
        self.end()
        for request in self._open_requests():
            self.acknowledge(request)
        for component in self.components:
            component.back_at = self.world.now + (0.0 if component is self.driver else self.rng.uniform(2.0, 20.0))

    def end(self) -> None:
        """What runs ends, and its leases with it."""
        for member in self.members:
            self._remove(member)
        for kv in self.model.range(KEYS.engines_prefix()):
            self.model.txn((), [Op.delete(kv.key)])

    def stop(self) -> None:
        self.put(CLUSTER_KEYS.job(KEYS.job), JobRecord(submission=1, stopped=True))
        self._stops_at = self.world.now + self.rng.uniform(0.0, 10.0)

    def resume(self) -> None:
        """The operator has the job go on that was stopped, or has failed."""
        self._stops_at, self.bad, self.makes_steps = float("inf"), "", True
        self.put(CLUSTER_KEYS.job(KEYS.job), JobRecord(submission=1))
        self.put(KEYS.job_status(), JobStatus(phase="starting", step=self.step))
        self.begin()

    # -- time passes ---------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        if self.is_over:
            self.end()
            return
        if self.world.now >= self._stops_at:
            status = self.read(KEYS.job_status(), JobStatus) or JobStatus(phase="rl")
            self.put(KEYS.job_status(), ended(status, "stopped", "stopped", 0.0))
            return
        self._carry_out()
        if not self.is_fenced:
            self._come_back()
            self._follow()
            if self.bad and self.rng.random() < 0.3:
                self._fail_again()
            self.work()
        for member in self.members:
            if self.world.now >= member.goes_on_at:
                self.go_on(member)

    def work(self) -> None:
        """The run makes a step, a piece of one, or nothing."""
        serves = any(not e.hung and not e.lags for e in self.engines.members)
        if self.is_fenced or self.is_over or not serves:
            return
        if (self.makes_steps and self.trainer.works and any(not m.hung for m in self.role.members)
                and self.rng.random() < 0.3):
            self.step, self.pieces = self.step + 1, 0
            self.world.counts["step of the run"] += 1
        elif self.rng.random() < 0.05:
            self.pieces += 1
            self.world.counts["piece of a step"] += 1
        else:
            return
        self._write_status()
        if self.step >= self.steps:
            self.world.counts["run finished"] += 1

    def _write_status(self) -> None:
        supervised = self.step < self.sft_steps
        done = self.step >= self.steps
        self.put(KEYS.job_status(), JobStatus(
            phase="sft" if supervised else "finished" if done else "rl", sft_step=min(self.step, self.sft_steps),
            step=max(0, self.step - self.sft_steps), pieces=self.pieces, needs_version=1 + self.step // 3,
            step_s=4.0))

    def _come_back(self) -> None:
        if self.driver.works:
            kept = {KEYS.engine(member.id) for member in self.engines.members}
            self.model.txn((), [Op.delete(kv.key) for kv in self.model.range(KEYS.engines_prefix())
                                if kv.key not in kept])
        for component in self.components:
            if self.world.now < component.back_at or (component is self.engines and not self.driver.works):
                continue
            if len(component.members) == component.size:
                continue
            if component is self.trainer:
                if not self.world.is_quiet and self.rng.random() < (0.4 if self.bad == TRAINER else 0.05):
                    self.end_agent()
                    continue
                self._leave_undone()
            while len(component.members) < component.size:
                self._start(component)

    def _leave_undone(self) -> None:
        """The group resumes from its last committed state, which may be a step older."""
        for member in [*self.trainer.members]:  # of a rank that was left: another process gets its name
            self.trainer.members.remove(member)
        if self.step and self.rng.random() < 0.3:
            self.step, self.pieces = self.step - 1, 0
            self.world.counts["step undone"] += 1
        self._write_status()

    def _start(self, component: Component) -> None:
        self._numbers += 1
        name = f"rank-{len(component.members)}" if component is self.trainer else f"{component.role}-{self._numbers}"
        member = SimMember(component.role, name, f"i{self._numbers}")
        component.members.append(member)
        self._register(member)
        if component is self.engines:
            status = self.read(KEYS.job_status(), JobStatus)
            self.put(KEYS.engine(name), Engine(
                id=name, pool=ROLLOUT_POOL, state=EngineState.READY, epoch=self.epoch, incarnation=member.incarnation,
                pid=1, version=max(1, status.needs_version if status is not None else 1)))

    def _register(self, member: SimMember) -> None:
        now = EPOCH_S + self.world.now
        self.put(KEYS.member(member.role, member.id), Member(
            role=member.role, id=member.id, pid=1, host="h", epoch=self.epoch, incarnation=member.incarnation,
            phase="works", beat_at=now, progress_at=now - (_HANGS_S if member.hung else 0.0),
            info={"ready": True, "faults": {}}))

    def _follow(self) -> None:
        """Engines get the version that the run needs, but those that lag; whoever is to leave the router leaves it."""
        status = self.read(KEYS.job_status(), JobStatus)
        for member in self.engines.members:
            engine = self.read(KEYS.engine(member.id), Engine)
            if engine is None or engine.state is EngineState.DEAD or status is None:
                continue
            version = engine.version if member.lags or member.hung else max(1, status.needs_version)
            now = engine.replace(version=max(engine.version, version))
            now = now.replace(state=EngineState.SYNCING if now.is_behind else EngineState.READY)
            if now != engine:
                self.put(KEYS.engine(member.id), now)

    # -- faults --------------------------------------------------------------------------------------------------------
    def _remove(self, member: SimMember, *, evidence: bool = False, clean: bool = False) -> None:
        """A member is gone. ``clean``: it was ended on purpose, and deregistered."""
        for component in self.components:
            if member in component.members:
                component.members.remove(member)
        ops = [Op.delete(KEYS.member(member.role, member.id))]
        if evidence:
            ops.append(Op.put(KEYS.evidence(member.role, member.id), Evidence(
                role=member.role, id=member.id, incarnation=member.incarnation, finding=ProcessFinding.GONE, at=0.0,
                by="agent").encode()))
        if clean:
            ops.append(Op.delete(KEYS.registry_entry(member.role, member.id)))
        self.model.txn((), ops)

    def die(self, component: Component) -> None:
        if not component.members:
            return
        self.world.counts[f"death: {component.role}"] += 1
        together = component is self.trainer and self.rng.random() < 0.7
        for member in [*component.members] if together else [self.rng.choice(component.members)]:
            self._remove(member, evidence=self.rng.random() < 0.7)
        component.back_at = self.world.now + self.rng.uniform(1.0, 25.0)

    def hang(self, component: Component) -> None:
        together = component is self.trainer and self.rng.random() < 0.5
        for member in component.members if together else component.members[:1]:
            if not member.hung:
                self.world.counts[f"hang: {component.role}"] += 1
                lasts = self.rng.random() < 0.6
                member.hung = True
                member.goes_on_at = float("inf") if lasts else self.world.now + self.rng.uniform(5.0, 120.0)
                self._register(member)

    def go_on(self, member: SimMember) -> None:
        self.world.counts["hang that ended by itself"] += 1
        member.hung, member.goes_on_at = False, float("inf")
        self._register(member)

    def end_agent(self) -> None:
        """The trainer's agent ends before its ranks have registered, which the driver reports."""
        self.world.counts["end of an agent reported"] += 1
        self.trainer.back_at = self.world.now + self.rng.uniform(1.0, 25.0)
        self.world.oracle.reported(TRAINER, self._emit(TRAINER_GROUP_EVENTS[TRAINER].agent_ended))

    def refuse(self) -> None:
        """A rank refuses what the group was to compute, which ends the group."""
        if len(self.trainer.members) == RANKS:
            self.world.counts["ranks ended after a refusal"] += 1
            self.world.oracle.refused(self._emit(TRAINER_GROUP_EVENTS[TRAINER].refused))
            for member in [*self.trainer.members]:
                self._remove(member, evidence=True)
            self.trainer.back_at = self.world.now + self.rng.uniform(1.0, 10.0)

    def _emit(self, kind: EventKind) -> int:
        event = events.build(kind, TRAINER, kind.name)
        return self.model.txn((), [events.put_op(KEYS, event)])

    def _fail_again(self) -> None:
        component = next(component for component in self.components if component.role == self.bad)
        if component.works:
            (self.die if self.rng.random() < 0.7 else self.hang)(component)

    # -- restarts ------------------------------------------------------------------------------------------------------
    def _open_requests(self) -> list[RestartRequest]:
        found = [RestartRequest.decode(kv.value) for kv in self.model.range(KEYS.restarts_prefix())]
        return [request for request in found if request.open]

    def acknowledge(self, request: RestartRequest) -> None:
        found = self.read(KEYS.restart(request.target), RestartRequest)
        if found is not None:
            self.put(KEYS.restart(request.target), found.observed(request.generation))

    def _is_due(self, request: RestartRequest) -> bool:
        if (name := (request.target, request.generation)) not in self._carried_out_at:
            outcome = self.rng.random() if not self.world.is_quiet else 1.0
            wait_s = self.rng.uniform(0.0, 10.0)
            if outcome < 0.15:
                wait_s = float("inf") if request.target != JOB else self.rng.uniform(30.0, 2 * LONGEST_RESTART_S)
                self.world.counts["restart that is not carried out"] += request.target != JOB
                self.world.counts["global restart that is late"] += request.target == JOB
            elif outcome < 0.3:
                wait_s = self.rng.uniform(10.0, 100.0)
            self._carried_out_at[name] = self.world.now + wait_s
        return self.world.now >= self._carried_out_at[name]

    def _carry_out(self) -> None:
        """The supervisor and the driver do what was requested."""
        for request in self._open_requests():
            is_due = self._is_due(request)
            if request.target == JOB:
                if request.has_newer_driver(self.newest_epoch):
                    self.acknowledge(request)
                elif is_due:
                    self.world.counts["global restart carried out"] += 1
                    self.begin()
                    return
            elif not is_due or self.is_fenced:
                continue
            elif request.target == DRIVER or self.driver.works:
                self._restart(request)

    def _restart(self, request: RestartRequest) -> None:
        for component in self.components:
            of_target = [member for member in component.members if member.target == request.target]
            for member in of_target:
                self._remove(member, clean=True)
                if component is self.engines:
                    self.model.txn((), [Op.delete(KEYS.engine(member.id))])
            if of_target or request.target in (component.role, role_target(component.role)):
                self.world.counts[f"restart carried out: {component.role}"] += 1
                late = not self.world.is_quiet and self.rng.random() < 0.1
                self.world.counts["restart whose component does not come back"] += late
                component.back_at = self.world.now + (1.5 * LONGEST_RESTART_S if late else self.rng.uniform(1.0, 15.0))
        self.acknowledge(request)

    def end_faults(self) -> None:
        """Nothing fails from now on. What hangs goes on to hang, and requests that were ignored stay so."""
        self.bad, self.makes_steps = "", True
        for component in self.components:
            component.back_at = min(component.back_at, self.world.now + 20.0)
        for member in self.engines.members:
            member.lags = False
