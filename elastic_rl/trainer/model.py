"""The policy: a Megatron GPTModel with the shape of an HF Qwen3 folder, wrapped for data parallelism."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from elastic_rl.config import Config
from elastic_rl.errors import ConfigError
from elastic_rl.trainer import hf_layout
from elastic_rl.trainer.hf_layout import AttentionDims
from elastic_rl.trainer.parallel import ParallelDims


@dataclass(frozen=True)
class ModelArch:
    """The model as a Qwen3 ``config.json`` describes it."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def read(cls, model_dir: Path | str) -> ModelArch:
        """Raises ConfigError when the folder has no Qwen3 model that the trainer supports."""
        path = Path(model_dir) / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read {path}: {e}") from e
        if raw.get("model_type") != "qwen3":
            raise ConfigError(f"{path} describes a {raw.get('model_type')!r} model",
                              hint="the trainer supports dense Qwen3 models")
        if raw.get("tie_word_embeddings") or raw.get("attention_bias"):
            raise ConfigError(f"{path}: tied embeddings and attention biases are not supported")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"{path}: rope scaling {rope.get('rope_type')!r} is not supported")
        return cls(layers=raw["num_hidden_layers"], hidden=raw["hidden_size"], ffn=raw["intermediate_size"],
                   heads=raw["num_attention_heads"], kv_heads=raw["num_key_value_heads"], head_dim=raw["head_dim"],
                   vocab=raw["vocab_size"], max_positions=raw["max_position_embeddings"],
                   rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
                   norm_eps=raw["rms_norm_eps"])

    def attention_dims(self, tp: int) -> AttentionDims:
        """Raises ConfigError when the heads do not fit."""
        return AttentionDims(self.heads, self.kv_heads, self.head_dim, self.vocab,
                             hf_layout.padded_vocab(self.vocab, tp))


class Policy:
    """This rank's part of the model."""

    def __init__(self, arch: ModelArch, cfg: Config, par: ParallelDims) -> None:
        self.arch, self.par = arch, par
        self.dims = arch.attention_dims(par.tp)
        # The optimizer and gradient code read the model through Megatron's DDP, so it is wrapped for one replica too.
        self.ddp = _wrap(_build(arch, self.dims, cfg, par))

    @property
    def module(self) -> torch.nn.Module:
        return self.ddp.module

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name, this rank's shard), in a fixed order. Layers are numbered over the whole model."""
        first = self.par.pp_rank * (self.arch.layers // self.par.pp)
        for name, param in self.module.named_parameters():
            yield hf_layout.with_layer_offset(name, first), param

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From tokens [N, T] int64, right-padded, to this rank's columns of the logits [N, T, padded_vocab / TP];
        before the last pipeline stage to the hidden states [T, N, hidden].

        Padding columns hold the dtype's minimum, so that they have no probability.
        """
        n, width = tokens.shape
        positions = torch.arange(width, device=tokens.device).expand(n, width)
        mask = torch.ones(width, width, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        logits: torch.Tensor = self.ddp(tokens, positions, mask)
        if not self.par.is_last_stage:
            return logits
        first = self.par.tp_rank * logits.shape[-1]
        real = self.dims.vocab - first
        if real < logits.shape[-1]:
            logits = logits.clone()
            logits[..., max(real, 0):] = torch.finfo(logits.dtype).min
        return logits

    @torch.no_grad()
    def load_hf(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's shards of full HF tensors. Raises ConfigError for a missing tensor or a wrong shape."""
        for name, param in self.parameters():
            shard = hf_layout.split(hf_layout.rule_of(name), tensors, self.dims, tp=self.par.tp,
                                    tp_rank=self.par.tp_rank)
            if shard.shape != param.shape:
                raise ConfigError(f"{name} has shape {list(shard.shape)} in the file, {list(param.shape)} in the model")
            param.copy_(shard)

    def load_folder(self, model_dir: Path | str) -> None:
        """Initialises from the safetensors files of an HF folder. Raises ConfigError."""
        files = sorted(Path(model_dir).glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{model_dir} has no safetensors file")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 (no mapping)
        self.load_hf(tensors)


def _uses_te(cfg: Config, par: ParallelDims) -> bool:
    spec = cfg.device.layer_spec
    return spec == "te" or (spec == "auto" and par.device.type == "cuda")


def _build(arch: ModelArch, dims: AttentionDims, cfg: Config, par: ParallelDims) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(cfg.seed + 1)
    config = TransformerConfig(
        num_layers=arch.layers, hidden_size=arch.hidden, ffn_hidden_size=arch.ffn, num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads, kv_channels=arch.head_dim, tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp, variable_seq_lengths=par.pp > 1,
        moe_token_dispatcher_type="alltoall",  # unused in a dense model; the default refuses variable lengths
        params_dtype=torch.float32, pipeline_dtype=torch.float32, use_cpu_initialization=par.device.type == "cpu",
        perform_initialization=False,  # weights come from the HF folder or from a trainer_state
        normalization="RMSNorm", layernorm_epsilon=arch.norm_eps, qk_layernorm=True, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, add_qkv_bias=False, hidden_dropout=0.0,
        attention_dropout=0.0, attention_softmax_in_fp32=True, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, deterministic_mode=par.device.type == "cpu",
        calculate_per_token_loss=True)  # gradients are summed over replicas; the train step divides by all tokens
    spec = (get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True) if _uses_te(cfg, par)
            else get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"))
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=dims.padded_vocab,
                     max_sequence_length=arch.max_positions, parallel_output=True,
                     share_embeddings_and_output_weights=False, position_embedding_type="rope",
                     rotary_base=arch.rope_theta, pre_process=par.pp_rank == 0, post_process=par.is_last_stage)
    return model.to(par.device)


def _wrap(model: torch.nn.Module) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
