"""Samples as tensors, and their wire format (safetensors: nothing is pickled).

A batch is named tensors, each of which the schema describes: the trainer asks for those that its algorithm needs, and
a new one needs a line in ``SCHEMA`` and nothing else. N is the number of samples, T the width of the batch. Tensors
[N, T] are aligned with the tokens: what they hold at t is about the token at t, which is predicted from those before.
L is the number of loss tokens, sample by sample: what takes much room for each is there for no others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    "tokens": TensorSpec(torch.int64, ("N", "T")),          # right-padded with 0
    "lengths": TensorSpec(torch.int64, ("N",)),             # tokens without padding
    "loss_mask": TensorSpec(torch.bool, ("N", "T")),        # tokens that the policy is trained on
    "old_logprobs": TensorSpec(torch.float32, ("N", "T")),  # log-probs they were sampled with; 0 elsewhere
    "trainer_logprobs": TensorSpec(torch.float32, ("N", "T")),  # the trainer's own, before a step's first update
    "ref_logprobs": TensorSpec(torch.float32, ("N", "T")),  # of the reference policy; 0 elsewhere
    "teacher_logprobs": TensorSpec(torch.float32, ("N", "T")),  # of the teacher; 0 elsewhere
    "teacher_top_ids": TensorSpec(torch.int32, ("L", "K")),  # its most probable ones in a token's place
    "teacher_top_logprobs": TensorSpec(torch.float32, ("L", "K")),
    "advantages": TensorSpec(torch.float32, ("N",)),
    "token_advantages": TensorSpec(torch.float32, ("N", "T")),  # instead of ``advantages``: one per token
    "turn_rewards": TensorSpec(torch.float32, ("N", "T")),  # at the last token of each turn; 0 elsewhere
    "values": TensorSpec(torch.float32, ("N", "T")),        # of the critic, before the step; 0 elsewhere
    "returns": TensorSpec(torch.float32, ("N", "T")),       # what the values should have been; 0 elsewhere
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
        sizes = {"L": int(self.tensors["loss_mask"].sum())}
        self._require_schema(sizes)
        lengths, mask = self["lengths"], self["loss_mask"]
        if not self.samples:
            return
        if int(lengths.min()) < 1 or int(lengths.max()) > sizes["T"]:
            raise ConfigError(f"lengths must be 1 to {sizes['T']}, not {int(lengths.min())} to {int(lengths.max())}")
        if bool((mask & (torch.arange(sizes["T"])[None] >= lengths[:, None])).any()):
            raise ConfigError("the loss mask includes padding")
        if bool(mask[:, 0].any()):
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
        return int(self["tokens"].shape[0])

    @property
    def width(self) -> int:
        """T: positions of each row, padding included."""
        return int(self["tokens"].shape[1])

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

    @property
    def loss_counts(self) -> torch.Tensor:
        """[N] int64: those of each sample."""
        return self["loss_mask"].sum(dim=1)

    def rows(self, part: slice | torch.Tensor, width: int | None = None) -> Batch:
        """The samples of a slice, or with these numbers; of rows of ``width`` positions, which none of them exceeds."""
        return Batch(self._rows(part, width))

    def _rows(self, part: slice | torch.Tensor, width: int | None) -> dict[str, torch.Tensor]:
        def of(name: str, tensor: torch.Tensor) -> torch.Tensor:
            dims = SCHEMA[name].dims
            if dims[0] == "L":
                return tensor[self._loss_rows(part)]
            return (tensor[:, :width] if dims == ("N", "T") else tensor)[part]

        return {name: of(name, tensor) for name, tensor in self.tensors.items()}

    def _loss_rows(self, part: slice | torch.Tensor) -> torch.Tensor:
        """Numbers [l] of the loss tokens of some samples, in the samples' order, in tensors [L, …]."""
        counts = self.loss_counts
        first = (counts.cumsum(0) - counts)[part]
        of_sample = torch.repeat_interleave(torch.arange(len(first)), counts[part])
        ends = counts[part].cumsum(0)
        return first[of_sample] + torch.arange(int(counts[part].sum())) - (ends - counts[part])[of_sample]

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
        return self.share((self["numbers"] % count == index).nonzero().flatten())

    def minibatches(self, count: int) -> list[Batch]:
        """The samples of this share by minibatch, of which the step's batch has ``count``: each is in one of them."""
        return [self] if count == 1 else [self.minibatch(index, count) for index in range(count)]

    def shares(self, count: int) -> list[Batch]:
        """Splits the samples over data-parallel replicas, as ``share_rows``."""
        return [self.share(rows) for rows in self.share_rows(count)]

    def share(self, rows: torch.Tensor) -> Batch:
        """The samples with these numbers, as wide as the longest of them: one long response does not pad the shares of
        all replicas."""
        return self.rows(rows, width=self._longest(rows))

    def joined(self, rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, T] of this batch from values [n, t] of each ``share`` of these rows; padding is 0 or False.

        Raises ConfigError for values that are not those of the shares.
        """
        out = values[0].new_zeros((self.samples, self.width))
        for of_share, own in zip(rows, values, strict=True):
            expected = [len(of_share), self._longest(of_share)]
            if list(own.shape) != expected:
                raise ConfigError(f"the values of a share must be {expected}, not {list(own.shape)}")
            out[of_share, :expected[1]] = own
        return out

    def _longest(self, rows: torch.Tensor) -> int:
        """Tokens of the longest of these samples; 0 without any."""
        return max(self["lengths"][rows].tolist(), default=0)

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
            return cls(load(raw))
        except (SafetensorError, ValueError, KeyError) as e:
            raise ConfigError(f"the body is not a batch in safetensors: {e}") from e


def collate_answers(prompts: Iterable[Prompt]) -> Batch:
    """The data's own answers, as samples to learn from."""
    return collate((prompt, demonstration(prompt)) for prompt in prompts)


def collate(rows: Iterable[tuple[Prompt, Sample]], advantages: Sequence[float] | None = None) -> Batch:
    """Right-pads samples to the longest of them. ``advantages``: one per sample, or None for a batch without.

    Raises ConfigError for a sample without a prompt token, and for a trained token without a log-prob if others have
    them.
    """
    pairs = list(rows)
    width = max((len(p.token_ids) + len(s.response_ids) for p, s in pairs), default=0)
    n = len(pairs)
    # Filled by numpy: a tensor for each sample would take ten times as long.
    tokens, mask = np.zeros((n, width), np.int64), np.zeros((n, width), np.bool_)
    logprobs = np.zeros((n, width), np.float32)
    lengths, sampled = [], False
    for i, (prompt, sample) in enumerate(pairs):
        at = len(prompt.token_ids)
        tokens[i, :at] = prompt.token_ids
        for segment in sample.segments:
            end = at + len(segment.token_ids)
            tokens[i, at:end] = segment.token_ids
            mask[i, at:end] = segment.loss
            if segment.logprobs:
                sampled = True
                logprobs[i, at:end] = segment.logprobs
            elif segment.token_ids and segment.loss and segment.version:
                raise ConfigError("a segment that a policy generated, and that is trained on, has no log-probs")
            at = end
        lengths.append(at)
    tensors = {"tokens": torch.from_numpy(tokens), "lengths": torch.tensor(lengths, dtype=torch.int64),
               "loss_mask": torch.from_numpy(mask),
               "versions": torch.tensor([s.oldest_version for _, s in pairs], dtype=torch.int64),
               "numbers": torch.arange(n)}
    if sampled:
        tensors["old_logprobs"] = torch.from_numpy(logprobs)
    if advantages is not None:
        tensors["advantages"] = torch.tensor(list(advantages), dtype=torch.float32)
    return Batch(tensors)


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
