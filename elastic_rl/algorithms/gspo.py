"""GSPO: group sequence policy optimization (arXiv:2507.18071). Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.advantages import GroupRelativeOptions
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import bounded_log_ratio, clipped_surrogate, ratio_stats


class GspoOptions(GroupRelativeOptions):
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """The importance ratio of a sequence is clipped from below at 1 minus this. It is a mean over the sequence's
    tokens, so it is far closer to 1 than a token's."""
    clip_high: Annotated[float, Field(ge=0)] = 4e-4
    """The importance ratio of a sequence is clipped from above at 1 plus this."""


def sequence_policy_loss(logp: Tensor, batch: LossBatch, options: GspoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with one importance ratio for each sequence, of M tokens: ``-min(s A, clip(s, 1 - clip_low,
    1 + clip_high) A)`` with ``s = exp(mean over the sequence of (logp - old))``, the
    length-normalised likelihood ratio (eqs. 5 and 7).

    It is written as GSPO-token (eqs. 13 and 14): each token has the value of its sequence's ratio, and the gradient of
    its own log-prob, ``s_t = sg(s) * exp(logp - sg(logp))``. The mean over the tokens of a sequence then has the value
    and the gradient of GSPO where the sequence has one advantage, and advantages may also differ from token to token.

    ``logp`` [M] fp32 is the only input that gets a gradient; ``old_logprobs`` and ``advantages`` [M] fp32. Returns the
    loss [M] and, detached [M] each, ``ratio_mean`` (the sequence's ratio), ``clip_fraction`` (1 where the clip removed
    the gradient) and ``kl`` (of the tokens, as in ``clipped_policy_loss``).
    """
    log_ratio = bounded_log_ratio(logp, batch["old_logprobs"])
    of_sequence = batch.to_tokens(batch.sequence_mean(log_ratio.detach()))
    ratio = (of_sequence + (logp - logp.detach())).exp()
    loss, clipped = clipped_surrogate(ratio, batch.advantages.detach(), options.clip_low, options.clip_high)
    return loss, ratio_stats(log_ratio.detach()) | {"ratio_mean": ratio.detach(), "clip_fraction": clipped}
