"""Per-token losses of PPO's family, and what the other losses share. Pure. How they are summed up, over which
denominator, is the training step's business."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.config.options import Options

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this, in both directions, before their exponential is taken, which would overflow."""


def bounded_log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """``logp - old`` [M], clamped to ``MAX_LOG_RATIO``; no gradient where the clamp binds."""
    return (logp - old.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_stats(log_ratio: Tensor) -> dict[str, Tensor]:
    """Statistics of log-ratios [M], detached: ``ratio_mean`` (the ratio) and ``kl`` (the k3 estimate of KL(old || new),
    nats)."""
    with torch.no_grad():
        ratio = log_ratio.exp()
        return {"ratio_mean": ratio, "kl": ratio - 1 - log_ratio}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), ``-min(rho A, clip(rho, 1 - low, 1 + high) A)`` [M], and,
    detached [M], 1 where the clip removed the gradient."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(unclipped, clipped), (clipped < unclipped).detach().to(ratio.dtype)


class ClipOptions(Options):
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The importance ratio is clipped from below at 1 minus this."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """The importance ratio is clipped from above at 1 plus this; larger than ``clip_low`` as in DAPO
    (arXiv:2503.14476)."""


def clipped_policy_loss(logp: Tensor, batch: LossBatch, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with an asymmetric clip (DAPO, arXiv:2503.14476), of M tokens:
    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``, ``rho = exp(logp - old)``.

    ``logp`` [M] fp32 is the only input that gets a gradient; ``old_logprobs`` [M] fp32 are the log-probs that the
    tokens were sampled with; ``advantages`` [M] fp32. Returns the loss [M] and, detached [M] each, ``ratio_mean`` (the
    ratio), ``clip_fraction`` (1 where the clip removed the gradient) and ``kl`` (the k3 estimate of KL(old || new), in
    nats).
    """
    # Beyond the clamp the clipped loss has no gradient anyway, and inf * 0 would be nan in the backward pass.
    log_ratio = bounded_log_ratio(logp, batch["old_logprobs"])
    loss, clipped = clipped_surrogate(log_ratio.exp(), batch.advantages.detach(), options.clip_low, options.clip_high)
    return loss, ratio_stats(log_ratio) | {"clip_fraction": clipped}


def negative_log_likelihood(logp: Tensor, _batch: LossBatch, _options: Options
                            ) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised fine-tuning: ``-logp`` [M]."""
    return -logp, {}
