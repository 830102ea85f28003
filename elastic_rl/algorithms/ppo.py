"""PPO's advantages of tokens (arXiv:1707.06347 with arXiv:1506.02438), and the loss of its critic. Pure.

A trained token is an action, whatever lies between two of them: what an environment or a tool said between two turns
is a part of the state that follows, and has no advantage, value or return of its own.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import ClipOptions
from elastic_rl.config import AlgorithmConfig, CriticConfig
from elastic_rl.config.options import Options
from elastic_rl.data.batch import Batch

_STD_EPSILON = 1e-8


class PpoOptions(ClipOptions):
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward one token later counts."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The lambda of generalised advantage estimation (arXiv:1506.02438): 0 trusts the critic, with little variance; 1
    trusts the rewards, without bias."""


def sample_rewards(rewards: Tensor, _options: Options) -> Tensor:
    """[G, K] fp32: the rewards as they are, since the critic is the baseline. ``gae_advantages`` finds them in the
    place of the samples' advantages. Raises ValueError for another shape than [G, K] and for rewards that are not
    finite."""
    if rewards.ndim != 2 or not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards must be finite and [groups, samples], not {list(rewards.shape)}")
    return rewards.to(torch.float32)


def gae_advantages(batch: Batch, options: PpoOptions, cfg: AlgorithmConfig) -> Tensor:
    """[N, T] fp32: generalised advantage estimates of the loss tokens (arXiv:1506.02438, eq. 16), 0 elsewhere.

    The last loss token of a sample gets the sample's reward (``advantages`` [N], see ``sample_rewards``), but for what
    of it is of a turn (``turn_rewards`` [N, T]), which the turn's last token gets; with ``ref_logprobs`` in the batch,
    each gets less ``kl_coef`` times the divergence from the reference policy at it (arXiv:2203.02155, eq. 2). A sample
    ends with its last loss token, also one that was cut off at its limit: nothing is expected after it.
    """
    mask = batch["loss_mask"]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    if "ref_logprobs" in batch:
        divergence = kl_estimate(batch["old_logprobs"].double(), batch["ref_logprobs"].double(), cfg.estimator)
        rewards -= cfg.kl_coef * torch.where(mask, divergence, 0.0)
    rows, last = last_loss_tokens(mask)
    at_end = batch["advantages"].double()
    if "turn_rewards" in batch:
        rewards += (of_turns := batch["turn_rewards"].double())
        at_end = at_end - of_turns.sum(dim=1)
    rewards[rows, last] += at_end[rows]
    return estimated(rewards, batch["values"], mask, gamma=options.gamma, lam=options.gae_lambda).to(torch.float32)


def last_loss_tokens(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have a loss token, and the position of the last one of each, of a mask [N, T]."""
    rows = mask.any(dim=1).nonzero()[:, 0]
    return rows, mask.shape[1] - 1 - mask[rows].flip(1).int().argmax(dim=1)


def estimated(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[N, T] float64: ``A_t = d_t + gamma lam A_t'``, ``d_t = r_t + gamma V_t' - V_t``, with t' the next token of the
    mask after t, and 0 for what would be after the last one. 0 where the mask is false. All arguments are [N, T];
    ``values`` at t is of the state in which token t is chosen."""
    # Tokens of the mask side by side, so that what lies between two of them is no step.
    place = (mask.cumsum(dim=1) - 1).clamp(min=0)
    width = int(mask.sum(dim=1).max()) if mask.numel() else 0
    rows, at = mask.nonzero(as_tuple=True)
    dense_rewards, dense_values, is_real = (torch.zeros(len(mask), width + 1, dtype=torch.float64) for _ in range(3))
    where = rows, place[rows, at]
    dense_rewards[where], dense_values[where] = rewards.double()[rows, at], values.double()[rows, at]
    is_real[where] = 1.0
    found = torch.zeros_like(dense_values)
    for t in range(width - 1, -1, -1):
        difference = dense_rewards[:, t] + gamma * dense_values[:, t + 1] - dense_values[:, t]
        found[:, t] = is_real[:, t] * (difference + gamma * lam * found[:, t + 1])
    out = torch.zeros(mask.shape, dtype=torch.float64)
    out[rows, at] = found[where]
    return out


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """[N, T] of the same dtype: mean 0 and standard deviation 1 over the tokens of the mask, 0 elsewhere. Without
    variance they are all 0."""
    own = advantages[mask].double()
    if not len(own):
        return torch.zeros_like(advantages)
    centred = (own - own.mean()) / (own.std(unbiased=False) + _STD_EPSILON)
    out = torch.zeros_like(advantages)
    out[mask] = centred.to(advantages.dtype)
    return out


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """How much of the variance of the returns the values explain: 1 for a perfect critic, 0 for a constant one, below 0
    for one that is worse; 0 without variance. All arguments are [N, T]."""
    actual, error = returns[mask].double(), (returns - values)[mask].double()
    variance = float(actual.var(unbiased=False)) if len(actual) else 0.0
    return 1.0 - float(error.var(unbiased=False)) / variance if variance > 0 else 0.0


def clipped_value_loss(value: Tensor, batch: LossBatch, cfg: CriticConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the larger squared error of the value, and of the value within ``value_clip`` of that before the step, from
    the return (as in OpenAI's baselines; arXiv:2006.05990, C.5), of M tokens.

    ``value`` [M] fp32 is the only input that gets a gradient; ``values`` [M] fp32 are those before the step,
    ``returns`` [M] fp32 what they should have been. Returns the loss [M] and, detached [M], ``value_clip_fraction``: 1
    where the clip removed the gradient.
    """
    old, target = batch["values"].detach(), batch["returns"].detach()
    error = (value - target).square()
    if cfg.value_clip is None:
        return 0.5 * error, {"value_clip_fraction": torch.zeros_like(error.detach())}
    bounded = (value.clamp(old - cfg.value_clip, old + cfg.value_clip) - target).square()
    return 0.5 * torch.maximum(error, bounded), {"value_clip_fraction": (bounded > error).detach().to(error.dtype)}
