"""How fast a step was trained, how well that used the devices, and the memory that it took."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic_rl.config import DeviceConfig
from elastic_rl.data.batch import Batch
from elastic_rl.models.arch import ModelArch
from elastic_rl.models.flops import training_flops
from elastic_rl.trainer.megatron.parallel import ParallelDims, max_over_ranks, sum_over_data
from elastic_rl.trainer.micro_batches import positions

PEAK_TFLOPS = {
    "A100": 312.0, "A800": 312.0, "L40S": 362.0, "H20": 148.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "H800": 989.0, "H200 NVL": 835.0, "H200": 989.0, "B200": 2250.0}
"""TFLOP/s of a device in bf16 without sparsity, by NVIDIA's data sheets, some of which give twice that: with it."""
_NAME = re.compile(rf"NVIDIA ({'|'.join(PEAK_TFLOPS)})(?=[ -]|$)(?!.* MIG )")


def peak_tflops(cfg: DeviceConfig, device_name: str, dtype: torch.dtype) -> float | None:
    """Dense TFLOP/s of one device at its best: the setting, else that of a known GPU that computes in bf16; None where
    neither is known. ``device_name``: as torch names it, "" on a CPU; ``dtype``: the dtype of the parameters."""
    if cfg.peak_tflops is not None:
        return cfg.peak_tflops
    found = _NAME.match(device_name)
    return PEAK_TFLOPS[found[1]] if found and dtype == torch.bfloat16 else None


@dataclass(frozen=True)
class Passed:
    """What went through the model of one replica in a pass over its samples."""

    tokens: int = 0
    positions: int = 0
    squares: int = 0
    """Squares of the number of positions of each sample, added up."""

    @classmethod
    def of(cls, share: Batch) -> Passed:
        own = positions(share)
        return cls(int(share["lengths"].sum()), int(own.sum()), int(own.square().sum()))

    def __add__(self, other: Passed) -> Passed:
        return Passed(self.tokens + other.tokens, self.positions + other.positions, self.squares + other.squares)


class Throughput:
    """Measures steps on one rank. All ranks call the same method."""

    def __init__(self, arch: ModelArch, cfg: DeviceConfig, par: ParallelDims, dtype: torch.dtype) -> None:
        """``dtype``: the dtype of the parameters."""
        self._arch, self._par = arch, par
        name = torch.cuda.get_device_name(par.device) if par.device.type == "cuda" else ""
        self._peak = peak_tflops(cfg, name, dtype)

    def of_step(self, share: Passed, updates: int, seconds: float) -> dict[str, float]:
        """Measures a step that took this rank ``seconds`` for ``updates`` passes, forward and
        backward, over its replica's share: metrics over all ranks (``telemetry/training_metrics.py`` says what they
        are)."""
        # float64: sums and bytes beyond 2**24 must stay exact
        sums = torch.tensor([share.tokens, share.positions, share.squares], dtype=torch.float64)
        tokens, places, squares = (int(v) for v in sum_over_data(sums.to(self._par.device), self._par).tolist())
        memory = torch.tensor(peak_memory_bytes(self._par.device), dtype=torch.float64, device=self._par.device)
        tflops = updates * training_flops(self._arch, places, squares) / seconds / self._par.world / 1e12
        return {"train_tokens_per_s": updates * tokens / seconds, "tflops_per_rank": tflops,
                **({"mfu": tflops / self._peak} if self._peak is not None else {}),
                "peak_memory_bytes": float(max_over_ranks(memory, self._par))}


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process has used so far: of the device, by tensors, on a GPU; resident, on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Not getrusage: its figure includes what the process was before exec.
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else 0
