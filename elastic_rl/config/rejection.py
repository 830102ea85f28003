"""``mode: rejection_sampling``."""

from __future__ import annotations

from elastic_rl.config.section import Positive, Section


class RejectionConfig(Section):
    keep: Positive = 1
    """With ``mode: rejection_sampling``, number of samples that are kept of each prompt, the best ones of
    ``train.group_size``; of equal responses one is kept, and none that reached the limit of its length."""
    min_reward: float | None = None
    """With ``mode: rejection_sampling``, smallest reward of a sample that is kept. null: any."""
    prompts: Positive | None = None
    """With ``mode: rejection_sampling``, number of prompts that are sampled, in the order of the seed; a prompt's turn
    comes again once all have had theirs. null: as many as there are. A source without end needs a number."""
