"""The RL loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Section


class TrainConfig(Section):
    steps: Annotated[int, Field(ge=1)] = 150
    """Largest number of RL steps; RL stops earlier at ``stop_eval_accuracy``. The learning rate decays over all of
    them, so a larger number also means that RL learns more slowly."""
    stop_eval_accuracy: Annotated[float, Field(gt=0)] | None = 0.95
    """RL stops once two evaluations in a row reach this accuracy. null: RL runs for all of ``steps``."""
    prompts_per_step: Positive = 64
    """Number of prompts in an RL step; a multiple of ``trainer.data_parallel``."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Number of samples generated for each prompt. Their rewards are compared with one another."""
    updates_per_step: Positive = 2
    """Number of optimizer updates on the samples of one step. The second and later ones are off-policy and clipped."""
    lr: float = 1e-3
    """Peak learning rate of RL."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Number of RL steps over which the learning rate rises linearly to ``lr``. Adam's moments start from zero here,
    and at the full rate its first updates, each of nearly ``lr`` an element, undo what the SFT phase learned."""
    lr_decay: Literal["linear", "constant"] = "linear"
    """Schedule of the learning rate after the warm-up. ``linear``: down to ``lr_final_fraction`` of ``lr`` at the last
    step, so that the noise of the sampled groups averages out. ``constant``: ``lr`` throughout."""
    lr_final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of ``lr`` at the last step, with ``lr_decay: linear``."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    eval_every_steps: Positive = 10
    """Number of RL steps between two evaluations on the held-out problems. RL can stop early only at an evaluation."""
    state_every_steps: Positive = 10
    """Number of RL steps between two commits of the trainer's state (optimizer, random states, data position). A
    recovery repeats at most this many steps."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Number of versions by which the weights that generated a sample may be older than the trainer's. 0: synchronous
    training."""
    logprob_tolerance: float = 1e-4
    """Largest difference between an engine's and the trainer's log-probability of the same token; a larger one raises
    ``logprob.mismatch``."""
