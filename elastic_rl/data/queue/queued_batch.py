"""A batch whose tokens are in the queue: each replica of a trainer group reads its own there, and whoever makes the
batch has no more of it than what it computes itself.

It is used as any other. A tensor of the samples that is asked for here, as the loss mask by an algorithm with
advantages of tokens, is read in pieces of a million tokens, of which the rest is dropped; the tensor itself is made
whole, [N, T], and kept for as long as the batch. For each place in it, padding included, ``loss_mask`` takes 1 byte,
``old_logprobs``, which is read with it, 4, and ``tokens`` 8.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from elastic_rl.data.batch import SCHEMA, Batch, collate
from elastic_rl.data.queue.step_groups import SampleReader, SampleRef, StepGroups
from elastic_rl.data.queue.summary import SampleSummary
from elastic_rl.errors import ConfigError

_QUEUE, _REFS, _NAMES = "queue", "refs", "names"
"""Metadata of a share in safetensors that says where its samples are, which, and which of their tensors it has."""
_PIECE_TOKENS = 1 << 20
"""Tokens of one piece, or of a single sample."""
QUEUED = frozenset(("tokens", "loss_mask", "old_logprobs"))
"""Tensors that samples in the queue make."""
_READ_TOGETHER = frozenset(("loss_mask", "old_logprobs"))
"""Tensors that are read together: who reads one mostly needs the other."""


@dataclass(frozen=True)
class Stored:
    """What of a batch is in the queue."""

    refs: tuple[SampleRef, ...]
    """The reference of each sample to what the queue has of it."""
    loss_tokens: torch.Tensor
    """[N] int64."""
    names: frozenset[str]
    """Tensors that the samples make, and that the batch has and does not hold."""
    reader: SampleReader
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors [N, T] that were asked for, whole; shared by all batches of these samples."""


@dataclass(frozen=True)
class QueuedBatch(Batch):
    """A batch whose columns are read from the queue when they are asked for. ``tensors``: those that it holds."""

    stored: Stored

    @classmethod
    def of(cls, refs: Sequence[SampleRef], samples: Sequence[SampleSummary], reader: SampleReader,
           advantages: Sequence[float] | None) -> QueuedBatch:
        """``samples``: the samples of ``refs``. ``advantages``: one per sample, or None for a batch without."""
        tensors = {"lengths": torch.tensor([s.length for s in samples], dtype=torch.int64),
                   "versions": torch.tensor([s.oldest_version for s in samples], dtype=torch.int64),
                   "numbers": torch.arange(len(samples))}
        if advantages is not None:
            tensors["advantages"] = torch.tensor(list(advantages), dtype=torch.float32)
        names = QUEUED if any(s.has_logprobs for s in samples) else QUEUED - {"old_logprobs"}
        loss_tokens = torch.tensor([s.loss_tokens for s in samples], dtype=torch.int64)
        return cls(tensors, Stored(tuple(refs), loss_tokens, names, reader))

    def _require_valid(self) -> None:
        """Checks the tensors that the batch holds; the rest is checked by whoever reads it."""
        self._require_schema({"N": len(self.stored.refs), "T": self.width, "L": self.loss_tokens})

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises ConfigError, which says what the batch has, and as ``SampleReader.read``."""
        if name in self.stored.names:
            return self._read(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in self.stored.names or super().__contains__(name)

    @property
    def samples(self) -> int:
        return len(self.stored.refs)

    @property
    def width(self) -> int:
        return max(self.tensors["lengths"].tolist(), default=0)

    @property
    def loss_counts(self) -> torch.Tensor:
        return self.stored.loss_tokens if "loss_mask" in self.stored.names else super().loss_counts

    def with_tensors(self, **tensors: torch.Tensor) -> QueuedBatch:
        return QueuedBatch({**self.tensors, **tensors}, self._having(self.stored.names - tensors.keys()))

    def only(self, *names: str) -> QueuedBatch:
        for name in names:
            if name not in self:
                super().__getitem__(name)  # raises what it lacks
        return QueuedBatch({name: tensor for name, tensor in self.tensors.items() if name in {*names, "lengths"}},
                           self._having(self.stored.names & {*names}))

    def without(self, *names: str) -> QueuedBatch:
        return QueuedBatch({name: tensor for name, tensor in self.tensors.items() if name not in names},
                           self._having(self.stored.names - {*names}))

    def _having(self, names: frozenset[str]) -> Stored:
        return Stored(self.stored.refs, self.stored.loss_tokens, names, self.stored.reader, self.stored.read)

    def rows(self, part: slice | torch.Tensor, width: int | None = None) -> QueuedBatch:
        numbers = torch.arange(self.samples)[part]
        stored = Stored(tuple(self.stored.refs[row] for row in numbers.tolist()), self.stored.loss_tokens[part],
                        self.stored.names, self.stored.reader)
        return QueuedBatch(self._rows(part, width), stored)

    @property
    def elsewhere_bytes(self) -> int:
        return self.samples * self.width * sum(SCHEMA[name].dtype.itemsize for name in self.stored.names)

    @property
    def stored_groups(self) -> tuple[int, ...]:
        return tuple(sorted({ordinal for ordinal, _ in self.stored.refs}))

    def require_stored(self) -> None:
        self.stored.reader.require(self.stored.refs)

    def loaded(self) -> Batch:
        """Raises as ``SampleReader.read``."""
        return Batch({**self.tensors, **{name: self[name] for name in self.stored.names}})

    def _read(self, wanted: str) -> torch.Tensor:
        read, stored = self.stored.read, self.stored
        if wanted not in read:
            names = {wanted} | (_READ_TOGETHER & stored.names if wanted in _READ_TOGETHER else set())
            read.update(_tensors(stored.refs, self.tensors["lengths"], names, stored.reader))
        return read[wanted]

    def to_bytes(self) -> bytes:
        """The batch as safetensors, with what says where the rest is. Raises GroupsLost, and ConfigError where no other
        process can read it."""
        address = self.stored.reader.address
        if address is None:
            self.require_stored()  # of a queue that was just replaced
            raise ConfigError("the samples of this batch can be read by this process only")
        return save({name: tensor.contiguous() for name, tensor in self.tensors.items()}, {
            _QUEUE: json.dumps(address), _REFS: json.dumps(self.stored.refs),
            _NAMES: json.dumps(sorted(self.stored.names))})


def batch_of(groups: StepGroups, advantages: Sequence[float] | None = None) -> Batch:
    """All samples of a step as a batch, of which another process has them if they are not in the memory of this one.
    ``advantages``: one per sample, or None for a batch without. Raises as ``collate`` and ``SampleReader.read``."""
    if groups.reader.is_local:
        return collate(groups.reader.read(groups.refs), advantages)
    return QueuedBatch.of(groups.refs, groups.samples, groups.reader, advantages)


def turn_rewards(groups: StepGroups, batch: Batch) -> torch.Tensor:
    """[N, T] fp32: what of each sample's reward is of a turn, at the turn's last token, if that is trained on; 0
    elsewhere. ``batch``: the batch of all samples."""
    found = torch.zeros((batch.samples, batch.width))
    for row, sample in enumerate(groups.samples):
        ends = [sample.prompt_tokens + end for end in sample.turn_ends[:len(sample.turn_rewards)]]
        found[row, ends] = torch.tensor(sample.turn_rewards, dtype=torch.float32)
    return torch.where(batch["loss_mask"], found, 0.0)


def _tensors(refs: Sequence[SampleRef], lengths: torch.Tensor, names: Set[str], reader: SampleReader
             ) -> dict[str, torch.Tensor]:
    """[N, T] each, of the samples that ``refs`` name, whose ``lengths`` [N] are known. Raises as ``SampleReader.read``,
    and ConfigError for samples of other lengths."""
    width = max(lengths.tolist(), default=0)
    made = {name: torch.zeros((len(refs), width), dtype=SCHEMA[name].dtype) for name in names}
    for piece in _pieces(lengths.tolist()):
        found = collate(reader.read([refs[row] for row in piece]))
        rows = slice(piece.start, piece.stop)
        if not torch.equal(found["lengths"], lengths[rows]):
            raise ConfigError("the queue has other samples than those of which this batch is")
        for name in names & found.tensors.keys():
            made[name][rows, :found.width] = found[name]
    return made


def _pieces(lengths: Sequence[int]) -> list[range]:
    """Consecutive samples of at most so many tokens together."""
    pieces: list[range] = []
    start = tokens = 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > _PIECE_TOKENS:
            pieces.append(range(start, row))
            start, tokens = row, 0
        tokens += length
    return [*pieces, range(start, len(lengths))] if lengths else []


@dataclass(frozen=True)
class QueuedShare:
    """A share of a batch as a rank gets it: its samples are yet to be read."""

    address: Mapping[str, Any]
    refs: tuple[SampleRef, ...]
    names: frozenset[str]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def from_bytes(cls, raw: bytes) -> QueuedShare | None:
        """None for a batch that has its samples itself, or that is none. Raises ConfigError for anything else but what
        ``QueuedBatch.to_bytes`` returned."""
        metadata = _metadata(raw)
        if _QUEUE not in metadata:
            return None
        try:
            refs = tuple((int(ordinal), int(index)) for ordinal, index in json.loads(metadata[_REFS]))
            names = frozenset(str(name) for name in json.loads(metadata[_NAMES]))
            return cls(dict(json.loads(metadata[_QUEUE])), refs, names, load(raw))
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
            raise ConfigError(f"the body is no share of a batch in the queue: {e}") from e

    @property
    def read_bytes(self) -> int:
        """Bytes that its samples have as tensors. Raises ConfigError for a share without the length of each."""
        widest = max(self._lengths().tolist(), default=0)
        return len(self.refs) * widest * sum(SCHEMA[name].dtype.itemsize for name in self.names & QUEUED)

    def _lengths(self) -> torch.Tensor:
        lengths = self.tensors.get("lengths")
        if lengths is None or lengths.shape != (len(self.refs),) or lengths.dtype != torch.int64 or (
                bool((lengths < 1).any())):
            raise ConfigError("a share of a batch in the queue needs the length of each sample")
        return lengths

    def read(self, reader: SampleReader) -> Batch:
        """The batch with its samples. Raises as ``SampleReader.read``, and ConfigError for what is no batch with them.
        """
        if unknown := self.names - QUEUED:
            raise ConfigError(f"samples in the queue have no tensors {sorted(unknown)}")
        return Batch({**_tensors(self.refs, self._lengths(), self.names, reader), **self.tensors})


def _metadata(raw: bytes) -> Mapping[str, str]:
    """The texts in the header of safetensors: its length as uint64, and JSON with "__metadata__". Empty where there
    are none."""
    try:
        [size] = struct.unpack_from("<Q", raw)
        found = json.loads(raw[8:8 + size]).get("__metadata__", {})
        return {str(name): str(value) for name, value in found.items()}
    except (struct.error, ValueError, AttributeError, RecursionError):
        return {}
