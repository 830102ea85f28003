"""Faults of a run on one host, by the names that they have in schedules and in the run's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chaos_tests.nemesis.schedule import Schedule
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.injector import FaultPlan
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


@dataclass(frozen=True)
class _Entry:
    make: Callable[[FaultContext], Fault]
    weight: float = 1.0


_ENTRIES: Mapping[str, _Entry] = {
    "engine_killed": _Entry(EngineKilled, 3.0),
    "all_engines_killed": _Entry(AllEnginesKilled),
    "trainer_rank_killed": _Entry(TrainerRankKilled, 3.0),
    "trainer_rank_stopped": _Entry(TrainerRankStopped),
    "actor_killed": _Entry(ActorKilled, 2.0),
    "rollout_killed": _Entry(lambda c: RoleKilled(c, "rollout")),
    "advantages_killed": _Entry(lambda c: RoleKilled(c, "advantages")),
    "driver_killed": _Entry(lambda c: RoleKilled(c, "driver"), 2.0),
    "router_killed": _Entry(RouterKilled, 2.0),
    "coordinator_killed": _Entry(CoordinatorKilled, 2.0),
    "dcs_killed": _Entry(DcsNodeKilled, 2.0),
    "etcd_killed": _Entry(lambda c: ServiceKilled(c, "etcd-0")),
    "etcd_stopped": _Entry(lambda c: EtcdStopped(c, _ETCD_AWAY_S)),
}
WEIGHTS: Mapping[str, float] = {name: entry.weight for name, entry in _ENTRIES.items()}
"""The catalogue of ``nemesis.schedule.drawn``."""


def plan_of(schedule: Schedule) -> FaultPlan:
    """The plan of the injector that plays a schedule."""
    def plan(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
        return [(strike.step, [_ENTRIES[name].make(context) for name in strike.faults]) for strike in schedule.strikes]
    return plan
