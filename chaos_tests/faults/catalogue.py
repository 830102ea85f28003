"""Faults by the names that they have in schedules and in the records of runs: of a run on one host, and of the hosts of
a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from chaos_tests.nemesis.schedule import Schedule
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.hosts import (
    EtcdQuorumStopped,
    HostApart,
    HostCut,
    HostDeaf,
    HostFault,
    HostMute,
    HostPoweredOff,
    HostsContext,
    LinkImpaired,
    Victim,
    coordinator_killed,
    etcd_killed,
)
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
from elastic_rl.host.test_hosts.impaired_link import Impairment

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


@dataclass(frozen=True)
class _HostEntry:
    """A fault that needs test hosts."""

    make: Callable[[HostsContext], HostFault]
    weight: float = 1.0


_IMPAIRED_S = 20.0
_SLOW, _LATE = Impairment(bytes_per_s=48 << 10), Impairment(delay_s=0.15, jitter_s=0.1)
_LOSSY = Impairment(loss=0.2)
HOST_FAULTS: Mapping[str, _HostEntry] = {
    "holder_host_cut": _HostEntry(lambda c: HostCut(c, Victim.HOLDER), 2.0),
    "leader_host_apart": _HostEntry(lambda c: HostApart(c, Victim.LEADER), 3.0),
    "holder_host_apart": _HostEntry(lambda c: HostApart(c, Victim.HOLDER)),
    "leader_host_deaf": _HostEntry(lambda c: HostDeaf(c, Victim.LEADER), 2.0),
    "etcd_leader_host_deaf": _HostEntry(lambda c: HostDeaf(c, Victim.ETCD_LEADER)),
    "holder_host_mute": _HostEntry(lambda c: HostMute(c, Victim.HOLDER), 2.0),
    "holder_host_powered_off": _HostEntry(lambda c: HostPoweredOff(c, Victim.HOLDER), 2.0),
    "leader_host_powered_off": _HostEntry(lambda c: HostPoweredOff(c, Victim.LEADER), 2.0),
    "bystander_host_powered_off": _HostEntry(lambda c: HostPoweredOff(c, Victim.BYSTANDER)),
    "etcd_leader_host_slow": _HostEntry(lambda c: LinkImpaired(c, Victim.ETCD_LEADER, "slow", _SLOW, _IMPAIRED_S)),
    "leader_host_late": _HostEntry(lambda c: LinkImpaired(c, Victim.LEADER, "late", _LATE, _IMPAIRED_S)),
    "holder_host_lossy": _HostEntry(lambda c: LinkImpaired(c, Victim.HOLDER, "lossy", _LOSSY, _IMPAIRED_S)),
    "leader_host_coordinator_killed": _HostEntry(coordinator_killed, 2.0),
    "etcd_leader_host_etcd_killed": _HostEntry(etcd_killed, 2.0),
    "etcd_quorum_stopped": _HostEntry(lambda c: EtcdQuorumStopped(c, _ETCD_AWAY_S)),
}
"""Faults of the hosts of a cluster, which need test hosts (``target_hosts``)."""
HOST_WEIGHTS: Mapping[str, float] = {name: entry.weight for name, entry in HOST_FAULTS.items()}


def plan_of(schedule: Schedule, guard: Callable[[str, Fault], Fault] = lambda name, fault: fault) -> FaultPlan:
    """The plan of the injector that plays a schedule. ``guard``: makes of a fault, by its name, the one that is
    injected."""
    def turn(step: int, second: float) -> Turn:
        return Elapsed(second) if schedule.by_time else step

    def plan(context: FaultContext, _steps: int) -> list[tuple[Turn, Sequence[Fault]]]:
        return [(turn(strike.step, strike.second),
                 [guard(name, FAULTS[name].make(context)) for name in strike.faults]) for strike in schedule.strikes]
    return plan
