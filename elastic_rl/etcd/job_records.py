"""Records of what a job does: its status, the metrics of its steps, its samples, the prompt groups in progress."""

from __future__ import annotations

from typing import Any

from elastic_rl.etcd.record import FiniteByName, FiniteOrNone, OpenEnum, Record

WORKING_PHASES = ("sft", "rl", "eval", "rejection_sampling")
"""Phases of a job that works, or waits for what it needs to."""
ENDED_PHASES = ("finished", "failed", "stopped")
"""Phases of a job whose run is over. Only a new submission begins another one."""


class GenerationCap(OpenEnum):
    """The limit that keeps a run from asking its engines for more samples, although there are further prompts."""

    NONE = ""
    POOL = "pool"
    """What the engines of the pool are taken to hold, with what waits in them."""
    REQUESTS = "requests"
    """The most requests that the run has in flight."""
    GROUPS_IN_FLIGHT = "train.max_groups_in_flight"
    STALENESS = "train.max_staleness"


class JobStatus(Record):
    """Progress of the run; written by the actor role. Times are unix seconds."""

    phase: str
    """starting, or one of ``WORKING_PHASES`` and ``ENDED_PHASES``."""
    step: int = 0
    """Last step of RL, or of what else the job is for; 0 in the supervised phase before RL."""
    steps: int = 0
    sft_step: int = 0
    """Last supervised step."""
    sft_steps: int = 0
    """Most supervised steps, of a job that has made any."""
    seed: int = 0
    started_at: float = 0.0
    updated_at: float = 0.0
    eval_accuracy: float | None = None
    """Result of the last evaluation of the main set; ``eval_measure`` says of what."""
    eval_measure: str = ""
    """``exact_match``: the share of the held-out answers that greedy decoding gives exactly, in the supervised phase.
    ``reward``: the mean reward."""
    eval_error: float = 0.0
    """Standard error of a mean reward, over the prompts."""
    eval_sets: FiniteByName = {}
    """The same of the further evaluation sets, by name; of many, the first 64."""
    eval_start: float | None = None
    """Mean reward of the main set at step 0 of RL, before any of its updates."""
    eval_start_error: float = 0.0
    """Standard error of that."""
    update_kl: float | None = None
    """Largest ``kl`` of the updates of the last ten steps, in nats, at most 1000: which stands for all that is more,
    and for what is no number."""
    update_kl_step: int = 0
    """The step with that."""
    worst_kl: float | None = None
    """The largest of all steps: a policy that was ruined moves no more."""
    worst_kl_step: int = 0
    worst_kl_lr: float | None = None
    """Learning rate of that step."""
    lr: float | None = None
    """Learning rate of the last step."""
    entropy: float | None = None
    """Entropy of the last step, in nats, where it is computed."""
    reward: float | None = None
    """Mean reward of the last step."""
    policy_version: int = 0
    needs_version: int = 0
    """Newest version that the run has asked its engines for: of older ones no new sample is of use."""
    staleness: int = 0
    """Number of versions by which the oldest sample of the last step was behind the trainer."""
    pieces: int = 0
    """Prompt groups that have finished, and parts of the next step that were computed, since step ``step`` was made: a
    step may take hours, and these say that it gets on."""
    step_s: float = 0.0
    """Wall seconds that a step of RL takes, as the last few did; 0 before the first one."""
    productive_s: float = 0.0
    """Wall seconds of the SFT phase, and of the steps of RL that were not undone by a recovery."""
    message: str = ""
    dropped_groups: dict[str, int] = {}
    """Prompt groups that were dropped on the record instead of being trained on, by reason; those of steps that a
    recovery has undone are not counted."""
    stage: str = ""
    """What the run works on: source, generate, reward, advantage, train, publish, evaluate, write and others."""
    waiting_for: str = ""
    """What it waits for, for people, such as "an engine that serves version 12: rollout-ab12 syncing v11"; empty while
    it works."""
    waiting_since: float = 0.0
    """When this wait began; 0 while it works."""
    waiting_kind: str = ""
    """Which part of the system it waits for: engines, router, trainer, etcd, reward, rollout, advantages, dcs, source,
    disk and others; empty while it works. Alerts and metrics go by it: one of a few short words."""
    generation_cap: GenerationCap = GenerationCap.NONE
    """The limit that has kept it for a while from asking its engines for more samples; empty while none does, and where
    there is nothing more to ask for."""


def ended(status: JobStatus, phase: str, message: str, at: float) -> JobStatus:
    """The status of a run that ends where it is: it works on nothing, waits for nothing, and nothing holds it back.
    ``phase``: one of ``ENDED_PHASES``. ``at``: unix seconds."""
    return status.replace(phase=phase, message=message, stage="", waiting_for="", waiting_kind="", waiting_since=0.0,
                          generation_cap=GenerationCap.NONE, updated_at=at)


def stopped_message(status: JobStatus, *, committed: bool) -> str:
    """Says that a run was stopped, and where it goes on when it is resumed. ``committed``: whether all that it had
    trained is committed."""
    supervised = not status.step and status.sft_step
    at = f"supervised step {status.sft_step}" if supervised else f"step {status.step}"
    return f"stopped by its operator at {at}" + (
        "" if committed else "; what it trained after its last commit could not be committed, and is done again")


class StepMetrics(Record):
    """Metrics of one RL step. The actor writes them with the job's status; the leader downsamples old ones."""

    step: int
    at: float
    reward: float
    """Mean reward of the step's samples."""
    eval_accuracy: float | None = None
    """Mean reward of the main evaluation set, if it was measured after this step."""
    eval_sets: FiniteByName = {}
    """The same of the further evaluation sets, by name; of many, the first 64."""
    staleness: int = 0
    policy_version: int = 0
    samples: int = 0
    tokens: int = 0
    """Tokens trained on, prompts included."""
    seconds: dict[str, float] = {}
    """Wall time by stage of the step: total, sync, generate, reward, teacher, advantage, train,
    publish_stall."""
    idle_s: FiniteByName = {}
    """Seconds, by stage, in which it waited for something else; part of ``seconds``."""
    reward_parts: FiniteByName = {}
    """Mean of each named part of the reward, over the step's samples."""
    response_tokens: FiniteByName = {}
    """Tokens of a response: mean and max."""
    truncated: float = 0.0
    """Share of the samples, 0 to 1, that ended at the limit of their length."""
    dropped_groups: int = 0
    """Prompt groups that were dropped on the record instead of being trained on in this step."""
    dropped_by_reason: dict[str, int] = {}
    """Dropped groups by reason."""
    update: FiniteByName = {}
    """Metrics of the updates of the step: loss, kl, clip_fraction, grad_norm and others, also the algorithm's own
    (``telemetry.training_metrics``)."""
    throughput: FiniteByName = {}
    """Tokens a second, MFU, memory (the same)."""


class SampleRecord(Record):
    """A sample that was trained on, for people who want to see what the model writes. Nothing decides by it.

    ``pipeline.records.sample_ring`` keeps the last few, and cuts texts that are too long.
    """

    step: int
    group: int
    """Ordinal of the prompt group."""
    index: int
    """Index of the sample in its group."""
    prompt: str = ""
    response: str = ""
    """Model output: hostile input for whoever shows it."""
    reward: FiniteOrNone = None
    """None: not a finite number."""
    reward_parts: FiniteByName = {}
    advantage: FiniteOrNone = None
    finish_reason: str = ""
    """stop, length, abort and others."""
    versions: list[int] = []
    """Policy versions that made its tokens, ascending."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    at: float = 0.0
    """Unix seconds at which it was trained on."""
    cut: bool = False
    """The middle of a text was left out."""


class OutputState(Record):
    """What a job that trains nothing has written: the committed state of its output. The actor writes it in one
    transaction under its term, after the piece that it names."""

    step: int = 0
    policy_version: int = 0
    """The newest version that the job has published, of the weights that it samples with."""
    consumed: dict[str, Any] = {}
    """The prompt groups whose samples are in the output, or were dropped, as ``ConsumedGroups`` has them."""
    cursor: dict[str, Any] = {}
    """What the actor decided up to this step."""
    pieces: list[tuple[int, int]] = []
    """[first step, term], ascending: which term of the actor wrote the pieces from this step on. An entry for each term
    that committed a step."""
    complete: bool = False
    """The output is one file; no piece is needed any more."""


class RunLogHead(Record):
    """Where the history of a job's records stands. The actor writes it under its term, and with each commit of the
    stream ``run_log`` in the transaction of that."""

    id: str
    """Random; made by the job's first start, so that the records of another job of this name are never taken for
    this one's."""
    sealed: int = 0
    """Offset up to which the history is in the stream, in bytes. What follows is under ``Keys.run_log_prefix``."""


class GroupLease(Record):
    """The prompt groups that a producer works on. It is void once a newer term of the actor has begun, or a newer
    epoch."""

    producer: str
    epoch: int
    term: int
    groups: list[list[int]]
    """Ordinals, as intervals [start, stop)."""
    at: float = 0.0
    """Unix seconds."""

