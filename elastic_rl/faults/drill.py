"""The fire drill of ``--faults``: kills real processes of a running job at fixed steps and records what followed.

A fault is three observations, each with its time: it *happened* (the witness: the process is gone, the request was
answered), it was *detected* (the control plane says so itself) and it was *healed*. What went on meanwhile is read off
the run's own records.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from elastic_rl.config import Config
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Engine, EngineState, JobStatus, Leader, Member, OperationState, PoolStatus
from elastic_rl.report.build import read_records
from elastic_rl.roles.rollout_pool import ROLLOUT_POOL, engines
from elastic_rl.roles.run_log import RunLog
from elastic_rl.runtime import wait_until

log = logging.getLogger(__name__)

_INJECT_S, _DETECT_S, _HEAL_S = 60.0, 60.0, 240.0


class Fault(Protocol):
    """One fault. ``inject`` returns (target, witness) once the fault has visibly happened."""

    name: str

    def inject(self) -> tuple[str, str]: ...

    def detected(self) -> bool: ...

    def healed(self) -> bool: ...


class FaultContext:
    """What every fault looks at and acts on."""

    def __init__(self, cfg: Config, etcd: EtcdClient, keys: Keys, api: AdminClient) -> None:
        self.cfg, self.etcd, self.keys, self.api = cfg, etcd, keys, api

    def engines(self) -> list[Engine]:
        return engines(self.etcd, self.keys)

    def ready(self) -> set[str]:
        return {e.id for e in self.engines() if e.state is EngineState.READY}

    def pool(self) -> PoolStatus | None:
        found = self.etcd.get(self.keys.pool_status(ROLLOUT_POOL))
        return PoolStatus.decode(found.value) if found else None

    def step(self) -> int:
        found = self.etcd.get(self.keys.job_status())
        status = JobStatus.decode(found.value) if found else None
        return status.step if status and status.phase == "rl" else 0

    def finished(self) -> bool:
        found = self.etcd.get(self.keys.job_status())
        return found is not None and JobStatus.decode(found.value).phase in ("finished", "failed")

    def leader(self) -> Leader | None:
        items, _ = self.etcd.range(self.keys.leader_prefix())
        return Leader.decode(min(items, key=lambda kv: kv.create_revision).value) if items else None

    def trainer_ranks(self) -> list[Member]:
        return members(self.etcd, self.keys, "trainer")

    def saw_event(self, kind: str, since: float, subject: str = "") -> bool:
        return any(e.kind == kind and e.at >= since and subject in (e.subject, "")
                   for e in events.recent(self.etcd, self.keys, limit=200))


def _kill(pid: int) -> str:
    """kill -9 of one process, and the proof that it is gone."""
    process = psutil.Process(pid)
    program, *args = process.cmdline()
    name = " ".join([Path(program).name, *args[:3]])[:80]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE,
               timeout_s=_INJECT_S, what=f"the end of pid {pid}", poll_s=0.01)
    return f"pid {pid} ({name}) was sent SIGKILL and seen to end"


class EngineKilled:
    name = "engine_killed"

    def __init__(self, scene: FaultContext) -> None:
        self.scene, self.victim, self.wanted = scene, "", scene.cfg.rollout.engines

    def inject(self) -> tuple[str, str]:
        wait_until(lambda: len(self.scene.ready()) >= self.wanted, timeout_s=_INJECT_S, what="a pool of ready engines")
        engine = next(e for e in self.scene.engines() if e.state is EngineState.READY and not e.external)
        self.victim = engine.id
        return engine.id, _kill(engine.pid)

    def detected(self) -> bool:
        return self.victim not in self.scene.ready()

    def healed(self) -> bool:
        return len(self.scene.ready() - {self.victim}) >= self.wanted


class TrainerRankKilled:
    name = "trainer_rank_killed"

    def __init__(self, scene: FaultContext) -> None:
        self.scene = scene

    def inject(self) -> tuple[str, str]:
        self.at, self.step = time.time(), self.scene.step()
        rank = max(self.scene.trainer_ranks(), key=lambda m: m.id)
        self.incarnation = rank.incarnation
        return f"trainer {rank.id}", _kill(rank.pid)

    def detected(self) -> bool:
        return self.scene.saw_event("trainer.failed", self.at)

    def healed(self) -> bool:
        """The group re-formed, and has trained a step beyond the one it was killed in."""
        return self.scene.saw_event("trainer.recovered", self.at) and self.scene.step() > self.step


class TrainerRankStopped:
    """SIGSTOP of one rank: its process is there and does nothing, so the others hang in their collectives."""

    name = "trainer_rank_stopped"

    def __init__(self, scene: FaultContext) -> None:
        self.scene = scene

    def inject(self) -> tuple[str, str]:
        self.at, self.step = time.time(), self.scene.step()
        rank = max(self.scene.trainer_ranks(), key=lambda m: m.id)
        process = psutil.Process(rank.pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, timeout_s=_INJECT_S, what="the rank's stop")
        return f"trainer {rank.id}", f"pid {rank.pid} was sent SIGSTOP and seen to stand still"

    def detected(self) -> bool:
        """By what beats on without working."""
        return self.scene.saw_event("trainer.hung", self.at)

    def healed(self) -> bool:
        return self.scene.saw_event("trainer.recovered", self.at) and self.scene.step() > self.step


class Restarted:
    """A part is started anew on an operator's request."""

    def __init__(self, scene: FaultContext, target: str) -> None:
        self.scene, self.target = scene, target
        self.name = f"restarted_{target.rpartition('/')[2]}"

    def inject(self) -> tuple[str, str]:
        self.step = self.scene.step()
        self.operation = self.scene.api.restart(self.target, reason="fire drill")
        return self.target, f"operation {self.operation['id']} was accepted"

    def detected(self) -> bool:
        """Whoever runs the part has taken it down."""
        now = self.scene.api.operation(self.operation["id"])
        return now["done"] > 0 or now["state"] == OperationState.SUCCEEDED

    def healed(self) -> bool:
        now = self.scene.api.operation(self.operation["id"])
        return now["state"] == OperationState.SUCCEEDED and self.scene.step() > self.step


class CoordinatorKilled:
    name = "coordinator_killed"

    def __init__(self, scene: FaultContext) -> None:
        self.scene, self.victim = scene, ""

    def inject(self) -> tuple[str, str]:
        leader = wait_until(self.scene.leader, timeout_s=_INJECT_S, what="a leading coordinator")
        self.victim, self.at = leader.replica, time.time()
        return f"coordinator {leader.replica}", _kill(leader.pid)

    def detected(self) -> bool:
        leader = self.scene.leader()
        return leader is None or leader.replica != self.victim

    def healed(self) -> bool:
        """Another replica leads and has said so in the events, which only a working leader writes."""
        leader = self.scene.leader()
        return leader is not None and leader.replica != self.victim and self.scene.saw_event("leader.elected", self.at)


class PoolScaled:
    """A PATCH of the pool's size through the admin API."""

    def __init__(self, scene: FaultContext, name: str, change: int) -> None:
        self.scene, self.name, self.change = scene, name, change

    def inject(self) -> tuple[str, str]:
        self.before = self.scene.ready()
        self.desired = self.scene.cfg.rollout.engines + max(self.change, 0)
        self.scene.api.patch(f"/v1/pools/{ROLLOUT_POOL}", {"desired": self.desired})
        return f"pool {ROLLOUT_POOL}", f"PATCH desired={self.desired} was accepted"

    def detected(self) -> bool:
        pool = self.scene.pool()
        if pool is None:
            return False
        return (pool.starting > 0 or pool.ready >= self.desired) if self.change > 0 else (
            pool.draining > 0 or pool.ready <= self.desired)

    def healed(self) -> bool:
        pool = self.scene.pool()
        return pool == PoolStatus(name=ROLLOUT_POOL, ready=self.desired, starting=0, draining=0)


FaultPlan = Callable[[FaultContext, int], list[tuple[int, Fault]]]
"""From the scene and the run's number of steps to (step, fault), in order."""


def standard_faults(scene: FaultContext, steps: int) -> list[tuple[int, Fault]]:
    """The drill of the quick start: (step, fault), in order, spread over the first four fifths of the run."""
    return [(max(1, round(steps * share)), fault) for share, fault in (
        (0.10, EngineKilled(scene)),
        (0.30, TrainerRankKilled(scene)),
        (0.45, CoordinatorKilled(scene)),
        (0.50, PoolScaled(scene, "pool_scaled_out", +1)),
        (0.75, PoolScaled(scene, "pool_scaled_in", -1)),
    )]


class Drill(threading.Thread):
    """Plays the faults one after the other: each waits for its step and for the one before to have healed."""

    def __init__(self, scene: FaultContext, run_log: RunLog, plan: list[tuple[int, Fault]]) -> None:
        super().__init__(name="drill", daemon=True)
        self.scene, self.run_log, self.plan = scene, run_log, plan
        self.stopping = threading.Event()

    def run(self) -> None:
        for step, fault in self.plan:
            while self.scene.step() < step:
                if self.stopping.wait(0.1) or self.scene.finished():
                    return
            self._play(fault)

    def _play(self, fault: Fault) -> None:
        times: dict[str, float | None] = {"injected_at": time.time(), "detected_at": None, "healed_at": None}
        step, target, witness = self.scene.step(), "", ""
        try:
            target, witness = fault.inject()
            wait_until(fault.detected, timeout_s=_DETECT_S, what=f"detection of {fault.name}", poll_s=0.02)
            times["detected_at"] = time.time()
            wait_until(fault.healed, timeout_s=_HEAL_S, what=f"recovery from {fault.name}")
            times["healed_at"] = time.time()
        except (ElasticRLError, psutil.Error) as e:
            witness = f"{witness} — {e}".strip(" —")
            log.exception("drill: %s", fault.name)
        self.run_log.write("fault", name=fault.name, step=step, target=target, witness=witness,
                           meanwhile=self._meanwhile(times), **times)

    def _meanwhile(self, times: dict[str, Any]) -> str:
        end = times["healed_at"] or time.time()
        steps = [r for r in read_records(self.run_log.path)
                 if r["kind"] == "step" and times["injected_at"] <= r["at"] <= end]
        samples = sum(r["samples"] for r in steps)
        return f"{len(steps)} steps trained on {samples} samples; {len(self.scene.ready())} engines ready"
