"""Megatron's local attention for packed rows and for context parallelism, which Megatron leaves to Transformer Engine.
Imports Megatron: only to be imported once the CPU's stand-ins are installed."""

from __future__ import annotations

import copy
from functools import partial
from itertools import groupby
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from elastic_rl.trainer.context_parallel import joined_for_parts, own_positions


class PackedAttention(DotProductAttention):
    """Megatron's attention; of a packed row each sequence attends to itself, by torch's fused kernel, which keeps no
    scores for the backward pass. So neither time nor memory depends on what else is in the row. Neighbours of the same
    length, of which short responses have many, take one call of the kernel.

    With context parallelism each rank gets the keys and values of all positions, for its own queries.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # Megatron's own class takes no other
        super().__init__(alone, *args, **kwargs)
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                attn_mask_type: Any = None, attention_bias: Tensor | None = None,
                packed_seq_params: Any = None) -> Tensor:
        """``query`` [T / CP, heads / TP, dim], ``key`` and ``value`` [T / CP, kv_heads / TP, dim] of a packed row, to
        [T / CP, heads / TP, dim]; of padded rows as Megatron's."""
        if packed_seq_params is None:
            padded: Tensor = super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
            return padded
        assert attention_bias is None, "no model here has one"
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        cp, cp_rank = self.config.context_parallel_size, 0
        if cp > 1:
            group = parallel_state.get_context_parallel_group()
            cp_rank = group.rank()
            own = own_positions(lengths, cp, cp_rank).to(key.device)
            # One collective, so that the backward passes of all ranks have them in the same order.
            key, value = joined_for_parts(torch.stack((key, value), dim=1), own, sum(lengths), group).unbind(1)
        runs = [(length, len(list(same))) for length, same in groupby(lengths)]
        queries = query.split([length * count // cp for length, count in runs])
        keys, values = (x.split([length * count for length, count in runs]) for x in (key, value))
        out = []
        for (_, count), *qkv in zip(runs, queries, keys, values, strict=True):
            # [count, heads, length, dim]
            q, k, v = (x.unflatten(0, (count, x.shape[0] // count)).transpose(1, 2) for x in qkv)
            out.append(attend(q, k, v, self.softmax_scale, cp, cp_rank).transpose(1, 2).flatten(0, 1))
        return torch.cat(out)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cp: int = 1, cp_rank: int = 0) -> Tensor:
    """Causal attention of a rank's positions ``q`` [N, heads, T / CP, dim] of N sequences to ``k`` and ``v`` [N,
    kv_heads, T, dim]; keeps nothing that grows with the square of T."""
    attention = partial(scaled_dot_product_attention, scale=scale, enable_gqa=True)

    def of_chunks() -> Tensor:
        parts, size = [], q.shape[2] // 2
        for of_chunk, chunk in zip(q.split(size, dim=2), (cp_rank, 2 * cp - 1 - cp_rank), strict=True):
            end = (chunk + 1) * size
            mask = torch.ones(size, end, dtype=torch.bool, device=q.device).tril(end - size)
            parts.append(attention(of_chunk, k[:, :, :end], v[:, :, :end], attn_mask=mask))
        return torch.cat(parts, dim=2)

    if cp == 1:
        return attention(q, k, v, is_causal=True)
    # The kernel keeps a mask that it is given, which is as large as the scores; so all is computed again instead.
    found: Tensor = checkpoint(of_chunks, use_reentrant=False, preserve_rng_state=False)
    return found
