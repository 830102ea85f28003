"""An engine's staged weights: filled beside the live model, and exchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_rl.engine.sglang import loader as loader_module
from elastic_rl.engine.sglang.loader import Loader
from elastic_rl.engine.sglang.staging import Staging
from elastic_rl.errors import EngineFailed

Tensors = Iterable[tuple[str, torch.Tensor]]
LIMIT = 1 << 30


class Model(nn.Module):
    """Stacks two tensors of a version into one parameter, as engines do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.gate_up = nn.Linear(16, 24, bias=False, device=device, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_up(self.norm(x).to(torch.bfloat16))

    def load_weights(self, tensors: Tensors) -> None:
        rows = {"gate": slice(0, 12), "up": slice(12, 24)}
        for name, tensor in tensors:
            if name in rows:
                self.gate_up.weight.data[rows[name]].copy_(tensor)
            else:
                self.norm.weight.data.copy_(tensor)


def version(value: float) -> list[tuple[str, torch.Tensor]]:
    """On the CPU, as views of an arena are."""
    return [("gate", torch.full((12, 16), value)), ("up", torch.full((12, 16), -value)), ("norm", torch.ones(16))]


def test_exchange_makes_the_staged_weights_live_at_addresses_that_captured_graphs_know(device: torch.device) -> None:
    model = Model(device)
    staging = Staging.from_model(model, LIMIT)
    assert staging is not None
    staging.fill(version(1.0))
    staging.exchange()
    addresses = [p.data_ptr() for p in model.parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    checksum = staging.fill(version(2.0))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "staging changed the live model"
    staging.exchange()
    assert model.gate_up.weight[0, 0] == 2.0 and model.gate_up.weight[23, 0] == -2.0
    assert checksum == staging.fill(version(2.0))
    if device.type == "cuda":
        assert [p.data_ptr() for p in model.parameters()] == addresses


def test_version_that_leaves_a_part_unset_is_not_finished(device: torch.device) -> None:
    staging = Staging.from_model(Model(device), LIMIT)
    assert staging is not None
    with pytest.raises(EngineFailed, match="gate_up"):
        staging.fill([t for t in version(1.0) if t[0] != "up"])


def test_staging_beside_a_model_that_computes_does_not_disturb_it(device: torch.device) -> None:
    model = Model(device)
    staging = Staging.from_model(model, LIMIT)
    assert staging is not None
    staging.fill(version(1.0))
    staging.exchange()
    x = torch.randn(4, 16, device=device)
    expected = model(x)
    outputs = []
    staging.begin()
    for tensor in version(3.0):
        outputs.append(model(x))  # queued on the current stream while the side stream is in use
        staging.add([tensor])
    staging.finish()
    assert all(torch.equal(output, expected) for output in outputs)


def test_loader_stages_in_parts_and_applies_by_ticket(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arena: dict[str, list[tuple[str, torch.Tensor]]] = {
        "all of 1": version(1.0), "part of 2": version(2.0)[:1], "rest of 2": version(2.0)[1:]}
    monkeypatch.setattr(loader_module, "_tensors", lambda reference: arena[reference])
    model, loader = Model(device), Loader()
    references: list[Any] = list(arena)
    loader.load(model, {"reference": references[0]}, LIMIT)
    loader.begin()
    loader.add(references[1])
    loader.add(references[2])
    loader.finish("ticket")
    assert model.gate_up.weight[0, 0] == 1.0
    with pytest.raises(EngineFailed, match="ticket"):
        loader.load(model, {"ticket": "another"}, LIMIT)
    loader.load(model, {"ticket": "ticket"}, LIMIT)
    assert model.gate_up.weight[0, 0] == 2.0
