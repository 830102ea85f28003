"""The model that a run starts from."""

from __future__ import annotations

from elastic_rl.config.section import Positive, Section


class ModelConfig(Section):
    path: str = ""
    """Folder of an HF model to start from; empty: a tiny one of the shape below is made from the seed."""
    hidden_size: Positive = 96
    """Width of the residual stream. RL on the built-in task needs half the steps that a width of 64 needs."""
    intermediate_size: Positive = 288
    """Width of the feed-forward layers."""
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 16
    max_positions: Positive = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
