"""Builds this rank's part of a model as a Megatron GPTModel."""

from __future__ import annotations

from typing import Any

import torch

from elastic_rl.config import Config
from elastic_rl.models.arch import ModelArch
from elastic_rl.models.layout import AttentionDims
from elastic_rl.trainer.context_parallel import multiple
from elastic_rl.trainer.megatron.megatron_cpu import cuda_literals
from elastic_rl.trainer.megatron.parallel import ParallelDims


def build(arch: ModelArch, dims: AttentionDims, cfg: Config, par: ParallelDims) -> torch.nn.Module:
    """Parameters are not initialised. Raises ConfigError when the experts do not fit the expert-parallel size."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    arch.require_expert_parallel(par.ep)
    model_parallel_cuda_manual_seed(cfg.seed + 1)
    family, dtype = arch.family, getattr(torch, cfg.device.dtype)
    config = TransformerConfig(
        num_layers=arch.layers, hidden_size=arch.hidden, ffn_hidden_size=arch.ffn, num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads, kv_channels=arch.head_dim, tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp, context_parallel_size=par.cp, variable_seq_lengths=par.pp > 1,
        moe_token_dispatcher_type="alltoall",  # also of a dense model: the default refuses variable lengths
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype is torch.bfloat16,
        use_cpu_initialization=par.device.type == "cpu",
        perform_initialization=False,  # weights come from the HF folder or from a trainer_state
        normalization="RMSNorm", layernorm_epsilon=arch.norm_eps, qk_layernorm=family.qk_norm, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=family.qkv_bias,
        hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=True, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, deterministic_mode=cfg.deterministic or par.device.type == "cpu",
        calculate_per_token_loss=True,  # gradients are summed over replicas; the train step divides by all tokens
        **_recompute(cfg), **_moe(arch, cfg, par))
    with cuda_literals():  # tied embeddings are summed over the first and the last stage, on the GPU
        model = GPTModel(config=config, transformer_layer_spec=_spec(arch, cfg, par), vocab_size=dims.padded_vocab,
                         max_sequence_length=arch.max_positions, parallel_output=True,
                         share_embeddings_and_output_weights=arch.tied, position_embedding_type="rope",
                         rotary_base=arch.rope_theta, rope_scaling=arch.rope_factor is not None,
                         rope_scaling_factor=arch.rope_factor or 1.0, pre_process=par.pp_rank == 0,
                         post_process=par.is_last_stage)
    if arch.value_head and par.is_last_stage:
        model.output_layer = ValueHead(config)
    return model.to(par.device, dtype)  # Megatron's local norms are fp32 whatever the config says


def wrap(model: torch.nn.Module, cfg: Config) -> Any:
    """The model in Megatron's DDP, which adds gradients up in fp32 and sums them over the replicas."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=cfg.trainer.distributed_optimizer), model)


def padded_length(config: Any, length: int) -> int:
    """Positions to which rows of ``length`` are padded: a multiple of the tensor-parallel size with sequence
    parallelism, which gives each rank as many, and with context parallelism of the chunks of a sequence."""
    of_tensor = config.tensor_model_parallel_size if config.sequence_parallel else 1
    divisor = of_tensor * multiple(config.context_parallel_size)
    return -(-length // divisor) * divisor


class ValueHead(torch.nn.Module):
    """The last layer of a critic: one number a position, in fp32. Each rank of a tensor-parallel group has all of it
    and computes the same, so its gradient is whole on each."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._gathers = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, **_of_logits: Any) -> tuple[torch.Tensor, None]:
        """Values [P, R, 1] of hidden states [P, R, hidden], with sequence parallelism this rank's positions of them."""
        if self._gathers:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of Megatron's local layers under sequence parallelism, which its wrapper of torch's norm refuses: each
    rank has some positions, so its gradient is a part, which Megatron sums over the tensor-parallel group."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[union-attr]


def _recompute(cfg: Config) -> dict[str, Any]:
    """Which activations the backward pass computes again (arXiv 2205.05198)."""
    if cfg.trainer.recompute == "none":
        return {}
    if cfg.trainer.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _moe(arch: ModelArch, cfg: Config, par: ParallelDims) -> dict[str, Any]:
    moe, aux = arch.moe, cfg.trainer.moe_aux_loss_coef
    if moe is None:
        return {}
    from megatron.core.transformer.moe import moe_utils

    # Megatron's router reads this name also where it could not import it, which is where Transformer Engine is missing.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    return {
        "num_moe_experts": moe.experts, "moe_ffn_hidden_size": moe.ffn, "moe_router_topk": moe.top_k,
        # HF: softmax over all experts, then the largest, divided by their sum with norm_topk_prob. That division makes
        # it the softmax over the chosen ones only.
        "moe_router_pre_softmax": not moe.norm_top_k, "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux else "none", "moe_aux_loss_coeff": aux,
        "moe_grouped_gemm": False, "expert_model_parallel_size": par.ep,
        # Without it the ranks of a TP group would send the same tokens to an expert, whose gradient would be too large.
        "sequence_parallel": par.tp > 1}


def _spec(arch: ModelArch, cfg: Config, par: ParallelDims) -> Any:
    """The modules of a layer, or of all layers of the stage and the norm after them."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    experts = arch.moe.experts if arch.moe is not None else None
    if uses_te(cfg, par):
        return get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=False,
                                                          qk_layernorm=arch.family.qk_norm)
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=arch.family.qk_norm,
                                    normalization="RMSNorm")
    if cfg.trainer.packing:
        from elastic_rl.trainer.megatron.packed_attention import PackedAttention

        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    if experts is None or par.tp == 1:
        return spec
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if arch.family.qk_norm:
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * (arch.layers // par.pp), layer_norm=RMSNorm)


def uses_te(cfg: Config, par: ParallelDims) -> bool:
    """Whether layers are Transformer Engine's instead of Megatron's own."""
    spec = cfg.device.layer_spec
    return spec == "te" or (spec == "auto" and par.device.type == "cuda")
