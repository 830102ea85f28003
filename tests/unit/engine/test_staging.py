"""Staged weights: the live model does not change until they are exchanged, and then equals the version."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_rl.dcs.codecs.tensors import checksum
from elastic_rl.engine.sglang.staging import Staging, poison, require_covered
from elastic_rl.errors import EngineFailed


class Stacked(nn.Parameter):
    """A parameter subclass that knows how it is loaded, as SGLang's do."""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up = Stacked(torch.zeros(2 * width, width), requires_grad=False)
        self.gate_up.weight_loader = self.load_half  # type: ignore[attr-defined]
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("cos", torch.arange(width, dtype=torch.float32), persistent=False)

    def load_half(self, param: torch.Tensor, loaded: torch.Tensor, half: int) -> None:
        width = param.shape[0] // 2
        param.data[half * width:(half + 1) * width].copy_(loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.gate_up.t()).chunk(2, -1)
        return gate * up * self.scale + self.cos


class Model(nn.Module):
    """Stacks two tensors into one parameter, ties its head to its embedding, converts dtypes."""

    def __init__(self, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = self.embed
        self.requires_grad_(False)

    def load_weights(self, tensors):
        params, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        for name, tensor in tensors:
            layer, _, part = name.rpartition(".")
            if part in ("gate", "up"):
                param = params[f"{layer}.gate_up"]
                param.weight_loader(param, tensor, part == "up")
            else:
                (params.get(name) if name in params else buffers[name]).data.copy_(tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.weight.t()


def version(seed: int, width: int = 8, layers: int = 2, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [("embed.weight", rand(5, width))] + [
        (f"layers.{i}.{name}", rand(*shape)) for i in range(layers)
        for name, shape in (("gate", (width, width)), ("up", (width, width)), ("scale", (width,)))]


def loaded(tensors) -> Model:
    model = Model()
    model.load_weights(tensors)
    return model


IDS = torch.tensor([[0, 3, 4]])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_live_model_equals_the_version_that_was_exchanged_last(seeds):
    model = loaded(version(99))
    staging, addresses = Staging.from_model(model, 1 << 20), set()
    before = model(IDS)
    for seed in seeds:
        found = staging.fill(version(seed))
        assert torch.equal(model(IDS), before), "staging changed the live model"
        staging.exchange()
        assert torch.equal(model(IDS), loaded(version(seed))(IDS))
        assert model.head.weight is model.embed.weight
        own = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("scale"))]
        assert found == Staging.from_model(loaded(version(seed)), 1 << 20).fill(version(seed))
        addresses.add(frozenset(t.data_ptr() for _, t in own))
        before = model(IDS)
    assert len(addresses) <= 2, "more than two sets of weights were allocated"


def test_checksum_differs_when_one_element_differs():
    staging = Staging.from_model(Model(), 1 << 20)
    tensors = version(1)
    sums = [staging.fill(tensors), staging.fill(tensors)]
    tensors[3][1][0] += 1e-6
    sums.append(staging.fill(tensors))
    assert sums[0] == sums[1] != sums[2]


def test_staging_converts_dtypes_as_the_model_does():
    model = Model()
    staging = Staging.from_model(model, 1 << 20)
    staging.fill(version(1, dtype=torch.bfloat16))
    staging.exchange()
    assert torch.equal(model.embed.weight, version(1, dtype=torch.bfloat16)[0][1].float())


@pytest.mark.parametrize("broken", [lambda v: v[:-3] + v[-2:], lambda v: v[1:]])
def test_staging_rejects_a_version_that_leaves_a_parameter_unset(broken):
    model = loaded(version(1))
    before = {n: checksum(p) for n, p in model.state_dict().items()}
    staging = Staging.from_model(model, 1 << 20)
    with pytest.raises(EngineFailed, match="unset"):
        staging.fill(broken(version(2)))
    assert {n: checksum(p) for n, p in model.state_dict().items()} == before
    staging.fill(version(2))
    staging.exchange()
    assert torch.equal(model(IDS), loaded(version(2))(IDS))


def test_staging_rejects_nan():
    tensors = version(1)
    tensors[0][1][0, 0] = float("nan")
    with pytest.raises(EngineFailed, match=r"embed\.weight"):
        Staging.from_model(Model(), 1 << 20).fill(tensors)


@pytest.mark.parametrize("keep", [lambda p: p.t(), lambda p: [p.clone()], lambda p: {"k": (p.clone(),)}])
def test_model_with_tensors_derived_from_its_weights_is_not_staged(keep):
    model = Model()
    assert Staging.from_model(model, 1 << 20) is not None
    model.layers[1].derived = keep(model.layers[1].gate_up.data)
    assert Staging.from_model(model, 1 << 20) is None


def test_model_over_the_limit_is_not_staged():
    nbytes = sum(p.nbytes for p in Model().parameters()) + 2 * 32
    assert Staging.from_model(Model(), nbytes) is not None
    assert Staging.from_model(Model(), nbytes - 1) is None


def test_live_model_computes_the_same_while_versions_are_staged():
    model = loaded(version(1))
    staging = Staging.from_model(model, 1 << 20)
    expected, stop, seen = model(IDS), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            seen.append(torch.equal(model(IDS), expected))

    thread = threading.Thread(target=work)
    thread.start()
    for seed in range(50):
        staging.fill(version(seed))
    stop.set()
    thread.join(60)
    assert seen and all(seen)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_poison_reveals_every_skipped_block_of_rows_or_columns(shape, data):
    """A loader may skip a run of rows (of any of the leading dimensions), or a run of columns."""
    tensor = torch.zeros(shape)
    poison([tensor])
    kept = tensor.clone()
    rows, kept_rows = tensor.view(-1, shape[-1]), kept.view(-1, shape[-1])
    along = data.draw(st.sampled_from([0, 1]))
    start = data.draw(st.integers(0, rows.shape[along] - 1))
    stop = data.draw(st.integers(start + 1, rows.shape[along]))
    rows.fill_(1.0)
    require_covered([("complete", tensor)])
    rows.narrow(along, start, stop - start).copy_(kept_rows.narrow(along, start, stop - start))
    with pytest.raises(EngineFailed, match="unset"):
        require_covered([("incomplete", tensor)])


@given(st.integers(1, 400), st.integers(2, 400), st.data())
def test_poison_reveals_skipped_blocks_of_three_rows_worth_of_elements(rows, columns, data):
    """A block of an expert in a stack of them: a run of rows, and of these a run of columns."""
    tensor = torch.ones(rows, columns)
    poison([tensor])
    height, width = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    top, left = data.draw(st.integers(0, rows - height)), data.draw(st.integers(0, columns - width))
    if height * width >= 3 * columns:
        assert tensor[top:top + height, left:left + width].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bits", ["nan", "-nan"])
def test_coverage_check_finds_one_nan_and_accepts_infinities(dtype, bits):
    tensor = torch.tensor([1.0, 2.0, -3.0] if dtype is torch.float8_e4m3fn else [1.0, float("inf"), -float("inf")])
    require_covered([("w", tensor.to(dtype))])
    tensor[1] = float(bits)
    with pytest.raises(EngineFailed):
        require_covered([("w", tensor.to(dtype))])
