"""Faults of a run on one host, by the names that they have in schedules and in the run's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from chaos_tests.nemesis.schedule import Schedule
from elastic_rl.faults import states
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.etcd import CompactedPastWatcher, EtcdPulsed, ForeignRecords
from elastic_rl.faults.injector import FaultPlan
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
from elastic_rl.faults.processes import BusyCores, Struck, Way
from elastic_rl.faults.stale import RacingRequests, StaleLeader, ZombieDriver
from elastic_rl.faults.storage import ChunksDamaged, DiskRefusesWrites

_ETCD_AWAY_S = 15.0
"""Longer than every lease."""
_BEYOND_LEASE_S = 12.0
"""For which a process is stopped, or has its GIL held, that is to come back when others take it for dead."""
_DISK_S, _BUSY_S, _PULSES_S, _RECORDS_S, _SECOND_ACTOR_S, _DRIVER_STOPPED_S = 15.0, 15.0, 15.0, 10.0, 10.0, 40.0


class Kind(StrEnum):
    """A kind of part, for the blast radius of a run against a cluster that others use."""

    ENGINE = "engine"
    TRAINER = "trainer"
    ROLE = "role"
    DRIVER = "driver"
    RUN = "run"
    ROUTER = "router"
    RAY = "ray"
    COORDINATOR = "coordinator"
    DCS = "dcs"
    ETCD = "etcd"
    HOST_AGENT = "host-agent"
    HOST = "host"
    API = "api"


class Need(StrEnum):
    """What a job, or who plays the faults, must have for a fault."""

    OUTSIDE = "outside"
    """The injector runs outside of the process of the run, which the fault ends."""
    PTRACE = "ptrace"
    """Linux on x86-64, and the permission to debug."""
    DISK = "disk"
    """The DCS nodes store chunks on disk (``dcs.disk_bytes``)."""


@dataclass(frozen=True)
class Entry:
    """A fault of the catalogue."""

    make: Callable[[FaultContext], Fault]
    strikes: Kind
    what: str
    """What it does, in one line."""
    weight: float = 1.0
    """How often a seed draws it, beside others."""
    undoable: bool = False
    """Whether something stays stopped, limited or damaged if the injector ends in the middle of it, until
    ``undo_all``; else the product itself, or the kernel, brings everything back."""
    needs: frozenset[Need] = frozenset()


def _struck(part: str, way: Way, strikes: Kind, what: str, *, weight: float = 0.5, state: states.State | None = None,
            needs: Set[Need] = frozenset()) -> Entry:
    seconds = 0.0 if way.ends else _BEYOND_LEASE_S
    also = {Need.PTRACE} if way in (Way.EXITED, Way.GIL_HELD) else set()
    return Entry(lambda c: Struck(c, part, way, state=state, seconds=seconds), strikes, what, weight,
                 undoable=way is Way.PAUSED or state is not None, needs=frozenset({*needs, *also}))


_ETCD_SLOW, _ANSWERS_LOST = "etcd_slow", "etcd_answers_lost"
ENTRIES: Mapping[str, Entry] = {
    # -- whole parts are killed
    "engine_killed": Entry(EngineKilled, Kind.ENGINE, "kill -9 of an engine's server", 3.0),
    "all_engines_killed": Entry(AllEnginesKilled, Kind.ENGINE, "kill -9 of every engine's server at once"),
    "trainer_rank_killed": Entry(TrainerRankKilled, Kind.TRAINER, "kill -9 of the last rank", 3.0),
    "trainer_rank_stopped": Entry(TrainerRankStopped, Kind.TRAINER, "SIGSTOP of the last rank, for good",
                                  undoable=True),
    "trainer_stopped": Entry(TrainerStopped, Kind.TRAINER, "SIGSTOP of all ranks and their agent, for good",
                             undoable=True),
    "actor_killed": Entry(ActorKilled, Kind.ROLE, "kill -9 of the actor while the trainer makes a step", 2.0),
    "second_actor": Entry(lambda c: SecondActor(c, _SECOND_ACTOR_S), Kind.ROLE,
                          "another actor takes the job over beside the one that runs, and is gone after a while"),
    "rollout_killed": Entry(lambda c: RoleKilled(c, "rollout"), Kind.ROLE, "kill -9 of the replica of rollout"),
    "advantages_killed": Entry(lambda c: RoleKilled(c, "advantages"), Kind.ROLE,
                               "kill -9 of the replica of advantages"),
    "driver_killed": Entry(lambda c: RoleKilled(c, "driver"), Kind.DRIVER, "kill -9 of the driver", 2.0),
    "router_killed": Entry(RouterKilled, Kind.ROUTER, "kill -9 of the router", 2.0),
    "coordinator_killed": Entry(CoordinatorKilled, Kind.COORDINATOR, "kill -9 of the leading coordinator", 2.0),
    "dcs_killed": Entry(DcsNodeKilled, Kind.DCS, "kill -9 of the DCS node", 2.0),
    "etcd_killed": Entry(lambda c: ServiceKilled(c, "etcd-0"), Kind.ETCD, "kill -9 of etcd"),
    "etcd_stopped": Entry(lambda c: EtcdStopped(c, _ETCD_AWAY_S), Kind.ETCD,
                          f"SIGSTOP of etcd for {_ETCD_AWAY_S:g} s", undoable=True),
    # -- other processes, and other ways
    "scheduler_killed": _struck("scheduler", Way.KILLED, Kind.ENGINE, "kill -9 of a scheduler of SGLang"),
    "scheduler_exited": _struck("scheduler", Way.EXITED, Kind.ENGINE, "a scheduler of SGLang exits with code 0"),
    "scheduler_gil_held": _struck("scheduler", Way.GIL_HELD, Kind.ENGINE, "the GIL of a scheduler is held"),
    "engine_terminated": _struck("engine", Way.TERMINATED, Kind.ENGINE, "SIGTERM of an engine's server"),
    "engine_paused": _struck("engine", Way.PAUSED, Kind.ENGINE, "SIGSTOP of an engine's server, and SIGCONT"),
    "engine_runner_killed": _struck("engine_runner", Way.KILLED, Kind.ENGINE, "kill -9 of what runs an engine"),
    "engine_runner_paused": _struck("engine_runner", Way.PAUSED, Kind.ENGINE,
                                    "zombie engine: what runs it is stopped, taken for dead, and comes back"),
    "trainer_rank_exited": _struck("trainer_rank", Way.EXITED, Kind.TRAINER, "a rank exits with code 0"),
    "trainer_rank_terminated": _struck("trainer_rank", Way.TERMINATED, Kind.TRAINER, "SIGTERM of a rank"),
    "trainer_rank_gil_held": _struck("trainer_rank", Way.GIL_HELD, Kind.TRAINER, "the GIL of a rank is held"),
    "trainer_agent_killed": _struck("trainer_agent", Way.KILLED, Kind.TRAINER, "kill -9 of the trainer's agent"),
    "actor_exited": _struck("actor", Way.EXITED, Kind.ROLE, "the actor exits with code 0"),
    "rollout_paused": _struck("rollout", Way.PAUSED, Kind.ROLE, "SIGSTOP of the replica of rollout, and SIGCONT"),
    "driver_exited": _struck("driver", Way.EXITED, Kind.DRIVER, "the driver exits with code 0 in the middle of a job"),
    "driver_terminated": _struck("driver", Way.TERMINATED, Kind.DRIVER, "SIGTERM of the driver"),
    "run_killed": _struck("run", Way.KILLED, Kind.RUN, "kill -9 of the process of the run", needs={Need.OUTSIDE}),
    "router_exited": _struck("router", Way.EXITED, Kind.ROUTER, "the router exits with code 0"),
    "router_paused": _struck("router", Way.PAUSED, Kind.ROUTER, "SIGSTOP of the router, and SIGCONT"),
    "gcs_killed": _struck("gcs", Way.KILLED, Kind.RAY, "kill -9 of the GCS of Ray's head"),
    "raylet_killed": _struck("raylet", Way.KILLED, Kind.RAY, "kill -9 of the raylet of Ray's worker"),
    "coordinator_terminated": _struck("coordinator", Way.TERMINATED, Kind.COORDINATOR,
                                      "SIGTERM of the leading coordinator"),
    "coordinator_exited": _struck("coordinator", Way.EXITED, Kind.COORDINATOR,
                                  "the leading coordinator exits with code 0"),
    "coordinator_follower_killed": _struck("coordinator_follower", Way.KILLED, Kind.COORDINATOR,
                                           "kill -9 of a coordinator that does not lead"),
    "dcs_exited": _struck("dcs", Way.EXITED, Kind.DCS, "the DCS node exits with code 0"),
    "dcs_terminated": _struck("dcs", Way.TERMINATED, Kind.DCS, "SIGTERM of the DCS node"),
    "dcs_paused": _struck("dcs", Way.PAUSED, Kind.DCS, "SIGSTOP of the DCS node, and SIGCONT"),
    "host_agent_killed": _struck("host_agent", Way.KILLED, Kind.HOST_AGENT, "kill -9 of the active host agent"),
    "etcd_terminated": _struck("etcd", Way.TERMINATED, Kind.ETCD, "SIGTERM of etcd"),
    "busy_cores": Entry(lambda c: BusyCores(c, _BUSY_S), Kind.HOST, "other processes use all cores for a while", 0.5),
    # -- in a state
    "engine_killed_generating": _struck("engine", Way.KILLED, Kind.ENGINE, "kill -9 of an engine that generates",
                                        state=states.GENERATING),
    "engine_killed_applying": _struck("engine", Way.KILLED, Kind.ENGINE,
                                      "kill -9 of an engine that has begun to apply a version", state=states.APPLYING),
    "engine_killed_draining": _struck("engine", Way.KILLED, Kind.ENGINE, "kill -9 of an engine that drains",
                                      state=states.DRAINING),
    "trainer_rank_killed_publishing": _struck("trainer_rank", Way.KILLED, Kind.TRAINER,
                                              "kill -9 of a rank before its version is committed",
                                              state=states.PUBLISHING),
    "trainer_rank_paused_publishing": _struck("trainer_rank", Way.PAUSED, Kind.TRAINER,
                                              "zombie publisher: a rank is stopped before its version is committed, "
                                              "and comes back", state=states.PUBLISHING),
    "dcs_killed_publishing": _struck("dcs", Way.KILLED, Kind.DCS, "kill -9 of the DCS node while a version is written",
                                     state=states.PUBLISHING),
    "driver_killed_taking_over": _struck("driver", Way.KILLED, Kind.DRIVER,
                                         "kill -9 of the driver, and of the next one while it takes over",
                                         state=states.DRIVER_TAKING_OVER),
    "coordinator_killed_taking_over": _struck("coordinator", Way.KILLED, Kind.COORDINATOR,
                                              "kill -9 of the leader, and of the next one before it has announced "
                                              "itself", state=states.LEADER_TAKING_OVER),
    # -- storage and etcd
    "dcs_disk_refuses_writes": Entry(lambda c: DiskRefusesWrites(c, _DISK_S), Kind.DCS,
                                     f"no file of the DCS node may grow for {_DISK_S:g} s", 0.5, undoable=True,
                                     needs=frozenset({Need.DISK})),
    "chunk_bits_flipped": Entry(lambda c: ChunksDamaged(c, torn=False), Kind.DCS,
                                "a bit of each chunk on disk flips while the node is down; an engine reads them", 0.5,
                                needs=frozenset({Need.DISK})),
    "chunks_torn": Entry(lambda c: ChunksDamaged(c, torn=True), Kind.DCS,
                         "each chunk on disk loses its end while the node is down; an engine reads them", 0.5,
                         needs=frozenset({Need.DISK})),
    _ETCD_SLOW: Entry(lambda c: EtcdPulsed(c, _ETCD_SLOW, seconds=_PULSES_S, stopped_s=0.15, running_s=0.1,
                                           loses_answers=False), Kind.ETCD,
                      "etcd is stopped for moments, as by a disk whose fsync is slow", 0.5, undoable=True),
    _ANSWERS_LOST: Entry(lambda c: EtcdPulsed(c, _ANSWERS_LOST, seconds=_PULSES_S, stopped_s=0.8, running_s=0.4,
                                              loses_answers=True), Kind.ETCD,
                         "etcd is stopped for longer than a call waits: writes are made whose answers are lost", 0.5,
                         undoable=True),
    "etcd_compacted_past_watcher": Entry(CompactedPastWatcher, Kind.ETCD,
                                         "etcd is restarted and compacted past what the leader has watched", 0.5,
                                         undoable=True),
    "foreign_records": Entry(lambda c: ForeignRecords(c, _RECORDS_S), Kind.ETCD,
                             "etcd has records of a later release, and one that is none", 0.5),
    # -- logical
    "stale_leader": Entry(StaleLeader, Kind.COORDINATOR, "the leader is stopped until another leads, and comes back",
                          undoable=True),
    "zombie_driver": Entry(lambda c: ZombieDriver(c, _DRIVER_STOPPED_S), Kind.DRIVER,
                           "the driver is stopped until the next one has taken over, and comes back", undoable=True),
    "racing_requests": Entry(RacingRequests, Kind.API, "clients of the API change one pool at the same time"),
}


def weights(has: Set[Need]) -> Mapping[str, float]:
    """The faults that are possible where these needs are met, as a catalogue of ``nemesis.schedule.drawn``."""
    return {name: entry.weight for name, entry in ENTRIES.items() if entry.needs <= has}


WEIGHTS: Mapping[str, float] = weights(frozenset({Need.PTRACE, Need.DISK}))
"""What ``train --faults`` can play: the injector is a thread of the process of the run."""


def plan_of(schedule: Schedule) -> FaultPlan:
    """The plan of the injector that plays a schedule."""
    def plan(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
        return [(strike.step, [ENTRIES[name].make(context) for name in strike.faults]) for strike in schedule.strikes]
    return plan
