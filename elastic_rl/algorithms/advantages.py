"""Advantage estimators. Pure. Each takes the rewards [G, K] of all prompt groups of a step, one row a group, and
returns advantages of the same shape, fp32; each raises ValueError for another shape than [G, K >= 2] and for rewards
that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_rl.config.options import Options

# Added to the standard deviation, so that advantages of rewards that differ only by rounding stay small.
STD_EPSILON = 1e-4


class GroupRelativeOptions(Options):
    normalize_std: bool = True
    """Whether the group-centred rewards are divided by their standard deviation, as in GRPO (arXiv:2402.03300)."""


def group_relative(rewards: Tensor, options: GroupRelativeOptions) -> Tensor:
    """GRPO's advantage (arXiv:2402.03300, section 4.1.2): a sample relative to the other samples of its prompt.

    ``rewards`` [G, K] fp32, one row per prompt group. Result [G, K] fp32: ``(r - mean) / (std + 1e-4)`` with the
    unbiased standard deviation of the row, or ``r - mean`` without ``normalize_std`` (Dr. GRPO,
    arXiv:2503.20783). A row sums to 0 up to rounding; a row of equal rewards gives exactly 0.

    Raises ValueError for another shape than [G, K >= 2] and for rewards that are not finite.
    """
    rewards = _checked(rewards)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if options.normalize_std:
        centred = centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    return _zero_where_equal(centred, _varied_rows(rewards))


def group_centred(rewards: Tensor, _options: Options) -> Tensor:
    """Dr. GRPO's advantage (arXiv:2503.20783): ``r - mean`` of the row. Without the division by the standard deviation,
    which gives prompts that are nearly always or nearly never solved more weight than others."""
    rewards = _checked(rewards)
    return _zero_where_equal(rewards - rewards.mean(dim=1, keepdim=True), _varied_rows(rewards))


def leave_one_out(rewards: Tensor, _options: Options) -> Tensor:
    """RLOO's advantage (arXiv:2402.14740, section 2.3): ``r`` less the mean of the *other* samples of its prompt, which
    is an unbiased baseline, since it does not depend on the sample: ``(r - mean) K / (K - 1)``."""
    rewards = _checked(rewards)
    k = rewards.shape[1]
    centred = (rewards - rewards.mean(dim=1, keepdim=True)) * (k / (k - 1))
    return _zero_where_equal(centred, _varied_rows(rewards))


def batch_normalised(rewards: Tensor, _options: Options) -> Tensor:
    """REINFORCE++'s advantage (arXiv:2501.03262): ``(r - mean) / (std + 1e-4)`` over all samples of the step, whatever
    their prompt, with the unbiased standard deviation. All sum to 0 up to rounding."""
    rewards = _checked(rewards)
    return _normalised(rewards, (rewards != rewards[:1, :1]).any())


def batch_normalised_with_baseline(rewards: Tensor, _options: Options) -> Tensor:
    """The advantage of REINFORCE++ with a baseline (arXiv:2501.03262): ``r`` less the mean of its row, then divided by
    the standard deviation of all of these plus 1e-4. For several samples of a prompt, whose difficulty it takes out.
    A row of equal rewards gives exactly 0."""
    rewards = _checked(rewards)
    varied = _varied_rows(rewards)
    centred = _zero_where_equal(rewards - rewards.mean(dim=1, keepdim=True), varied)
    return _zero_where_equal(_normalised(centred, varied.any()), varied)


def _checked(rewards: Tensor) -> Tensor:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, samples >= 2], got {list(rewards.shape)}")
    rewards = rewards.float()
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    return rewards


def _varied_rows(rewards: Tensor) -> Tensor:
    return (rewards != rewards[:, :1]).any(dim=1, keepdim=True)


def _zero_where_equal(values: Tensor, varied: Tensor) -> Tensor:
    """The mean of equal numbers can be off by a rounding step, which divided by the epsilon is not negligible."""
    return torch.where(varied, values, torch.zeros_like(values))


def _normalised(values: Tensor, varied: Tensor) -> Tensor:
    """``values`` [G, K] centred and divided by their standard deviation over all; 0 unless ``varied`` []."""
    return _zero_where_equal((values - values.mean()) / (values.std() + STD_EPSILON), varied)
