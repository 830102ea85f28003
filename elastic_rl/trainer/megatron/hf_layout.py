"""Converts tensors between Megatron's layout and HF's, both ways. Pure: no process group, no model.

A parameter and its two Adam moments have one layout, so the same rules convert weights and optimizer state. The full HF
layout is stored; a group of any tensor-parallel size splits it into its own shards, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from elastic_rl.models.layout import AttentionDims, Rule, ShardLayout


def merge(rule: Rule, shards: Sequence[torch.Tensor], dims: AttentionDims) -> dict[str, torch.Tensor]:
    """Merges shards in rank order into contiguous full HF tensors by name."""
    if rule.layout is ShardLayout.WHOLE:
        return {rule.hf[0]: shards[0].contiguous()}
    if rule.layout is ShardLayout.COLUMNS:
        return {rule.hf[0]: torch.cat(list(shards), dim=1)}
    if rule.layout is ShardLayout.GATE_UP:
        halves = [s.chunk(2, dim=0) for s in shards]
        return {name: torch.cat([h[i] for h in halves], dim=0) for i, name in enumerate(rule.hf)}
    full = torch.cat(list(shards), dim=0)
    if rule.layout is ShardLayout.VOCAB:
        return {rule.hf[0]: full[:dims.vocab].contiguous()}
    per_group = dims.heads // dims.kv_heads
    grouped = full.view(dims.kv_heads, per_group + 2, dims.head_dim, *full.shape[1:])
    parts = (grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1])
    return {name: part.reshape(-1, *full.shape[1:]).contiguous() for name, part in zip(rule.hf, parts, strict=True)}


@dataclass(frozen=True)
class ShardRange:
    """Consecutive elements of one rank's shard, flattened: all of it, or the part that this data-parallel replica keeps
    with the distributed optimizer."""

    shape: tuple[int, ...]
    """Shape of the shard."""
    start: int
    """Place of the first element in the flattened shard."""
    values: torch.Tensor
    """[n] of any dtype and device."""

    @classmethod
    def whole(cls, shard: torch.Tensor) -> ShardRange:
        """The range of all of a contiguous shard."""
        return cls(tuple(shard.shape), 0, shard.detach().view(-1))

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()

    def between(self, start: int, stop: int) -> torch.Tensor:
        """The values that the range has of these elements of the flattened shard."""
        return self.values[max(start - self.start, 0):max(stop - self.start, 0)]


@dataclass(frozen=True)
class Piece:
    """What a range of one rank's shard has of one HF tensor: a range of it along one dimension, and where its elements
    are in the flattened shard: in runs of one length."""

    hf: str
    shape: tuple[int, ...]
    """Shape of the full HF tensor."""
    dim: int
    start: int
    stop: int
    target: ShardRange
    run: int
    """Number of elements."""
    runs: Sequence[int]
    """First element of each."""
    padding: tuple[int, int] = (0, 0)
    """Elements of the shard that no HF tensor has; they are zero."""

    @property
    def is_empty(self) -> bool:
        """Whether the range has nothing of the tensor, nor of the padding."""
        return not any(self.target.between(at, at + n).numel() for at, n in self._places())

    @torch.no_grad()
    def fill(self, part: torch.Tensor) -> None:
        """Writes the range of the HF tensor, of any device and dtype, as far as ``target`` has it."""
        flat = part.reshape(-1)
        for i, at in enumerate(self.runs):
            found = self.target.between(at, at + self.run)
            first = i * self.run + max(self.target.start - at, 0)
            found.copy_(flat[first:first + found.numel()])
        self.target.between(*self.padding).zero_()

    def _places(self) -> Iterator[tuple[int, int]]:
        yield from ((at, self.run) for at in self.runs)
        yield self.padding[0], self.padding[1] - self.padding[0]


def pieces(rule: Rule, target: ShardRange, dims: AttentionDims, *, tp: int, tp_rank: int) -> list[Piece]:
    """The pieces that a range of one rank's shard consists of, in the order of ``rule.hf``; for a whole shard the
    inverse of ``merge``. HF tensors of which the range has nothing are left out."""
    rows, *rest = target.shape
    row = math.prod(rest)

    def of_rows(name: str, count: int, *firsts: int) -> Piece:
        """``count`` rows in runs that begin at these rows."""
        return Piece(name, (count * tp, *rest), 0, count * tp_rank, count * (tp_rank + 1), target,
                     count // len(firsts) * row, [first * row for first in firsts])

    def found() -> Iterator[Piece]:
        name = rule.hf[0]
        match rule.layout:
            case ShardLayout.WHOLE:
                yield Piece(name, target.shape, 0, 0, rows, target, rows * row, [0])
            case ShardLayout.COLUMNS:
                width, *others = rest
                yield Piece(name, (rows, width * tp, *others), 1, width * tp_rank, width * (tp_rank + 1), target,
                            rows * row, [0])
            case ShardLayout.VOCAB:
                start, stop = (min(rows * rank, dims.vocab) for rank in (tp_rank, tp_rank + 1))
                real = (stop - start) * row
                yield Piece(name, (dims.vocab, *rest), 0, start, stop, target, real, [0], (real, rows * row))
            case ShardLayout.GATE_UP:
                for i, half in enumerate(rule.hf):
                    yield of_rows(half, rows // 2, i * (rows // 2))
            case ShardLayout.QKV:
                groups, per_group = dims.kv_heads // tp, dims.heads // dims.kv_heads
                heads = ((0, per_group), (per_group, 1), (per_group + 1, 1))
                for of_heads, (head, count) in zip(rule.hf, heads, strict=True):
                    firsts = [(group * (per_group + 2) + head) * dims.head_dim for group in range(groups)]
                    yield of_rows(of_heads, groups * count * dims.head_dim, *firsts)

    return [piece for piece in found() if not piece.is_empty]
