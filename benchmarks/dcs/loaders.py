"""A weight loader of the alternatives, which runs inside an engine's scheduler (``elastic_rl.bench.dcs.loaders``)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.dcs.exchanges import DcpReader
from elastic_rl.bench.dcs.loaders import Tensors, request_of

DCP = f"{__name__}.dcp"
_reader = DcpReader()


@torch.no_grad()
def dcp(model: Any, named_tensors: Tensors) -> None:
    """Loads a torch DCP folder into memory that is kept, and that into the model."""
    model.load_weights(iter(list(_reader(request_of(named_tensors)))))
