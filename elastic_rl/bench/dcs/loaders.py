"""The bench's weight loader, which runs inside an engine's scheduler and is named to it with
``--custom-weight-loader``.

It is called with one uint8 tensor of JSON by ``update_weights_from_tensor``, as ``elastic_rl.engine.sglang.loader`` is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from elastic_rl.dcs.fetch import mapping

BARE = f"{__name__}.bare"

Tensors = Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def bare(model: Any, named_tensors: Tensors) -> None:
    """The model's own ``load_weights`` from mapped memory, nothing verified; writes how long it took, in seconds, to
    the file ``times``."""
    request = request_of(named_tensors)
    tensors = list(mapping.load_tensors(request["reference"]))
    sum(float(t.view(-1)[0]) for _, t in tensors)  # mapped in this process before the clock starts
    start = time.monotonic()
    model.load_weights(iter(tensors))
    took = time.monotonic() - start
    with Path(request["times"]).open("a", encoding="utf-8") as out:
        out.write(f"{took}\n")


def request_of(named_tensors: Tensors) -> dict[str, Any]:
    """What the tensor of such a call says."""
    [(_, packed)] = named_tensors
    request: dict[str, Any] = json.loads(packed.cpu().numpy().tobytes())
    return request
