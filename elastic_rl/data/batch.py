"""Samples as tensors, and their wire format (safetensors: nothing is pickled).

A batch is named tensors, each of which the schema describes: the trainer asks for those that its algorithm needs, and
a new one needs a line in ``SCHEMA`` and nothing else. It is ragged: the samples' tokens lie one sample after the other,
and nothing is padded to the longest of them. N is the number of samples, V that of their tokens, and L that of the loss
tokens, which are those of V that the policy is trained on, in the same order: what is only needed for these is there
for no others. What a tensor [L] holds of a token is about its prediction from the tokens before it.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from elastic_rl.data.samples import Prompt, Sample, demonstration
from elastic_rl.errors import ConfigError


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and dimensions of a tensor. ``dims``: names of its dimensions; those of one name have one size."""

    dtype: torch.dtype
    dims: tuple[str, ...]


SCHEMA: dict[str, TensorSpec] = {
    "tokens": TensorSpec(torch.int32, ("V",)),
    "lengths": TensorSpec(torch.int64, ("N",)),             # tokens of each sample, 1 or more
    "loss_mask": TensorSpec(torch.bool, ("V",)),            # tokens that the policy is trained on
    "old_logprobs": TensorSpec(torch.float32, ("L",)),      # log-probs they were sampled with; 0 where none sampled
    "trainer_logprobs": TensorSpec(torch.float32, ("L",)),  # the trainer's own, before a step's first update
    "ref_logprobs": TensorSpec(torch.float32, ("L",)),      # of the reference policy
    "teacher_logprobs": TensorSpec(torch.float32, ("L",)),  # of the teacher
    "teacher_top_ids": TensorSpec(torch.int32, ("L", "K")),  # its most probable ones in a token's place
    "teacher_top_logprobs": TensorSpec(torch.float32, ("L", "K")),
    "advantages": TensorSpec(torch.float32, ("N",)),
    "token_advantages": TensorSpec(torch.float32, ("L",)),  # instead of ``advantages``: one per token
    "turn_rewards": TensorSpec(torch.float32, ("L",)),      # at the last token of each turn; 0 elsewhere
    "values": TensorSpec(torch.float32, ("L",)),            # of the critic, before the step
    "returns": TensorSpec(torch.float32, ("L",)),           # what the values should have been
    "versions": TensorSpec(torch.int64, ("N",)),            # oldest policy version that generated the sample
    "numbers": TensorSpec(torch.int64, ("N",)),             # of the sample in the step's batch, see ``minibatch``
}
_REQUIRED = ("tokens", "lengths", "loss_mask")
_FINITE = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "teacher_top_logprobs", "advantages",
           "token_advantages", "turn_rewards", "values", "returns")


@dataclass(frozen=True)
class Batch:
    """N samples as named tensors, checked against the schema."""

    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        """Raises ConfigError for an unknown or missing tensor and for inconsistent shapes, dtypes or lengths."""
        self._require_valid()

    def _require_schema(self, sizes: dict[str, int]) -> None:
        """``sizes``: the sizes of dimensions, as far as they are known."""
        for name, tensor in self.tensors.items():
            spec = SCHEMA.get(name)
            if spec is None:
                raise ConfigError(f"a batch has no tensor {name!r}; the schema has {sorted(SCHEMA)}")
            if tensor.dtype != spec.dtype or tensor.ndim != len(spec.dims):
                raise ConfigError(f"{name} must be {spec.dtype} {list(spec.dims)}, not {tensor.dtype} "
                                  f"{list(tensor.shape)}")
            for dim, size in zip(spec.dims, tensor.shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ConfigError(f"{name} is {list(tensor.shape)}, but {dim} is {sizes[dim]} in other tensors")
        for name in _FINITE:
            if name in self.tensors and not bool(torch.isfinite(self.tensors[name]).all()):
                raise ConfigError(f"{name} has a value that is not finite")

    def _require_valid(self) -> None:
        for name in _REQUIRED:
            if name not in self.tensors:
                raise ConfigError(f"a batch needs the tensor {name!r}; it has {sorted(self.tensors)}")
        lengths, mask = self["lengths"], self["loss_mask"]
        self._require_schema({"V": int(lengths.sum()), "L": int(mask.sum())})
        if not self.samples:
            return
        if int(lengths.min()) < 1 or int(lengths.max()) > len(mask):
            raise ConfigError(f"lengths must be 1 to {len(mask)}, not {int(lengths.min())} to {int(lengths.max())}")
        if bool(mask[self.starts].any()):
            raise ConfigError("the loss mask includes a first token, which nothing predicts")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises ConfigError, which says what the batch has."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ConfigError(f"the batch has no tensor {name!r}, only {sorted(self.tensors)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def samples(self) -> int:
        return int(self["lengths"].shape[0])

    @cached_property
    def starts(self) -> torch.Tensor:
        """[N] int64: where the tokens of each sample begin in tensors [V]."""
        return starts_of(self["lengths"])

    def by_sample(self, name: str) -> tuple[torch.Tensor, ...]:
        """A tensor [V, …] or [L, …] as one for each sample, without a copy. Raises ConfigError as ``[]``."""
        counts = self.loss_counts if SCHEMA[name].dims[0] == "L" else self["lengths"]
        return self[name].split(counts.tolist()) if self.samples else ()

    def require_tokens_below(self, vocab: int) -> None:
        """Raises ConfigError for a token id that a model with this vocabulary does not have."""
        tokens = self["tokens"]
        if self.samples and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab):
            raise ConfigError(f"the batch has token ids from {int(tokens.min())} to {int(tokens.max())}; the model has "
                              f"{vocab} tokens", hint="the data must be tokenized with the model's own tokenizer")

    def with_tensors(self, **tensors: torch.Tensor) -> Batch:
        """The same samples with further tensors, or others in the place of theirs. Raises as the constructor."""
        return Batch({**self.tensors, **tensors})

    def only(self, *names: str) -> Batch:
        """The same samples with these tensors alone. Raises ConfigError for one that it does not have."""
        return Batch({name: self[name] for name in names})

    def without(self, *names: str) -> Batch:
        """A batch of the same samples without these tensors."""
        return Batch({name: tensor for name, tensor in self.tensors.items() if name not in names})

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that are trained on."""
        return int(self.loss_counts.sum())

    @cached_property
    def loss_counts(self) -> torch.Tensor:
        """[N] int64: those of each sample."""
        if not self.samples:
            return torch.zeros(0, dtype=torch.int64)
        mask = self["loss_mask"].numpy().view(np.uint8)
        return torch.from_numpy(np.add.reduceat(mask, self.starts.numpy(), dtype=np.int64))

    @cached_property
    def _loss_starts(self) -> torch.Tensor:
        """[N] int64: where the loss tokens of each sample begin in tensors [L]."""
        return starts_of(self.loss_counts)

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] sums of values [L]; 0 for a sample without a loss token."""
        return values.new_zeros(self.samples).index_add(0, self.to_tokens(torch.arange(self.samples)), values)

    def to_tokens(self, of_samples: torch.Tensor) -> torch.Tensor:
        """[L] from [N]: the value of each loss token's sample."""
        return torch.repeat_interleave(of_samples, self.loss_counts)

    def without_loss(self, rows: torch.Tensor) -> Batch:
        """The same samples, of which those with these numbers have no loss token."""
        return Batch(self._without_loss(self.tensors, rows))

    def _without_loss(self, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = torch.ones(self.samples, dtype=torch.bool).index_fill(0, rows, False)
        of_loss = self.to_tokens(kept)
        found = {name: tensor[of_loss] if SCHEMA[name].dims[0] == "L" else tensor for name, tensor in tensors.items()}
        return {**found, "loss_mask": tensors["loss_mask"] & torch.repeat_interleave(kept, self["lengths"])}

    def rows(self, part: slice | torch.Tensor) -> Batch:
        """The samples of a slice, without a copy, or with these numbers."""
        return Batch(self._rows(part))

    def _rows(self, part: slice | torch.Tensor) -> dict[str, torch.Tensor]:
        dims = {SCHEMA[name].dims[0] for name in self.tensors}
        where = {"N": part, **({"V": _spans(self.starts, self["lengths"], part)} if "V" in dims else {}),
                 **({"L": _spans(self._loss_starts, self.loss_counts, part)} if "L" in dims else {})}
        return {name: tensor[where[SCHEMA[name].dims[0]]] for name, tensor in self.tensors.items()}

    def loss_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """[l] int64: where the loss tokens of some samples are in tensors [L], in the order of ``rows``."""
        return spans(self._loss_starts[rows], self.loss_counts[rows])

    @property
    def sample_bytes(self) -> torch.Tensor:
        """[N] int64: bytes of each sample in all tensors, those that it does not hold included."""
        return bytes_of({name: math.prod(tensor.shape[1:]) for name, tensor in self.tensors.items()},
                        self["lengths"], self.loss_counts)

    def share_rows(self, count: int, minibatches: int = 1, cost: Callable[[int], float] = float) -> list[torch.Tensor]:
        """The numbers of the samples of each of ``count`` data-parallel replicas, ascending, with about as much work
        each (``balanced``), and of each of so many minibatches. ``cost``: the work of a sample of so many tokens; by
        default as much as it has tokens."""
        costs, totals = [cost(length) for length in self["lengths"].tolist()], [0.0] * count
        rows: list[list[int]] = [[] for _ in range(count)]
        for i in range(minibatches):
            for share, of_minibatch in enumerate(balanced(costs[i::minibatches], count, totals)):
                own = [row * minibatches + i for row in of_minibatch]
                totals[share] += sum(costs[row] for row in own)
                rows[share] += own
        return [torch.tensor(sorted(own), dtype=torch.int64) for own in rows]

    def minibatch(self, index: int, count: int) -> Batch:
        """The samples of this share that are in one of ``count`` minibatches of the step's batch: every ``count``-th
        one of that, whatever the number of replicas."""
        return self.rows((self["numbers"] % count == index).nonzero().flatten())

    def minibatches(self, count: int) -> list[Batch]:
        """The samples of this share by minibatch, of which the step's batch has ``count``: each is in one of them."""
        return [self] if count == 1 else [self.minibatch(index, count) for index in range(count)]

    def shares(self, count: int) -> list[Batch]:
        """Splits the samples over data-parallel replicas, as ``share_rows``."""
        return [self.rows(rows) for rows in self.share_rows(count)]

    def pieces(self, rows: torch.Tensor, limit: int) -> list[torch.Tensor]:
        """These rows, in order, in pieces of samples with at most ``limit`` bytes, or of a single one. One at least."""
        sizes = self.sample_bytes[rows].tolist()
        return [rows[piece.start:piece.stop] for piece in cut_in_pieces(sizes, limit)] or [rows]

    @classmethod
    def of_pieces(cls, pieces: Sequence[Batch]) -> Batch:
        """The samples of several batches of the same ``layout``, in order."""
        if len(pieces) == 1:
            return pieces[0]
        return cls({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0].tensors})

    def joined(self, rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """[L] of this batch from values [l] of each share, which has these ``rows`` of it.

        Raises ConfigError for values that are not those of the shares.
        """
        out = values[0].new_zeros(self.loss_tokens)
        for of_share, own in zip(rows, values, strict=True):
            where = self.loss_rows(of_share)
            if own.shape != where.shape:
                raise ConfigError(f"the values of a share must be {list(where.shape)}, not {list(own.shape)}")
            out[where] = own
        return out

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes of the tensors that it has and does not hold."""
        return 0

    @property
    def stored_groups(self) -> tuple[int, ...]:
        """Ordinals of the groups whose samples are elsewhere."""
        return ()

    def require_stored(self) -> None:
        """Raises GroupsLost for samples that are elsewhere, and known to be gone."""

    def loaded(self) -> Batch:
        """The batch with all tensors in the memory of this process."""
        return self

    def to_bytes(self) -> bytes:
        """The batch as safetensors."""
        return save({name: tensor.contiguous() for name, tensor in self.tensors.items()})

    @classmethod
    def from_bytes(cls, raw: bytes) -> Batch:
        """Raises ConfigError when the bytes are not a batch."""
        try:
            tensors = load(raw)
            mask = tensors.get("loss_mask")
            if mask is not None and mask.dtype == torch.bool and mask.numel() and int(mask.view(torch.uint8).max()) > 1:
                raise ConfigError("a byte of the loss mask is neither 0 nor 1")
            return cls(tensors)
        except (SafetensorError, ValueError, KeyError) as e:
            raise ConfigError(f"the body is not a batch in safetensors: {e}") from e


def layout(raw: bytes) -> Mapping[str, tuple[int, ...]]:
    """The tensors of a batch in safetensors, and the size of a row of each: batches in which both are the same can
    become one. ``raw``: what ``Batch.from_bytes`` takes."""
    return {name: tuple(told["shape"][1:]) for name, told in header(raw).items() if name != "__metadata__"}


def header(raw: bytes) -> Mapping[str, Any]:
    """What bytes in safetensors begin with: the dtype and the shape of each tensor by its name, and under
    "__metadata__" texts by theirs. Empty for bytes that have no such header."""
    try:
        found = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def collate_answers(prompts: Iterable[Prompt]) -> Batch:
    """The data's own answers, as samples to learn from."""
    return collate((prompt, demonstration(prompt)) for prompt in prompts)


def collate(rows: Iterable[tuple[Prompt, Sample]], advantages: Sequence[float] | None = None) -> Batch:
    """Samples as a batch. ``advantages``: one per sample, or None for a batch without. Without ``old_logprobs`` where
    no policy sampled, as in demonstrations, and nothing says that one should have: a batch for RL has them, also of
    empty responses alone.

    Raises ConfigError for a trained token of a policy without a log-prob.
    """
    pairs = list(rows)
    lengths = [len(p.token_ids) + sum(len(s.token_ids) for s in sample.segments) for p, sample in pairs]
    # Filled by numpy: a tensor for each sample would take ten times as long.
    tokens, mask = np.zeros(sum(lengths), np.int32), np.zeros(sum(lengths), np.bool_)
    logprobs: list[np.ndarray] = []
    at, sampled = 0, advantages is not None
    for prompt, sample in pairs:
        end = at + len(prompt.token_ids)
        tokens[at:end] = prompt.token_ids
        for segment in sample.segments:
            at, end = end, end + len(segment.token_ids)
            tokens[at:end] = segment.token_ids
            mask[at:end] = segment.loss
            sampled = sampled or bool(segment.logprobs)
            if not segment.loss:
                continue
            if segment.token_ids and segment.version and not segment.logprobs:
                raise ConfigError("a segment that a policy generated, and that is trained on, has no log-probs")
            logprobs.append(np.asarray(segment.logprobs, np.float32) if segment.logprobs
                            else np.zeros(end - at, np.float32))
        at = end
    tensors = {"tokens": torch.from_numpy(tokens), "lengths": torch.tensor(lengths, dtype=torch.int64),
               "loss_mask": torch.from_numpy(mask),
               "versions": torch.tensor([s.oldest_version for _, s in pairs], dtype=torch.int64),
               "numbers": torch.arange(len(pairs))}
    if sampled:
        tensors["old_logprobs"] = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *logprobs]))
    if advantages is not None:
        tensors["advantages"] = torch.tensor(list(advantages), dtype=torch.float32)
    return Batch(tensors)


def spans(starts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """int64 numbers of ``counts`` [n] consecutive elements from each of ``starts`` [n] on, one span after the other."""
    return torch.repeat_interleave(starts - starts_of(counts), counts) + torch.arange(int(counts.sum()))


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """[N] int64: where each of N spans begins that have so many elements [N] and lie one after the other."""
    return counts.cumsum(0) - counts


def _spans(starts: torch.Tensor, counts: torch.Tensor, part: slice | torch.Tensor) -> slice | torch.Tensor:
    """Where the elements of some of N spans are, which lie one after the other."""
    starts, counts = starts[part], counts[part]
    if isinstance(part, slice) and part.step in (None, 1):
        first = int(starts[0]) if len(starts) else 0
        return slice(first, first + int(counts.sum()))
    return spans(starts, counts)


def bytes_of(columns: Mapping[str, int], lengths: torch.Tensor, loss_counts: torch.Tensor) -> torch.Tensor:
    """[N] int64: bytes of each sample in tensors of these names, which have so many values for each element of their
    first dimension."""
    each = {dim: sum(n * SCHEMA[name].dtype.itemsize for name, n in columns.items() if SCHEMA[name].dims[0] == dim)
            for dim in ("N", "V", "L")}
    return each["N"] + each["V"] * lengths + each["L"] * loss_counts


def cut_in_pieces(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive numbers whose sizes are at most ``limit`` together, or of a single one."""
    pieces: list[range] = []
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and total + size > limit:
            pieces.append(range(start, number))
            start, total = number, 0
        total += size
    return [*pieces, range(start, len(sizes))] if sizes else []


def balanced(costs: Sequence[float], count: int, totals: Sequence[float] = ()) -> list[list[int]]:
    """The rows of each of ``count`` data-parallel replicas, in ascending order, of a batch whose sequences cost so
    much. Pure: every call with the same arguments, in any process, gives the same answer, so that who sends shares
    can put what comes back in order again. ``totals``: what each replica has of other minibatches; of replicas with
    equally much the one that has less of these is next.

    The most costly sequence that is left goes to the replica with the least work: Graham's rule for the schedule with
    the longest processing time first. No replica has more work than the average and one sequence together.
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    least = [(0.0, totals[share] if totals else 0.0, share) for share in range(count)]
    heapq.heapify(least)
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        work, total, share = least[0]
        heapq.heapreplace(least, (work + costs[row], total, share))
        rows[share].append(row)
    return [sorted(of_share) for of_share in rows]
