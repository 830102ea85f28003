"""Records of the cluster: its hosts, the singletons that they hold, its jobs."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ConfigDict

from elastic_rl.config import JOB_NAME
from elastic_rl.etcd.record import OpenEnum, Record

_DRIVER = "driver/"


def driver_of(job: str) -> str:
    """Name of the singleton that carries out a job: the process of its run, with the driver that this keeps running."""
    return _DRIVER + job


def job_of_driver(singleton: str) -> str:
    """The job that a singleton carries out; empty for another singleton, and for what no job can be called."""
    job = singleton.removeprefix(_DRIVER)
    return job if singleton.startswith(_DRIVER) and re.fullmatch(JOB_NAME, job) else ""


class ClusterSpec(Record):
    """What its operator wants of the cluster; written by ``up``."""

    parallel_jobs: int = 1
    """So many jobs may run at once; the others wait."""
    max_preempted_share: float = 0.5
    """Share of the hosts that notices of preemption drain at the same time, at most, but one host always."""


# -- hosts -------------------------------------------------------------------------------------------------------------
class Host(Record):
    """The registration of a host. Its agent writes it in one transaction under two keys: under its lease, which says
    that the host is there, and without one.

    The mod revision of both keys names the registration: it is the fencing token of what the agent writes about its
    host, so that a late write of an agent's process that was replaced is refused. The key without a lease makes
    registrations that came and went visible: a leader's late write that says LOST of a host that was absent twice is
    refused, and does not take the second absence for the first.
    """

    id: str
    incarnation: str
    """Random; differs after each boot of the host, so that no process of an earlier one can be alive. An agent that is
    restarted keeps it, because what it started before runs on."""
    address: str = ""
    """Address under which other hosts reach this one."""
    machine: str = ""
    """Names the machine's boot and the pid namespace (``process_state.machine_id``)."""
    cpus: int = 0
    gpus: int = 0
    memory_bytes: int = 0
    shm_bytes: int = 0
    labels: dict[str, str] = {}
    release: str = ""
    """Release of elastic-rl that its agent runs."""
    log_port: int = 0
    """Port at ``address`` where its agent serves the logs of the host; 0 where it serves none."""
    run_dir: str = ""
    """Its folder with the cluster's and the jobs' folders, for people: where the logs of a host are that is away."""


class RunState(OpenEnum):
    """State of a service on a host."""

    RUNNING = "running"
    ENDED = "ended"
    """It is restarted when the restart policy allows it."""
    COMPLETED = "completed"
    """It has done its work and is not restarted."""


class ServiceStatus(Record):
    """A service as the agent of its host reports it."""

    state: RunState
    pid: int = 0
    """Its process; 0 while it does not run."""
    generation: int = 0
    """Generation of the assignment that it was started for; 0 for what every host runs."""
    restarts: int = 0
    """Restarts in place of this generation, without a stable run in between."""
    reason: str = ""
    """What it waits for; empty while it runs."""


class PreemptionNotice(Record):
    """The provider of a host has announced that it takes the machine back. The same notice gives an equal record."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    reason: str
    """What the provider says, such as ``aws: terminate``."""
    deadline_at: float = 0.0
    """When the machine ends, unix seconds; 0 where the provider does not say."""
    warning_s: float = 30.0
    """Where it does not: seconds that the machine has from the notice on."""

    def left_s(self, now: float) -> float:
        """Seconds that the machine has, for its own agent that learns of the notice now. ``now``: unix seconds, by the
        clock of that machine."""
        return max(0.0, self.deadline_at - now) if self.deadline_at else self.warning_s


class HostStatus(Record):
    """What the agent reports about its host, under the lease and the fencing token of its registration."""

    registration: int
    """Mod revision of the registration under which it was written."""
    observed_revision: int = 0
    """Revision of etcd at which the assignments were read that the services below follow."""
    services: dict[str, ServiceStatus] = {}
    """All services that run, or are to be running, by name. A singleton's name is that of its assignment."""
    not_ready: str = ""
    """Why the host can take no singleton now, such as a process of an older generation that still ends; else empty."""
    preemption: PreemptionNotice | None = None
    """The notice of preemption that stands; None while there is none."""
    preemption_left_s: float | None = None
    """Seconds that the machine had left when this was written: a duration, since no two clocks agree. It is written
    again once half of it is over. None: there is no notice, or the agent is of a release that does not say."""
    preemption_unknown: bool = False
    """Whether this agent has not been told yet: what an earlier one has reported stands."""
    preemption_problem: str = ""
    """Why the agent cannot tell whether there is a notice, so that the last answer stands; empty while it can, and
    where no source of notices was given."""


class Drain(Record):
    """A request to empty a host."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    within_s: float
    """Seconds within which each singleton may choose when it moves; after that it is moved."""
    incarnation: str = ""
    """The incarnation of the host that is to be emptied; void for another one. Empty: whichever registers."""


PREEMPTION = "a notice of preemption"
"""``HostSpec.by`` of a drain that the leader asked for."""


class HostSpec(Record):
    """What operators want of a host, and the drain with which the leader follows a notice of preemption."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    cordoned: bool = False
    """The host is given nothing more and keeps what it has."""
    drain: Drain | None = None
    """The host is to be emptied; null: it is not."""
    reason: str = ""
    """Why, in the words of who asked last."""
    by: str = ""
    """Name of the token of who asked last."""
    at: float = 0.0
    """When that was, unix seconds; 0: nobody has asked for anything."""

    def described(self, what: str) -> str:
        """Text that says ``what`` was requested, by whom and why."""
        return what + (f" by {self.by}" if self.by else "") + (f": {self.reason}" if self.reason else "")


class HostPhase(OpenEnum):
    JOINING = "joining"
    """Registered; its agent has not reported yet that it can take work. What it holds it keeps."""
    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    """What it holds moves elsewhere."""
    LEFT = "left"
    """Drained: it holds nothing and may be switched off."""
    SUSPECTED = "suspected"
    """Its lease has ended. Nothing follows from that yet: it may be slow."""
    LOST = "lost"
    """What it holds is assigned elsewhere where another host is fit."""


class HostState(Record):
    """What the leader concluded about a host."""

    phase: HostPhase
    incarnation: str
    since_s: float
    """When the phase began, in seconds of the leader clock."""
    drain_deadline_s: float = 0.0
    """When a drain stops to wait, in seconds of the leader clock; 0 while none is under way."""
    drain_at: float = 0.0
    """``HostSpec.at`` of the request that this deadline is of: another request gets another deadline. 0 while none is
    under way."""
    drain_overdue: bool = False
    """Whether that deadline is over: what is still there is to end."""
    preemption: PreemptionNotice | None = None
    """The notice of preemption of this incarnation that the leader has followed, as long as the agent reports it: an
    operator who takes the drain back is not overruled by the same notice."""
    preemption_deadline_s: float = 0.0
    """The latest deadline of any drain while that notice stands, in seconds of the leader clock; 0 while none does."""
    preemption_pending: bool = False
    """Whether a notice is not followed yet, since notices drain as many hosts already as they may."""
    reason: str = ""


# -- assignments -------------------------------------------------------------------------------------------------------
class FailedHost(Record):
    """A host that a singleton was moved away from because it kept ending there."""

    host: str
    at_s: float
    """Seconds of the leader clock."""


class Assignment(Record):
    """Which host holds a singleton, such as the driver of a job. There is one key a singleton, so two hosts cannot be
    named at once.

    The version of the key is the assignment's *generation*. The holder's writes carry the condition that the key still
    has it, so each put, whatever it changes, fences the holder off. Hence a record is only written to move or release a
    singleton, and what changes meanwhile (restarts, pid) is in the host's status.

    The key must not be deleted while a process of any generation may live. Deleting it resets the version: the numbers
    are given out a second time, and a holder that was cut off since its generation 3 would pass the guard of the new
    generation 3, so that two processes train one job. A singleton that nobody is to hold has a record without a host.
    """

    host: str = ""
    """Empty: released, no host is to run it."""
    incarnation: str = ""
    """Incarnation of that host. The assignment is void after the host's next boot."""
    arguments: dict[str, Any] = {}
    """What the singleton is started with."""
    reason: str = ""
    """Why this generation was begun."""
    failed: list[FailedHost] = []
    """Recent moves because of failures, the oldest first: they bound how often it moves."""


# -- jobs --------------------------------------------------------------------------------------------------------------
class JobRecord(Record):
    """A job of the cluster, and what its operator wants of it."""

    id: str = ""
    """A random id: an earlier job of the same name, whose files a host may still have, had another one."""
    settings: str = ""
    """The settings that the coordinators follow, sealed (``job_settings``): those of the last submission that was not
    refused."""
    priority: int = 0
    """Among waiting jobs the highest is started first."""
    submission: int = 0
    """Number of the newest submission; 0 before the first. A job that has ended and is resumed is submitted once more.
    """
    stopped: bool = False
    """An operator asked to stop this submission."""
    stop_s: float = 60.0
    """Seconds that a run of the job which is stopped may take to commit what it has trained
    (``trainer.stop_timeout_s``)."""
    submitted_at: float = 0.0
    """Unix seconds, for people."""
    host: str = ""
    """The host that it was submitted on, which has its files: others take its driver only while that one is not fit."""


def is_stopped(record: JobRecord | None, submission: int) -> bool:
    """Whether the run of a submission is to end: its operator has stopped it, or submitted the job once more, or taken
    it off the cluster. ``record``: of its job; None where there is none. ``submission`` 0: a run that was not
    submitted, such as a bench's, for which only the first counts."""
    if record is None:
        return bool(submission)
    return record.stopped or submission not in (0, record.submission)


class JobPhase(OpenEnum):
    QUEUED = "queued"
    STARTING = "starting"
    """Its driver is assigned, or waits for a host."""
    RUNNING = "running"
    """Its driver has run. It stays so while parts of the job are away."""
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def live(self) -> bool:
        """Whether the job has its place among those that run at once."""
        return self in (JobPhase.STARTING, JobPhase.RUNNING)

    @property
    def ended(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.STOPPED)


class JobState(Record):
    """What the leader made of a job's newest submission that it has seen."""

    phase: JobPhase
    submission: int
    order: int
    """Place in the order of submissions: the revision at which the submission was written."""
    reason: str = ""
    """What it waits for, or why it ended."""
    stop_deadline_s: float = 0.0
    """When a run that was stopped is no longer given time to end in order, in seconds of the leader clock; 0 for one
    that was not."""


class RayHead(Record):
    """The head of a job's Ray, by the job's driver. Every other host of the cluster runs a worker of it."""

    host: str
    """The host that has it, with the driver and what else of the run is on one host."""
    address: str
    """``host:port`` of its GCS."""
    epoch: int
    """Epoch of the run that the Ray is of."""
    left: dict[str, float] = {}
    """Hosts that are to be emptied and have nothing of the run any more, so that they may end their workers; each with
    the drain that this was found in (``HostState.drain_at``)."""


class RunStatus(Record):
    """How a submission goes, by its run: written under the generation of the driver's assignment."""

    submission: int
    phase: JobPhase
    """STARTING while what was submitted is checked, RUNNING from then on, then how it has ended."""
    at: float = 0.0
    """When the phase began, unix seconds."""
    submitted_at: float = 0.0
    """When the job was submitted, as its record has it, unix seconds."""
    generation: int = 0
    """Generation of the driver's assignment under which this was written; 0 where no process of the run has."""
    stop_s: float | None = None
    """``JobRecord.stop_s`` of this submission, which the record has no more once it is submitted again with another
    one. None before the run has begun."""
    error: str = ""
    """Kind of the error that ended the run; empty where it has ended otherwise, as in a crash loop."""
    message: str = ""
    hint: str = ""
    step: int = 0
    """Last step of a job that has finished; 0 where that is not known."""
