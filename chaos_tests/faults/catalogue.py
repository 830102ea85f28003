"""Faults by the names that they have in schedules and in the records of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from chaos_tests.nemesis.schedule import Schedule
from elastic_rl.config import Config
from elastic_rl.config.groups import ACTOR
from elastic_rl.faults import clock, ptrace, states
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.etcd import CompactedPastWatcher, EtcdPulsed, ForeignRecords
from elastic_rl.faults.finding import ETCD
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
from elastic_rl.faults.injector import Elapsed, FaultPlan, Trigger
from elastic_rl.faults.kinds import CoordinatorKilled, EngineKilled, RoleKilled, TrainerRankKilled, TrainerRankStopped
from elastic_rl.faults.outages import (
    ActorKilled,
    AllEnginesKilled,
    DcsNodeKilled,
    EtcdStopped,
    RouterKilled,
    SecondActor,
    ServiceKilled,
    TrainerStopped,
)
from elastic_rl.faults.processes import PROCESS_KINDS, BusyCores, Struck, Way
from elastic_rl.faults.stale import RacingRequests, StaleLeader, ZombieDriver
from elastic_rl.faults.storage import ChunksDamaged, DiskRefusesWrites
from elastic_rl.host.test_hosts.impaired_link import Impairment

_ETCD_AWAY_S = 15.0
"""Longer than every lease."""
_BEYOND_LEASE_S = 12.0
"""Time for which a process is stopped, or has its GIL held, that is to come back when others take it for dead."""
_DISK_S, _BUSY_S, _PULSES_S, _RECORDS_S, _SECOND_ACTOR_S = 15.0, 15.0, 15.0, 10.0, 10.0


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
    RUN = "run"
    RAY = "ray"
    API = "api"


_NETWORK = "network"


class Need(StrEnum):
    """What a job, or who plays the faults, must have for a fault."""

    OUTSIDE = "outside"
    """The injector runs outside of the process of the run, which the fault ends."""
    PTRACE = "ptrace"
    """Linux on x86-64, and the permission to debug."""
    CLOCK = "clock"
    """The kernel lets the clock of a process be set (``faults.clock``)."""
    DISK = "disk"
    """The DCS nodes store chunks on disk (``dcs.disk_bytes``)."""
    ONE_HOST = "one_host"
    """The processes of the job are this host's, which finds them by its files. All faults have it that have not the
    next one."""
    OWN_CLUSTER = "own_cluster"
    """The cluster is made for the run: the fault destroys what nobody could give back to somebody else's."""
    TEST_HOSTS = "test_hosts"
    """The cluster is on test hosts (``target_hosts``), of which the context of the faults knows."""


@dataclass(frozen=True)
class Entry:
    """A fault that a schedule can name."""

    make: Callable[[FaultContext], Fault]
    part: Part
    what: str
    weight: float = 1.0
    takes_all: bool = False
    """Whether it leaves no replica of the part, however many there are."""
    needs: frozenset[Need] = frozenset()
    also: frozenset[Part] = frozenset()
    """Parts that it strikes beside ``part``, one replica of each."""
    takes_replica: bool = True
    """Whether a replica of ``part`` is lost or away."""
    repaired_unseen: bool = False
    """Whether the process is replaced in place, before anything depends on it: no alert tells of it."""
    slows: bool = False
    """Whether it makes work slow, and nothing else: it is no reason for any loss."""
    ends_leases: bool = False
    """Whether it lasts so long that every lease may end: it is a reason for the loss of any member."""
    loses: str = ""
    """The role of the members of the job that it ends, in whose place others begin; "" where it ends none."""
    victims: frozenset[Victim] = frozenset()
    """The hosts that a fault of test hosts is of, by what they do."""
    of_network: bool = False
    """Whether it is of a host or of its network: the end of one may end a part of another one."""
    restarts_all: bool = False
    """Whether the run may rebuild its whole compute plane for it alone."""
    recovers_without_step: bool = False
    """Whether the run may have recovered from it before the next step: nothing that runs needs the part."""

    @property
    def parts(self) -> frozenset[Part]:
        return self.also | {self.part}

    @property
    def strikes(self) -> frozenset[str]:
        """What another fault at the same time must leave alone: else one of them may find nothing to strike, or be
        seen to end too early."""
        return self.victims | {_NETWORK} if self.of_network else self.victims or self.parts

    @property
    def seen_in(self) -> frozenset[Part]:
        """The parts whose losses it may be the reason for."""
        if self.slows or not (self.takes_replica or self.also):
            return frozenset()
        if self.ends_leases:
            return frozenset(Part)
        beyond = frozenset[Part]() if self.repaired_unseen else SEEN_BEYOND.get(self.part, frozenset())
        return self.parts | beyond

    @property
    def fields(self) -> Mapping[str, Sequence[str]]:
        """What the record of the fault says of it: ``parts``, its ``part`` first, and ``seen_in``."""
        return {"parts": [self.part, *sorted(self.also - {self.part})], "seen_in": sorted(self.seen_in)}

    @property
    def all_needs(self) -> frozenset[Need]:
        return self.needs if Need.TEST_HOSTS in self.needs else self.needs | {Need.ONE_HOST}


SEEN_BEYOND: Mapping[Part, frozenset[Part]] = {
    Part.HOSTS: frozenset(Part),
    Part.RAY: frozenset({Part.ENGINES, Part.TRAINER, Part.ROLES}),
    Part.RUN: frozenset({Part.DRIVER}),
}
"""Parts that are lost with another one, though a fault that strikes it strikes none of them: a host takes with it all
that runs on it, Ray the actors, and a run its driver."""


_CLOCKS = frozenset({Way.CLOCK_SET_BACK, Way.CLOCK_SET_AHEAD})
_OF_MEMBERS = frozenset({Part.ENGINES, Part.TRAINER, Part.ROLES, Part.DRIVER})
"""Parts whose processes are members of the job."""


def _struck(part: str, way: Way, strikes: Part, what: str, *, weight: float = 0.5,
            state: states.VictimState | None = None, needs: Set[Need] = frozenset(), takes_all: bool = False,
            also: Set[Part] = frozenset(), repaired_unseen: bool = False, restarts_all: bool = False) -> Entry:
    seconds = 0.0 if way.ends else _BEYOND_LEASE_S
    traced = {Need.CLOCK} if way in _CLOCKS else {Need.PTRACE} if way in (Way.EXITED, Way.GIL_HELD) else set()
    loses = PROCESS_KINDS[part].component if way.ends and strikes in _OF_MEMBERS else ""
    return Entry(lambda c: Struck(c, part, way, state=state, seconds=seconds), strikes, what, weight, takes_all,
                 needs=frozenset({*needs, *traced}), also=frozenset(also), repaired_unseen=repaired_unseen,
                 takes_replica=way not in _CLOCKS, loses=loses, restarts_all=restarts_all)


_PARTS_LOST: Mapping[str, Entry] = {
    "engine_killed": Entry(EngineKilled, Part.ENGINES, "kill -9 of the server of a ready engine", 3.0,
                           loses="engine"),
    "all_engines_killed": Entry(AllEnginesKilled, Part.ENGINES, "kill -9 of every engine at once", takes_all=True,
                                loses="engine"),
    "trainer_rank_killed": Entry(TrainerRankKilled, Part.TRAINER, "kill -9 of the last rank of the trainer", 3.0,
                                 loses=ACTOR.name),
    "trainer_rank_stopped": Entry(TrainerRankStopped, Part.TRAINER,
                                  "SIGSTOP of the last rank: the others hang in their collectives", loses=ACTOR.name),
    "actor_killed": Entry(ActorKilled, Part.ROLES, "kill -9 of the actor while the trainer is at a step", 2.0,
                          loses="actor"),
    "rollout_killed": Entry(lambda c: RoleKilled(c, "rollout"), Part.ROLES, "kill -9 of the role rollout",
                            loses="rollout"),
    "advantages_killed": Entry(lambda c: RoleKilled(c, "advantages"), Part.ROLES, "kill -9 of the role advantages",
                                loses="advantages"),
    "driver_killed": Entry(lambda c: RoleKilled(c, "driver"), Part.DRIVER, "kill -9 of the driver", 2.0,
                           loses="driver"),
    "router_killed": Entry(RouterKilled, Part.ROUTER, "kill -9 of the router of the rollout pool", 2.0),
    "coordinator_killed": Entry(CoordinatorKilled, Part.COORDINATORS, "kill -9 of the coordinator that leads", 2.0,
                                recovers_without_step=True),
    "dcs_killed": Entry(DcsNodeKilled, Part.DCS, "kill -9 of the job's DCS node on this host", 2.0),
    "etcd_killed": Entry(lambda c: ServiceKilled(c, ETCD), Part.ETCD, "kill -9 of etcd, which restarts on its data",
                         takes_all=True, also=frozenset({Part.DRIVER})),
    "etcd_stopped": Entry(lambda c: EtcdStopped(c, _ETCD_AWAY_S), Part.ETCD,
                          f"SIGSTOP of etcd for {_ETCD_AWAY_S:g} s: connections stay, nothing answers, and a host that "
                          "has no lease for so long ends its driver", takes_all=True, also=frozenset({Part.DRIVER}),
                          ends_leases=True),
}
_ETCD_SLOW, _ANSWERS_LOST = "etcd_slow", "etcd_answers_lost"
_OTHERS: Mapping[str, Entry] = {
    "trainer_stopped": Entry(TrainerStopped, Part.TRAINER, "SIGSTOP of all ranks and their agent, for good",
                             takes_all=True, loses=ACTOR.name),
    "second_actor": Entry(lambda c: SecondActor(c, _SECOND_ACTOR_S), Part.ROLES,
                          "another actor takes the job over beside the one that runs, and is gone after a while"),
    # -- other processes, and other ways
    "scheduler_killed": _struck("scheduler", Way.KILLED, Part.ENGINES, "kill -9 of a scheduler of SGLang"),
    "scheduler_exited": _struck("scheduler", Way.EXITED, Part.ENGINES, "a scheduler of SGLang exits with code 0"),
    "scheduler_gil_held": _struck("scheduler", Way.GIL_HELD, Part.ENGINES, "the GIL of a scheduler is held"),
    "engine_terminated": _struck("engine", Way.TERMINATED, Part.ENGINES, "SIGTERM of an engine's server"),
    "engine_paused": _struck("engine", Way.PAUSED, Part.ENGINES, "SIGSTOP of an engine's server, and SIGCONT"),
    "engine_runner_killed": _struck("engine_runner", Way.KILLED, Part.ENGINES, "kill -9 of what runs an engine"),
    "engine_runner_paused": _struck("engine_runner", Way.PAUSED, Part.ENGINES,
                                    "zombie engine: what runs it is stopped, taken for dead, and comes back"),
    "trainer_rank_exited": _struck("trainer_rank", Way.EXITED, Part.TRAINER, "a rank exits with code 0"),
    "trainer_rank_terminated": _struck("trainer_rank", Way.TERMINATED, Part.TRAINER, "SIGTERM of a rank"),
    "trainer_rank_gil_held": _struck("trainer_rank", Way.GIL_HELD, Part.TRAINER, "the GIL of a rank is held"),
    "trainer_agent_killed": _struck("trainer_agent", Way.KILLED, Part.TRAINER, "kill -9 of the trainer's agent"),
    "actor_exited": _struck("actor", Way.EXITED, Part.ROLES, "the actor exits with code 0"),
    "rollout_paused": _struck("rollout", Way.PAUSED, Part.ROLES, "SIGSTOP of the replica of rollout, and SIGCONT"),
    "driver_exited": _struck("driver", Way.EXITED, Part.DRIVER, "the driver exits with code 0 in the middle of a job"),
    "driver_terminated": _struck("driver", Way.TERMINATED, Part.DRIVER,
                                 "SIGTERM of the driver, which ends what it runs",
                                 also={Part.ENGINES, Part.TRAINER, Part.ROLES}),
    "driver_paused": _struck("driver", Way.PAUSED, Part.DRIVER,
                             "SIGSTOP of the driver: its run kills it, and the next one takes over"),
    "run_killed": _struck("run", Way.KILLED, Part.RUN, "kill -9 of the process of the run, with which its driver ends",
                          needs={Need.OUTSIDE}, also={Part.DRIVER}, repaired_unseen=True,
                          restarts_all=True),
    "router_exited": _struck("router", Way.EXITED, Part.ROUTER, "the router exits with code 0"),
    "router_paused": _struck("router", Way.PAUSED, Part.ROUTER, "SIGSTOP of the router, and SIGCONT"),
    "gcs_killed": _struck("gcs", Way.KILLED, Part.RAY, "kill -9 of the GCS of Ray's head", repaired_unseen=True,
                          restarts_all=True),
    "raylet_killed": _struck("raylet", Way.KILLED, Part.RAY, "kill -9 of the raylet of Ray's worker",
                             also={Part.ENGINES, Part.TRAINER, Part.ROLES, Part.DRIVER}),
    "coordinator_terminated": _struck("coordinator", Way.TERMINATED, Part.COORDINATORS,
                                      "SIGTERM of the leading coordinator"),
    "coordinator_exited": _struck("coordinator", Way.EXITED, Part.COORDINATORS,
                                  "the leading coordinator exits with code 0"),
    "coordinator_follower_killed": _struck("coordinator_follower", Way.KILLED, Part.COORDINATORS,
                                           "kill -9 of a coordinator that does not lead"),
    "dcs_exited": _struck("dcs", Way.EXITED, Part.DCS, "the DCS node exits with code 0"),
    "dcs_terminated": _struck("dcs", Way.TERMINATED, Part.DCS, "SIGTERM of the DCS node"),
    "dcs_paused": _struck("dcs", Way.PAUSED, Part.DCS, "SIGSTOP of the DCS node, and SIGCONT"),
    "coordinator_clock_set_back": _struck("coordinator", Way.CLOCK_SET_BACK, Part.COORDINATORS,
                                          "the wall clock of the leading coordinator is an hour behind"),
    "coordinator_clock_set_ahead": _struck("coordinator", Way.CLOCK_SET_AHEAD, Part.COORDINATORS,
                                           "the wall clock of the leading coordinator is an hour ahead: silences "
                                           "end early", needs={Need.OWN_CLUSTER}),
    "host_agent_clock_set_back": _struck("host_agent", Way.CLOCK_SET_BACK, Part.HOSTS,
                                         "the wall clock of the active host agent is an hour behind"),
    "driver_clock_set_ahead": _struck("driver", Way.CLOCK_SET_AHEAD, Part.DRIVER,
                                      "the wall clock of the driver is an hour ahead"),
    "engine_runner_clock_set_back": _struck("engine_runner", Way.CLOCK_SET_BACK, Part.ENGINES,
                                            "the wall clock of what runs an engine is an hour behind"),
    "trainer_rank_clock_set_ahead": _struck("trainer_rank", Way.CLOCK_SET_AHEAD, Part.TRAINER,
                                            "the wall clock of a rank is an hour ahead"),
    "dcs_clock_set_back": _struck("dcs", Way.CLOCK_SET_BACK, Part.DCS,
                                  "the wall clock of the DCS node is an hour behind"),
    "etcd_clock_set_ahead": _struck("etcd", Way.CLOCK_SET_AHEAD, Part.ETCD, "the wall clock of etcd is an hour ahead"),
    "host_agent_killed": _struck("host_agent", Way.KILLED, Part.HOSTS, "kill -9 of the active host agent",
                                 repaired_unseen=True),
    "etcd_terminated": _struck("etcd", Way.TERMINATED, Part.ETCD, "SIGTERM of etcd", also={Part.DRIVER}),
    "busy_cores": Entry(lambda c: BusyCores(c, _BUSY_S), Part.HOSTS, "other processes use all cores for a while", 0.5,
                        takes_replica=False, slows=True),
    # -- in a state
    "engine_killed_generating": _struck("engine", Way.KILLED, Part.ENGINES, "kill -9 of an engine that generates",
                                        state=states.GENERATING),
    "engine_killed_applying": _struck("engine", Way.KILLED, Part.ENGINES,
                                      "kill -9 of an engine that has begun to apply a version", state=states.APPLYING),
    "engine_killed_draining": _struck("engine", Way.KILLED, Part.ENGINES, "kill -9 of an engine that drains",
                                      state=states.DRAINING),
    "trainer_rank_killed_publishing": _struck("trainer_rank", Way.KILLED, Part.TRAINER,
                                              "kill -9 of a rank before its version is committed",
                                              state=states.PUBLISHING),
    "trainer_rank_paused_publishing": _struck("trainer_rank", Way.PAUSED, Part.TRAINER,
                                              "zombie publisher: a rank is stopped before its version is committed, "
                                              "and comes back", state=states.PUBLISHING),
    "dcs_killed_publishing": _struck("dcs", Way.KILLED, Part.DCS, "kill -9 of the DCS node while a version is written",
                                     state=states.PUBLISHING),
    "driver_killed_taking_over": _struck("driver", Way.KILLED, Part.DRIVER,
                                         "kill -9 of the driver, and of the next one while it takes over",
                                         state=states.DRIVER_TAKING_OVER, takes_all=True),
    "coordinator_killed_taking_over": _struck("coordinator", Way.KILLED, Part.COORDINATORS,
                                              "kill -9 of the leader, and of the next one before it has announced "
                                              "itself", state=states.LEADER_TAKING_OVER, takes_all=True),
    # -- storage and etcd
    "dcs_disk_refuses_writes": Entry(lambda c: DiskRefusesWrites(c, _DISK_S), Part.DCS,
                                     f"no file of the DCS node may grow for {_DISK_S:g} s", 0.5,
                                     needs=frozenset({Need.DISK}), takes_replica=False),
    "chunk_bits_flipped": Entry(lambda c: ChunksDamaged(c, torn=False), Part.DCS,
                                "a bit of each chunk on disk flips while the node is down; an engine reads them", 0.5,
                                needs=frozenset({Need.DISK, Need.OWN_CLUSTER}), also=frozenset({Part.ENGINES})),
    "chunks_torn": Entry(lambda c: ChunksDamaged(c, torn=True), Part.DCS,
                         "each chunk on disk loses its end while the node is down; an engine reads them", 0.5,
                         needs=frozenset({Need.DISK, Need.OWN_CLUSTER}), also=frozenset({Part.ENGINES})),
    _ETCD_SLOW: Entry(lambda c: EtcdPulsed(c, _ETCD_SLOW, seconds=_PULSES_S, stopped_s=0.15, running_s=0.1,
                                           loses_answers=False), Part.ETCD,
                      "etcd is stopped for moments, as by a disk whose fsync is slow", 0.5, slows=True),
    _ANSWERS_LOST: Entry(lambda c: EtcdPulsed(c, _ANSWERS_LOST, seconds=_PULSES_S, stopped_s=0.8, running_s=0.4,
                                              loses_answers=True), Part.ETCD,
                         "etcd is stopped for longer than a call waits: writes are made whose answers are lost", 0.5),
    "etcd_compacted_past_watcher": Entry(CompactedPastWatcher, Part.ETCD,
                                         "etcd is restarted and compacted past what the leader has watched", 0.5,
                                         also=frozenset({Part.COORDINATORS, Part.DRIVER})),
    "foreign_records": Entry(lambda c: ForeignRecords(c, _RECORDS_S), Part.ETCD,
                             "etcd has records of a later and of an earlier release, and one that is none", 0.5,
                             takes_replica=False),
    # -- logical
    "stale_leader": Entry(StaleLeader, Part.COORDINATORS, "the leader is stopped until another leads, and comes back",
                          repaired_unseen=True),
    "zombie_driver": Entry(ZombieDriver, Part.DRIVER,
                           "the driver is stopped while the next generation begins, and comes back"),
    "racing_requests": Entry(RacingRequests, Part.API, "clients of the API change one pool at the same time",
                             takes_replica=False),
}
_IMPAIRED_S = 20.0
_SLOW, _LATE = Impairment(bytes_per_s=48 << 10), Impairment(delay_s=0.15, jitter_s=0.1)
_LOSSY = Impairment(loss=0.2)
_ON_A_HOST = frozenset({Part.COORDINATORS, Part.ETCD, Part.DCS, Part.DRIVER, Part.RUN})
"""What each test host has, and may seem to be lost with it."""


def _of_hosts(victim: Victim, make: Callable[[HostsContext, Victim], HostFault], what: str, weight: float = 1.0, *,
              part: Part = Part.HOSTS, also: Set[Part] = _ON_A_HOST, slows: bool = False) -> Entry:
    return Entry(lambda c: make(cast(HostsContext, c), victim), part, what, weight, needs=frozenset({Need.TEST_HOSTS}),
                 also=frozenset(also - {part}), slows=slows, victims=frozenset({victim}), of_network=part is Part.HOSTS,
                 restarts_all=part is Part.HOSTS and not slows)


_OF_HOSTS: Mapping[str, Entry] = {
    "holder_host_cut": _of_hosts(Victim.HOLDER, HostCut, "the run's host is off the network", 2.0),
    "leader_host_apart": _of_hosts(Victim.LEADER, HostApart, "the leader's host and others do not hear each other; "
                                   "clients reach both", 3.0),
    "holder_host_apart": _of_hosts(Victim.HOLDER, HostApart, "the run's host and the others do not hear each other; "
                                   "clients reach both"),
    "leader_host_deaf": _of_hosts(Victim.LEADER, HostDeaf, "the leader's host is heard and hears none", 2.0),
    "etcd_leader_host_deaf": _of_hosts(Victim.ETCD_LEADER, HostDeaf, "the host of etcd's leader is heard, and hears no "
                                       "other"),
    "holder_host_mute": _of_hosts(Victim.HOLDER, HostMute, "the run's host hears, and no other hears it", 2.0),
    "holder_host_powered_off": _of_hosts(Victim.HOLDER, HostPoweredOff, "the host with the run loses its power, and "
                                         "nobody is told; it returns", 2.0),
    "leader_host_powered_off": _of_hosts(Victim.LEADER, HostPoweredOff, "the leader's host loses its power; it returns",
                                         2.0),
    "bystander_host_powered_off": _of_hosts(Victim.BYSTANDER, HostPoweredOff, "a host that leads nothing loses its "
                                            "power; it returns"),
    "etcd_leader_host_slow": _of_hosts(
        Victim.ETCD_LEADER, lambda c, v: LinkImpaired(c, v, "slow", _SLOW, _IMPAIRED_S),
        "the link of etcd's leader carries 48 KiB a second for a while"),  # once it is full, no heartbeat is in time
    "leader_host_late": _of_hosts(
        Victim.LEADER, lambda c, v: LinkImpaired(c, v, "late", _LATE, _IMPAIRED_S),
        "what the leader's host gets is 150 to 250 ms late for a while", slows=True),
    "holder_host_lossy": _of_hosts(
        Victim.HOLDER, lambda c, v: LinkImpaired(c, v, "lossy", _LOSSY, _IMPAIRED_S),
        "a fifth of what the run's host gets is lost for a while", slows=True),
    "leader_host_coordinator_killed": _of_hosts(
        Victim.LEADER, coordinator_killed, "kill -9 of the coordinator that leads", 2.0, part=Part.COORDINATORS,
        also=frozenset()),
    "etcd_leader_host_etcd_killed": _of_hosts(
        Victim.ETCD_LEADER, etcd_killed, "kill -9 of the member that leads etcd", 2.0, part=Part.ETCD,
        also=frozenset()),
    "etcd_quorum_stopped": Entry(lambda c: EtcdQuorumStopped(cast(HostsContext, c), _ETCD_AWAY_S), Part.ETCD,
                                 f"SIGSTOP of a majority of etcd's members for {_ETCD_AWAY_S:g} s", takes_all=True,
                                 needs=frozenset({Need.TEST_HOSTS}), also=_ON_A_HOST - {Part.ETCD} | {Part.HOSTS},
                                 ends_leases=True, victims=frozenset(Victim)),
}
FAULTS: Mapping[str, Entry] = {**_PARTS_LOST, **_OTHERS, **_OF_HOSTS}


def met(cfg: Config, *, hosts: bool = False, own: bool = True) -> frozenset[Need]:
    """The needs that are met where this process strikes a job with these settings on this machine. ``hosts``: whether
    its cluster is on test hosts. ``own``: whether its cluster is made for the run."""
    return frozenset({Need.OUTSIDE, Need.TEST_HOSTS if hosts else Need.ONE_HOST,
                      *({Need.OWN_CLUSTER} if own else ()),
                      *({Need.PTRACE} if ptrace.allowed() else ()),
                      *({Need.CLOCK} if clock.possible() else ()), *({Need.DISK} if cfg.dcs.disk_bytes else ())})


def weights(has: Set[Need]) -> Mapping[str, float]:
    """The faults that are possible where these needs are met, as a catalogue of ``nemesis.schedule.drawn``."""
    return {name: entry.weight for name, entry in FAULTS.items() if entry.all_needs <= has}


WEIGHTS: Mapping[str, float] = {name: entry.weight for name, entry in _PARTS_LOST.items()}
"""The faults in which a whole part is lost or away: a catalogue of ``nemesis.schedule.drawn``."""


def plan_of(schedule: Schedule, guard: Callable[[str, Fault], Fault] = lambda name, fault: fault) -> FaultPlan:
    """The plan of the injector that plays a schedule. ``guard``: makes of a fault, by its name, the one that is
    injected."""
    def trigger(step: int, second: float) -> Trigger:
        return Elapsed(second) if schedule.by_time else step

    def plan(context: FaultContext, _steps: int) -> list[tuple[Trigger, Sequence[Fault]]]:
        return [(trigger(strike.step, strike.second),
                 [guard(name, FAULTS[name].make(context)) for name in strike.faults]) for strike in schedule.strikes]
    return plan
