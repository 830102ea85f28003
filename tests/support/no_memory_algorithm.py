"""GRPO as a user's own algorithm. Importing it, as ranks do, has the last rank of a group lack memory in the middle of
a pass over ``MARK``, while the others wait for it in a collective."""

from __future__ import annotations

import os
from typing import Any

import torch

from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.trainer.micro_batches import ModelInput

MARK = (5, 6, 5, 6, 5, 6)
"""Tokens that no right answer has."""


def _lack_memory() -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    from elastic_rl.trainer.megatron.policy import Policy

    forward, linear = Policy.forward, RowParallelLinear.forward
    is_marked = False

    def marked(self: Policy, micro: ModelInput) -> torch.Tensor:
        nonlocal is_marked
        if int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:  # read here: ranks are forked
            return forward(self, micro)
        tokens, begin = micro.tokens.flatten(), torch.tensor(MARK[:-1])  # a model gets no last token of a sample
        is_marked = len(tokens) >= len(begin) and bool((tokens.unfold(0, len(begin), 1) == begin).all(dim=1).any())
        return forward(self, micro)

    def lacks(self: Any, *args: Any) -> Any:
        if is_marked:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return linear(self, *args)

    Policy.forward, RowParallelLinear.forward = marked, lacks  # type: ignore[method-assign]


_lack_memory()
spec = ALGOS["grpo"]
