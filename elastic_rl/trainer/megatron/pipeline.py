"""Runs micro-batches through the stages of a pipeline-parallel model, forward and backward: Megatron's 1F1B schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from elastic_rl.trainer.context_parallel import multiple
from elastic_rl.trainer.megatron.megatron_cpu import cuda_literals
from elastic_rl.trainer.megatron.parallel import max_over_data, sum_over_data
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.micro_batches import ModelInput

_Loss = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]
Finish = Callable[[int, torch.Tensor], torch.Tensor]
"""Returns, of a micro-batch's number and this rank's columns of its logits [R, P, padded_vocab / TP], its part of the
loss."""


def run(policy: Policy, micros: Sequence[ModelInput], finish: Finish, *, train: bool,
        on_pass: Callable[[int], None] = lambda number: None) -> None:
    """Runs every micro-batch (their shapes may differ) once through the whole model, and accumulates gradients if
    ``train``. ``on_pass``: called on each rank with the number of each micro-batch before it; with expert parallelism
    also with further numbers, up to that of the replica that has most.

    All ranks of a pipeline make the same call. ``finish`` is called on the ranks of the last stage, in order. With
    expert parallelism every replica makes the call, since their forward passes are collectives.
    """
    if policy.par.ep > 1:
        micros, finish = _as_many_as_others(policy, micros, finish)
    if train and policy.has_aux_loss:  # a collective, which a replica without samples takes part in
        own = float(sum(micro.positions for micro in micros))
        positions = torch.tensor([own], dtype=torch.float64, device=policy.par.device)
        policy.set_aux_loss_positions(int(sum_over_data(positions, policy.par)))
    if not micros:
        return
    if policy.par.pp == 1:
        for i, micro in enumerate(micros):
            on_pass(i)
            loss = finish(i, policy.forward(micro))
            if train:
                loss.backward()
        return
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with cuda_literals():
        get_forward_backward_func()(
            forward_step_func=partial(_forward, policy, finish, on_pass), data_iterator=iter(list(enumerate(micros))),
            model=policy.ddp, num_microbatches=len(micros), forward_only=not train,
            # Sent with each tensor, since they vary (``variable_seq_lengths``).
            seq_length=micros[0].tokens.shape[1], micro_batch_size=micros[0].tokens.shape[0])


def _as_many_as_others(policy: Policy, micros: Sequence[ModelInput], finish: Finish
                       ) -> tuple[list[ModelInput], Finish]:
    """Adds micro-batches up to the number of the replica that has most: one token for each chunk, without a loss."""
    own, most = len(micros), torch.tensor([float(len(micros))], device=policy.par.device)
    missing = int(max_over_data(most, policy.par)) - own
    size = multiple(policy.par.cp)
    fill = ModelInput(torch.zeros(1, size, dtype=torch.int64, device=policy.par.device), (size,) if size > 1 else ())

    def finish_own(number: int, logits: torch.Tensor) -> torch.Tensor:
        return finish(number, logits) if number < own else logits.sum() * 0.0

    return [*micros, *[fill] * missing], finish_own


def _forward(policy: Policy, finish: Finish, on_pass: Callable[[int], None], micros: Iterator[tuple[int, ModelInput]],
             _model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], _Loss]]:
    number, micro = next(micros)
    on_pass(number)

    def loss(logits: torch.Tensor) -> _Loss:
        # The schedule does not divide by this count of tokens (``calculate_per_token_loss``): ``finish`` has done so.
        return finish(number, logits), torch.tensor(0, dtype=torch.int), {}

    return policy.forward(micro), loss
