"""A batch whose tokens are in the queue: each replica of a trainer group reads its own there, and whoever makes the
batch has no more of it than what it computes itself.

It is used as any other. A tensor of the samples that is asked for here, as the log-probs by an algorithm with
advantages of tokens, is read in pieces of a million tokens, of which the rest is dropped; the tensor itself is made
whole and kept for as long as the batch. For each token ``loss_mask`` takes 1 byte and ``tokens`` 4; for each loss token
``old_logprobs``, which is read with the mask, takes 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from elastic_rl.data.batch import SCHEMA, Batch, bytes_of, collate, cut_in_pieces, header
from elastic_rl.data.queue.step_groups import SampleReader, SampleRef, StepGroups
from elastic_rl.data.queue.summary import SampleSummary
from elastic_rl.errors import ConfigError

_QUEUE, _REFS, _NAMES = "queue", "refs", "names"
"""Metadata of a share in safetensors that says where its samples are, which, and which of their tensors it has."""
_PIECE_TOKENS = 1 << 20
"""Tokens of one piece, or of a single sample."""
_LONGEST = 1 << 32
"""Tokens of a sample, at most: sums of lengths from elsewhere may not overflow."""
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
    """Tensors that were asked for, whole; shared by all batches of these samples."""


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
        loss_tokens = torch.tensor([s.loss_tokens for s in samples], dtype=torch.int64)
        return cls(tensors, Stored(tuple(refs), loss_tokens, QUEUED, reader))

    def _require_valid(self) -> None:
        """Checks the tensors that the batch holds; the rest is checked by whoever reads it."""
        self._require_schema({"N": len(self.stored.refs), "V": int(self.tensors["lengths"].sum()),
                              "L": self.loss_tokens})

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises ConfigError, which says what the batch has, and as ``SampleReader.read``."""
        if name in self.stored.names:
            self._read(self.stored.names & _READ_TOGETHER if name in _READ_TOGETHER else {name})
            return self.stored.read[name]
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in self.stored.names or super().__contains__(name)

    @property
    def samples(self) -> int:
        return len(self.stored.refs)

    @cached_property
    def loss_counts(self) -> torch.Tensor:
        return self.stored.loss_tokens

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

    def without_loss(self, rows: torch.Tensor) -> QueuedBatch:
        held = {name: self[name] for name in self.stored.names & _READ_TOGETHER}
        read = {name: tensor for name, tensor in self.stored.read.items() if name not in _READ_TOGETHER}
        return QueuedBatch(self._without_loss({**self.tensors, **held}, rows), replace(
            self.stored, loss_tokens=self.stored.loss_tokens.index_fill(0, rows, 0),
            names=self.stored.names - _READ_TOGETHER, read=read))

    def rows(self, part: slice | torch.Tensor) -> QueuedBatch:
        numbers = torch.arange(self.samples)[part]
        stored = Stored(tuple(self.stored.refs[row] for row in numbers.tolist()), self.stored.loss_tokens[part],
                        self.stored.names, self.stored.reader)
        return QueuedBatch(self._rows(part), stored)

    @property
    def sample_bytes(self) -> torch.Tensor:
        return super().sample_bytes + self._elsewhere_bytes

    @property
    def elsewhere_bytes(self) -> int:
        return int(self._elsewhere_bytes.sum())

    @property
    def _elsewhere_bytes(self) -> torch.Tensor:
        """[N] int64: bytes of each sample in the tensors that the queue has."""
        return bytes_of(dict.fromkeys(self.stored.names, 1), self.tensors["lengths"], self.loss_counts)

    @property
    def stored_groups(self) -> tuple[int, ...]:
        return tuple(sorted({ordinal for ordinal, _ in self.stored.refs}))

    def require_stored(self) -> None:
        self.stored.reader.require(self.stored.refs)

    def loaded(self) -> Batch:
        """Raises as ``SampleReader.read``."""
        self._read(self.stored.names)
        return Batch({**self.tensors, **{name: self[name] for name in self.stored.names}})

    def _read(self, names: Set[str]) -> None:
        """Reads those of these tensors that were not read before."""
        stored = self.stored
        if unread := names - stored.read.keys():
            stored.read.update(_tensors(stored.refs, self.tensors["lengths"], unread, stored.reader))

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
    batch = QueuedBatch.of(groups.refs, groups.samples, groups.reader, advantages)
    return batch.loaded() if groups.reader.is_local else batch


def turn_rewards(groups: StepGroups, batch: Batch) -> torch.Tensor:
    """[L] fp32: what of each sample's reward is of a turn, at the turn's last token, if that is trained on; 0
    elsewhere. ``batch``: the batch of all samples."""
    found = torch.zeros(batch.loss_tokens)
    for own, mask, sample in zip(found.split(batch.loss_counts.tolist()), batch.by_sample("loss_mask"), groups.samples,
                                 strict=True):
        if not sample.turn_rewards:
            continue
        ends = torch.tensor(sample.turn_ends[:len(sample.turn_rewards)]) + sample.prompt_tokens
        trained = mask[ends]
        own[(mask.cumsum(0) - 1)[ends[trained]]] = torch.tensor(sample.turn_rewards, dtype=torch.float32)[trained]
    return found


def _tensors(refs: Sequence[SampleRef], lengths: torch.Tensor, names: Set[str], reader: SampleReader
             ) -> dict[str, torch.Tensor]:
    """The tensors of these names of the samples that ``refs`` name, whose ``lengths`` [N] are known. Raises as
    ``SampleReader.read``, and ConfigError for samples of other lengths."""
    made: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for piece in cut_in_pieces(lengths.tolist(), _PIECE_TOKENS):
        found = collate(reader.read([refs[row] for row in piece]))
        if not torch.equal(found["lengths"], lengths[piece.start:piece.stop]):
            raise ConfigError("the queue has other samples than those of which this batch is")
        if "old_logprobs" in names and "old_logprobs" not in found:
            found = found.with_tensors(old_logprobs=torch.zeros(found.loss_tokens))
        for name in names:
            made[name].append(found[name])
    return {name: torch.cat([torch.zeros(0, dtype=SCHEMA[name].dtype), *pieces]) for name, pieces in made.items()}


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
        metadata = header(raw).get("__metadata__")
        if not isinstance(metadata, dict) or _QUEUE not in metadata:
            return None
        try:
            refs = tuple((int(ordinal), int(index)) for ordinal, index in json.loads(metadata[_REFS]))
            names = frozenset(str(name) for name in json.loads(metadata[_NAMES]))
            return cls(dict(json.loads(metadata[_QUEUE])), refs, names, load(raw))
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
            raise ConfigError(f"the body is no share of a batch in the queue: {e}") from e

    @property
    def read_bytes(self) -> int:
        """Bytes that its samples have as tensors, at most. Raises ConfigError for a share without the length of each.
        """
        lengths = self._lengths()
        return int(bytes_of(dict.fromkeys(self.names & QUEUED, 1), lengths, lengths).sum())

    def _lengths(self) -> torch.Tensor:
        lengths = self.tensors.get("lengths")
        if lengths is None or lengths.shape != (len(self.refs),) or lengths.dtype != torch.int64 or (
                bool(((lengths < 1) | (lengths > _LONGEST)).any())):
            raise ConfigError("a share of a batch in the queue needs the length of each sample")
        return lengths

    def read(self, reader: SampleReader) -> Batch:
        """The batch with its samples. Raises as ``SampleReader.read``, and ConfigError for what is no batch with them.
        """
        if unknown := self.names - QUEUED:
            raise ConfigError(f"samples in the queue have no tensors {sorted(unknown)}")
        return Batch({**_tensors(self.refs, self._lengths(), self.names, reader), **self.tensors})
