"""The records stored under the keys: small pydantic models, as JSON. Unknown fields are ignored on reading, so that
replicas of two releases can run side by side during an upgrade."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable value; a change is a new record, written by a guarded transaction."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        return cls.model_validate_json(raw)

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed."""
        return self.model_copy(update=changes)


class OpenEnum(StrEnum):
    """An enum of which a newer release may know more values. Such a value is kept as it is, and equals none of ours."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown

    @property
    def known(self) -> bool:
        """Whether this release knows the value."""
        return any(self is member for member in type(self))


class Leader(Record):
    """A candidate of the election; ``url`` is that of its admin API."""

    replica: str
    url: str
    pid: int


class Epoch(Record):
    """Fencing epoch of the run: a write of a lower epoch is refused."""

    number: int
    holder: str
    started_at: float


class Member(Record):
    """A process that does work, written by that process under its own lease."""

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
    info: dict[str, Any] = {}


class JobStatus(Record):
    """Progress of the run; written by the actor role. Times are unix seconds."""

    phase: str
    """starting, sft, rl, finished or failed."""
    step: int = 0
    steps: int = 0
    seed: int = 0
    started_at: float = 0.0
    updated_at: float = 0.0
    eval_accuracy: float | None = None
    """Last eval accuracy, 0 to 1."""
    reward: float | None = None
    """Mean reward of the last step."""
    policy_version: int = 0
    staleness: int = 0
    """Number of versions by which the oldest sample of the last step was behind the trainer."""
    productive_s: float = 0.0
    """Wall seconds of the SFT phase, and of the steps of RL that were not undone by a recovery."""
    message: str = ""


class StepMetrics(Record):
    """Metrics of one RL step. The actor writes them with the job's status; the leader downsamples old ones."""

    step: int
    at: float
    reward: float
    """Mean reward of the step's samples."""
    eval_accuracy: float | None = None
    """Eval accuracy, 0 to 1, if it was measured after this step."""
    staleness: int = 0
    policy_version: int = 0
    samples: int = 0
    tokens: int = 0
    """Tokens trained on, prompts included."""
    seconds: dict[str, float] = {}
    """Wall time by phase of the step: total, sync, generate, reward, advantage, train, publish_stall."""


class PoolSpec(Record):
    """Desired state of a pool; changed through the API."""

    name: str
    desired: int


class PoolStatus(Record):
    """Observed state of a pool; written by the driver."""

    name: str
    ready: int
    starting: int
    draining: int
    external: int = 0
    """Ready engines that someone else runs; in none of the other numbers."""


class EngineState(OpenEnum):
    STARTING = "starting"
    SYNCING = "syncing"
    """Process is up; the weights are being pulled or verified. Not routable."""
    READY = "ready"
    """Weights verified, known to the router."""
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    """Its weights may be torn; it serves again only after a verified full reload."""
    DEAD = "dead"

    @property
    def serving(self) -> bool:
        """Whether it belongs to the pool and has, or is fetching, a version to serve."""
        return self in (EngineState.SYNCING, EngineState.READY)

    @property
    def ended(self) -> bool:
        return self in (EngineState.QUARANTINED, EngineState.DEAD)


class Engine(Record):
    id: str
    pool: str
    state: EngineState
    epoch: int
    incarnation: str = ""
    """Of the member that runs the engine and writes this record; random, and new with each start."""
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
    layout: str = ""
    """Digest of how its weights are laid out in memory; engines of one layout and version have the same checksum."""
    checksum: str = ""
    """Of the weights of ``version``, all ranks; empty if unknown."""
    running: int = 0
    """Requests that it is processing; updated every few seconds."""
    waiting: int = 0
    """Requests that are queued in it."""
    external: bool = False
    """Someone else runs its server: it is extra, is never ended, and is not replaced."""
    reason: str = ""


class ExternalEngine(Record):
    """The registration of a server that someone else runs. It stays until the engine is drained or has ended, so that
    the next driver serves it again."""

    engine: str
    """Id that the engine has in the pool."""
    pool: str
    url: str
    by: str = ""
    at: float = 0.0
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
    """What it changes: pools/NAME, engines/ID, roles/NAME, trainer or job."""
    params: dict[str, Any] = {}
    state: OperationState = OperationState.RUNNING
    phase: str = "accepted"
    """Its present step; which there are depends on its kind."""
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


class RestartRequest(Record):
    """A request to restart a part of the compute plane. The process that runs the part carries it out and then sets
    ``observed_generation``, so that each request is carried out once, whichever process dies in between."""

    target: str
    """engines/ID, roles/NAME, trainer or job."""
    generation: int
    """Number of the newest request; each one is one higher, and none is ever used again."""
    observed_generation: int = 0
    """Number of the newest request that was carried out or withdrawn."""
    reason: str = ""
    by: str = ""
    at: float = 0.0
    epoch: int = 0
    """Of a restart of the job: the epoch that the newest request ended."""

    def has_newer_driver(self, epoch: int) -> bool:
        """Whether a driver has started since a restart of the job was requested, when ``epoch`` is that of the run now.
        The request itself ended one epoch and began the next; a driver begins one of its own."""
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
    """A few DCS nodes to ask first for its chunks. ``Placement`` has all of them."""
    created_at: float = 0.0
    committed_at: float = 0.0
    meta: dict[str, Any] = {}
    """Set by the publisher: train step, model id, policy version of a trainer_state, trace context."""


class Placement(Record):
    """Where the chunks of a committed version are, and its manifest with them."""

    parts: list[list[str]]
    """For each part of the manifest the ids of the nodes that hold all chunks of it; the first one wrote it."""
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
    """Of the arena."""
    disk_bytes: int = 0
    """Limit on what it stores on disk; 0: it stores nothing there."""
    disk_used_bytes: int = 0
    disk_room_bytes: int = 0
    """Free space there, by its limit and by the file system."""
    chunks: int = 0
    unsaved: int = 0
    """Chunks that are not yet on its disk."""
    lost_chunks: int = 0
    """Chunks of which it found the last copy corrupt or missing since its start."""
    catalog: str = ""
    """Id of the catalog that its chunks belong to; empty before it learned of one with a commit."""
    commits: int = 0
    """Highest ``CatalogIdentity.commits`` that it has seen."""

    @property
    def incarnation(self) -> str:
        """Differs after each start of the node: the process creates its arena under a random name."""
        return self.arena_path


class LedgerEntry(Record):
    """The prompt groups that one optimizer step was trained on."""

    step: int
    epoch: int
    groups: list[int]
    """Ordinals of the prompt groups in the run's prompt order."""
    samples: int
    policy_versions: list[int] = []
