"""Fills this rank's shards from full HF tensors that come one at a time, in any order, and reads no more of each than
the shards have of it."""

from __future__ import annotations

from typing import Protocol

import torch

from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import ModelArch
from elastic_rl.trainer.megatron import hf_layout
from elastic_rl.trainer.megatron.hf_layout import Piece, ShardRange
from elastic_rl.trainer.megatron.parallel import ParallelDims


class HfTensor(Protocol):
    """A full HF tensor of which a range can be read: a ``torch.Tensor``, or one in a file (``model.FileTensor``)."""

    @property
    def shape(self) -> torch.Size: ...

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


class ShardLoader:
    """The shards that are to be filled, by the names of the HF tensors that they are made of. For one thread."""

    def __init__(self, arch: ModelArch, par: ParallelDims) -> None:
        self._arch, self._dims, self._par = arch, arch.attention_dims(par.tp), par
        self._pieces: dict[str, list[Piece]] = {}
        self._missing: set[str] = set()

    def expect(self, megatron_name: str, target: ShardRange, prefix: str = "") -> None:
        """Adds a range of a shard that is named and split as the parameter of that name; several of one parameter get
        the same values. ``prefix``: the prefix of the HF names. Raises ConfigError for a parameter that has no HF
        counterpart."""
        rule = self._arch.rule_of(megatron_name)
        for piece in hf_layout.pieces(rule, target, self._dims, tp=self._par.tp, tp_rank=self._par.tp_rank):
            self._pieces.setdefault(prefix + piece.hf, []).append(piece)
            self._missing.add(prefix + piece.hf)

    def wants(self, name: str) -> bool:
        """Whether a shard has a piece of this HF tensor."""
        return name in self._pieces

    def load(self, name: str, tensor: HfTensor) -> None:
        """Copies what the shard has of a wanted tensor; nothing of ``tensor`` is kept. Raises ConfigError for a tensor
        of another shape than the model's."""
        first = self._pieces[name][0]
        if tuple(tensor.shape) != first.shape:
            raise ConfigError(f"{name} has shape {list(tensor.shape)} where the model has {list(first.shape)}",
                              hint="is this the model that the run was started with?")
        part = tensor.narrow(first.dim, first.start, first.stop - first.start)
        for piece in self._pieces[name]:
            piece.fill(part)
        self._missing.discard(name)

    def set_to_zero(self, name: str) -> None:
        """Loads zeros as a wanted tensor, which a later ``load`` may replace."""
        self.load(name, torch.zeros(self._pieces[name][0].shape))

    def require_complete(self) -> None:
        """Raises ConfigError when a tensor has not come."""
        if self._missing:
            raise ConfigError(f"the model has no tensor {', '.join(sorted(self._missing)[:5])}",
                              hint=f"its config.json describes a {self._arch.family.model_type} model that has it; is "
                                   "the model complete?")
