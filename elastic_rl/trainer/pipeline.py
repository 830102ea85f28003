"""Micro-batches through the stages of a pipeline-parallel model, forward and back: Megatron's 1F1B schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from elastic_rl.trainer.megatron_cpu import cuda_literals
from elastic_rl.trainer.model import Policy

Finish = Callable[[int, torch.Tensor], torch.Tensor]
"""Given a micro-batch's number and this rank's columns of its logits [n, T, padded_vocab / TP], what it adds to the
loss."""


def run(policy: Policy, micros: Sequence[torch.Tensor], finish: Finish, *, train: bool) -> None:
    """Every micro-batch (tokens [n, T] int64, right-padded; n may differ) once through the whole model; gradients are
    added up if ``train``.

    All ranks of a pipeline call it alike. ``finish`` is called on those of the last stage, in order.
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
            seq_length=micros[0].shape[1], micro_batch_size=micros[0].shape[0])  # told with each tensor: they vary


def _forward(policy: Policy, finish: Finish, micros: Iterator[tuple[int, torch.Tensor]], _model: Any
             ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]]:
    number, tokens = next(micros)

    def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # The schedule would divide by this count of tokens; ``finish`` knows better, and is left alone
        # (``calculate_per_token_loss``).
        return finish(number, logits), torch.tensor(0, dtype=torch.int), {}

    return policy.forward(tokens), loss
