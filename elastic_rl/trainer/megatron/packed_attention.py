"""Megatron's local attention for packed rows, which Megatron leaves to Transformer Engine. Imports Megatron: only to be
imported once the CPU's stand-ins are installed."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention


class PackedAttention(DotProductAttention):
    """Megatron's attention; of a packed row each sequence attends to itself, by torch's fused kernel, which keeps no
    scores for the backward pass. So neither time nor memory depends on what else is in the row. Neighbours of the same
    length, of which short responses have many, take one call of the kernel."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                attn_mask_type: Any = None, attention_bias: torch.Tensor | None = None,
                packed_seq_params: Any = None) -> torch.Tensor:
        """``query`` [T, heads / TP, dim], ``key`` and ``value`` [T, kv_heads / TP, dim] of a packed row, to
        [T, heads / TP, dim]; of padded rows as Megatron's."""
        if packed_seq_params is None:
            padded: torch.Tensor = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            return padded
        assert attention_bias is None, "no model here has one"
        runs = [(length, len(list(same))) for length, same in groupby(packed_seq_params.cu_seqlens_q.diff().tolist())]
        parts = zip(*(x.split([length * count for length, count in runs]) for x in (query, key, value)), strict=True)
        out = []
        for (length, count), qkv in zip(runs, parts, strict=True):
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)  # [count, heads, length, dim]
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
            out.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(out)
