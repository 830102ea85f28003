"""The policy's distribution at single tokens, from logits whose columns are split over the tensor-parallel group. Only
values [M] cross the group, but for ``most_probable``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


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


def _reduced(values: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
