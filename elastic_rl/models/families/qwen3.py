"""Qwen3, dense."""

from __future__ import annotations

from elastic_rl.models.families.parameters import (
    ATTENTION,
    ATTENTION_BIAS,
    MLP,
    OTHER_ACTIVATION,
    QK_NORM,
    QUANTIZED,
    QWEN_DEFAULTS,
    SLIDING_WINDOW,
)
from elastic_rl.models.family import Family

QWEN3 = Family("qwen3", ATTENTION | QK_NORM | MLP, qk_norm=True,
               refusals=(QUANTIZED, OTHER_ACTIVATION, ATTENTION_BIAS, SLIDING_WINDOW),
              defaults={**QWEN_DEFAULTS, "head_dim": 128})
