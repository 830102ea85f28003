"""Custom weight loader of SGLang: maps the arena of the local DCS node and brings one version into the model, verified.

Runs inside each scheduler process (one a TP rank), called by ``/update_weights_from_tensor`` with
``load_format="elastic_rl.engine.loader.load"``. It returns only if this rank's parameters are the version, bit for bit;
otherwise it raises, which ends the scheduler: an engine with doubtful weights never serves a token.

What is verified:
1. every slice of the mapped arena against its digest in the manifest (``dcs.mapping.load_tensors``);
2. *coverage*: the parameters are loaded into staging buffers that were filled with NaN; one that is left means that the
   version lacks a tensor, or that the loader skipped it;
3. *equality*: after the copy from staging into the live parameters the two are compared byte by byte.
The model's own ``load_weights`` does the stacking and TP slicing, so this holds for every architecture and TP size.
Until the last check of staging passed, the live weights are untouched. Staging doubles the memory of the parameters; a
rank with more than ``STAGING_LIMIT_BYTES`` of them loads in place instead, with checks 1 and 2 only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from elastic_rl.dcs.mapping import load_tensors
from elastic_rl.dcs.tensors import checksum
from elastic_rl.errors import EngineFailed

REFERENCE = "elastic_rl.reference"
LOADER = "elastic_rl.engine.loader.load"
# Inherited by the scheduler from the runner.
STAGING_LIMIT_BYTES = int(os.environ.get("ELASTIC_RL_STAGING_LIMIT_BYTES", str(2 << 30)))

_staging: dict[int, torch.Tensor] = {}  # by address of the live parameter; kept, since fresh memory is slow to touch

Tensors = Iterable[tuple[str, torch.Tensor]]


def load(model: torch.nn.Module, named_tensors: Tensors) -> None:
    """Loads and verifies the version whose JSON reference is the uint8 tensor named ``REFERENCE``.

    Raises ChunkCorrupt before anything changed, EngineFailed when coverage or equality fails.
    """
    packed = dict(named_tensors)[REFERENCE]
    reference: dict[str, Any] = json.loads(packed.cpu().numpy().tobytes())
    # A list, not the iterator: all digests are checked before the first parameter changes. They are views.
    apply(model, list(load_tensors(reference)))


@torch.no_grad()
def apply(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]],
          staging_limit_bytes: int = STAGING_LIMIT_BYTES) -> None:
    """Brings tensors under their HF names into the model. Raises EngineFailed unless every parameter is covered."""
    params = dict(model.named_parameters())
    if sum(p.nbytes for p in params.values()) > staging_limit_bytes:
        _poison(p.data for p in params.values())
        _call_load_weights(model, tensors)
        _require_covered((name, p.data) for name, p in params.items())
        return
    live = {name: p.data for name, p in params.items()}
    staged = {name: _staging_for(tensor) for name, tensor in live.items()}
    _poison(staged.values())
    try:
        for name, param in params.items():
            param.data = staged[name]
        _call_load_weights(model, tensors)
    finally:
        for name, param in params.items():
            param.data = live[name]
    _require_covered(staged.items())
    for name, tensor in live.items():
        tensor.copy_(staged[name])
        if not _same_bytes(tensor, staged[name]):
            raise EngineFailed(f"parameter {name} differs from the version after it was written")


def _call_load_weights(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], object] = model.load_weights  # type: ignore[assignment]
    load_weights(iter(tensors))


def _staging_for(live: torch.Tensor) -> torch.Tensor:
    found = _staging.get(live.data_ptr())
    if found is None or found.shape != live.shape or found.dtype != live.dtype:
        found = torch.empty_like(live)
        _staging[live.data_ptr()] = found
    return found


def _poison(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _require_covered(named: Tensors) -> None:
    bare = [name for name, t in named if t.is_floating_point() and _holds_nan(t)]
    if bare:
        raise EngineFailed(f"the version leaves {len(bare)} parameters unset or holds NaN, such as {bare[0]}",
                           hint="the published tensors do not match the engine's model")


def _holds_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN. The maximum is NaN then, and is found many times as fast as a mask of them all."""
    if tensor.numel() and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return bool(tensor.amax().isnan())
    return bool(torch.isnan(tensor).any())


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bytes, NaN and -0 included."""
    if a.device.type == "cpu":
        return checksum(a) == checksum(b)  # hashing both is several times as fast as torch's comparison
    return torch.equal(_raw(a), _raw(b))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
