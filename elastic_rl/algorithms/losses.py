"""Policy losses. Pure."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor,
                        clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347) with an asymmetric clip and the mean over all tokens (DAPO,
    arXiv:2503.14476): ``-mean_t min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)``, ``rho = exp(logp - old)``.

    ``logp`` [N, R] fp32 is the only input that gets a gradient; ``old_logp`` [N, R] fp32 are the log-probs the tokens
    were sampled with; ``advantages`` [N] fp32; ``mask`` [N, R] is 1 (or True) on response tokens. Values where the mask
    is 0 are ignored. An empty mask gives a loss of 0 with a zero gradient.

    To split a batch, weight each part's loss by its fraction of the tokens (``stats["tokens"]``).

    Returns the scalar loss and detached scalars, all over masked tokens: ``ratio_mean``, ``clip_fraction`` (fraction of
    tokens whose gradient the clip removed), ``kl`` (the k3 estimate of KL(old || new), in nats per token), ``tokens``.
    Raises ValueError for inconsistent shapes or a clip out of range.
    """
    n, r = logp.shape
    if old_logp.shape != (n, r) or mask.shape != (n, r) or advantages.shape != (n,):
        raise ValueError(f"shapes do not fit: logp {list(logp.shape)}, old_logp {list(old_logp.shape)}, "
                         f"mask {list(mask.shape)}, advantages {list(advantages.shape)}")
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low must be in [0, 1] and clip_high >= 0, got {clip_low} and {clip_high}")
    on = mask.bool()
    weight = on.to(logp.dtype)
    tokens = weight.sum()
    divisor = tokens.clamp(min=1)
    # Padding is removed before exp: inf * 0 would be nan in the loss, and in the gradient even after a where.
    log_ratio = torch.where(on, logp - old_logp.detach(), torch.zeros_like(logp))
    ratio = log_ratio.exp()
    adv = advantages.detach()[:, None]
    unclipped = ratio * adv
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * adv
    loss = -(torch.minimum(unclipped, clipped) * weight).sum() / divisor
    with torch.no_grad():
        stats = {
            "ratio_mean": (ratio * weight).sum() / divisor,
            "clip_fraction": ((clipped < unclipped).to(weight.dtype) * weight).sum() / divisor,
            "kl": ((ratio - 1 - log_ratio) * weight).sum() / divisor,
            "tokens": tokens,
        }
    return loss, stats
