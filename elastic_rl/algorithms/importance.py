"""Truncated importance sampling between the engines that sample and the trainer that learns. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_rl.algorithms.losses import bounded_log_ratio


@torch.no_grad()
def truncated_weight(trainer: Tensor, engine: Tensor, cap: float) -> Tensor:
    """``min(exp(trainer - engine), cap)`` [M], without gradient: the factor of a token's loss that makes up for
    sampling from a distribution that is not quite the trainer's (other kernels, other precision, older weights), with
    its variance bounded (F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025; truncation: E. Ionides, 2008).

    ``trainer`` [M] fp32: the trainer's log-probs before the step's first update; ``engine`` [M] fp32: those that the
    tokens were sampled with.
    """
    return bounded_log_ratio(trainer, engine).exp().clamp(max=cap)
