"""The divergence of samples from the reference policy, in their rewards. Pure."""

from __future__ import annotations

import torch

from elastic_rl.algorithms.kl import kl_estimate, rewards_less_kl
from elastic_rl.config import AlgorithmConfig
from elastic_rl.data.batch import Batch


def without_scores(batch: Batch) -> Batch:
    """What a forward pass needs of a batch."""
    return batch.only("tokens", "lengths", "loss_mask")


def sample_divergences(batch: Batch, reference: torch.Tensor, cfg: AlgorithmConfig) -> torch.Tensor:
    """[N] float64: the divergence of each sample from the reference policy, in nats: the sum of the estimates of its
    loss tokens, whose log-probs under the policy are those that they were sampled with (arXiv:2203.02155, eq. 2).

    ``reference`` [L] fp32: log-probs of the loss tokens.
    """
    estimates = kl_estimate(batch["old_logprobs"].double(), reference.double(), cfg.estimator)
    return batch.sequence_sum(estimates)


def penalised(rewards: list[list[float]], divergences: torch.Tensor, cfg: AlgorithmConfig) -> list[list[float]]:
    """The rewards of groups, less the weighted divergences [N] of their samples, which are in the same order. Groups
    need not have the same number of samples."""
    flat = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    left = iter(rewards_less_kl(flat, divergences, cfg).tolist())
    return [[next(left) for _ in group] for group in rewards]
