"""Runs micro-batches through the stages of a pipeline-parallel model, forward and backward: Megatron's 1F1B schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from elastic_rl.trainer.megatron_cpu import cuda_literals
from elastic_rl.trainer.model import Policy

Finish = Callable[[int, torch.Tensor], torch.Tensor]
"""From a micro-batch's number and this rank's columns of its logits [n, T, padded_vocab / TP] to its part of the loss.
"""


def run(policy: Policy, micros: Sequence[torch.Tensor], finish: Finish, *, train: bool) -> None:
    """Runs every micro-batch (tokens [n, T] int64, right-padded; n may differ) once through the whole model, and
    accumulates gradients if ``train``.

    All ranks of a pipeline make the same call. ``finish`` is called on the ranks of the last stage, in order.
    """
    if not micros:
        return
    if policy.par.pp == 1:
        for i, tokens in enumerate(micros):
            loss = finish(i, policy.forward(tokens))
            if train:
                loss.backward()
        return
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with cuda_literals():
        get_forward_backward_func()(
            forward_step_func=partial(_forward, policy, finish), data_iterator=iter(list(enumerate(micros))),
            model=policy.ddp, num_microbatches=len(micros), forward_only=not train,
            # Sent with each tensor, since they vary (``variable_seq_lengths``).
            seq_length=micros[0].shape[1], micro_batch_size=micros[0].shape[0])


def _forward(policy: Policy, finish: Finish, micros: Iterator[tuple[int, torch.Tensor]], _model: Any
             ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]]:
    number, tokens = next(micros)

    def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # The schedule does not divide by this count of tokens (``calculate_per_token_loss``): ``finish`` has done so.
        return finish(number, logits), torch.tensor(0, dtype=torch.int), {}

    return policy.forward(tokens), loss
