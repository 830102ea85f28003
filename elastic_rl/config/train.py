"""The RL loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import LrDecay, Positive, Seconds, Section


class TrainConfig(Section):
    steps: Annotated[int, Field(ge=1)] = 150
    """Largest number of RL steps; RL stops earlier at ``stop_eval_accuracy``. The learning rate decays over all of
    them, so a larger number also means that RL learns more slowly."""
    stop_eval_accuracy: Annotated[float, Field(gt=0)] | None = 0.95
    """RL stops once two evaluations in a row reach this mean reward of the main evaluation set, which is its accuracy
    for rewards of 0 and 1. null: RL runs for all of ``steps``."""
    prompts_per_step: Positive = 64
    """Number of prompts in an RL step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Number of samples generated for each prompt. Their rewards are compared with one another."""
    updates_per_step: Positive = 2
    """Number of times that the samples of one step are trained on: PPO's epochs, each of ``minibatches`` updates of the
    optimizer. All updates but the first one are off-policy and clipped."""
    minibatches: Positive = 1
    """Number of parts of a step's samples, as many in each, with an update of the optimizer each. Each data-parallel
    replica splits its own samples."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of RL."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Number of RL steps over which the learning rate rises linearly to ``lr``. Adam's moments start from zero here,
    and at the full rate its first updates, each of nearly ``lr`` an element, undo what the SFT phase learned."""
    lr_decay: LrDecay = "linear"
    """Schedule of the learning rate after the warm-up. ``linear``: down to ``lr_final_fraction`` of ``lr`` at the last
    step, so that the noise of the sampled groups averages out. ``cosine``: the same along half a cosine. ``wsd``:
    ``lr``, then a line down over the last ``lr_decay_fraction`` of the steps (arXiv 2404.06395): the weights before it
    can be trained on for as long as one likes. ``constant``: ``lr`` throughout."""
    lr_decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of ``steps`` over which the learning rate falls, with ``lr_decay: wsd``."""
    lr_final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of ``lr`` at the last step, unless ``lr_decay`` is ``constant``."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's average of the gradient, an update."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's average of the squared gradient, an update."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """What AdamW adds to the root of the averaged squared gradient before it divides by it."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    eval_every_steps: Positive = 10
    """Number of RL steps between two evaluations on the held-out problems. RL can stop early only at an evaluation."""
    state_every_steps: Positive = 10
    """Number of RL steps between two commits of the trainer's state (optimizer, random states, data position). A
    recovery repeats at most this many steps."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Number of versions by which the weights that generated a sample may be older than the trainer's. 0: synchronous
    training."""
    schedule: Literal["sync", "fully_async"] = "sync"
    """How generation and training follow each other. ``sync``: the groups of a step are generated, then trained on.
    ``fully_async``: groups are generated all the time beside the steps, and a step takes those that have finished, in
    that order; ``max_staleness`` bounds how far the two may be apart. With ``max_staleness: 0`` it trains what ``sync``
    trains; 1 lets one step's groups be generated during the step before, and 2 also covers the time in which engines
    get a version."""
    max_groups_in_flight: Positive | None = None
    """With ``schedule: fully_async``, number of prompt groups that are generated at once. null: as many as
    ``max_staleness`` allows, which is ``(max_staleness + 1) * prompts_per_step`` with those that wait or are trained
    on."""
    prompts_per_part: Positive | None = None
    """With ``schedule: fully_async``, number of prompt groups whose gradients are computed as soon as so many have
    finished, while others of the same step are still generated; the update follows once all
    ``prompts_per_step`` are there. null: all of a step together. Shortens steps that wait for their last samples, with
    ``max_staleness: 0`` above all; needs one update of a step, and an algorithm whose advantages are of a group
    alone. Gradients are those of the whole step, up to rounding."""
    keep_steps: Annotated[list[Positive], Field(max_length=32)] = []
    """RL steps whose batch is written to a file before the step is made, so that ``elastic-rl debug step`` and ``train
    --only train`` can train from it again; with ``mode: rejection_sampling``, steps whose groups are made into a batch
    for that. The files are in the folder ``kept_steps`` of the job, on the host of the actor. Not with
    ``prompts_per_part``."""
    queue: Literal["embedded", "transfer_queue"] = "embedded"
    """With ``schedule: fully_async``, where finished groups wait for their step. ``embedded``: in the memory of the
    actor, which sends the ranks of the trainer what they train on. ``transfer_queue``: in Ray actors of the package
    TransferQueue, where the ranks read it themselves; install ``elastic-rl[transfer-queue]``, and let nobody else use
    the cluster's hosts and network, since its sockets take pickles without a password. Groups that a queue loses are
    generated again."""
    queue_units: Annotated[int, Field(ge=1, le=256)] = 2
    """Storage actors, with ``queue: transfer_queue``; 256 at most. One that dies takes the groups of all with it."""
    queue_call_timeout_s: Seconds = 30.0
    """Seconds that one group may take into the queue, or a million tokens or one sample out of it, with
    ``queue: transfer_queue``, before that is tried again. After three such calls in a row the queue's actors are
    replaced, and the groups in it are generated again."""
    logprob_tolerance: Annotated[float, Field(ge=0)] | None = None
    """Largest difference between an engine's and the trainer's log-probability of the same token; a larger one raises
    ``logprob.mismatch``, in steps all of whose samples are of the newest weights. null: 1e-4, and 0.5 with
    ``device.dtype: bfloat16``, in which engine and trainer round differently."""

    @property
    def updates(self) -> int:
        """Updates of the optimizer in an RL step."""
        return self.updates_per_step * self.minibatches
