"""Faults of the parts of a job, some of those that can be injected: real processes are killed or stopped."""

from __future__ import annotations

import time
from abc import abstractmethod

import psutil

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.config.groups import ACTOR, TrainerGroupSpec
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.device_phase import SeenPhase, Side
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Engine, EngineState, Member, OperationState, PoolStatus
from elastic_rl.faults.context import INJECT_TIMEOUT_S, Fault, FaultContext, VictimTaken, command, suspend
from elastic_rl.faults.finding import engines_of_pool, ray_process
from elastic_rl.faults.undo import Undo
from elastic_rl.runtime.waiting import wait_until


class RecoversWithSteps(Fault):
    """A fault of something that the run needs. The run has recovered from it once that works again, or another process
    in its place, and has trained steps since that it could not have trained without it."""

    def __init__(self, context: FaultContext) -> None:
        self.context, self.at = context, 0.0
        self._back_at = 0
        """The step in which what the fault struck was seen to work again."""
        self._further = context.cfg.train.max_staleness + 2
        """Steps, of which one may have been under way, and of the others as many may be of groups that were generated
        before."""

    @abstractmethod
    def is_back(self) -> bool:
        """Whether what the fault struck works, or another process does in its place."""

    def healed(self) -> bool:
        """One that comes back and dies again, as in a crash loop, has not recovered."""
        step = self.context.step()
        if not self._back_at:
            self._back_at = step if self.is_back() else 0
            return False
        if step < self._back_at + self._further:
            return False
        if not self.is_back():
            self._back_at = 0
            return False
        return True


class EngineKilled(RecoversWithSteps):
    """The death of an engine's server."""

    def __init__(self, context: FaultContext, pool: str = ROLLOUT_POOL, state: EngineState = EngineState.READY
                 ) -> None:
        """``state``: the state of the engine when it is killed, such as *released* of a colocated
        one."""
        super().__init__(context)
        self.pool, self.state, self.victim = pool, state, ""
        self.desired = 0
        self.name = "_".join((*([pool] if pool != ROLLOUT_POOL else []),
                              *([state.value] if state is not EngineState.READY else []), "engine_killed"))

    def inject(self) -> tuple[str, str]:
        self.desired = self.context.desired(self.pool)

        def whole() -> list[Engine]:
            found = engines_of_pool(self.context, EngineState(self.state), self.pool)
            return found if len(found) >= self.desired else []

        found = wait_until(whole, timeout_s=INJECT_TIMEOUT_S, what=f"a pool of {self.state} engines", poll_s=0.01)
        engine = found[0]  # the end of one that has just begun counts as a failed start
        self.victim, self.at = engine.id, time.time()
        return engine.id, self.context.kill(engine.pid)

    def detected(self) -> bool:
        """It is not counted as an engine that can serve any more, now or in its next phase."""
        return not any(e.id == self.victim and e.state in (EngineState.READY, EngineState.RELEASED)
                       for e in self.context.engines(self.pool))

    def is_back(self) -> bool:
        return len(self.context.ready(self.pool) - {self.victim}) >= self.desired


class RoleKilled(RecoversWithSteps):
    """The death of the only member of a role: of a role's only replica, or of the driver."""

    def __init__(self, context: FaultContext, role: str) -> None:
        super().__init__(context)
        self.role, self.name = role, f"{role}_killed"

    def inject(self) -> tuple[str, str]:
        self.at = time.time()
        def only_one() -> list[Member]:  # the record of one that has ended is there until its lease is over
            found = self.context.members(self.role)
            return found if len(found) == 1 else []

        [self.victim] = wait_until(only_one, timeout_s=INJECT_TIMEOUT_S, what=f"one member of the role {self.role}")
        return self.victim.id, self.context.kill(self.victim.pid)

    def detected(self) -> bool:
        return self.context.has_event(event_kinds.of_members(self.role).dead, self.at, self.victim.id)

    def is_back(self) -> bool:
        return any(m.id != self.victim.id for m in self.context.members(self.role))


class PoolRouterKilled(RecoversWithSteps):
    """The death of the router of a pool. ``outages.RouterKilled`` is that of a run in which no groups wait for their
    step."""

    def __init__(self, context: FaultContext, pool: str = ROLLOUT_POOL) -> None:
        super().__init__(context)
        self.pool, self.victim = pool, 0
        self.name = "router_killed" if pool == ROLLOUT_POOL else f"{pool}_router_killed"

    def inject(self) -> tuple[str, str]:
        self.victim = wait_until(lambda: self.context.router_pid(self.pool), timeout_s=INJECT_TIMEOUT_S,
                                 what=f"the router of the pool {self.pool}")
        self.at = time.time()
        return f"router of {self.pool}", self.context.kill(self.victim)

    def detected(self) -> bool:
        return self.context.has_event(event_kinds.ROUTER_RESTARTED, self.at, f"routers/{self.pool}")

    def is_back(self) -> bool:
        return self.context.router_pid(self.pool) not in (0, self.victim)


class RayNodeKilled(RecoversWithSteps):
    """The death of the process without which a node of Ray ends: the GCS of the head, the raylet of the worker. Without
    the head everything on the worker goes on; replicas go on for a moment without the raylet, and so may a step."""

    def __init__(self, context: FaultContext, node: str) -> None:
        """``node``: name of its service."""
        super().__init__(context)
        self.node, self.name, self.victim = node, f"{node.replace('-', '_')}_killed", 0

    def inject(self) -> tuple[str, str]:
        self.victim = wait_until(self._pid, timeout_s=INJECT_TIMEOUT_S, what=self.node)
        self.at = time.time()
        return self.node, self.context.kill(self.victim)

    def _pid(self) -> int:
        return ray_process(self.context, self.node)

    def detected(self) -> bool:
        return self.context.has_event(event_kinds.COMPUTE_FAILING, self.at, self.node) or self.is_back()

    def is_back(self) -> bool:
        return self._pid() not in (0, self.victim)


class QueueActorKilled(RecoversWithSteps):
    """The death of an actor of TransferQueue."""

    def __init__(self, context: FaultContext, actor: str) -> None:
        """``actor``: its class, ``TransferQueueController`` or ``SimpleStorageUnit``."""
        super().__init__(context)
        self.actor, self.name = actor, {"TransferQueueController": "queue_controller_killed",
                                        "SimpleStorageUnit": "queue_storage_killed"}[actor]

    def inject(self) -> tuple[str, str]:
        self.at = time.time()
        self.before = wait_until(self._pids, timeout_s=INJECT_TIMEOUT_S, what="the actors of TransferQueue")
        victim = min(self.before)
        return f"queue actor {self.actor}", self.context.kill(victim)

    def _pids(self) -> set[int]:
        """Pids of the actors of this class, whose name Ray gives to their processes."""
        return {process.pid for process in self.context.processes() if f"ray::{self.actor}" in command(process)}

    def detected(self) -> bool:
        return self.context.has_event(event_kinds.QUEUE_REPLACED, self.at)

    def is_back(self) -> bool:
        return bool(now := self._pids()) and not now & self.before


class TrainerRankKilled(RecoversWithSteps):
    """The death of the last rank of a trainer group."""

    def __init__(self, context: FaultContext, group: TrainerGroupSpec = ACTOR, phase: Side | None = None) -> None:
        """``phase``: for a group that shares devices with engines, the side whose phase it is when the rank is killed;
        None: it does not matter."""
        super().__init__(context)
        self.group, self.phase = group.name, phase
        # One that does not train has nothing to go back to: the run need not miss it before it is back.
        kinds = event_kinds.TRAINER_GROUP_EVENTS[group.name]
        # A loop that has just taken over resumes from the trainer's state without finding a loss.
        self._lost_as = {kinds.restarted, kinds.failed} if group.trains else {kinds.restarted}
        self._back_as = kinds.recovered if group.trains else kinds.restarted
        self.name = f"{group.name}_rank_killed" + (f"_in_phase_of_{phase}" if phase else "")

    def inject(self) -> tuple[str, str]:
        ranks = wait_until(lambda: self.context.members(self.group), timeout_s=INJECT_TIMEOUT_S,
                           what=f"ranks of the group {self.group}")
        rank = max(ranks, key=lambda m: m.id)
        seen = ""
        if self.phase is not None:
            wait_until(lambda: self._stopped_in_phase(psutil.Process(rank.pid)), timeout_s=INJECT_TIMEOUT_S,
                       what=f"the phase of {self.phase}", poll_s=0.01)
            seen = f"; it was stopped in the phase of {self.phase}, and did nothing until then"
        self.at = time.time()
        return f"{self.group} {rank.id}", self.context.kill(rank.pid) + seen

    def _stopped_in_phase(self, rank: psutil.Process) -> bool:
        """Whether the rank does nothing any more since a moment of the phase; else it goes on."""
        if self._seen_phase() is not self.phase:
            return False
        self.context.require_own(rank)
        entry = self.context.undo.note(Undo.CONTINUE, rank.pid)
        suspend(rank, self.context.striking())
        if self._seen_phase() is self.phase:
            return True
        self.context.undo.undo(entry)  # it had passed meanwhile
        return False

    def _seen_phase(self) -> Side | None:
        etcd, keys = self.context.etcd, self.context.keys
        return SeenPhase.of(etcd.get(keys.device_phase()), fencing.current_epoch(etcd, keys)).side

    def detected(self) -> bool:
        return any(self.context.has_event(kind, self.at) for kind in self._lost_as)

    def is_back(self) -> bool:
        return self.context.has_event(self._back_as, self.at)


class TrainerRankStopped(RecoversWithSteps):
    """SIGSTOP of one rank: the process exists and does nothing, so the others hang in their collectives."""

    name = "trainer_rank_stopped"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self.incarnation, self.ranks = "", 0

    def inject(self) -> tuple[str, str]:
        self.at = time.time()
        ranks = self.context.trainer_ranks()
        rank = max(ranks, key=lambda m: m.id, default=None)
        if rank is None or not psutil.pid_exists(rank.pid):
            raise VictimTaken("no rank is there")
        self.incarnation, self.ranks = rank.incarnation, len(ranks)
        return f"trainer {rank.id}", self.context.stop(psutil.Process(rank.pid))

    def detected(self) -> bool:
        """Whether the rank's lease ended, the leader found that the others hang, or their collective timed out."""
        return any(self.context.has_event(kind, self.at) for kind in event_kinds.begins_fault(ACTOR.name))

    def is_back(self) -> bool:
        """There are as many ranks as before, and another one has its place. The training loop need not have reported
        it: it waited for the trainer, so the leader may have found it hung, and restarted it too."""
        ranks = self.context.trainer_ranks()
        return len(ranks) >= self.ranks and all(m.incarnation != self.incarnation for m in ranks)


class Restarted(Fault):
    """A part is restarted on an operator's request."""

    def __init__(self, context: FaultContext, target: str) -> None:
        self.context, self.target = context, target
        self.name = f"restarted_{target.rpartition('/')[2]}"

    def inject(self) -> tuple[str, str]:
        self.step = self.context.step()
        with self.context.striking(f"a restart of {self.target} was asked for"):
            self.operation = self.context.api.restart(self.target, reason="injected fault")
        return self.target, f"operation {self.operation['id']} was accepted"

    def detected(self) -> bool:
        """The process that runs the part has ended it."""
        now = self.context.api.operation(self.operation["id"])
        return now["done"] > 0 or now["state"] == OperationState.SUCCEEDED

    def healed(self) -> bool:
        now = self.context.api.operation(self.operation["id"])
        return now["state"] == OperationState.SUCCEEDED and self.context.step() > self.step


class CoordinatorKilled(Fault):
    """The death of the coordinator that leads. Nothing that runs needs it, so no step is asked for."""

    name = "coordinator_killed"

    def __init__(self, context: FaultContext) -> None:
        self.context, self.at = context, 0.0
        self.victim = self.replicas = 0

    def inject(self) -> tuple[str, str]:
        self.replicas = self._replicas()
        leader = wait_until(self.context.leader, timeout_s=INJECT_TIMEOUT_S, what="a leading coordinator")
        self.victim, self.at = leader.pid, time.time()
        return f"coordinator {leader.replica}", self.context.kill(leader.pid)

    def detected(self) -> bool:
        leader = self.context.leader()
        return leader is None or leader.pid != self.victim

    def healed(self) -> bool:
        """Another process leads, which may be the restarted replica, and has written its event, which only a working
        leader does, and there are as many as before."""
        leader = self.context.leader()
        return (leader is not None and leader.pid != self.victim and self._replicas() >= self.replicas
                and self.context.has_event(event_kinds.LEADER_ELECTED, self.at))

    def _replicas(self) -> int:
        return self.context.etcd.count(ClusterKeys(self.context.cfg.cluster_name).leader_prefix())


class PoolScaled(Fault):
    """A PATCH of the pool's size through the admin API. No fault, but it must be survived as one."""

    def __init__(self, context: FaultContext, name: str, change: int) -> None:
        self.context, self.name, self.change = context, name, change

    def inject(self) -> tuple[str, str]:
        self.desired = max(1, self.context.desired() + self.change)
        with self.context.striking(f"{self.desired} engines were asked for"):
            self.context.api.patch(f"pools/{ROLLOUT_POOL}", {"desired": self.desired})
        return f"pool {ROLLOUT_POOL}", f"PATCH desired={self.desired} was accepted"

    def detected(self) -> bool:
        pool = self.context.pool()
        if pool is None:
            return False
        return (pool.starting > 0 or pool.ready >= self.desired) if self.change > 0 else (
            pool.draining > 0 or pool.ready <= self.desired)

    def healed(self) -> bool:
        status = self.context.pool()
        return status is not None and status.replace(router_url="") == PoolStatus(
            name=ROLLOUT_POOL, ready=self.desired, starting=0, draining=0)
