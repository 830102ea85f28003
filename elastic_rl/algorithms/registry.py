"""Algorithms by their name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from elastic_rl.algorithms.advantages import group_relative
from elastic_rl.algorithms.losses import clipped_policy_loss


@dataclass(frozen=True)
class Algorithm:
    """The functions of an RL algorithm."""

    name: str
    advantages: Callable[[Tensor, bool], Tensor]
    """``(rewards [G, K], normalize_std) -> [G, K]``."""
    loss: Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, dict[str, Tensor]]]
    """``(logp, old_logp, advantages, mask, clip_low, clip_high) -> (loss, stats)``."""


ALGOS: dict[str, Algorithm] = {
    "grpo": Algorithm("grpo", group_relative, clipped_policy_loss),
}
