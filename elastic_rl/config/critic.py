"""The critic: the value model of PPO, and the trainer group that trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from elastic_rl.config.groups import CRITIC
from elastic_rl.config.section import PathText, Section, faults_of_changes
from elastic_rl.config.train import TrainConfig
from elastic_rl.config.trainer import TrainerConfig


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
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first RL steps that only the critic learns from. The policy stays as it is meanwhile; its loss is
    measured."""


def faults(trainer: TrainerConfig, train: TrainConfig, critic: CriticConfig) -> Iterator[str]:
    """What is wrong with the changes of these sections."""
    for name in critic.train.keys() - CRITIC.train_keys:
        yield f"critic.train.{name}: a critic can have otherwise only {', '.join(CRITIC.train_keys)}"
    yield from faults_of_changes(trainer, critic.trainer, "critic.trainer")
    yield from faults_of_changes(train, critic.train, "critic.train")
