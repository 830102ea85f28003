"""GRPO as a user's own algorithm, whose loss takes long on one rank, in the first step only."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from torch import Tensor

from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.registry import ALGOS, GrpoOptions

SLOW_RANK, SLOW_LOSSES, SLOW_S = 1, 4, 7.0
"""So many losses of this rank take so many seconds longer each."""
_calls: list[float] = []


def _token_loss(logp: Tensor, batch: LossBatch, options: GrpoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    if os.environ["RANK"] == str(SLOW_RANK) and len(_calls) < SLOW_LOSSES:
        _calls.append(time.monotonic())
        time.sleep(SLOW_S)
    return ALGOS["grpo"].token_loss(logp, batch, options)


spec = replace(ALGOS["grpo"], token_loss=_token_loss)
