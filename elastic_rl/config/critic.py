"""The critic: the value model of PPO, and the trainer group that trains it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from elastic_rl.config.section import PathText, Section


class CriticConfig(Section):
    enabled: bool | None = None
    """Whether the job has a critic, which an algorithm of your own with the input ``values`` needs. null: with
    ``algorithm.name: ppo``."""
    model: PathText = ""
    """Hugging Face folder that the critic begins with, at this path on every host; it must have the policy's tokens.
    Its value head is the tensor ``score.weight`` of the folder, or zero where the folder has none. Empty: the model
    that the policy begins with."""
    trainer: dict[str, Any] = {}
    """Settings of the section ``trainer`` that are different for the critic's group, such as ``tensor_parallel`` and
    ``data_parallel``. It has ranks, and with GPUs as many of these, of its own."""
    train: dict[str, Any] = {}
    """Settings of the section ``train`` that are different for the critic: those of the learning rate (``lr`` is mostly
    larger than the policy's), of AdamW, ``max_grad_norm``, ``updates_per_step`` and ``minibatches``."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a token's value may move in one step before its gradient ends (PPO's clipped value loss): the loss is the
    larger squared error of the value and of the value within this of the one before the step. null: not clipped."""
    whiten_advantages: bool = True
    """Whether the advantages that the policy's loss gets are brought to mean 0 and standard deviation 1 over all
    trained tokens of a step. What the critic learns from is not."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first RL steps that only the critic learns from. The policy stays as it is meanwhile; its loss is
    measured."""
