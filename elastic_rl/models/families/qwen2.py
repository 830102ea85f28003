"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from elastic_rl.models.families.parameters import (
    ATTENTION,
    MLP,
    OTHER_ACTIVATION,
    QKV_BIAS,
    QUANTIZED,
    QWEN_DEFAULTS,
    SLIDING_WINDOW,
)
from elastic_rl.models.family import Family

QWEN2 = Family("qwen2", ATTENTION | QKV_BIAS | MLP, qkv_bias=True, head_dim_from_width=True, own_head_dim=False,
               refusals=(QUANTIZED, OTHER_ACTIVATION, SLIDING_WINDOW), defaults=QWEN_DEFAULTS)
