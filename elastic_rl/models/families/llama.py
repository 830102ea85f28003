"""Llama 2, 3.x and models of the same shape."""

from __future__ import annotations

from elastic_rl.models.families.parameters import ATTENTION, ATTENTION_BIAS, MLP, OTHER_ACTIVATION, QUANTIZED
from elastic_rl.models.family import Family, Refusal

LLAMA = Family(
    "llama", ATTENTION | MLP, head_dim_from_width=True,
    refusals=(QUANTIZED, OTHER_ACTIVATION, ATTENTION_BIAS, Refusal("mlp_bias", "biases of the MLP")))
