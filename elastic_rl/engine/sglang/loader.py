"""Custom weight loader of SGLang: loads one version from the arena of this host into the model, and verifies it.

Runs inside each scheduler process (one per tensor-parallel rank), called by ``/update_weights_from_tensor`` with
``load_format="elastic_rl.engine.sglang.loader.load"``. It returns only if this rank's parameters equal the version bit
for bit; otherwise it raises, which ends the scheduler: an engine with torn weights never serves a token.

It verifies:
1. every slice of the mapped arena against its digest in the manifest (``dcs.fetch.mapping.load_tensors``);
2. *coverage*: the parameters are loaded into memory that was filled with NaN; a NaN that is left means that the version
   lacks a tensor, or that the loader skipped it;
3. *equality*, where bytes are copied after that (``staging.Staging.exchange``).
The model's own ``load_weights`` does the stacking and slicing, so this holds for every architecture and layout.

A request is ``{"reference": …}``, or ``{"ticket": …}`` for a version that the stager of this process has staged before
the engine was paused (``stager``). The first request of a process starts its stager. A model that cannot be
staged is loaded in place, with checks 1 and 2 only: its live weights change while they are verified.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic_rl.config import EngineConfig
from elastic_rl.dcs.fetch.mapping import load_tensors
from elastic_rl.engine.sglang import stager
from elastic_rl.engine.sglang.staging import Staging, call_load_weights, poison, require_covered
from elastic_rl.errors import EngineFailed, StagingFailed
from elastic_rl.runtime import failpoints

REQUEST = "elastic_rl.request"
LOADER = "elastic_rl.engine.sglang.loader.load"
LIMIT_ENV = "ELASTIC_RL_STAGING_LIMIT_BYTES"
"""The scheduler inherits it from the runner; an external server may lack it."""

Tensors = Iterable[tuple[str, torch.Tensor]]


class Loader:
    """Loads versions into the models of one process: the model and, with speculative decoding, its draft."""

    def __init__(self) -> None:
        self._stagings: dict[nn.Module, Staging | None] = {}
        self._ticket = ""

    def load(self, model: nn.Module, request: dict[str, Any], limit_bytes: int) -> None:
        """Raises ChunkCorrupt before anything changed, and EngineFailed."""
        first = not self._stagings
        if model not in self._stagings:
            self._stagings[model] = Staging.from_model(model, limit_bytes)
        staging = self._stagings[model]
        if staging is None:
            load_in_place(model, _tensors(request["reference"]))
        elif "ticket" not in request:
            staging.fill(_tensors(request["reference"]))
            staging.exchange()
        elif request["ticket"] == self._ticket:
            staging.exchange()
        else:
            raise EngineFailed("the version of this ticket is not staged in this process")
        failpoints.reach("apply.applied")
        if first and staging is not None:
            stager.start(self, _rank())

    def begin(self) -> None:
        """Prepares the staged weights of every model for a new version. Raises StagingFailed for a model without."""
        self._ticket = ""
        for model, staging in self._stagings.items():
            if staging is None:
                raise StagingFailed(f"{type(model).__name__} cannot be staged")
            staging.begin()

    def add(self, reference: dict[str, Any]) -> None:
        """Verifies tensors of the version and loads them into the staged weights. Raises ChunkCorrupt."""
        tensors = _tensors(reference)
        for staging in filter(None, self._stagings.values()):
            staging.add(tensors)

    def finish(self, ticket: str) -> str:
        """Names the staged version ``ticket`` and returns its checksum. Raises EngineFailed unless it is complete."""
        checksums = [staging.finish() for staging in self._stagings.values() if staging is not None]
        failpoints.reach("apply.staged")
        self._ticket = ticket
        return " ".join(checksums)


@torch.no_grad()
def load_in_place(model: nn.Module, tensors: Tensors) -> None:
    """Loads tensors under their HF names into the live weights. Raises EngineFailed unless all are covered."""
    poison(p.data for p in model.parameters())
    call_load_weights(model, tensors)
    require_covered((name, p.data) for name, p in model.named_parameters())


_loader = Loader()


def load(model: nn.Module, named_tensors: Tensors) -> None:
    """Entry point for SGLang: the request is the JSON in the uint8 tensor named ``REQUEST``."""
    packed = dict(named_tensors)[REQUEST]
    limit_bytes = int(os.environ.get(LIMIT_ENV, EngineConfig().staging_limit_bytes))
    _loader.load(model, json.loads(packed.cpu().numpy().tobytes()), limit_bytes)


def _tensors(reference: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    # A list, not the iterator: all digests are checked before the first parameter changes. The tensors are views.
    return list(load_tensors(reference))


def _rank() -> int:
    """Rank of this process within its engine."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
