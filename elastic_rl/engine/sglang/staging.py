"""A second set of a model's weights: filled and checked while the model serves, then exchanged for the live ones.

A *shadow* of the model shares everything with it but its parameters and persistent buffers, so the model's own
``load_weights`` (stacking, slicing by tensor-parallel rank, conversion of dtypes) fills it, whatever the architecture,
without touching the live model. On the CPU the exchange swaps pointers; on other devices addresses must not change
(captured graphs hold them), so the bytes are copied within the device and compared.

It costs the memory of the parameters once more. It is not possible for a model that keeps other tensors beside its
parameters (derived from them, such as absorbed projections): its ``load_weights`` would change those under the live
model. ``Staging.from_model`` returns None then, and the model is loaded in the pause.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.codecs.tensors import checksum
from elastic_rl.errors import EngineFailed
from elastic_rl.runtime import failpoints

Tensors = Iterable[tuple[str, torch.Tensor]]


class Staging:
    """The staged weights of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._live = dict(_own_tensors(model))
        self._shadow = _shadow(model)
        self._staged = dict(_own_tensors(self._shadow))
        self._device = next(iter(self._live.values())).device

    @classmethod
    def from_model(cls, model: nn.Module, limit_bytes: int) -> Staging | None:
        """None when the model's weights exceed ``limit_bytes``, or it keeps tensors of other kinds."""
        if sum(t.nbytes for _, t in _own_tensors(model)) > limit_bytes or any(map(_has_loose_tensors, model.modules())):
            return None
        return cls(model)

    def fill(self, tensors: Tensors) -> str:
        """``begin``, ``add`` and ``finish`` in one."""
        self.begin()
        self.add(tensors)
        return self.finish()

    @torch.no_grad()
    def begin(self) -> None:
        """Discards what is staged."""
        with _side_stream(self._device):
            poison(self._staged.values())

    @torch.no_grad()
    def add(self, tensors: Tensors) -> None:
        """Loads tensors under their HF names. The live model does not change."""
        with _side_stream(self._device):
            call_load_weights(self._shadow, tensors)

    @torch.no_grad()
    def finish(self) -> str:
        """The checksum of the staged weights: over every parameter's bytes, by name, in this rank's layout.

        Raises EngineFailed when a parameter is unset or holds NaN.
        """
        with _side_stream(self._device):
            require_covered(self._staged.items())
            return digest_of("\n".join(f"{name} {checksum(t)}" for name, t in sorted(self._staged.items())).encode())

    @torch.no_grad()
    def exchange(self) -> None:
        """Makes the staged weights the live ones. Raises EngineFailed when a copy differs: the live ones are then torn.
        """
        for name, live in self._live.items():
            staged = self._staged[name]
            if live.shape != staged.shape or live.dtype != staged.dtype:
                raise EngineFailed(f"{name} changed its layout after it was staged")
            if live.device.type == "cpu":
                live.data, staged.data = staged.data, live.data
            else:
                live.copy_(staged)
            failpoints.reach("apply.torn")
        if self._device.type != "cpu":
            self._require_equal()

    def _require_equal(self) -> None:
        for name, live in self._live.items():
            if not torch.equal(_raw(live), _raw(self._staged[name])):
                raise EngineFailed(f"{name} differs from the version after it was written")


def call_load_weights(model: nn.Module, tensors: Tensors) -> None:
    """Calls the method that every SGLang model has and ``nn.Module`` does not declare."""
    model.load_weights(iter(tensors))  # type: ignore[operator]


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Puts NaN where a part that is not loaded leaves one: all over the first row, and in each further row (along the
    last dimension) at one place that moves on by more than a third from row to row, so that no block goes unnoticed."""
    for tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.dim() < 2 or not tensor.is_contiguous():
            tensor.fill_(float("nan"))
            continue
        rows = tensor.view(-1, tensor.shape[-1])
        rows[0] = float("nan")
        at = torch.arange(len(rows), device=tensor.device)
        rows[at, at * _stride(rows.shape[1]) % rows.shape[1]] = float("nan")


def _stride(columns: int) -> int:
    """About 0.38 of the columns and coprime to them: places that far apart are spread evenly and reach every column."""
    step = max(round(columns * 0.381966), 1)
    while math.gcd(step, columns) != 1:
        step += 1
    return step


def require_covered(named: Tensors) -> None:
    """Raises EngineFailed when NaN is left anywhere."""
    uncovered = [name for name, t in named if t.is_floating_point() and _has_nan(t)]
    if uncovered:
        raise EngineFailed(f"the version leaves {len(uncovered)} parameters unset or holds NaN, such as {uncovered[0]}",
                           hint="the published tensors do not match the engine's model")


def _has_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN. The sum is NaN then too, and is many times as fast as a mask of all elements."""
    if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) and not tensor.sum().isnan():
        return False
    return bool(torch.isnan(tensor).any())


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, each once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _has_loose_tensors(module: nn.Module) -> bool:
    """Whether the module keeps a tensor that is neither a parameter nor a buffer."""
    def holds(value: object) -> bool:
        if isinstance(value, dict):
            return any(map(holds, value.values()))
        if isinstance(value, list | tuple):
            return any(map(holds, value))
        return isinstance(value, torch.Tensor)

    return any(holds(v) for name, v in vars(module).items() if name not in ("_parameters", "_buffers", "_modules"))


def _shadow(model: nn.Module) -> nn.Module:
    """A copy of the tree of modules with empty tensors. What is shared in the model is shared in the shadow."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, torch.Tensor] = {}

    def module_of(module: nn.Module) -> nn.Module:
        if id(module) not in modules:
            twin = modules[id(module)] = copy.copy(module)
            twin._parameters = {n: p if p is None else tensor_of(p) for n, p in module._parameters.items()}  # type: ignore[assignment,misc]
            twin._buffers = {n: b if b is None or n in module._non_persistent_buffers_set else tensor_of(b)
                             for n, b in module._buffers.items()}
            twin._modules = {n: m if m is None else module_of(m) for n, m in module._modules.items()}
        return modules[id(module)]

    def tensor_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            data = torch.empty_like(tensor.data)
            if isinstance(tensor, nn.Parameter):
                # of the same class and with the same attributes: loaders read `weight_loader`, `output_dim` and others
                data = torch.Tensor._make_subclass(type(tensor), data, False)
                data.__dict__.update(tensor.__dict__)
            tensors[id(tensor)] = data
        return tensors[id(tensor)]

    return module_of(model)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    with stream:
        yield
    stream.synchronize()


def _side_stream(device: torch.device) -> AbstractContextManager[None]:
    """Queues work on the device to a stream of its own, and waits for it at the end; nothing on the CPU."""
    return contextlib.nullcontext() if device.type == "cpu" else _on(torch.Stream(device))
