"""What is kept under the keys: small pydantic records, stored as JSON. Unknown fields are ignored on reading, so that
replicas of two releases can run side by side during an upgrade."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen value; a change is a new record written by a guarded transaction."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        return cls.model_validate_json(raw)

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed."""
        return self.model_copy(update=changes)


class Leader(Record):
    """A candidate of the election; ``url`` is its admin API."""

    replica: str
    url: str
    pid: int


class Epoch(Record):
    """Fencing epoch of the run: a write of a lower epoch is refused."""

    number: int
    holder: str
    started_at: float


class Member(Record):
    """A process that does work, written from inside that process under its own lease."""

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
    """Unix seconds, by the member's clock, of the last sign of life from the thread that works."""
    beat_at: float = 0.0
    """Unix seconds, by the same clock, of the last beat; beats come from a thread that does nothing else."""
    info: dict[str, Any] = {}


class JobStatus(Record):
    """How far the run is; written by the actor role. Times are unix seconds."""

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
    """Versions that the oldest sample of the last step lay behind the trainer."""
    productive_s: float = 0.0
    """Wall seconds of the SFT phase, and of the steps of RL that were not undone by a recovery."""
    message: str = ""


class StepMetrics(Record):
    """One RL step of the run's curves. The actor writes it with the job's status; the leader thins old ones."""

    step: int
    at: float
    reward: float
    """Mean reward of the step's samples."""
    eval_accuracy: float | None = None
    """Eval accuracy, 0 to 1, where it was taken after this step."""
    staleness: int = 0
    policy_version: int = 0
    samples: int = 0
    tokens: int = 0
    """Tokens trained on, prompts included."""
    seconds: dict[str, float] = {}
    """Wall time by phase of the step: total, sync, generate, reward, advantage, train, publish_stall."""


class PoolSpec(Record):
    """What the operator wants; changed through the API."""

    name: str
    desired: int


class PoolStatus(Record):
    """What is; written by the driver."""

    name: str
    ready: int
    starting: int
    draining: int
    adopted: int = 0
    """Engines that others run and that are ready; in none of the other numbers."""


class EngineState(StrEnum):
    STARTING = "starting"
    SYNCING = "syncing"
    """Process is up; the weights are being pulled or verified. Not routable."""
    READY = "ready"
    """Weights verified, known to the router."""
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    """Its weights may be torn; it never serves again until a full reload was verified."""
    DEAD = "dead"


class Engine(Record):
    id: str
    pool: str
    state: EngineState
    epoch: int
    url: str = ""
    pid: int = 0
    """Process id of the SGLang server."""
    version: int = 0
    """Policy version whose bytes were verified in the engine; 0 before the first."""
    applying: int = 0
    """Version that is being applied; set before the first byte, cleared after verification."""
    host: str = ""
    started_at: float = 0.0
    updated_at: float = 0.0
    pull_apply_s: float = 0.0
    """Seconds from seeing the head to verified, for ``version``."""
    pause_s: float = 0.0
    """Seconds of them in which the engine made no token, and was asked for its version."""
    layout: str = ""
    """How its weights lie in memory; two engines of one layout and version have the same checksum."""
    checksum: str = ""
    """Of the weights of ``version``, all ranks; empty where it is not known."""
    running: int = 0
    """Requests that it works on; looked at every few seconds."""
    waiting: int = 0
    """Requests that wait in it for their turn."""
    adopted: bool = False
    """Its server is run by somebody else: it is extra, is never ended, and is not replaced."""
    reason: str = ""


class ExternalEngine(Record):
    """A wish that a server that somebody else runs takes part in a pool. It stays until the engine is drained or has
    ended, so that the next driver takes the server in again."""

    engine: str
    """Id that the engine has in the pool."""
    pool: str
    url: str
    by: str = ""
    at: float = 0.0
    ended: str = ""
    """Why it takes part no longer, for those who waited for it."""
    ended_at: float = 0.0


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Event(Record):
    id: str
    at: float
    kind: str
    """Dotted, such as engine.dead, trainer.restarted, leader.elected, pool.scaled, version.committed."""
    subject: str
    message: str
    severity: Severity = Severity.INFO
    data: dict[str, Any] = {}


class Silence(Record):
    """Alerts that are not told for a while. ``kind`` and ``subject`` are patterns, in which ``*`` stands for anything;
    times are unix seconds."""

    id: str
    kind: str = "*"
    subject: str = "*"
    created_at: float
    until: float
    by: str = ""
    comment: str = ""

    def matches(self, kind: str, subject: str, now: float) -> bool:
        """Whether it silences an alert at this time."""
        return now < self.until and _like(self.kind, kind) and _like(self.subject, subject)


def _like(pattern: str, text: str) -> bool:
    # Not fnmatch: a subject may hold brackets, such as an IPv6 address.
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None


class OperationKind(StrEnum):
    SCALE = "scale"
    """Bring a pool to a number of engines."""
    DRAIN = "drain"
    """Let an engine finish its requests and leave; with or without a replacement."""
    RESTART = "restart"
    """Start an engine, the trainer, a role or the whole compute plane anew."""
    ADOPT = "adopt"
    """Have an engine that somebody else runs take part in a pool."""


class OperationState(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED)


class Operation(Record):
    """Something that takes longer than a request. Times are unix seconds."""

    id: str
    """Sorts by the time of its beginning."""
    kind: OperationKind
    target: str
    """What it is done to: pools/NAME, engines/ID, roles/NAME, trainer or job."""
    params: dict[str, Any] = {}
    state: OperationState = OperationState.RUNNING
    phase: str = "accepted"
    """The step of its kind that it is in."""
    done: int = 0
    total: int = 0
    """How far it is, such as 2 of 3 engines; 0 where there is nothing to count."""
    message: str = ""
    by: str = ""
    """Name of the token that asked for it, or policy."""
    created_at: float = 0.0
    updated_at: float = 0.0
    deadline_at: float = 0.0
    """When it fails, if it is not done by then."""
    ended_at: float = 0.0
    result: dict[str, Any] = {}
    error: str = ""


class RestartRequest(Record):
    """A wish that a part of the compute plane is started anew. Whoever runs the part compares ``wanted`` with what it
    has done, so a wish is carried out once, whoever dies in between."""

    target: str
    """engines/ID, roles/NAME, trainer or job."""
    wanted: int
    """Number of the newest wish; each one is one higher."""
    done: int = 0
    """Number of the wish that was carried out last."""
    reason: str = ""
    by: str = ""
    at: float = 0.0
    epoch: int = 0
    """Of the job: the epoch that the newest wish ended."""


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
    """Digest of the manifest blob; empty before the commit."""
    nbytes: int = 0
    sources: list[str] = []
    """A few DCS nodes to ask first for its chunks. ``Placement`` has all of them."""
    created_at: float = 0.0
    committed_at: float = 0.0
    meta: dict[str, Any] = {}
    """The publisher's own facts: train step, model id, policy version of a trainer_state, trace context."""


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
    """File of the shared-memory arena; only processes of the same host can map it."""
    arena_bytes: int
    used_bytes: int = 0
    """Of the arena."""
    disk_bytes: int = 0
    """What it may fill of its disk; 0: it keeps nothing there."""
    disk_used_bytes: int = 0
    disk_room_bytes: int = 0
    """What it could still add there, by its limit and by the file system."""
    chunks: int = 0
    unsaved: int = 0
    """Chunks that are still to be copied to its disk."""
    catalog: str = ""
    """Id of the catalog that its chunks belong to; empty before it learned of one with a commit."""
    commits: int = 0
    """Highest ``CatalogIdentity.commits`` that it has seen."""

    @property
    def incarnation(self) -> str:
        """Differs after each start of the node: the process makes its arena anew, under a random name."""
        return self.arena_path


class LedgerEntry(Record):
    """Prompt groups that one optimiser step was trained on."""

    step: int
    epoch: int
    groups: list[int]
    """Ordinal numbers of the prompt groups in the run's prompt order."""
    samples: int
    policy_versions: list[int] = []
    dropped: list[int] = []
