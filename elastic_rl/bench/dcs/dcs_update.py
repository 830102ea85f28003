"""The way by which new weights get from a trainer into engines: publish, pull, stage, confirm, apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from elastic_rl.bench.dcs.engines import BenchEngine
from elastic_rl.bench.dcs.testbed import STREAM, Cluster
from elastic_rl.errors import EngineFailed

Tensors = Sequence[tuple[str, torch.Tensor]]
Update = Callable[[Tensors], None]
"""Brings the tensors into all engines, and returns when the last one has them."""
_NODE = "n0"
_HEAD_S = 120.0


class DcsUpdate:
    """The checkpoint service: publish; each engine's runner follows the head, pulls, stages, confirms and applies."""

    def __init__(self, cluster: Cluster, engines: Sequence[BenchEngine], nbytes: int) -> None:
        if not cluster.processes:
            cluster.node(_NODE, 2 * nbytes)
        self._engines = engines
        self._publisher = cluster.publisher(_NODE)
        self._pullers = [cluster.puller(_NODE) for _ in engines]
        self._heads = [cluster.adopt(puller.watch_head(STREAM)) for puller in self._pullers]
        self._settle = cluster.settle
        self.last = 0

    def update(self, tensors: Tensors) -> None:
        with ThreadPoolExecutor(len(self._engines)) as pool:
            applied = [pool.submit(self._follow, i, self.last) for i in range(len(self._engines))]
            self.last = self._publisher.publish(tensors, meta={}).number
            for future in applied:
                future.result()

    def _follow(self, i: int, after: int) -> None:
        version = self._heads[i].get(_HEAD_S)
        while version is not None and version.number <= after:
            version = self._heads[i].get(_HEAD_S)
        if version is None:
            raise EngineFailed("no version came")
        engine, puller = self._engines[i], self._pullers[i]
        with engine.stage() as session, puller.pull(STREAM, version.number, on_part=session.add) as pulled:
            update = session.finish(pulled.reference())
            pulled.confirm()
            engine.apply(update, version.number)

    def settle(self) -> None:
        self._settle()

    @contextmanager
    def reference(self) -> Iterator[dict[str, Any]]:
        """The reference of the newest version, pinned while the context is open."""
        with self._pullers[0].pull(STREAM) as pulled:
            yield pulled.reference()
