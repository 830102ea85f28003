"""Moves what a rank keeps on its device to host memory and back, between two steps.

Megatron 0.16 can free the gradient buffers (``offload_grad_buffers``) and move the optimizer's state
(``offload_to_cpu``). The latter gives each tensor new memory on the way back, so that views of one another no longer
are: with the distributed optimizer fp32 masters are ranges of the parameters' buffer, and the state by name
(``AdamState``) holds tensors of the optimizer. So this moves *memory* instead, as Megatron does for gradients: the
storage of each tensor is copied and resized to nothing, and later resized and filled. Every tensor stays the object
that it is, every view a view, and all bits come back.

What stays on the device: the context of CUDA, the buffers of NCCL, random states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.policy import Policy

Tensors = Callable[[], Iterable[torch.Tensor]]


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes device memory: on a CPU there is nothing to move."""
    return tensor.device.type != "cpu"


@dataclass(frozen=True)
class _Moved:
    storage: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor | None
    """The storage's bytes, uint8; None for one whose content is not needed again."""


class DeviceMemory:
    """The memory of some tensors. Host memory is kept for the next time, and takes as much as they do."""

    def __init__(self, kept: Tensors, scratch: Tensors = tuple, *, movable: Callable[[torch.Tensor], bool] = on_device
                 ) -> None:
        """``kept``: tensors whose content comes back, called at each offload, since the optimizer makes its state as it
        goes; ``scratch``: tensors that are zero afterwards. Several of them may share memory. ``movable``: which of
        them to move."""
        self._kept, self._scratch, self._movable = kept, scratch, movable
        self._moved: list[_Moved] = []
        self._host: dict[int, torch.Tensor] = {}
        """Host memory by the storage that it is for."""

    @classmethod
    def of_rank(cls, policy: Policy, adam: Adam, movable: Callable[[torch.Tensor], bool] = on_device) -> DeviceMemory:
        """The device memory of all that a rank keeps from one step to the next. The reference policy is in host memory
        anyway."""
        return cls(lambda: _kept(policy, adam), lambda: _gradients(policy), movable=movable)

    @torch.no_grad()
    def offload(self) -> int:
        """Moves everything to host memory, and returns how many bytes of the device that has freed. The tensors must
        not be used until ``onload``. Does nothing when it is offloaded."""
        if self._moved:
            return 0
        moved: dict[int, _Moved] = {}
        for tensors, keep in ((self._kept, True), (self._scratch, False)):
            for tensor in filter(self._movable, tensors()):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in moved:
                    host = self._copy(storage) if keep else None
                    moved[storage._cdata] = _Moved(storage, storage.nbytes(), host)
        self._host = {name: found.host for name, found in moved.items() if found.host is not None}
        self._moved = list(moved.values())
        for found in self._moved:
            found.storage.resize_(0)
        if any(found.storage.device.type != "cpu" for found in self._moved):
            torch.cuda.empty_cache()  # the allocator's cache is memory of this process too
        return sum(found.nbytes for found in self._moved)

    @torch.no_grad()
    def onload(self) -> None:
        """Moves everything back. Raises RuntimeError when the device has no room. Does nothing when nothing is
        offloaded."""
        for found in self._moved:
            found.storage.resize_(found.nbytes)
            if found.host is None:
                _bytes_of(found.storage).zero_()
            else:
                _bytes_of(found.storage).copy_(found.host)
        self._moved = []

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        host = self._host.get(storage._cdata)
        if host is None or host.numel() != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        return host.copy_(_bytes_of(storage))  # waits for it, and for what the device computes in this stream


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor [bytes] uint8 of its own on the same memory: writes to it change no tensor's version."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _kept(policy: Policy, adam: Adam) -> Iterator[torch.Tensor]:
    yield from (p.data for p in policy.module.parameters())
    yield from policy.module.buffers()
    for buffer in (*policy.ddp.buffers, *policy.ddp.expert_parallel_buffers):
        if buffer.param_data is not None:
            yield buffer.param_data
    yield from adam.tensors()


def _gradients(policy: Policy) -> Iterator[torch.Tensor]:
    """Zeroed before each step; between two steps at most the scratch of a publish."""
    return (buffer.grad_data for buffer in (*policy.ddp.buffers, *policy.ddp.expert_parallel_buffers))
