"""A rank's side of a publish: from the device through the reused host buffers into an arena."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

for needed in ("google.protobuf", "grpc", "orjson", "psutil"):
    pytest.importorskip(needed)

from elastic_rl.dcs.codecs.digests import digest_of  # noqa: E402
from elastic_rl.dcs.codecs.tensors import from_bytes  # noqa: E402
from elastic_rl.dcs.publish.part_writer import PartWriter  # noqa: E402
from elastic_rl.dcs.publish.parts import Part  # noqa: E402
from elastic_rl.trainer.checkpoint.host_copy import HostCopier, Named  # noqa: E402

CHUNK = 4096


class MemoryNode:
    """A node and its arena in this process."""

    def __init__(self) -> None:
        self.memory = torch.full((8 << 20,), 255, dtype=torch.uint8)
        self.node = SimpleNamespace(id="n", incarnation="i", arena_path="")
        self.client = SimpleNamespace(local=lambda: self)
        self.chunks: dict[str, bytes] = {}
        self._used = 0

    def attach(self, _: Any) -> torch.Tensor:
        return self.memory

    def alloc(self, nbytes: int, *, upto: int = 0) -> tuple[int, int]:
        start, self._used = self._used, self._used + max(nbytes, upto)
        return start, max(nbytes, upto)

    def seal(self, offset: int, nbytes: int, *, digest: str, keep_rest: bool) -> str:
        data = bytes(self.memory[offset:offset + nbytes].numpy())
        name = digest_of(data, digest)
        self.chunks[name] = data
        return name

    def read(self, part: Part) -> dict[str, torch.Tensor]:
        return {t.name: from_bytes(torch.frombuffer(bytearray(b"".join(
            self.chunks[s.digest][s.offset:s.offset + s.nbytes] for s in t.slices)), dtype=torch.uint8),
            t.dtype, t.shape) for _, t in part.tensors}


def test_tensors_of_one_shape_in_one_host_buffer_are_told_apart(device: torch.device) -> None:
    """The writer stores a view of the same memory only once; here the memory has another content each time."""
    sent: list[Named] = [(i, f"w{i}", torch.full((64, 32), float(i), device=device)) for i in range(9)]
    sent.append((9, "rng.torch", torch.get_rng_state()))
    node = MemoryNode()
    writer = PartWriter(node, chunk_bytes=CHUNK)  # type: ignore[arg-type]
    for order, name, host in HostCopier(device, staged=True)(sent):
        writer.add(name, host, order)
    stored = node.read(writer.seal())
    assert list(stored) == [name for _, name, _ in sent]
    assert all(torch.equal(stored[name], tensor.cpu()) for _, name, tensor in sent)
