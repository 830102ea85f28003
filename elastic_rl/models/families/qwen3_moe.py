"""Qwen3 with experts in every layer."""

from __future__ import annotations

from elastic_rl.models.families.parameters import (
    ATTENTION,
    ATTENTION_BIAS,
    EXPERTS,
    OTHER_ACTIVATION,
    QK_NORM,
    QUANTIZED,
    SLIDING_WINDOW,
)
from elastic_rl.models.family import Family, Refusal

QWEN3_MOE = Family(
    "qwen3_moe", ATTENTION | QK_NORM | EXPERTS, qk_norm=True, experts=True,
    refusals=(QUANTIZED, OTHER_ACTIVATION, ATTENTION_BIAS, SLIDING_WINDOW,
              Refusal("mlp_only_layers", "layers without experts", (None, [])),
              Refusal("decoder_sparse_step", "layers without experts", (1,))))
