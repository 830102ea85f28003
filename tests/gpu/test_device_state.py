"""A group of one rank, over NCCL on CUDA: its state is saved through the host and restored bit for bit."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

CASES = ("float32", "bfloat16", "bfloat16-distributed")
Ended = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """The scenario on a type of device, which runs once for all cases."""
    @functools.cache
    def run(device: str) -> Ended:
        script, folder = str(Path(__file__).with_name("state_scenario.py")), str(tmp_path_factory.mktemp(device))
        return subprocess.run([sys.executable, script, device, folder, *CASES], capture_output=True, text=True,
                              timeout=500, check=False)

    return run


@pytest.mark.parametrize("case", CASES)
def test_restored_rank_trains_on_as_an_undisturbed_one(
        device: torch.device, case: str, ended: Callable[[str], Ended]) -> None:
    found = ended(device.type)
    assert f"{case} same" in found.stdout.splitlines(), found.stderr[-4000:]
