"""Groups of ranks that compute with the policy and do not train it: ``actor_fwd`` and ``reference``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_rl.config.section import Section, faults_of_changes
from elastic_rl.config.trainer import TrainerConfig


class ForwardConfig(Section):
    enabled: bool = False
    """Whether the job has the group: ranks, and with GPUs as many of these, of its own. They have the weights and no
    optimizer, and take each version that they need from the checkpoint service."""
    trainer: dict[str, Any] = {}
    """Settings of the section ``trainer`` that are different for the group, such as ``tensor_parallel``,
    ``data_parallel`` and ``micro_batch_tokens``."""


def faults(trainer: TrainerConfig, groups: Mapping[str, ForwardConfig]) -> Iterator[str]:
    """What is wrong with the changes of these sections. ``groups``: by name."""
    for name, group in groups.items():
        yield from faults_of_changes(trainer, group.trainer, f"{name}.trainer")
