"""Batches from rows of equal width, as a reader of a test sees them best, and back."""

from __future__ import annotations

import torch

from elastic_rl.data.batch import Batch


def from_rows(tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor, **tensors: torch.Tensor) -> Batch:
    """The batch of samples in rows [N, T], of which each has so many tokens. Of ``tensors`` those [N, T] are about the
    loss tokens; others are taken as they are."""
    inside = torch.arange(tokens.shape[1])[None] < lengths[:, None]
    loss_mask = loss_mask.bool() & inside
    return Batch({"tokens": tokens[inside].int(), "lengths": lengths.long(), "loss_mask": loss_mask[inside],
                  **{name: tensor[loss_mask] if tensor.shape == tokens.shape else tensor
                     for name, tensor in tensors.items()}})


def in_rows(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """[N, T] from values [L] of a batch, 0 where no loss token is; or from [V], 0 beyond a sample's end. T is the
    longest sample's length."""
    mask = torch.nn.utils.rnn.pad_sequence(list(batch.by_sample("loss_mask")), batch_first=True)
    inside = torch.arange(mask.shape[1])[None] < batch["lengths"][:, None]
    out = values.new_zeros(mask.shape)
    out[inside if len(values) == len(batch["tokens"]) else mask] = values
    return out
