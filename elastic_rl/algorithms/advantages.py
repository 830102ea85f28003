"""Advantage estimators. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

# Added to the standard deviation, so that advantages of rewards that differ only by rounding stay small.
STD_EPSILON = 1e-4


def group_relative(rewards: Tensor, normalize_std: bool = True) -> Tensor:
    """GRPO's advantage (arXiv:2402.03300, eq. 1): a sample relative to the other samples of its prompt.

    ``rewards`` [G, K] fp32, one row per prompt group. Result [G, K] fp32: ``(r - mean) / (std + 1e-4)`` with the
    unbiased standard deviation of the row, or ``r - mean`` without ``normalize_std`` (Dr. GRPO, arXiv:2503.20783). A
    row sums to 0 up to rounding; a row of equal rewards gives exactly 0.

    Raises ValueError for another shape than [G, K >= 2] and for rewards that are not finite.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, samples >= 2], got {list(rewards.shape)}")
    rewards = rewards.float()
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # The mean of equal numbers can be off by a rounding step, which divided by the epsilon is not negligible.
    varied = (rewards != rewards[:, :1]).any(dim=1, keepdim=True)
    if normalize_std:
        centred = centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    return torch.where(varied, centred, torch.zeros_like(centred))
