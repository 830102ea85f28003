"""Context parallelism: the ranks of a context-parallel group each hold some positions of every sequence of a packed
row. Knows no Megatron.

Of a sequence in 2 * CP chunks rank r has the chunks r and 2 * CP - 1 - r (the load-balanced, or zigzag, split), so that
under a causal mask all ranks have as much to compute: the cut of Transformer Engine and of Megatron's rotary embedding.
Only attention needs positions of other ranks. Losses of whole sequences need their log-probs, which ``joined`` gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def multiple(cp: int) -> int:
    """The length of each sequence is a multiple of this."""
    return 2 * cp if cp > 1 else 1


def own_positions(lengths: Sequence[int], cp: int, cp_rank: int) -> Tensor:
    """int64 positions of a rank in a row of sequences of these lengths, each a multiple of ``multiple(cp)``, in the
    order in which the rank has them. Pure."""
    chunks = multiple(cp)
    own = (cp_rank, chunks - 1 - cp_rank) if cp > 1 else (0,)
    starts = [0, *accumulate(lengths)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(
        torch.arange(start + chunk * length // chunks, start + (chunk + 1) * length // chunks)
        for start, length in zip(starts, lengths, strict=False) for chunk in own)])


def places(own: Tensor, positions: int) -> Tensor:
    """[positions] int64: where the rank with the positions ``own`` has each one; -1 where it has not. Pure."""
    found = torch.full((positions,), -1, dtype=torch.int64)
    found[own] = torch.arange(len(own))
    return found


def joined(own: Tensor, at: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather: [size, …] of all ranks, of which this one has ``own`` [n, …] ``at`` [n]. Each rank goes on with the
    same computation, so the gradient of a rank's values is its own."""
    found: Tensor = _Sum.apply(own.new_zeros(size, *own.shape[1:]).index_copy(0, at, own), group, False)
    return found


def joined_for_parts(own: Tensor, at: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """All-gathers as ``joined`` does, where ranks go on with different parts: the gradient of a value is the sum of
    theirs."""
    found: Tensor = _Sum.apply(own.new_zeros(size, *own.shape[1:]).index_copy(0, at, own), group, True)
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, sums_gradients: bool) -> Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        ctx.mark_dirty(values)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sums_gradients:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None
