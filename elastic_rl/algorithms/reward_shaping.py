"""Changes of rewards before advantages are made of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.config import AlgorithmConfig


def overlong_penalty(length: int, limit: int, cfg: AlgorithmConfig) -> float:
    """DAPO's soft punishment of a response of ``length`` tokens, of ``limit`` at most (arXiv:2503.14476, eq. 13): 0 up
    to ``limit - overlong_buffer_tokens``, then falling on a line to ``-overlong_penalty`` at ``limit`` and beyond it.
    0 throughout without a buffer. A buffer that is larger than the limit begins at the first token.
    """
    buffer = min(cfg.overlong_buffer_tokens, limit)
    if not buffer:
        return 0.0
    over = length - (limit - buffer)
    return -cfg.overlong_penalty * min(max(over / buffer, 0.0), 1.0)


def shaped_rewards(rewards: Sequence[float], lengths: Sequence[int], limit: int, cfg: AlgorithmConfig) -> list[float]:
    """The rewards of samples with the penalty for their lengths added; without a buffer exactly as they were."""
    if not cfg.overlong_buffer_tokens:
        return list(rewards)
    return [r + overlong_penalty(n, limit, cfg) for r, n in zip(rewards, lengths, strict=True)]
