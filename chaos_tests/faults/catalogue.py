"""Faults by the names that they have in schedules and in the records of runs: of a run on one host, and of the hosts of
a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from elastic_rl.host.test_hosts.impaired_link import Impairment

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


def plan_of(schedule: Schedule) -> FaultPlan:
    """The plan of the injector that plays a schedule."""
    def plan(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
        return [(strike.step, [_ENTRIES[name].make(context) for name in strike.faults]) for strike in schedule.strikes]
    return plan
