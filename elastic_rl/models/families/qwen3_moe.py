"""Qwen3 with experts in every layer."""

from __future__ import annotations

from elastic_rl.models.families.parameters import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERTS,
    OTHER_ACTIVATION,
    QK_NORM,
    QUANTIZED,
    QWEN_DEFAULTS,
    SLIDING_WINDOW,
)
from elastic_rl.models.family import Family, Refusal

QWEN3_MOE = Family(
    "qwen3_moe", ATTENTION | QK_NORM | EXPERTS, qk_norm=True, experts=True, head_dim_from_width=True,
    refusals=(QUANTIZED, OTHER_ACTIVATION, ATTENTION_BIAS, SLIDING_WINDOW,
              Refusal("mlp_only_layers", "layers without experts", (None, [])),
              Refusal("decoder_sparse_step", "layers without experts", (1,))),
    defaults={**QWEN_DEFAULTS, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
              "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128})
