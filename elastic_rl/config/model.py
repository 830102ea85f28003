"""The model that a run starts from."""

from __future__ import annotations

from elastic_rl.config.section import Positive, Section


class ModelConfig(Section):
    path: str = ""
    """Folder of a Hugging Face model to start from. Empty: a small model of the shape below, initialised from the
    seed."""
    hidden_size: Positive = 96
    """Width of the hidden states. This and all settings below are ignored when ``path`` is set."""
    intermediate_size: Positive = 288
    """Width of the MLP's hidden layer."""
    num_layers: Positive = 2
    """Number of transformer layers; a multiple of ``trainer.pipeline_parallel``."""
    num_heads: Positive = 4
    """Number of attention heads; a multiple of ``trainer.tensor_parallel``."""
    num_kv_heads: Positive = 2
    """Number of key-value heads; a multiple of ``trainer.tensor_parallel``."""
    head_dim: Positive = 16
    """Width of one attention head."""
    max_positions: Positive = 64
    """Longest sequence, prompt and response together, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
