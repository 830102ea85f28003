"""commit-100k: how long the commit of a version of 100,000 tensors takes.

From the moment when the last tensor has been read until the version is visible: the last chunk, the manifest made,
encoded, stored and hashed, and the transaction. A 1T model has so many tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from elastic_rl.bench.dcs.testbed import Testbed
from elastic_rl.bench.measurement import Row

TENSORS = 100_000
GOAL_S = 1.0
_ELEMENTS = 64


def measure(testbed: Testbed) -> list[Row]:
    commits, pulls = [], []
    with testbed.cluster() as cluster:
        cluster.node("n0", 4 * TENSORS * _ELEMENTS * 2 + (128 << 20))
        publisher, puller = cluster.publisher("n0"), cluster.puller("n0")
        for i in range(testbed.samples + 1):
            tensors = _Tensors(i)
            version = publisher.publish(tensors, meta={})
            commits.append(time.monotonic() - tensors.read_at)
            start = time.monotonic()
            with puller.pull(version.stream, version.number) as pulled:
                if len(pulled.manifest.tensors) != TENSORS:
                    raise RuntimeError(f"{len(pulled.manifest.tensors)} tensors came back")
                pulls.append(time.monotonic() - start)
            cluster.sweep()
    return [Row.of("commit-100k", f"commit of a version of {TENSORS:,} tensors", commits[1:], "s", goal=GOAL_S),
            Row.of("commit-100k-pull", "… and its pull on the same host", pulls[1:], "s")]


class _Tensors:
    """Small tensors that differ from one version to the next; notes when the last one was taken."""

    def __init__(self, seed: int) -> None:
        words = TENSORS * _ELEMENTS // 2
        self._data = (torch.arange(words, dtype=torch.int32) + seed * words).view(torch.bfloat16)
        self.read_at = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(TENSORS):
            yield (f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight",
                   self._data[i * _ELEMENTS:(i + 1) * _ELEMENTS])
        self.read_at = time.monotonic()
