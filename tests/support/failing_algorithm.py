"""GRPO as a user's own algorithm, whose loss fails when the batch says so."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import ALGOS, GrpoOptions

FAILS = 777.0
"""The advantage of a sample with which the loss fails."""
FAILS_AFTER_AN_UPDATE = 778.0
"""The same, once the log-probs of the sample have changed since it was first seen."""
OVERFLOWS = 779.0
"""The advantage of a sample whose loss and slopes are finite, and whose gradient is not."""
_first_seen: list[Tensor] = []


def _token_loss(logp: Tensor, batch: LossBatch, options: GrpoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    if bool((batch.advantages == FAILS).any()):
        raise RuntimeError("the loss of the test")
    if bool((later := batch.advantages == FAILS_AFTER_AN_UPDATE).any()):
        _first_seen.append(logp[later].detach())
        if not torch.equal(_first_seen[0], _first_seen[-1]):
            raise RuntimeError("the loss of the test, after an update")
    loss, stats = ALGOS["grpo"].token_loss(logp, batch, options)
    return torch.where(batch.advantages == OVERFLOWS, loss * 1e25, loss), stats


spec = replace(ALGOS["grpo"], token_loss=_token_loss)
