"""Parameters that several families have alike. Names as in transformers' checkpoints and in megatron-core 0.16."""

from __future__ import annotations

from typing import Any

from elastic_rl.models.family import Parameters, Refusal
from elastic_rl.models.layout import ShardLayout

TOP: Parameters = {
    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",), ShardLayout.VOCAB),
    "output_layer.weight": (("lm_head.weight",), ShardLayout.VOCAB),
    "decoder.final_layernorm.weight": (("model.norm.weight",), ShardLayout.WHOLE),
}
"""Parameters outside the layers, with their whole names. With tied embeddings the output layer is the embedding."""

ATTENTION: Parameters = {
    "input_layernorm.weight": (("input_layernorm.weight",), ShardLayout.WHOLE),
    # Transformer Engine fuses the two norms into the linear layers after them.
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), ShardLayout.WHOLE),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), ShardLayout.WHOLE),
    "self_attention.linear_qkv.weight": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), ShardLayout.QKV),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), ShardLayout.COLUMNS),
}
QK_NORM: Parameters = {
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), ShardLayout.WHOLE),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), ShardLayout.WHOLE),
}
QKV_BIAS: Parameters = {
    "self_attention.linear_qkv.bias": (
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), ShardLayout.QKV),
}
MLP: Parameters = {
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), ShardLayout.WHOLE),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), ShardLayout.GATE_UP),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), ShardLayout.COLUMNS),
}
EXPERTS: Parameters = {
    "mlp.router.weight": (("mlp.gate.weight",), ShardLayout.WHOLE),
    "mlp.experts.local_experts.{}.linear_fc1.weight": (
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"), ShardLayout.GATE_UP),
    "mlp.experts.local_experts.{}.linear_fc2.weight": (("mlp.experts.{}.down_proj.weight",), ShardLayout.COLUMNS),
}

QUANTIZED = Refusal("quantization_config", "quantized weights", (None,))
OTHER_ACTIVATION = Refusal("hidden_act", "activations other than SwiGLU's", ("silu",))
ATTENTION_BIAS = Refusal("attention_bias", "attention biases")
SLIDING_WINDOW = Refusal("use_sliding_window", "sliding-window attention")

QWEN_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
"""The defaults of transformers' ``Qwen2Config`` and ``Qwen3Config``."""
