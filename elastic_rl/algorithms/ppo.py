"""PPO's advantages of tokens (arXiv:1707.06347 with arXiv:1506.02438), and the loss of its critic. Pure.

A trained token is an action, whatever lies between two of them: what an environment or a tool said between two turns
is a part of the state that follows, and has no advantage, value or return of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import ClipOptions
from elastic_rl.config import AlgorithmConfig, CriticConfig
from elastic_rl.config.options import Options
from elastic_rl.data.batch import Batch, cut_in_pieces, spans, starts_of

_STD_EPSILON = 1e-8
_BLOCK = 256
"""Tokens of one block of ``_discounted``."""
_PIECE = 1 << 20
"""Loss tokens of the samples whose advantages are computed together, or of a single one."""


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
    """[L] fp32: generalised advantage estimates of the loss tokens (arXiv:1506.02438, eq. 16).

    The last loss token of a sample gets the sample's reward (``advantages`` [N], see ``sample_rewards``), but for what
    of it is of a turn (``turn_rewards`` [L]), which the turn's last token gets; with ``ref_logprobs`` in the batch,
    each gets less ``kl_coef`` times the divergence from the reference policy at it (arXiv:2203.02155, eq. 2). A sample
    ends with its last loss token, also one that was cut off at its limit: nothing is expected after it.
    """
    counts, found, start = batch.loss_counts, torch.zeros(batch.loss_tokens), 0
    names = ("values", "turn_rewards", *(("old_logprobs", "ref_logprobs") if "ref_logprobs" in batch else ()))
    read = {name: batch[name] for name in names if name in batch}
    for rows in cut_in_pieces(counts.tolist(), _PIECE):  # in float64, of all tokens it would take ten times as much
        own = counts[rows.start:rows.stop]
        part = slice(start, start := start + int(own.sum()))
        rewards = _rewards({name: tensor[part].double() for name, tensor in read.items()}, own,
                           batch["advantages"][rows.start:rows.stop].double(), cfg)
        found[part] = estimated(rewards, read["values"][part], own, gamma=options.gamma, lam=options.gae_lambda
                                ).to(torch.float32)
    return found


def _rewards(read: Mapping[str, Tensor], counts: Tensor, at_end: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """[L] float64: the reward of each loss token of samples with so many, ``counts`` [N], of which the last gets
    ``at_end`` [N]."""
    rewards = torch.zeros(int(counts.sum()), dtype=torch.float64)
    if "ref_logprobs" in read:
        rewards -= cfg.kl_coef * kl_estimate(read["old_logprobs"], read["ref_logprobs"], cfg.estimator)
    if "turn_rewards" in read:
        rewards += read["turn_rewards"]
        at_end = at_end - torch.zeros(len(counts), dtype=torch.float64).index_add(
            0, torch.repeat_interleave(torch.arange(len(counts)), counts), read["turn_rewards"])
    rewards[_last(counts)] += at_end[counts > 0]
    return rewards


def estimated(rewards: Tensor, values: Tensor, counts: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[L] float64: ``A_t = d_t + gamma lam A_t'``, ``d_t = r_t + gamma V_t' - V_t``, with t' the next loss token of the
    same sample, and 0 for what would be after its last one. ``rewards`` and ``values`` are [L], the latter of the
    states in which the tokens are chosen; ``counts`` [N]: loss tokens of each sample."""
    following = torch.cat([values[1:], values.new_zeros(1)])[:len(values)].double()
    following[_last(counts)] = 0.0
    return _discounted(rewards.double() + gamma * following - values.double(), counts, gamma * lam)


def _last(counts: Tensor) -> Tensor:
    """int64: where in [L] the last loss token of each sample is that has one. ``counts`` [N]: those of each sample."""
    return (counts.cumsum(0) - 1)[counts > 0]


def _discounted(errors: Tensor, counts: Tensor, factor: float) -> Tensor:
    """[L] float64: ``A_t = d_t + factor A_(t + 1)`` of the ``errors`` d [L] of each sample, which has ``counts`` [N] of
    them. In blocks, so that a response of 100,000 tokens takes hundreds of operations in a row and not as many as it
    has tokens."""
    blocks = (counts + _BLOCK - 1) // _BLOCK
    places = spans(starts_of(blocks) * _BLOCK, counts)
    within = torch.zeros(int(blocks.sum()) * _BLOCK, dtype=torch.float64)
    within[places] = errors
    within = within.view(-1, _BLOCK)
    reach = 1
    while reach < _BLOCK:  # each has the sum of ``reach`` of them, and gets that of as many more
        within[:, :-reach] = within[:, :-reach] + factor ** reach * within[:, reach:]
        reach *= 2
    first, after, ends = within[:, 0].tolist(), [0.0] * len(within), {*(blocks.cumsum(0) - 1).tolist()}
    for block in range(len(first) - 1, -1, -1):
        if block not in ends:
            after[block] = first[block + 1]
        first[block] += factor ** _BLOCK * after[block]
    powers = factor ** torch.arange(_BLOCK, 0, -1, dtype=torch.float64)
    return (within + powers * torch.tensor(after, dtype=torch.float64)[:, None]).view(-1)[places]


def whitened(advantages: Tensor) -> Tensor:
    """[L] of the same dtype: mean 0 and standard deviation 1 over all loss tokens. Without variance they are all 0."""
    if not len(advantages):
        return advantages
    own = advantages.double()
    return ((own - own.mean()) / (own.std(unbiased=False) + _STD_EPSILON)).to(advantages.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """How much of the variance of the returns [L] the values [L] explain: 1 for a perfect critic, 0 for a constant one,
    below 0 for one that is worse; 0 without variance."""
    actual, error = returns.double(), (returns - values).double()
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
