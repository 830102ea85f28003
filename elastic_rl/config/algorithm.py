"""The RL algorithm."""

from __future__ import annotations

from typing import Literal

from elastic_rl.config.section import Section


class AlgorithmConfig(Section):
    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Asymmetric clip of the importance ratio (DAPO, arXiv:2503.14476)."""
    normalize_std: bool = True
    """Divide the group-centred reward by its standard deviation (GRPO, arXiv:2402.03300)."""
