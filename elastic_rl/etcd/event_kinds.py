"""Every kind of event, and what each means to the alerts, the fault statistics and the failure policy.

A kind is ``component.what``. It is declared here once, and whoever asks what a kind means asks here: ``events.build``
takes declared kinds only. An event that is read may be of a newer release and have a kind that this one does not know:
then only its severity says something.

``python -m elastic_rl.etcd.event_kinds`` prints the table of docs/operating/events.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from elastic_rl.config.groups import TRAINER_GROUPS

ALREADY_REPORTED = "already_reported"
"""Field of ``Event.data``, true for an event that opens no alert: the leader has found and reported before what it
says."""


@dataclass(frozen=True)
class EventKind:
    name: str
    """``component.what``."""
    what: str
    """What has happened, for the table in the docs."""
    begins: bool = False
    """A fault of its part begins, or gives another sign. The fault is that of the event's subject; of a trainer group
    it is that of the group, whose ranks fail together."""
    ends: bool = False
    """The fault that ``begins`` opened is over: the part works again."""
    counted: str = ""
    """Part of which it counts as one restart (``job``: the whole compute plane); empty for none."""
    alert: str = ""
    """Kind of the alert that it opens, with the event's subject. Empty: none, unless its severity is error."""
    one_time: bool = False
    """The alert has no end: it is one notification."""
    by_state: bool = False
    """The alert about it is a condition on the state of the job, which ends with the state. The event opens none."""
    ends_alert: str = ""
    """Kind of the alert, of the event's subject, that it declares over."""
    also_ends: tuple[str, ...] = ()
    """Kinds of alerts that may stand for the one of ``ends_alert``, as signs of the same fault, and are over with it
    (``coordinator.alerts.rules``)."""

    @property
    def component(self) -> str:
        """What it is about: engine, a trainer group, coordinator, dcs, driver, router, the name of a role, run …"""
        return self.name.partition(".")[0]

    def fault(self, subject: str) -> str:
        """Name of the fault that an event of this kind begins or ends."""
        return f"{self.component}/{'' if self.component in TRAINER_GROUPS else subject}"


@dataclass(frozen=True)
class TrainerGroupEvents:
    """The kinds of one trainer group. Its members have those of ``MemberEvents`` too."""

    started: EventKind
    restarted: EventKind
    restarting: EventKind
    failed: EventKind
    agent_ended: EventKind
    reformed: EventKind
    restarts_exhausted: EventKind
    recovered: EventKind
    rewound: EventKind
    refused: EventKind
    profiled: EventKind
    stacks: EventKind
    went_back: EventKind
    state_lost: EventKind

    @classmethod
    def of(cls, group: str) -> TrainerGroupEvents:
        dead = f"{group}.dead"
        return cls(
            EventKind(f"{group}.started", "the ranks of the group work, for the first time in this epoch"),
            EventKind(f"{group}.restarted", "torch elastic has formed the group again", counted=group),
            EventKind(f"{group}.restarting", "the group was ended on purpose: its restart was requested, or it is "
                      "on other hosts now"),
            EventKind(f"{group}.failed", "the actor's command was not carried out: a rank, or the group, is gone",
                      begins=True, alert=dead),
            EventKind(f"{group}.agent_ended", "the group's agent ended, and its driver starts another one", begins=True,
                      counted=group, alert=dead),
            EventKind(f"{group}.reformed", "a host of the group was lost or drained, or there is room for more "
                      "replicas of the model: its ranks are on other hosts now, or more or fewer"),
            EventKind(f"{group}.restarts_exhausted", "torch elastic has used up `trainer.max_restarts` and ended; the "
                      "text has the last failure. The driver starts the group again",
                      alert=f"{group}.restarts_exhausted"),
            EventKind(f"{group}.recovered", "the group works again", ends=True, ends_alert=dead,
                      also_ends=(f"{group}.hung",)),
            EventKind(f"{group}.rewound", "the algorithm's loss failed after an update of a step: the group is back at "
                      "its last committed state, and makes no step before `elastic-rl restart trainer` (with corrected "
                      "code) or `restart roles/actor` (to try again)", alert=f"{group}.rewound"),
            EventKind(f"{group}.refused", "a rank had too little memory in the middle of a pass with other ranks: "
                      "the group forms again at its last committed state, and the step counts as refused"),
            EventKind(f"{group}.profiled", "a rank has written the profile of a step to a file, which the text names"),
            EventKind(f"{group}.stacks", "the group hung, and the stacks of its processes on a host were written to a "
                      "file, which the text names, before they were ended"),
            EventKind(f"{group}.went_back", "of a job with a critic: the group was ahead of the other one, and went "
                      "back to a state that both have"),
            EventKind(f"{group}.state_lost", "the newest state that the group committed is not available, and it "
                      "resumes from an older one", alert=f"{group}.state_lost"))


@dataclass(frozen=True)
class MemberEvents:
    """The kinds by which the leader reports what becomes of the members of one role."""

    suspected: EventKind
    alive: EventKind
    dead: EventKind
    late: EventKind
    hung: EventKind
    resumed: EventKind
    returned: EventKind
    recovered: EventKind

    @classmethod
    def of(cls, role: str) -> MemberEvents:
        reports_itself = role in TRAINER_GROUPS or role == ENGINE
        counted = "" if reports_itself else role
        return cls(
            EventKind(f"{role}.suspected", "it sends no heartbeats and may be slow, or dead"),
            EventKind(f"{role}.alive", "a suspected member sends heartbeats again: nothing has happened"),
            KINDS[f"{role}.dead"] if role == ENGINE else EventKind(f"{role}.dead", "it is dead", begins=True,
                                                                   by_state=True),
            EventKind(f"{role}.late", "it sends heartbeats, and its work takes much longer than expected: the text has "
                      "the expected end. Nothing is done about it"),
            EventKind(f"{role}.hung", "it sends heartbeats but makes no progress", begins=True, by_state=True),
            EventKind(f"{role}.resumed", "it was hung, and makes progress again", ends=True),
            # One rank that is back is no group that works: its own events say when it does.
            EventKind(f"{role}.returned", "a dead member is back", ends=role not in TRAINER_GROUPS, counted=counted),
            TRAINER_GROUP_EVENTS[role].recovered if role in TRAINER_GROUPS else
            EventKind(f"{role}.recovered", "another member does the work of a dead one", ends=True, counted=counted))


ENGINE = "engine"
"""Role of the engines, and part of their events."""
_WHATS = frozenset(field.name for field in fields(MemberEvents))
TRAINER_GROUP_EVENTS = {group: TrainerGroupEvents.of(group) for group in TRAINER_GROUPS}

ENGINE_STARTING = EventKind("engine.starting", "its runner starts")
ENGINE_CANCELLED = EventKind("engine.cancelled", "it is no longer wanted, and had no room yet")
ENGINE_REGISTERING = EventKind("engine.registering", "an operator registers a server as an external engine")
ENGINE_REFUSED = EventKind("engine.refused", "an external engine never served: its server is not fit for the pool")
ENGINE_READY = EventKind("engine.ready", "it serves requests for the first time, and ends the oldest fault of an "
                         "engine that it can replace", ends=True)
ENGINE_DRAINING = EventKind("engine.draining", "it leaves the pool, once its requests are done or go on elsewhere")
ENGINE_DRAIN_TIMEOUT = EventKind("engine.drain_timeout", "it was stopped with requests in flight")
ENGINE_STOPPED = EventKind("engine.stopped", "it has left the pool")
ENGINE_CANNOT_FETCH = EventKind("engine.cannot_fetch", "it cannot fetch or load a version", alert="engine.cannot_fetch")
ENGINE_FETCH_RECOVERED = EventKind("engine.fetch_recovered", "it has fetched a version again",
                                   ends_alert="engine.cannot_fetch", also_ends=("engine.lagging",))
ENGINE_BEHIND = EventKind("engine.behind", "it lacks a version that most others serve, and gets no requests until it "
                          "has caught up")
ENGINE_FOLLOWS = EventKind("engine.follows", "it has got a version in time again, after it was behind")
ENGINE_STACKS = EventKind("engine.stacks", "it hung or stayed behind, and the stacks of its processes were written "
                          "to a file, which the text names, before they were ended")
ENGINE_DEAD = EventKind("engine.dead", "it is dead", begins=True, alert="engine.dead")
ENGINE_QUARANTINED = EventKind("engine.quarantined", "its weights are torn, or differ from those of the other engines",
                               begins=True, alert="engine.dead")
ENGINE_REPLACED = EventKind("engine.replaced", "it has ended, and the driver starts another one", begins=True,
                            counted=ENGINE, alert="engine.dead")
ENGINE_REMOVED = EventKind("engine.removed", "an external engine has ended, and is not replaced")

POOL_SCALED = EventKind("pool.scaled", "the desired number of engines was changed")
POOL_AUTOSCALING_CHANGED = EventKind("pool.autoscaling_changed", "autoscaling of the pool was set or disabled")
POOL_SCALING_RECOMMENDED = EventKind("pool.scaling_recommended", "autoscaling, as a dry run, would have changed the "
                                     "desired number of engines")
POOL_REMOVED = EventKind("pool.removed", "the pool is not in the settings any more")
ROUTER_RESTARTED = EventKind("router.restarted", "the driver restarts the router of a pool", counted="router",
                             alert="router.restarted", one_time=True)
ROUTER_FOREIGN_WORKER = EventKind("router.foreign_worker", "the router listed a worker that is no engine of the job",
                                  alert="router.foreign_worker")

RESTART_REQUESTED = EventKind("restart.requested", "a restart of a part was asked for", alert="restart.requested",
                              one_time=True)
OPERATION_SUCCEEDED = EventKind("operation.succeeded", "an operation has ended well")
OPERATION_FAILED = EventKind("operation.failed", "an operation has failed", alert="operation.failed")
OPERATION_CANCELLED = EventKind("operation.cancelled", "an operation was withdrawn; only one of the job ends the alert",
                                ends_alert="run.global_restart", also_ends=("driver.dead", "driver.hung"))
ALERTS_SILENCED = EventKind("alerts.silenced", "a silence begins")
ALERTS_UNSILENCED = EventKind("alerts.unsilenced", "a silence was ended by a person")
ALERTS_UNDELIVERED = EventKind("alerts.undelivered", "an alert was dropped before every receiver took it")

LEADER_ELECTED = EventKind("leader.elected", "a coordinator replica leads")
LEADER_ABSENT = EventKind("leader.absent", "there was no leader for longer than `alerts.leader_gap_s`; the next one "
                          "says so", alert="leader.absent", one_time=True)
ETCD_RESTARTED = EventKind("etcd.restarted", "the host agent has started the cluster's etcd again", counted="etcd",
                           alert="etcd.restarted", one_time=True)
DCS_RESTARTED = EventKind("dcs.restarted", "the host agent has started a node again", counted="dcs",
                          alert="dcs.restarted", one_time=True)
COORDINATOR_RESTARTED = EventKind("coordinator.restarted", "the host agent has started a replica again",
                                  counted="coordinator", alert="coordinator.restarted", one_time=True)
HOST_PREEMPTION = EventKind("host.preemption", "the provider of a host has announced that it takes the machine back, "
                            "and the leader has it drained", alert="host.preemption", one_time=True)
HOST_PREEMPTION_PENDING = EventKind("host.preemption_pending", "notices of preemption drain as many hosts already as "
                                    "they may (`coordinator.max_preempted_share`), and further ones wait",
                                    alert="host.preemption_pending", one_time=True)
RAY_WORKER_RESTARTED = EventKind("compute.restarted", "the agent of a host has started its worker of the job's Ray "
                                 "again", alert="compute.restarted", one_time=True)
DCS_CATALOG_MISMATCH = EventKind("dcs.catalog_mismatch", "etcd has no catalog, another one or an older one than the "
                                 "nodes", alert="dcs.catalog_mismatch")
DCS_DURABLE_FAILED = EventKind("dcs.durable_failed", "versions cannot be copied to the durable store",
                               alert="dcs.durable_failed")
DCS_DURABLE_RECOVERED = EventKind("dcs.durable_recovered", "versions are copied to the durable store again",
                                  ends_alert="dcs.durable_failed", also_ends=("durable.behind",))

COMPUTE_FAILING = EventKind("compute.failing", "the driver cannot keep a part running, and tries again", by_state=True)
COMPUTE_WORKING = EventKind("compute.working", "the driver keeps the part running again")
DRIVER_RESTARTED = EventKind("driver.restarted", "the driver ended before the job did, and the next one takes over "
                             "what still runs", alert="driver.dead")
DRIVER_STACKS = EventKind("driver.stacks", "the driver hung, and the stacks of its processes were written to a file, "
                          "which the text names, before it was ended")
RUN_STARTED = EventKind("run.started", "what was submitted has passed its checks, and the job begins")
RUN_RESUMED = EventKind("run.resumed", "what was submitted has passed its checks, and the job goes on from the step "
                        "that the text names; a warning where another number of steps changes the learning rate")
RUN_WARNED = EventKind("run.warned", "the checks of what was submitted warn of something, as `config check` does")
RUN_REFUSED = EventKind("run.refused", "the checks of what was submitted refuse it, as the text says: the job stays as "
                        "it was", alert="run.refused")
RUN_GLOBAL_RESTART = EventKind("run.global_restart", "the whole compute plane is rebuilt", counted="job",
                               alert="run.global_restart")
RUN_RESTARTED = EventKind("run.restarted", "the process of a run has ended, and the driver with it; the next one goes "
                          "on with the run", counted="job", alert="run.restarted", one_time=True)
RUN_CRASH_LOOP = EventKind("run.crash_loop", "several restarts made no progress, so the run is stopped; everything is "
                           "kept", alert="run.crash_loop")
RUN_STOPPED = EventKind("run.stopped", "its operator has stopped the run, which has committed what it had trained; "
                        "where it has not, the text says so")
RUN_FINISHED = EventKind("run.finished", "the run has made its last step")
RUN_EXPORTED = EventKind("run.exported", "a run that ended well has written the job's newest policy to the "
                            "folder that the text names")
RUN_NOT_EXPORTED = EventKind("run.not_exported", "a run that ended well cannot write the job's policy to its "
                                "folder, as the text says; the checkpoint service has it")

ACTOR_RESYNCED = EventKind("actor.resynced", "a command of the actor did not fit to the trainer's state, and the actor "
                           "goes on from that state")
GROUPS_LEASED_AGAIN = EventKind("groups.leased_again", "an actor took over: the prompt groups that the one before had "
                                "begun, and that are not consumed, are generated again")
REWARD_FAILED = EventKind("reward.failed", "prompt groups were dropped, since the reward failed for them alone; at "
                          "most one event a minute")
GENERATE_FAILED = EventKind("generate.failed", "prompt groups were dropped, since the function that generates "
                            "failed, or no engine answered, for them alone; at most one event a minute")
FILTER_FAILED = EventKind("filter.failed", "prompt groups were dropped, since a filter failed for them alone; at most "
                          "one event a minute")
TRAIN_FAILED = EventKind("train.failed", "prompt groups were dropped, or demonstrations left out of a supervised step, "
                         "since the trainer cannot compute with them: the gradient is not finite, a pass needs too "
                         "much memory, or the loss fails; at most one event a minute")
RESPONSES_TRUNCATED = EventKind("responses.truncated", "all responses of a step ended at their limit of length, none "
                                "with a stop token: mostly the model does not know its end token")
LOGPROB_MISMATCH = EventKind("logprob.mismatch", "log-probs of engine and trainer differ, or one of them gives no "
                             "number", alert="logprob.mismatch")
SAMPLES_UNPUBLISHED = EventKind("samples.unpublished", "samples of a policy version that was never published were "
                                "refused", alert="samples.unpublished")
QUEUE_REPLACED = EventKind("queue.replaced", "an actor of TransferQueue was gone or did not answer, or three calls in "
                           "a row took longer than `train.queue_call_timeout_s`: all are replaced, and what was queued "
                           "is generated again", alert="queue.replaced", one_time=True)
VERSION_DROPPED = EventKind("version.dropped", "a version could not be published, as when a DCS node has died; its "
                            "weights are published again")
VERSION_FAILING = EventKind("version.failing", "a version could not be published, and neither could any other one for "
                            "half a minute or longer", alert="publish.failed")
VERSION_REPUBLISHED = EventKind("version.republished", "engines lack a version, and no DCS node has all of its chunks "
                                "any more, so its weights are published again")
TRACKER_FAILED = EventKind("tracker.failed", "a tracker gets no more metrics")
BENCH_MEASURED = EventKind("bench.measured", "a benchmark has written it")

KINDS = {kind.name: kind for kind in [
    *(value for value in list(globals().values()) if isinstance(value, EventKind)),
    *(getattr(group, field.name) for group in TRAINER_GROUP_EVENTS.values() for field in fields(TrainerGroupEvents))]}
"""Every kind by name, without those of members, whose roles may be any."""


@lru_cache(maxsize=256)
def of_members(role: str) -> MemberEvents:
    """The kinds of a role's members, also of a role that only another release has."""
    return MemberEvents.of(role)


def find(name: str) -> EventKind | None:
    """The kind of an event that was read; None for one that this release does not know."""
    if name in KINDS:
        return KINDS[name]
    role, _, what = name.partition(".")
    return getattr(of_members(role), what) if role and what in _WHATS else None


def begins_fault(component: str) -> frozenset[EventKind]:
    """The kinds by which a fault of a component begins."""
    declared = (kind for kind in KINDS.values() if kind.component == component)
    of_its_members = (getattr(of_members(component), what) for what in _WHATS)
    return frozenset(kind for kind in (*declared, *of_its_members) if kind.begins)


def table() -> list[str]:
    """The rows of docs/operating/events.md."""
    groups, members = TrainerGroupEvents.of("<group>"), MemberEvents.of("<role>")
    group_names = {kind.name for kind in KINDS.values() if kind.component in TRAINER_GROUPS}
    kinds = [*(getattr(members, what.name) for what in fields(MemberEvents)),
             *(getattr(groups, what.name) for what in fields(TrainerGroupEvents)),
             *(kind for name, kind in KINDS.items() if name not in group_names)]
    return ["| kind | what has happened | fault | alert |", "|---|---|---|---|",
            *(f"| `{kind.name}` | {kind.what} | {_fault_cell(kind)} | {_alert_cell(kind)} |" for kind in kinds)]


def _fault_cell(kind: EventKind) -> str:
    restart = f"restart of {kind.counted}" if kind.counted else ""
    return ", ".join(filter(None, ("begins" if kind.begins else "ends" if kind.ends else "", restart))) or "–"


def _alert_cell(kind: EventKind) -> str:
    if kind.by_state:
        return f"`{kind.name}`, by the state of the job"
    if kind.ends_alert:
        return f"ends `{kind.ends_alert}`"
    return f"`{kind.alert}`" + (", one-time" if kind.one_time else "") if kind.alert else "–"


if __name__ == "__main__":
    print("\n".join(table()))
