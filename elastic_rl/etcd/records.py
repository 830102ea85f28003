"""The records stored under the keys: small pydantic models, as JSON. Unknown fields are ignored on reading, so that
replicas of two releases can run side by side during an upgrade."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Self

from elastic_rl.config.autoscale import AutoscaleFields
from elastic_rl.etcd.job_records import (  # noqa: F401 (of here)
    ENDED_PHASES,
    WORKING_PHASES,
    GenerationCap,
    GroupLease,
    JobStatus,
    OutputState,
    RunLogHead,
    SampleRecord,
    StepMetrics,
    ended,
    stopped_message,
)
from elastic_rl.etcd.record import OpenEnum, Record


class Leader(Record):
    """A candidate of the election; ``url`` is that of its admin API."""

    replica: str
    url: str
    pid: int


class JobHealth(StrEnum):
    """Whether a coordinator can decide about a job."""

    OK = "ok"
    FAILING = "failing"
    """Its reconcile passes over the job fail, or do not return."""
    NOT_OPEN = "not-open"
    """It has not taken up the job: its settings cannot be used."""


class JobProblem(Record):
    """What keeps a coordinator from deciding about a job."""

    replica: str
    health: JobHealth
    message: str


class Epoch(Record):
    """Fencing epoch of the run: a write of a lower epoch is refused."""

    number: int
    holder: str
    started_at: float


class JobSpec(Record):
    """What a job decided when it was first started; a start with other settings is refused."""

    settings: dict[str, Any]
    """The settings of ``config.fixed_settings``, by dotted key."""
    created_at: float = 0.0
    """Unix seconds."""
    from_job: str = ""
    """The job whose policy this one began with; empty for one that began with a model of its own."""
    from_version: int = 0
    """Number of that policy version."""


class StatedWork(Record):
    """The cost of what a process works on since its last progress, stated before it begins."""

    flops: float
    """Estimated operations."""
    s_per_flop: float = 0.0
    """Seconds that this process took for an operation lately; 0: it has made none yet."""


class Member(Record):
    """A process that does work, written by that process under its own lease. Where the agent of its host collects its
    heartbeats, they are newer there than here: ``heartbeats.merge`` puts both together."""

    role: str
    id: str
    pid: int
    host: str
    epoch: int = 0
    incarnation: str = ""
    """Random; differs after each start of the process."""
    url: str = ""
    step: int = 0
    phase: str = ""
    progress_at: float = 0.0
    """Unix seconds, by the member's clock, of the last progress that the working thread reported."""
    beat_at: float = 0.0
    """Unix seconds, by the same clock, of the last heartbeat, which another thread of the process sends."""
    beats: int = 0
    """Number of that heartbeat: of two, the one with the higher number is newer, also after the clock was set."""
    in_flight: int | None = None
    """Things that it works on for others, such as prompt groups, at that heartbeat; None: it does not count them."""
    work: StatedWork | None = None
    """What it has worked on since ``progress_at``; None: it does not say."""
    info: dict[str, Any] = {}
    machine: str = ""
    """Names the machine's boot and the pid namespace (``process_state.machine_id``); empty if unknown."""
    collector: str = ""
    """Host whose agent may have newer heartbeats of this process (``HostHeartbeats``); empty: nobody has."""


class Heartbeat(Record):
    """A heartbeat of a member: what changes in its record all the time."""

    role: str
    id: str
    incarnation: str
    step: int = 0
    phase: str = ""
    progress_at: float = 0.0
    beat_at: float = 0.0
    in_flight: int | None = None
    work: StatedWork | None = None
    beats: int = 0
    """Number of the heartbeat. All fields up to this one are as in ``Member``."""
    revision: int = 0
    """A revision of etcd at which the process still ran, as its agent saw; 0: unknown."""


class HostHeartbeats(Record):
    """The last heartbeats of the members of a job on one host, written by the host's agent."""

    host: str
    beats: list[Heartbeat] = []


class MemberProcess(Record):
    """The process of a member, for the witnesses of its machine."""

    role: str
    id: str
    incarnation: str
    """Incarnation, as the member registry has it."""
    pid: int
    started: int
    """Clock ticks from the boot to its start: with the pid it names one process."""


class Witness(Record):
    """A process that watches those of its machine, and says so for as long as its lease lasts."""

    name: str
    machine: str
    host: str
    pid: int
    load_per_core: float = 0.0
    """Threads that run or want to, per core, over about the last minute; coarse."""


class ProcessFinding(OpenEnum):
    GONE = "gone"
    """The process has ended."""
    STOPPED = "stopped"
    """It exists and has not run at all for a while, because of a signal such as SIGSTOP."""


class Evidence(Record):
    """The word of a witness, or of its parent, that a member's process cannot work."""

    role: str
    id: str
    incarnation: str
    finding: ProcessFinding
    at: float
    """Unix seconds, by the clock of who says so."""
    by: str
    """Who says so."""


class PoolSpec(Record):
    """Desired state of a pool; changed through the API."""

    name: str
    desired: int
    model: str = ""
    """Hugging Face folder of the model that its engines serve."""
    stream: str = "policy"
    """Stream whose versions they serve; empty for the weights of the folder, which never change."""


class PoolStatus(Record):
    """Observed state of a pool; written by the driver."""

    name: str
    ready: int
    starting: int
    draining: int
    external: int = 0
    """Ready engines that someone else runs; in none of the other numbers."""
    pending: int = 0
    """Engines that wait for room in the cluster; in none of the other numbers."""
    released: int = 0
    """Engines that wait for the trainer's phase to end; in none of the other numbers."""
    behind: int = 0
    """Engines that get no requests until they have caught up with the others; in none of the other numbers."""
    message: str = ""
    """What the pool waits for; empty when it waits for nothing but its engines' start."""
    router_url: str = ""
    """Base URL of its router."""


class FormationHost(Record):
    """A host of a trainer group."""

    name: str
    address: str
    """At which others reach its ranks; empty: the host of the driver, where all ranks are."""
    ranks: int
    """Number of ranks on it."""


class Formation(Record):
    """On which hosts a trainer group is, and with how many replicas of the model it trains. Its number is the version
    of its key. Written by the driver before it starts the ranks."""

    epoch: int
    hosts: list[FormationHost]
    data_parallel: int
    reason: str = ""
    """Why it took the place of the one before."""

    def ranks(self) -> dict[str, int]:
        """Number of ranks of each host, by its name."""
        return {host.name: host.ranks for host in self.hosts}


class SharedDevices(Record):
    """The GPUs that trainer and engines of a colocated job share for an epoch. Written by the driver before anything
    uses them."""

    epoch: int
    gpus: dict[str, list[str]]
    """Their ids on each host, by the host's name; rank i of a host has the i-th."""
    data_parallel: int
    """Number of replicas of the model that are trained on them."""


class Autoscaler(AutoscaleFields, Record):
    """Autoscaling of a pool, as an operator has set it through the API. It takes the place of the settings."""

    pool: str
    by: str = ""
    at: float = 0.0
    """Unix seconds."""


class AutoscalerState(Record):
    """What the leader has observed of an autoscaled pool. Times are seconds of the leader clock."""

    pool: str
    desired: int
    """The desired number of engines that it knows; another one in the pool's spec was set by somebody else."""
    changed_s: float
    """When that number was set or found."""
    observed_s: float
    """When the load was known last."""
    high_s: float = 0.0
    """For how long the load has been high."""
    low_s: float = 0.0
    """For how long the load has been low."""
    recommended: int = 0
    """The number that a dry run would have set last; 0 for none."""
    added: int = 0
    """Engines that its last change of the number added, until all are ready; else 0."""
    no_room_since_s: float = 0.0
    """Since when some of these have had no room; 0: all have."""
    no_room_until_s: float = 0.0
    """Until when no more engines are requested, since there was no room for more; 0: there was."""
    message: str = ""
    """What it goes by, and what it waits for."""
    updated_at: float = 0.0
    """Unix seconds, for people."""


class EngineState(OpenEnum):
    STARTING = "starting"
    SYNCING = "syncing"
    """Process is up; the weights are being pulled or verified. Not routable."""
    READY = "ready"
    """Weights verified, known to the router."""
    DRAINING = "draining"
    RELEASED = "released"
    """Colocated with the trainer, whose phase it is: it has no device memory, and its weights belong to no version. Not
    routable, and no failure."""
    QUARANTINED = "quarantined"
    """The engine's weights may be torn; it serves again only after a verified full reload."""
    DEAD = "dead"

    @property
    def serving(self) -> bool:
        """Whether it belongs to the pool and has, or is fetching, a version to serve."""
        return self in (EngineState.SYNCING, EngineState.READY)

    @property
    def stays(self) -> bool:
        """Whether it belongs to the pool, or will, and is not about to leave it."""
        return self in (EngineState.STARTING, EngineState.SYNCING, EngineState.READY, EngineState.RELEASED)

    @property
    def ended(self) -> bool:
        return self in (EngineState.QUARANTINED, EngineState.DEAD)


class Straggler(Record):
    """What the leader has asked of an engine that lacked a version which others served. It stays in the engine's record
    until the engine has followed a later version in time."""

    needs: int = 0
    """Oldest version with which the engine may be routed again; 0 once it has caught up."""
    missed: int
    """Version that it lacked when it was last taken out of the router."""
    since: float
    """Seconds of the leader clock at which it was, or at which it was last seen to have got a newer version."""
    version: int = 0
    """Version that it had then."""

    def caught_up(self, version: int) -> Straggler:
        """The same for an engine in which ``version`` was verified."""
        return self.replace(needs=0) if version >= self.needs else self


class Engine(Record):
    id: str
    pool: str
    state: EngineState
    epoch: int
    incarnation: str = ""
    """Incarnation of the member that runs the engine and writes this record; random, and new with each start."""
    url: str = ""
    pid: int = 0
    """Process id of the SGLang server."""
    version: int = 0
    """Policy version whose bytes were verified in the engine; 0 before the first."""
    applying: int = 0
    """Version that is being applied; set before the first byte changes, cleared after verification."""
    host: str = ""
    started_at: float = 0.0
    updated_at: float = 0.0
    pull_apply_s: float = 0.0
    """Seconds from seeing the head to the verified weights, for ``version``."""
    pause_s: float = 0.0
    """Seconds of them in which the engine generated no token."""
    unfetchable_version: int = 0
    """Version of which its last pull found no sound copy of a chunk: corrupt ones only, or none on any node that
    answers; 0 where that ended otherwise."""
    layout: str = ""
    """Digest of how its weights are laid out in memory; engines of one layout and version have the same checksum."""
    checksum: str = ""
    """Checksum of the weights of ``version``, all ranks; empty if unknown."""
    running: int = 0
    """Requests that it is processing; updated every few seconds."""
    waiting: int = 0
    """Requests that are queued in it."""
    token_usage: float | None = None
    """Used share of its KV cache, 0 to 1, to the nearest twentieth, as of the same probe; None if unknown."""
    slots: int = 0
    """The most requests that it processes at once; 0 if unknown, as of a server that someone else runs."""
    load_known: bool = False
    """Whether the last probe was answered: else ``running``, ``waiting`` and ``token_usage`` are of an older one."""
    holds_device: bool = False
    """Colocated with the trainer: whether its server may have device memory. Set before the server takes any, in the
    transaction that makes sure of its phase; cleared once it has none."""
    external: bool = False
    """Someone else runs its server: it is extra, is never ended, and is not replaced."""
    straggler: Straggler | None = None
    """The leader writes it; None for an engine that follows."""
    reason: str = ""

    @property
    def is_behind(self) -> bool:
        """Whether it is to be out of the router until it has caught up."""
        return self.straggler is not None and self.straggler.needs > self.version


class ExternalEngine(Record):
    """The registration of a server that someone else runs. It stays until the engine is drained or has ended, so that
    the next driver serves it again."""

    engine: str
    """Id that the engine has in the pool."""
    pool: str
    url: str
    host: str = ""
    """Name of the host of the cluster that the server is on, whose checkpoint node its engine reads; empty until a
    driver has seen the registration, which it binds to its own host."""
    by: str = ""
    at: float = 0.0
    waits_for: str = ""
    """Why it is not served now, as the driver says; empty where it is."""
    ended: str = ""
    """Why it left the pool; empty while it is registered."""
    ended_at: float = 0.0


class Severity(OpenEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 for the least severe. What a newer release may know besides these counts as an error."""
        return {Severity.INFO: 0, Severity.WARNING: 1}.get(self, 2)


class Event(Record):
    id: str
    at: float
    kind: str
    """Dotted, such as engine.dead, trainer.recovered, leader.elected, pool.scaled, run.finished."""
    subject: str
    message: str
    severity: Severity = Severity.INFO
    data: dict[str, Any] = {}


class Silence(Record):
    """Suppresses notifications of matching alerts for a time. ``kind`` and ``subject`` are patterns, in which ``*``
    matches anything; times are unix seconds."""

    id: str
    kind: str = "*"
    subject: str = "*"
    created_at: float
    until: float
    by: str = ""
    comment: str = ""

    def matches(self, kind: str, subject: str, now: float) -> bool:
        """Whether it suppresses an alert of this kind and subject at this time."""
        return now < self.until and _like(self.kind, kind) and _like(self.subject, subject)


def _like(pattern: str, text: str) -> bool:
    # Not fnmatch: a subject may hold brackets, such as an IPv6 address.
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None


class OperationKind(OpenEnum):
    SCALE = "scale"
    """Bring a pool to a number of engines."""
    DRAIN = "drain"
    """Let an engine finish its requests and leave; with or without a replacement."""
    RESTART = "restart"
    """Restart an engine, the trainer, a role or the whole compute plane."""
    REGISTER = "register"
    """Have a server that someone else runs serve in a pool."""


class OperationState(OpenEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED)


class Operation(Record):
    """A long-running request of the API. Times are unix seconds."""

    id: str
    """Ids sort by start time."""
    kind: OperationKind
    target: str
    """What it changes: pools/NAME, engines/ID, roles/NAME, a trainer group, driver or job."""
    params: dict[str, Any] = {}
    state: OperationState = OperationState.RUNNING
    phase: str = "accepted"
    """The operation's present step; which there are depends on its kind."""
    done: int = 0
    total: int = 0
    """Progress, such as 2 of 3 engines; 0 where there is nothing to count."""
    message: str = ""
    by: str = ""
    """Name of the token that requested it, or policy."""
    created_at: float = 0.0
    updated_at: float = 0.0
    timeout_s: float = 0.0
    """It fails when it is not done after so many seconds; time without a leader does not count."""
    deadline_at: float = 0.0
    """Unix seconds at which it fails if it is not done by then and there is a leader all the time."""
    leader_deadline_s: float = 0.0
    """The same by the leader clock, which decides; set by the leader's first pass."""
    ended_at: float = 0.0
    result: dict[str, Any] = {}
    error: str = ""


FAILURE_POLICY = "failure_policy"
"""Who asked for what the leader does by its failure policy."""


class RestartRequest(Record):
    """A request to restart a part of the compute plane, or its driver. The process that runs the part carries it out
    and then sets ``observed_generation``, so that each request is carried out once, whichever process dies in between.
    """

    target: str
    """engines/ID, roles/NAME, a trainer group, driver or job."""
    generation: int
    """Number of the newest request; each one is one higher, and none is ever used again."""
    observed_generation: int = 0
    """Number of the newest request that was carried out or withdrawn."""
    reason: str = ""
    by: str = ""
    at: float = 0.0
    epoch: int = 0
    """The epoch that the newest request ended, of a restart of the job."""

    @property
    def of_failure_policy(self) -> bool:
        """Whether the leader asked for it, since the part hangs or stays behind."""
        return self.by == FAILURE_POLICY

    def has_newer_driver(self, epoch: int) -> bool:
        """Whether a driver has started since a restart of the job was requested, when ``epoch`` is that of the run now.
        The request itself ended one epoch and began the next, in which nothing runs that a driver could take over; so
        the driver begins one of its own."""
        return epoch > self.epoch + 1

    @property
    def open(self) -> bool:
        """Whether a request is still to be carried out."""
        return self.observed_generation < self.generation

    def observed(self, generation: int) -> Self:
        """The record once the requests up to ``generation`` were carried out or withdrawn; later ones stay open."""
        return self.replace(observed_generation=max(self.observed_generation, min(generation, self.generation)))


class VersionState(StrEnum):
    STAGING = "staging"
    COMMITTED = "committed"
    RELEASING = "releasing"
    GONE = "gone"
    ABORTED = "aborted"


class Version(Record):
    """A version of a stream in the checkpoint service's catalog."""

    stream: str
    number: int
    state: VersionState
    epoch: int
    manifest: str = ""
    """Digest of the manifest; empty before the commit."""
    nbytes: int = 0
    sources: list[str] = []
    """A few DCS nodes to ask first for its chunks. ``ReplicaSets`` has all of them."""
    created_at: float = 0.0
    committed_at: float = 0.0
    meta: dict[str, Any] = {}
    """Set by the publisher: train step, model id, policy version of a trainer_state, trace context."""


class ReplicaSets(Record):
    """Where the chunks of a committed version are, and its manifest with them."""

    parts: list[list[str]]
    """Ids of the nodes that hold all chunks of a part, for each part of the manifest; the first one wrote it."""
    as_of: int = 0
    """Revision of etcd at which the nodes were read: what is said of one that has registered since is to be checked."""


class CatalogIdentity(Record):
    """Which catalog of versions this is. Nodes remember the identity beside their chunks, so that an etcd that lost its
    data, was restored from an old backup, or is another one, cannot have them dropped."""

    id: str
    """Random; made with the catalog."""
    commits: int = 0
    """Transactions that made versions visible. Lower than what a node has seen: the catalog is older than the node."""
    created_at: float = 0.0
    suspended: str = ""
    """Why nothing may be published until ``elastic-rl versions recover``; empty: it may."""


class UploadTask(Record):
    """The version that the nodes copy to the durable store now; each node copies the parts that it holds."""

    node: str
    """Which node chose it, and completes it."""
    stream: str = ""
    """Empty: nothing is to be copied."""
    number: int = 0
    anchor: int = 0
    """Version whose chunks, whole in the store, deltas are made against; ``number`` itself for a whole copy."""


class DcsNode(Record):
    id: str
    host: str
    port: int
    pid: int
    arena_path: str
    """Path of the shared-memory arena; only processes on the same host can map it."""
    arena_bytes: int
    used_bytes: int = 0
    """Bytes of the arena that are used."""
    disk_bytes: int = 0
    """Limit on what it stores on disk; 0: it stores nothing there."""
    disk_used_bytes: int = 0
    disk_room_bytes: int = 0
    """Free space there, by its limit and by the file system."""
    chunks: int = 0
    unsaved: int = 0
    """Chunks that are not yet on its disk."""
    disk_fault: str = ""
    """Why the last chunk could not be saved; empty while saving works, and where there only is no room."""
    lost_chunks: int = 0
    """Chunks of which it found the last copy corrupt or missing since its start."""
    catalog: str = ""
    """Id of the catalog that its chunks belong to; empty before it learned of one with a commit."""
    commits: int = 0
    """Highest ``CatalogIdentity.commits`` that it has seen."""
    machine: str = ""
    """The machine, as in a member's record."""

    @property
    def incarnation(self) -> str:
        """Differs after each start of the node: the process creates its arena under a random name."""
        return self.arena_path

    @property
    def process(self) -> str:
        """The process, as its witnesses and the member registry name it."""
        return f"{self.pid}:{self.port}"
