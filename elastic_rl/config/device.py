"""Devices, collectives and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from elastic_rl.config.section import Section


class DeviceConfig(Section):
    type: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` takes CUDA when torch sees one."""
    dist_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collectives of the trainer; ``auto``: nccl on CUDA, gloo on a CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter dtype of trainer and engines."""
    layer_spec: Literal["auto", "local", "te"] = "auto"
    """Megatron layer spec; ``auto``: Transformer Engine on CUDA, local on a CPU."""

    def uses_cuda(self, available: Callable[[], bool]) -> bool:
        """Whether this configuration computes on GPUs. ``available`` answers for ``auto``: torch asks this process's
        machine (``torch.cuda.is_available``), the driver asks Ray about the cluster."""
        return self.type == "cuda" or (self.type == "auto" and available())
