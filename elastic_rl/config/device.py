"""Devices, collectives and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Section


class DeviceConfig(Section):
    type: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer and the engines. ``auto``: CUDA where torch finds a device, else the CPU. With ``cpu`` the
    run's processes see no GPU of the machine."""
    dist_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the trainer's collectives. ``auto``: nccl on CUDA, gloo on a CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and activations in the trainer and the engines, and of published weights. With ``bfloat16``
    the trainer keeps fp32 master weights beside them, and sums gradients and updates in fp32; log-probabilities of
    engine and trainer then differ more (``train.logprob_tolerance``)."""
    layer_spec: Literal["auto", "local", "te"] = "auto"
    """Megatron layer spec. ``te``: Transformer Engine; ``local``: Megatron's own layers. ``auto``: ``te`` on CUDA,
    ``local`` on a CPU."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Most TFLOP/s that one device of the trainer can do in the dtype it trains in, without sparsity. The MFU of a step
    is its share of that. null: of GPUs that are known, in bf16; for any other device no MFU is reported."""

    def uses_cuda(self, available: Callable[[], bool]) -> bool:
        """Whether this configuration computes on GPUs. ``available`` decides ``auto``: in a process that imports torch
        ``torch.cuda.is_available``, in the driver what Ray knows of the cluster."""
        return self.type == "cuda" or (self.type == "auto" and available())

    def environment(self) -> dict[str, str]:
        """Environment of the driver, which every process of the run inherits. With ``cpu`` it hides the GPUs, so that
        what a library decides by ``torch.cuda.is_available`` agrees with this section."""
        return {"CUDA_VISIBLE_DEVICES": ""} if self.type == "cpu" else {}
