"""The policy's distribution at single tokens, from logits whose columns are split over the tensor-parallel group. Only
values [M] cross the group, but for ``most_probable``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST = 1e-8
"""Probabilities count as at least this where their logarithm is taken."""


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p(target) [M] fp32 from this rank's columns ``logits`` [M, padded_vocab / TP] fp32, which are overwritten,
    and ``targets`` [M]."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # Megatron's kernel wants a sequence dimension.
    return -vocab_parallel_cross_entropy(logits.unsqueeze(0).contiguous(), targets.unsqueeze(0)).squeeze(0)


def entropy(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Entropy [M] in nats of the distributions with this rank's columns ``logits`` [M, padded_vocab / TP].

    ``group``: the tensor-parallel group; None when this rank has all columns. Takes memory for two more tensors of the
    size of ``logits``, one of which is kept for the backward pass; that has no collective, since each rank has all
    that the gradient of its own columns needs: ``d H / d z_j = -p_j (log p_j + H)``.
    """
    result: Tensor = _Entropy.apply(logits, group)
    return result


def divergence_from_top(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, group: dist.ProcessGroup | None
                        ) -> Tensor:
    """KL(policy || other) [M] in nats where of the other distribution only the K most probable tokens are known: all
    other tokens count as one outcome. That is at most the divergence over all tokens, and equal to it where the two
    agree within the rest (data processing inequality).

    ``logits`` [M, padded_vocab / TP] fp32: this rank's columns. ``top_ids`` [M, K] int64, different in each row, or -1
    for none, and their ``top_logprobs`` [M, K] fp32 under the other distribution, which are low for none. ``group``:
    the tensor-parallel group; None when this rank has all columns. Takes memory for three more tensors of the size of
    ``logits``, one of which is kept for the backward pass, which has no collective: with ``c`` the log-ratio of a
    token's outcome, ``d KL / d z_j = p_j (c_j - KL)``.
    """
    result: Tensor = _DivergenceFromTop.apply(logits, top_ids, top_logprobs, group)
    return result


def most_probable(logits: Tensor) -> Tensor:
    """The most probable token, int64 [M], from this rank's columns ``logits`` [M, padded_vocab / TP]. Gathers them all
    on each rank."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits.contiguous()).argmax(dim=-1)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        peak = _reduced(logits.amax(dim=-1), dist.ReduceOp.MAX, group)
        probabilities = (logits - peak.unsqueeze(-1)).exp_()
        total = _reduced(probabilities.sum(dim=-1), dist.ReduceOp.SUM, group)
        probabilities.div_(total.unsqueeze(-1))
        found = _reduced(-torch.xlogy(probabilities, probabilities).sum(dim=-1), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(probabilities, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        probabilities, found = ctx.saved_tensors
        # xlogy: the padding columns, and others whose probability is 0, get no gradient.
        slope = torch.xlogy(probabilities, probabilities).addcmul_(probabilities, found.unsqueeze(-1))
        return slope.mul_(-gradient.unsqueeze(-1)), None


class _DivergenceFromTop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, group: dist.ProcessGroup | None
                ) -> Tensor:
        peak = _reduced(logits.amax(dim=-1), dist.ReduceOp.MAX, group)
        p = (logits - peak.unsqueeze(-1)).exp_()
        total = _reduced(p.sum(dim=-1), dist.ReduceOp.SUM, group)
        p.div_(total.unsqueeze(-1))
        columns = top_ids - logits.shape[-1] * (0 if group is None else dist.get_rank(group))
        is_own = (columns >= 0) & (columns < logits.shape[-1])
        columns = columns.clamp(0, logits.shape[-1] - 1)
        own = torch.where(is_own, p.gather(-1, columns), 0.0)
        top = _reduced(own.clone(), dist.ReduceOp.SUM, group)
        # Not 1 less the others, which would be all rounding where these are nearly certain.
        named = torch.zeros(p.shape, dtype=torch.int8, device=p.device).scatter_add_(-1, columns, is_own.to(torch.int8))
        rest = _reduced(torch.where(named > 0, 0.0, p).sum(dim=-1), dist.ReduceOp.SUM, group)
        other_rest = (1 - top_logprobs.exp().sum(dim=-1)).clamp(min=_LEAST)
        ratio = top.clamp(min=_LEAST).log() - top_logprobs
        ratio_rest = rest.clamp(min=_LEAST).log() - other_rest.log()
        found = (top * ratio).sum(dim=-1) + rest * ratio_rest
        slope = p * (ratio_rest - found).unsqueeze(-1)
        slope.scatter_add_(-1, columns, torch.where(is_own, own * (ratio - ratio_rest.unsqueeze(-1)), 0.0))
        ctx.save_for_backward(slope)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradient.unsqueeze(-1), None, None, None


def _reduced(values: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
