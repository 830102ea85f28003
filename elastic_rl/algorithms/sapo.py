"""SAPO: soft adaptive policy optimization (arXiv:2511.20347). Pure."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.advantages import GroupRelativeOptions
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import bounded_log_ratio, ratio_stats


class SapoOptions(GroupRelativeOptions):
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the gate for tokens with a positive advantage: the larger, the faster their gradient falls when
    the importance ratio leaves 1."""
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    """Temperature of the gate for tokens with a negative advantage; larger than ``tau_positive``, since their gradients
    raise the logits of all other tokens and are less stable."""


def soft_gated_loss(logp: Tensor, batch: LossBatch, options: SapoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate with a smooth gate in the place of the clip, of M tokens: ``-f(rho) A`` with ``rho = exp(logp -
    old)``, ``f(rho) = (4 / tau) sigmoid(tau (rho - 1))`` and tau ``tau_positive`` where A > 0, else
    ``tau_negative``. The gradient of a token is that of the plain surrogate times ``4 p (1 - p)``, ``p =
    sigmoid(tau (rho - 1))``: 1 on-policy, and falling the further the ratio is from 1.

    ``logp`` [M] fp32 is the only input that gets a gradient; ``old_logprobs`` and ``advantages`` [M] fp32. Returns the
    loss [M] and, detached [M] each, ``ratio_mean``, ``gate_mean`` (the factor ``4 p (1 - p)``) and ``kl``, the first
    and the last as in ``clipped_policy_loss``.
    """
    advantages = batch.advantages.detach()
    log_ratio = bounded_log_ratio(logp, batch["old_logprobs"])
    tau = torch.where(advantages > 0, options.tau_positive, options.tau_negative).to(logp.dtype)
    opened = torch.sigmoid(tau * (log_ratio.exp() - 1))
    gate = (4 * opened * (1 - opened)).detach()
    return -(4 / tau) * opened * advantages, ratio_stats(log_ratio) | {"gate_mean": gate}
