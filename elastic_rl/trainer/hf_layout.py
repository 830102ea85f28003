"""Converts tensors between Megatron's layout and HF's, both ways. Pure: no process group, no model.

A parameter and its two Adam moments have one layout, so the same rules convert weights and optimizer state. The full HF
layout is stored; a group of any tensor-parallel size splits it into its own shards, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from elastic_rl.errors import ConfigError


class ShardLayout(Enum):
    """How a parameter is split over tensor-parallel ranks."""

    WHOLE = "whole"
    """The same on every rank."""
    COLUMNS = "columns"
    VOCAB = "vocab"
    """Rows, after padding the vocabulary to a multiple of the group size."""
    QKV = "qkv"
    """Rows; per KV group the queries of the group, then its key, then its value."""
    GATE_UP = "gate_up"
    """Each rank holds its rows of gate, then its rows of up."""


@dataclass(frozen=True)
class AttentionDims:
    """Sizes of attention and vocabulary. Megatron has ``padded_vocab`` rows, HF the first ``vocab`` of them."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    padded_vocab: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.padded_vocab < self.vocab:
            raise ConfigError(f"padded vocabulary {self.padded_vocab} is smaller than the vocabulary {self.vocab}")


def padded_vocab(vocab: int, tp: int) -> int:
    """The smallest multiple of ``tp`` that is at least ``vocab``."""
    return -(-vocab // tp) * tp


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter: its HF tensors and its layout."""

    hf: tuple[str, ...]
    layout: ShardLayout


_TOP = {
    "embedding.word_embeddings.weight": Rule(("model.embed_tokens.weight",), ShardLayout.VOCAB),
    "output_layer.weight": Rule(("lm_head.weight",), ShardLayout.VOCAB),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",), ShardLayout.WHOLE),
}
_LAYER = {
    "input_layernorm.weight": (("input_layernorm.weight",), ShardLayout.WHOLE),
    # Transformer Engine fuses the two norms into the linear layers after them.
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), ShardLayout.WHOLE),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), ShardLayout.WHOLE),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), ShardLayout.WHOLE),
    "self_attention.linear_qkv.weight": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), ShardLayout.QKV),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), ShardLayout.COLUMNS),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), ShardLayout.WHOLE),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), ShardLayout.WHOLE),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), ShardLayout.GATE_UP),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), ShardLayout.COLUMNS),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def with_layer_offset(megatron_name: str, first: int) -> str:
    """The name in the whole model of a parameter of a pipeline stage whose first layer is ``first``."""
    match = _LAYER_NAME.fullmatch(megatron_name)
    return f"decoder.layers.{int(match[1]) + first}.{match[2]}" if match else megatron_name


def rule_of(megatron_name: str) -> Rule:
    """The rule of a Megatron parameter. Raises ConfigError for one that has no HF counterpart here."""
    if megatron_name in _TOP:
        return _TOP[megatron_name]
    match = _LAYER_NAME.fullmatch(megatron_name)
    if match is None or match[2] not in _LAYER:
        raise ConfigError(f"the Megatron parameter {megatron_name!r} has no HF counterpart",
                          hint="only dense Qwen3-shaped models with untied embeddings are supported")
    names, layout = _LAYER[match[2]]
    return Rule(tuple(f"model.layers.{match[1]}.{n}" for n in names), layout)


def merge(rule: Rule, shards: Sequence[torch.Tensor], dims: AttentionDims) -> dict[str, torch.Tensor]:
    """Merges shards in rank order into contiguous full HF tensors by name."""
    if rule.layout is ShardLayout.WHOLE:
        return {rule.hf[0]: shards[0].contiguous()}
    if rule.layout is ShardLayout.COLUMNS:
        return {rule.hf[0]: torch.cat(list(shards), dim=1)}
    if rule.layout is ShardLayout.GATE_UP:
        halves = [s.chunk(2, dim=0) for s in shards]
        return {name: torch.cat([h[i] for h in halves], dim=0) for i, name in enumerate(rule.hf)}
    full = torch.cat(list(shards), dim=0)
    if rule.layout is ShardLayout.VOCAB:
        return {rule.hf[0]: full[:dims.vocab].contiguous()}
    per_group = dims.heads // dims.kv_heads
    grouped = full.view(dims.kv_heads, per_group + 2, dims.head_dim, *full.shape[1:])
    parts = (grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1])
    return {name: part.reshape(-1, *full.shape[1:]).contiguous() for name, part in zip(rule.hf, parts, strict=True)}


def split(rule: Rule, hf: Mapping[str, torch.Tensor], dims: AttentionDims, *, tp: int, tp_rank: int) -> torch.Tensor:
    """The shard of one rank of full HF tensors; the inverse of ``merge``. Padded vocabulary rows are zero.

    Raises ConfigError when a tensor is missing.
    """
    missing = [name for name in rule.hf if name not in hf]
    if missing:
        raise ConfigError(f"the model has no tensor {', '.join(missing)}",
                          hint="only dense Qwen3-shaped models with untied embeddings are supported")
    tensors = [hf[name] for name in rule.hf]
    if rule.layout is ShardLayout.WHOLE:
        return tensors[0].clone()
    if rule.layout is ShardLayout.GATE_UP:
        return torch.cat([t.chunk(tp, dim=0)[tp_rank] for t in tensors], dim=0)
    if rule.layout is ShardLayout.COLUMNS:
        return tensors[0].chunk(tp, dim=1)[tp_rank].clone(memory_format=torch.contiguous_format)
    full = tensors[0]
    if rule.layout is ShardLayout.VOCAB:
        pad = full.new_zeros(dims.padded_vocab - full.shape[0], *full.shape[1:])
        full = torch.cat([full, pad], dim=0)
    else:
        rest = full.shape[1:]
        full = torch.cat([t.view(dims.kv_heads, -1, dims.head_dim, *rest) for t in tensors], dim=1).reshape(-1, *rest)
    return full.chunk(tp, dim=0)[tp_rank].clone()
