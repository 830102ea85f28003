"""Llama 2, 3.x and models of the same shape."""

from __future__ import annotations

from elastic_rl.models.families.parameters import ATTENTION, ATTENTION_BIAS, MLP, OTHER_ACTIVATION, QUANTIZED
from elastic_rl.models.family import Family, Refusal

LLAMA = Family(
    "llama", ATTENTION | MLP, head_dim_from_width=True,
    refusals=(QUANTIZED, OTHER_ACTIVATION, ATTENTION_BIAS, Refusal("mlp_bias", "biases of the MLP")),
    defaults={"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048,
              "rms_norm_eps": 1e-6, "eos_token_id": 2})
