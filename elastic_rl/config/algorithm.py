"""The RL algorithm."""

from __future__ import annotations

from typing import Literal

from elastic_rl.config.section import Section


class AlgorithmConfig(Section):
    name: Literal["grpo"] = "grpo"
    """Name of the algorithm: ``grpo`` (arXiv:2402.03300)."""
    clip_low: float = 0.2
    """The importance ratio is clipped from below at 1 minus this."""
    clip_high: float = 0.28
    """The importance ratio is clipped from above at 1 plus this; larger than ``clip_low`` as in DAPO
    (arXiv:2503.14476)."""
    normalize_std: bool = True
    """Whether the group-centred rewards are divided by their standard deviation, as in GRPO (arXiv:2402.03300)."""
