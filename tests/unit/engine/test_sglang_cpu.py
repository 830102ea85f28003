"""The stand-ins for packages without a CPU build: not installed under CUDA or over an installed package."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from elastic_rl.engine.sglang import sglang_cpu
from elastic_rl.errors import PreflightFailed


def test_stand_ins_are_not_installed_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    with pytest.raises(PreflightFailed, match="CUDA"):
        sglang_cpu.install()
    assert sys.meta_path == before


def test_installed_package_is_not_replaced(monkeypatch):
    monkeypatch.setattr(sglang_cpu, "PACKAGES", ("json", "no_such_package_at_all"))
    assert sglang_cpu.missing() == ["no_such_package_at_all"]


def test_missing_kernel_can_be_named_but_not_called(monkeypatch):
    finder = sglang_cpu.StandInFinder(["standin_pkg"])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    module = importlib.import_module("standin_pkg.deep.er")
    try:
        assert isinstance(module.SomeClass, type) and module.kernel[(1,)] is not None
        with pytest.raises(NotImplementedError, match="standin_pkg.deep.er.kernel"):
            module.kernel(1)
    finally:
        for name in [n for n in sys.modules if n.startswith("standin_pkg")]:
            del sys.modules[name]


def test_slot_kernel_writes_each_requests_slots_into_its_row():
    table = torch.zeros(3, 5, dtype=torch.int32)
    sglang_cpu.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]),
                                            torch.tensor([7, 8, 9]), 5)
    assert table.tolist() == [[9, 0, 0, 0, 0], [0] * 5, [0, 7, 8, 0, 0]]
