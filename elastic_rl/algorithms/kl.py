"""Estimates of the divergence from a reference policy, of sampled tokens (J. Schulman, "Approximating KL divergence",
2020). Pure."""

from __future__ import annotations

from torch import Tensor

from elastic_rl.algorithms.losses import MAX_LOG_RATIO
from elastic_rl.config import AlgorithmConfig
from elastic_rl.config.algorithm import KlEstimator


def kl_estimate(logp: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) in nats, estimated from each of M tokens that the policy sampled. With ``r = logp -
    reference``:

    - ``k1``: ``r``. Its mean is right, but it is negative for some tokens, and the gradient of the mean is 0 in
      expectation: of no use in losses. As a reward it alone is right: the gradient of the expected reward,
      ``E[-r * grad logp]``, is that of the divergence, and with k2 or k3 in the place of ``r`` it nearly vanishes near
      the reference and points away from it elsewhere.
    - ``k2``: ``r**2 / 2``. Biased, but on samples of the policy its gradient is that of the divergence.
    - ``k3``: ``exp(-r) - 1 + r``. Right, never negative, of small variance; GRPO's choice (arXiv:2402.03300, eq. 4).
      Its gradient is that of KL(reference || policy).

    ``logp`` [M] may have a gradient; ``reference`` [M] gets none. Result [M]. For k3 the exponent is bounded by
    ``MAX_LOG_RATIO``.
    """
    ratio = logp - reference.detach()
    if estimator == "k1":
        return ratio
    if estimator == "k2":
        return 0.5 * ratio.square()
    bounded = ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-bounded).exp() - 1 + bounded


def rewards_less_kl(rewards: Tensor, kl: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Rewards less ``kl_coef`` times the divergence of each sample, ``kl`` of the same shape: the sum of the estimates
    of its tokens, without gradient (arXiv:2203.02155, eq. 2). Raises ValueError for another shape."""
    if rewards.shape != kl.shape:
        raise ValueError(f"the divergences must be {list(rewards.shape)} as the rewards, not {list(kl.shape)}")
    return rewards - cfg.kl_coef * kl.detach()
