"""The RL loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Section


class TrainConfig(Section):
    steps: Annotated[int, Field(ge=1)] = 150
    """Steps of RL at most; the run ends earlier when it reaches ``stop_eval_accuracy``, on the built-in task after
    about 100. The linear decay of the learning rate is planned over all of them, so more steps also learn slower."""
    stop_eval_accuracy: Annotated[float, Field(gt=0)] | None = 0.95
    """RL ends once two evaluations in a row are at least this; unset (null): never before ``steps``."""
    prompts_per_step: Positive = 64
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples of one prompt; their rewards are compared with one another."""
    updates_per_step: Positive = 2
    """Optimiser updates on one batch of experience; the second and later ones are off-policy and clipped."""
    lr: float = 1e-3
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 10
    """RL steps over which the rate rises on a line to its value. Adam's moments start from zero here, and at the full
    rate its first updates, all of nearly ``lr`` an element, undo what the SFT phase taught."""
    lr_decay: Literal["linear", "constant"] = "linear"
    """``linear``: from ``lr`` at the first step to ``lr_final_fraction`` of it at the last one; what the noise of the
    sampled groups shakes loose early then settles."""
    lr_final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of ``lr`` that is left at the last step."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    eval_every_steps: Positive = 10
    """RL steps between evaluations on all held-out problems; the run can end only at an evaluation."""
    state_every_steps: Positive = 10
    """Optimizer, RNG and data cursor are committed every so many steps; at most that many are done again."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Versions a sample may lie behind the trainer; 0 is sync mode."""
    logprob_tolerance: float = 1e-4
    """Largest difference between an engine's and the trainer's log-prob of the same token that is not an alert."""
