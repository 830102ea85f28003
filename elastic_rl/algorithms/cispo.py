"""CISPO: clipped importance-sampling weight policy optimization (MiniMax-M1, arXiv:2506.13585). Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.advantages import GroupRelativeOptions
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import bounded_log_ratio, ratio_stats


class CispoOptions(GroupRelativeOptions):
    max_weight: Annotated[float, Field(gt=0)] = 5.0
    """Largest importance weight of a token (1 + epsilon_high in the paper)."""


def clipped_weight_loss(logp: Tensor, batch: LossBatch, options: CispoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a capped importance weight, of M tokens: ``-sg(min(rho, max_weight)) A logp`` with ``rho =
    exp(logp - old)`` (eqs. 4 and 5; the weight has no lower bound, as in the paper's runs). Unlike in PPO's clip, no
    token loses its gradient: rare tokens, whose ratios move most, are often the ones that matter.

    ``logp`` [M] fp32 is the only input that gets a gradient; ``old_logprobs`` and ``advantages`` [M] fp32. Returns the
    loss [M] and, detached [M] each, ``ratio_mean``, ``clip_fraction`` (1 where the cap holds) and ``kl``, the first and
    the last as in ``clipped_policy_loss``.
    """
    log_ratio = bounded_log_ratio(logp, batch["old_logprobs"]).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=options.max_weight)
    return -weight * batch.advantages.detach() * logp, ratio_stats(log_ratio) | {
        "clip_fraction": (ratio > options.max_weight).to(logp.dtype)}
