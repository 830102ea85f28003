"""A process that reads tensors from one of the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from benchmarks.dcs.exchanges import LOADERS
from elastic_rl.bench.dcs.reader import complete
from elastic_rl.bench.workers import serve


class ExchangeReader:
    """Keeps the tensors that it loaded last until ``release``."""

    def __init__(self) -> None:
        self._loader: Callable[[Mapping[str, Any]], Iterable[tuple[str, torch.Tensor]]] | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def open(self, kind: str) -> None:
        self._loader = LOADERS[kind]()

    def load(self, reference: dict[str, Any], names: int, nbytes: int) -> dict[str, float]:
        assert self._loader is not None
        self._tensors = dict(self._loader(reference))
        return complete(self._tensors, names, nbytes)

    def release(self) -> None:
        self._tensors = {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    reader = ExchangeReader()
    serve({"open": reader.open, "load": reader.load, "release": reader.release})
