"""Copies tensors from the trainer's device to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

Named = tuple[int, str, torch.Tensor]
"""Order in the version, name, tensor."""


class HostCopier:
    """Copies tensors one after the other; on CUDA on a side stream through two pinned buffers, so that one is read
    while the next one is being copied. Buffers are reused over calls."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._pinned: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    def __call__(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """The same tensors on the CPU; each is valid until the next one is requested."""
        if not self._cuda:
            yield from tensors
            return
        pending: tuple[Named, torch.cuda.Event] | None = None
        for i, (order, name, tensor) in enumerate(tensors):
            started = (order, name, self._start(tensor, i % 2)), torch.cuda.Event()
            started[1].record(self._stream)
            if pending is not None:
                pending[1].synchronize()
                yield pending[0]
            pending = started
        if pending is not None:
            pending[1].synchronize()
            yield pending[0]

    def _start(self, tensor: torch.Tensor, which: int) -> torch.Tensor:
        assert self._stream is not None
        if self._pinned[which].nbytes < tensor.nbytes:
            self._pinned[which] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        host = self._pinned[which][:tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host
