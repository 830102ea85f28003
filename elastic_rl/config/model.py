"""The model that a run starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import PathText, Positive, Section


class ModelConfig(Section):
    path: PathText = ""
    """Folder of a Hugging Face model to start from, of one of the families that ``model.family`` lists. Empty: a small
    model of the shape below, initialised from the seed."""
    family: Literal["qwen3", "llama", "qwen2", "qwen3_moe"] = "qwen3"
    """Family of the small model. This and all settings below are ignored when ``path`` is set."""
    tied_embeddings: bool = False
    """Whether the output layer of the small model is its word embedding."""
    hidden_size: Positive = 96
    """Width of the hidden states."""
    intermediate_size: Positive = 288
    """Width of the MLP's hidden layer."""
    num_layers: Positive = 2
    """Number of transformer layers; a multiple of ``trainer.pipeline_parallel``."""
    num_heads: Positive = 4
    """Number of attention heads; a multiple of ``trainer.tensor_parallel``."""
    num_kv_heads: Positive = 2
    """Number of key-value heads; a multiple of ``trainer.tensor_parallel``."""
    head_dim: Positive = 16
    """Width of one attention head; even. A ``qwen2`` model has none of its own: ``hidden_size`` over ``num_heads``."""
    max_positions: Positive = 64
    """Longest sequence, prompt and response together, in tokens."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Epsilon of the RMS norms."""
    num_experts: Positive = 4
    """Number of experts in each layer of a ``qwen3_moe`` model; a multiple of ``trainer.expert_parallel``."""
    experts_per_token: Annotated[int, Field(ge=2)] = 2
    """Number of experts that a token is sent to in a ``qwen3_moe`` model; at most ``num_experts``."""
    expert_intermediate_size: Positive = 96
    """Width of the hidden layer of one expert of a ``qwen3_moe`` model; a multiple of ``trainer.tensor_parallel``."""
