"""Tells an allocation that failed from other errors of torch, so that a pass that needs too much memory is refused and
ends no rank."""

from __future__ import annotations

import gc

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""What torch's message names when memory of the host has run out: the error has no class of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error))


def free_unused(device: torch.device) -> None:
    """Gives memory back that a pass which was given up has left behind. Called once its error is out of scope, whose
    frames hold its tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
