"""Faults of a run on one host, by the names that they have in schedules and in the run's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from chaos_tests.nemesis.schedule import Schedule
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.injector import Elapsed, FaultPlan, Turn
from elastic_rl.faults.kinds import CoordinatorKilled, EngineKilled, RoleKilled, TrainerRankKilled, TrainerRankStopped
from elastic_rl.faults.outages import (
    ActorKilled,
    AllEnginesKilled,
    DcsNodeKilled,
    EtcdStopped,
    RouterKilled,
    ServiceKilled,
)

_ETCD_AWAY_S = 15.0
"""Longer than every lease."""


class Part(StrEnum):
    """What a fault strikes: the parts of a cluster by which its operator bounds the damage."""

    ENGINES = "engines"
    TRAINER = "trainer"
    ROLES = "roles"
    DRIVER = "driver"
    ROUTER = "router"
    COORDINATORS = "coordinators"
    DCS = "dcs"
    ETCD = "etcd"
    HOSTS = "hosts"


@dataclass(frozen=True)
class Entry:
    """A fault that a schedule can name."""

    make: Callable[[FaultContext], Fault]
    part: Part
    what: str
    weight: float = 1.0
    takes_all: bool = False
    """Whether it leaves no replica of the part, however many there are."""


FAULTS: Mapping[str, Entry] = {
    "engine_killed": Entry(EngineKilled, Part.ENGINES, "kill -9 of the server of a ready engine", 3.0),
    "all_engines_killed": Entry(AllEnginesKilled, Part.ENGINES, "kill -9 of every engine at once", takes_all=True),
    "trainer_rank_killed": Entry(TrainerRankKilled, Part.TRAINER, "kill -9 of the last rank of the trainer", 3.0),
    "trainer_rank_stopped": Entry(TrainerRankStopped, Part.TRAINER,
                                  "SIGSTOP of the last rank: the others hang in their collectives"),
    "actor_killed": Entry(ActorKilled, Part.ROLES, "kill -9 of the actor while the trainer is at a step", 2.0),
    "rollout_killed": Entry(lambda c: RoleKilled(c, "rollout"), Part.ROLES, "kill -9 of the role rollout"),
    "advantages_killed": Entry(lambda c: RoleKilled(c, "advantages"), Part.ROLES, "kill -9 of the role advantages"),
    "driver_killed": Entry(lambda c: RoleKilled(c, "driver"), Part.DRIVER, "kill -9 of the driver", 2.0),
    "router_killed": Entry(RouterKilled, Part.ROUTER, "kill -9 of the router of the rollout pool", 2.0),
    "coordinator_killed": Entry(CoordinatorKilled, Part.COORDINATORS, "kill -9 of the coordinator that leads", 2.0),
    "dcs_killed": Entry(DcsNodeKilled, Part.DCS, "kill -9 of the job's DCS node on this host", 2.0),
    "etcd_killed": Entry(lambda c: ServiceKilled(c, "etcd-0"), Part.ETCD, "kill -9 of etcd, which restarts on its data",
                         takes_all=True),
    "etcd_stopped": Entry(lambda c: EtcdStopped(c, _ETCD_AWAY_S), Part.ETCD,
                          f"SIGSTOP of etcd for {_ETCD_AWAY_S:g} s: connections stay, nothing answers", takes_all=True),
}
WEIGHTS: Mapping[str, float] = {name: entry.weight for name, entry in FAULTS.items()}
"""The catalogue of ``nemesis.schedule.drawn``."""


def plan_of(schedule: Schedule, guard: Callable[[str, Fault], Fault] = lambda name, fault: fault) -> FaultPlan:
    """The plan of the injector that plays a schedule. ``guard``: makes of a fault, by its name, the one that is
    injected."""
    def turn(step: int, second: float) -> Turn:
        return Elapsed(second) if schedule.by_time else step

    def plan(context: FaultContext, _steps: int) -> list[tuple[Turn, Sequence[Fault]]]:
        return [(turn(strike.step, strike.second),
                 [guard(name, FAULTS[name].make(context)) for name in strike.faults]) for strike in schedule.strikes]
    return plan
