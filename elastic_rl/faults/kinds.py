"""The faults that can be injected: real processes are killed or stopped, real requests are sent."""

from __future__ import annotations

import time

import psutil

from elastic_rl.etcd.records import EngineState, Member, OperationState, PoolStatus
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, kill
from elastic_rl.pipeline.rollout_pool import ROLLOUT_POOL
from elastic_rl.runtime import wait_until


class EngineKilled:
    name = "engine_killed"

    def __init__(self, context: FaultContext) -> None:
        self.context, self.victim, self.desired = context, "", context.cfg.rollout.engines

    def inject(self) -> tuple[str, str]:
        wait_until(lambda: len(self.context.ready()) >= self.desired, timeout_s=INJECT_TIMEOUT_S,
                   what="a pool of ready engines")
        engine = next(e for e in self.context.engines() if e.state is EngineState.READY and not e.external)
        self.victim = engine.id
        return engine.id, kill(engine.pid)

    def detected(self) -> bool:
        return self.victim not in self.context.ready()

    def healed(self) -> bool:
        return len(self.context.ready() - {self.victim}) >= self.desired


class _TrainerRankFault:
    """A fault of the last rank of the trainer."""

    def __init__(self, context: FaultContext) -> None:
        self.context = context

    def _choose(self) -> Member:
        """The rank, with the time and the step noted for what follows."""
        self.at, self.step = time.time(), self.context.step()
        return max(self.context.trainer_ranks(), key=lambda m: m.id)


class TrainerRankKilled(_TrainerRankFault):
    name = "trainer_rank_killed"

    def inject(self) -> tuple[str, str]:
        rank = self._choose()
        return f"trainer {rank.id}", kill(rank.pid)

    def detected(self) -> bool:
        return self.context.has_event("trainer.failed", self.at)

    def healed(self) -> bool:
        """The group has re-formed, and has trained a step beyond the one in which the rank was killed."""
        return self.context.has_event("trainer.recovered", self.at) and self.context.step() > self.step


class TrainerRankStopped(_TrainerRankFault):
    """SIGSTOP of one rank: the process exists and does nothing, so the others hang in their collectives."""

    name = "trainer_rank_stopped"

    def inject(self) -> tuple[str, str]:
        rank = self._choose()
        self.incarnation = rank.incarnation
        process = psutil.Process(rank.pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, timeout_s=INJECT_TIMEOUT_S,
                   what=f"the stop of pid {rank.pid}")
        return f"trainer {rank.id}", f"pid {rank.pid} was sent SIGSTOP and seen to stop"

    def detected(self) -> bool:
        """Its lease ended, the leader found that the others hang, or their collective timed out."""
        return any(self.context.has_event(f"trainer.{kind}", self.at) for kind in ("dead", "hung", "failed"))

    def healed(self) -> bool:
        """Another rank has its place, and the run has trained a further step. The training loop need not have reported
        it: it waited for the trainer, so the leader may have found it hung, and restarted it too."""
        ranks = self.context.trainer_ranks()
        return bool(ranks) and self.context.step() > self.step and all(
            m.incarnation != self.incarnation for m in ranks)


class Restarted:
    """A part is restarted on an operator's request."""

    def __init__(self, context: FaultContext, target: str) -> None:
        self.context, self.target = context, target
        self.name = f"restarted_{target.rpartition('/')[2]}"

    def inject(self) -> tuple[str, str]:
        self.step = self.context.step()
        self.operation = self.context.api.restart(self.target, reason="injected fault")
        return self.target, f"operation {self.operation['id']} was accepted"

    def detected(self) -> bool:
        """The process that runs the part has ended it."""
        now = self.context.api.operation(self.operation["id"])
        return now["done"] > 0 or now["state"] == OperationState.SUCCEEDED

    def healed(self) -> bool:
        now = self.context.api.operation(self.operation["id"])
        return now["state"] == OperationState.SUCCEEDED and self.context.step() > self.step


class CoordinatorKilled:
    name = "coordinator_killed"

    def __init__(self, context: FaultContext) -> None:
        self.context, self.victim = context, ""

    def inject(self) -> tuple[str, str]:
        leader = wait_until(self.context.leader, timeout_s=INJECT_TIMEOUT_S, what="a leading coordinator")
        self.victim, self.at = leader.replica, time.time()
        return f"coordinator {leader.replica}", kill(leader.pid)

    def detected(self) -> bool:
        leader = self.context.leader()
        return leader is None or leader.replica != self.victim

    def healed(self) -> bool:
        """Another replica leads and has written its event, which only a working leader does."""
        leader = self.context.leader()
        return (leader is not None and leader.replica != self.victim
                and self.context.has_event("leader.elected", self.at))


class PoolScaled:
    """A PATCH of the pool's size through the admin API. No fault, but it must be survived as one."""

    def __init__(self, context: FaultContext, name: str, change: int) -> None:
        self.context, self.name, self.change = context, name, change

    def inject(self) -> tuple[str, str]:
        self.desired = self.context.cfg.rollout.engines + max(self.change, 0)
        self.context.api.patch(f"/v1/pools/{ROLLOUT_POOL}", {"desired": self.desired})
        return f"pool {ROLLOUT_POOL}", f"PATCH desired={self.desired} was accepted"

    def detected(self) -> bool:
        pool = self.context.pool()
        if pool is None:
            return False
        return (pool.starting > 0 or pool.ready >= self.desired) if self.change > 0 else (
            pool.draining > 0 or pool.ready <= self.desired)

    def healed(self) -> bool:
        return self.context.pool() == PoolStatus(name=ROLLOUT_POOL, ready=self.desired, starting=0, draining=0)
