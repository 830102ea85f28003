"""On-policy distillation (arXiv:2306.13649; arXiv:2306.08543): the policy learns on its own samples from a teacher's
log-probs of them, by the reverse KL divergence. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from elastic_rl.algorithms.advantages import GroupRelativeOptions
from elastic_rl.algorithms.losses import ClipOptions
from elastic_rl.config import AlgorithmConfig
from elastic_rl.data.batch import Batch


class DistillationOptions(ClipOptions, GroupRelativeOptions):
    reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the advantages that follow from rewards, as those of ``grpo``, beside the teacher's. 0: rewards are
    reported, and teach nothing."""


def teacher_advantages(batch: Batch, options: DistillationOptions, cfg: AlgorithmConfig) -> Tensor:
    """[L] fp32: of each loss token ``teacher_coef * (log p_teacher - log p_policy)``, with the log-prob that it was
    sampled with: the estimate of the negative divergence that the token alone is responsible for (MiniLLM's single-step
    part, arXiv:2306.08543, eq. 3). ``reward_coef`` times the advantage of its sample is added.

    With ``teacher_top_k`` the divergence itself is a term of the loss, and only the latter is left here.
    """
    found = options.reward_coef * batch.to_tokens(batch["advantages"])
    if not cfg.teacher_top_k:
        found = found + cfg.teacher_coef * (batch["teacher_logprobs"] - batch["old_logprobs"])
    return found
