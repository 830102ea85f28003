"""Copies tensors from the trainer's device to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

Named = tuple[int, str, torch.Tensor]
"""Order in the version, name, tensor."""
_Wait = Callable[[], object]


class HostCopier:
    """Copies tensors one after the other; from CUDA on a side stream through two pinned buffers, so that one is read
    while the next one is being copied. Tensors that are on the CPU already (random states) are passed on as they are.

    Buffers are reused over calls: two, each as large as the largest tensor so far.
    """

    def __init__(self, device: torch.device, *, staged: bool | None = None) -> None:
        """``staged``: copy through buffers; by default where the device is CUDA. (On the CPU for tests: the same
        buffers, without streams.)"""
        self._cuda = device.type == "cuda"
        self._staged = self._cuda if staged is None else staged
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    def __call__(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """The same tensors on the CPU, in the same order; each is valid until the next one is requested. When it is
        exhausted nothing reads the device's tensors any more, so that they may change."""
        if not self._staged:
            yield from tensors
            return
        pending: tuple[Named, _Wait] | None = None
        which = 0
        for order, name, tensor in tensors:
            if self._cuda and tensor.device.type == "cpu":
                started: tuple[Named, _Wait] = (order, name, tensor), lambda: None
            else:
                host, wait = self._start(tensor, which)
                started, which = ((order, name, host), wait), 1 - which
            if pending is not None:
                yield _awaited(pending)
            pending = started
        if pending is not None:
            yield _awaited(pending)

    def _start(self, tensor: torch.Tensor, which: int) -> tuple[torch.Tensor, _Wait]:
        """Begins to copy into a buffer, whose last tensor is not valid any more; the copy, and how to wait for it."""
        if self._buffers[which].nbytes < tensor.nbytes:
            self._buffers[which] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        host = self._buffers[which][:tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if self._stream is None:
            host.copy_(tensor)
            return host, lambda: None
        # What computes the tensor is queued on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()
        # Its memory came from the current stream's pool, to which it would return while the side stream reads it.
        tensor.record_stream(self._stream)
        return host, copied.synchronize


def _awaited(pending: tuple[Named, _Wait]) -> Named:
    named, wait = pending
    wait()
    return named
