"""On-policy distillation (arXiv:2306.13649; arXiv:2306.08543): the policy learns on its own samples from a teacher's
log-probs of them, by the reverse KL divergence. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_rl.config import AlgorithmConfig
from elastic_rl.data.batch import Batch


def teacher_advantages(batch: Batch, cfg: AlgorithmConfig) -> Tensor:
    """[N, T] fp32: of each token ``teacher_coef * (log p_teacher - log p_policy)``, with the log-prob that it was
    sampled with: the estimate of the negative divergence that the token alone is responsible for (MiniLLM's single-step
    part, arXiv:2306.08543, eq. 3). ``reward_coef`` times the advantage of its sample is added.

    With ``teacher_top_k`` the divergence itself is a term of the loss, and only the latter is left here.
    """
    found = cfg.reward_coef * batch["advantages"][:, None].expand(batch.samples, batch.width)
    if not cfg.teacher_top_k:
        found = found + cfg.teacher_coef * (batch["teacher_logprobs"] - batch["old_logprobs"])
    return torch.where(batch["loss_mask"], found, 0.0)
