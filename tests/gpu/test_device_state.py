"""A group of one rank, over NCCL on CUDA: its state is saved through the host and restored bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize(("dtype", "distributed"), [("float32", "false"), ("bfloat16", "false"), ("bfloat16", "true")])
def test_restored_rank_trains_on_as_an_undisturbed_one(
        device: torch.device, tmp_path: Path, dtype: str, distributed: str) -> None:
    script = str(Path(__file__).with_name("state_scenario.py"))
    done = subprocess.run([sys.executable, script, device.type, str(tmp_path), dtype, distributed],
                          capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-1:] == ["same"]
