"""commit-100k: how long the commit of a version takes that has as many tensors and chunks as a model of 1T parameters.

Timed from the moment when the last tensor has been read until the version is visible: the last chunk, the manifest
made, encoded, stored and hashed, and the transaction. 1T parameters in bf16 are 2 TB: about 100,000 tensors, and
477,000 chunks of the default size. The tensors and chunks here are smaller, in the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from elastic_rl.bench.dcs.testbed import DCS, Testbed
from elastic_rl.bench.measurement import Row

TENSORS = 100_000
MODEL_BYTES = 2 * 10**12
CHUNKS = -(-MODEL_BYTES // DCS.chunk_bytes)
GOAL_S = 1.0
_CHUNK_BYTES = 256
_ELEMENTS = CHUNKS * _CHUNK_BYTES // TENSORS // 64 * 32
"""bf16, of a tensor; 64 bytes are the alignment within a chunk."""
_ARENA_BYTES = 256 << 20
_FEWER = 0.98
"""Share of CHUNKS that a version must have: alignment takes a few."""


def measure(testbed: Testbed) -> Iterator[Row]:
    commits: list[float] = []  # the first one does not count where there are several
    pulls: list[float] = []
    with testbed.cluster() as cluster:
        # Nodes save a chunk a file, and no node stores the chunks of a whole such model.
        cluster.start("n0", 4 * TENSORS * _ELEMENTS * 2 + _ARENA_BYTES, disk_bytes=0)
        cluster.await_nodes()
        publisher, puller = cluster.publisher("n0", chunk_bytes=_CHUNK_BYTES), cluster.puller("n0")
        for i in range(1 if testbed.options.quick else 3):
            tensors = _Tensors(i)
            version = publisher.publish(tensors, meta={})
            commits.append(time.monotonic() - tensors.read_at)
            start = time.monotonic()
            with puller.pull(version.stream, version.number) as pulled:
                pulls.append(time.monotonic() - start)
                chunks = len(pulled.manifest.chunks)
                if len(pulled.manifest.tensors) != TENSORS or chunks < _FEWER * CHUNKS:
                    raise RuntimeError(f"{len(pulled.manifest.tensors)} tensors in {chunks} chunks came back")
            cluster.settle()
    yield Row.of("commit-100k", f"commit of a version of {TENSORS:,} tensors in {chunks:,} chunks",
                 commits[1:] or commits, "s", goal=GOAL_S)
    yield Row.of("commit-100k-pull", "… and its pull on the same host", pulls[1:] or pulls, "s")


class _Tensors:
    """Small tensors that differ from one version to the next; notes when the last one was read."""

    def __init__(self, seed: int) -> None:
        words = TENSORS * _ELEMENTS // 2
        self._data = (torch.arange(words, dtype=torch.int32) + seed * words).view(torch.bfloat16)
        self.read_at = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(TENSORS):
            yield (f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight",
                   self._data[i * _ELEMENTS:(i + 1) * _ELEMENTS])
        self.read_at = time.monotonic()
